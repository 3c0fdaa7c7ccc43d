"""Codecs by their names, and the errors in docs/project/lab-notes.md: defects of the maths within the contract show here."""

import pytest
import torch

from plimsoll.engine.codecs.blocks import GROUP, hadamard
from plimsoll.engine.codecs.integers import Int4, Int8
from plimsoll.engine.codecs.registry import FAMILIES, find_codec, lossless_codecs
from plimsoll.errors import InvalidCodec


def relative_error(name: str, tensor: torch.Tensor) -> float:
    codec = find_codec(name)
    payload = codec.encode(tensor)
    assert payload is not None
    return float((codec.decode(payload) - tensor).norm() / tensor.norm())


def normal(count: int = 2**16) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", 0.00166),
        ("fp8", 0.0258),
        ("int8", 0.0060),
        ("int8:unrotated", 0.0060),
        ("int8:affine", 0.0054),
        ("int8:stochastic", 0.0085),
        ("int4", 0.0903),
        ("int4:unrotated", 0.0903),
        ("int4:block=32:symmetric", 0.0975),
    ],
)
def test_errors_on_normal_data_are_as_noted(name, expected):
    assert relative_error(name, normal()) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("family", ["int8", "int4"])
def test_rotation_helps_where_there_are_outliers(family):
    tensor = torch.nn.functional.silu(3 * normal()) * 3 * normal().flip(0)
    assert relative_error(family, tensor) < 0.65 * relative_error(f"{family}:unrotated", tensor)


def test_symmetric_codes_keep_zeros():
    tensor = normal().clamp(min=0)
    codec = find_codec("int8:unrotated")
    assert (codec.decode(codec.encode(tensor))[tensor == 0] == 0).all()


def test_the_rotation_is_its_own_inverse():
    matrix = torch.from_numpy(hadamard())
    assert torch.allclose(matrix @ matrix, torch.eye(GROUP), atol=1e-6)
    assert torch.equal(matrix, matrix.T)


def test_topk_keeps_the_largest_and_of_equal_ones_the_first():
    codec = find_codec("topk:share=0.5")
    kept = codec.decode(codec.encode(torch.tensor([1.0, -3.0, 2.0, -2.0, 2.0, 0.5])))
    assert kept.tolist() == [0.0, -3.0, 2.0, -2.0, 0.0, 0.0]


def test_a_tensor_that_is_no_mask_or_too_wide_is_refused():
    assert find_codec("bits").encode(torch.tensor([0.0, 1.0, 2.0])) is None
    assert find_codec("bits").encode(torch.tensor([0.0, -0.0, 1.0])) is None
    assert find_codec("narrow").encode(torch.tensor([0, 2**40])) is None


def test_masks_take_a_bit_and_their_constant():
    dropout = (torch.arange(80) % 3 == 0) / 0.9
    payload = find_codec("bits").encode(dropout)
    assert payload.bytes == 10 + 4


def test_parameters_may_come_in_any_order_and_say_what_is_the_default():
    assert find_codec("int4:stochastic:block=32:affine") == Int4(block=32, rounding="stochastic")
    assert find_codec("int4:stochastic:block=32:affine").name == "int4:block=32:stochastic"
    assert find_codec("int8:block=64:symmetric:nearest") == Int8()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("int8:block=48", "a power of two from 32 to 4096"),
        ("int8:block=16", "a power of two from 32 to 4096"),
        ("int8:block", "affine"),
        ("int8:block=x", "a power of two"),
        ("int8:symmetric=1", "symmetric"),
        ("int8:loud", "nearest or stochastic"),
        ("int8:affine:symmetric", "twice"),
        ("topk:share=2", "a number from 1e-06 to 1.0"),
        ("topk:share=nan", "a number"),
        ("bits:block=32", "no parameters"),
        ("int8:", "int8 accepts"),
        ("int9", "int8"),
    ],
)
def test_a_parameter_that_does_not_fit_says_which_do(name, why):
    with pytest.raises(InvalidCodec) as caught:
        find_codec(name)
    assert repr(name) in caught.value.found
    assert why in caught.value.why
    assert ":" in name or "topk" in caught.value.next


def test_every_family_is_lossless_or_lossy():
    assert {codec.name for codec in lossless_codecs()} == {"bits", "narrow", "sign", "zeros"}
    assert {name for name in FAMILIES if not find_codec(name).is_lossless} == {"bf16", "fp8", "int4", "int8", "topk"}
    assert [codec.name for codec in lossless_codecs() if codec.keeps_sign_only] == ["sign"]
