"""Names in, codecs out."""

import pytest

from plimsoll.engine.codecs.integers import Int4, Int8
from plimsoll.engine.codecs.registry import find_codec, lossless_codecs, lossy_codecs
from plimsoll.errors import InvalidCodec


def test_parameters_may_come_in_any_order_and_say_what_is_the_default():
    assert find_codec("int4:stochastic:block=32:affine") == Int4(block=32, rounding="stochastic")
    assert find_codec("int4:stochastic:block=32:affine").name == "int4:block=32:stochastic"
    assert find_codec("int8:block=64:symmetric:nearest") == Int8()


def test_an_unknown_family_names_the_closest():
    with pytest.raises(InvalidCodec) as caught:
        find_codec("int9")
    assert "int8" in caught.value.why
    assert "topk" in caught.value.next


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
        ("int8:", "int8 takes"),
    ],
)
def test_a_parameter_that_does_not_fit_says_which_do(name, why):
    with pytest.raises(InvalidCodec) as caught:
        find_codec(name)
    assert repr(name) in caught.value.found
    assert why in caught.value.why


def test_every_family_is_lossless_or_lossy():
    assert {codec.name for codec in lossless_codecs()} == {"bits", "narrow", "sign", "zeros"}
    assert {codec.name for codec in lossy_codecs()} == {"bf16", "fp8", "int4", "int8", "topk"}
    assert [codec.name for codec in lossless_codecs() if codec.keeps_sign_only] == ["sign"]
