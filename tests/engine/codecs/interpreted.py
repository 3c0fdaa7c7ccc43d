"""Kernels against the torch form, under Triton's interpreter: run by test_kernels.py in a process of its own.

The interpreter cuts off where a GPU rounds to bfloat16, so that decoded bfloat16 may be one unit in the last place away.
"""

import itertools

import pytest
import torch

from plimsoll.engine.codecs import kernels
from plimsoll.engine.codecs.integers import Int4, Int8, IntegerCodec
from plimsoll.engine.codecs.protocol import Payload
from plimsoll.engine.codecs.registry import find_codec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODECS = [
    *(
        family(block, mode, basis)
        for family, block, mode, basis in itertools.product(
            (Int8, Int4), (32, 128), ("symmetric", "affine"), ("unrotated", "rotated")
        )
    ),
    Int8(4096),
]


def data(dtype: torch.dtype, count: int = 9001) -> torch.Tensor:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 3
    tensor[:70] = 0
    tensor[200:300] += 90
    tensor[400::50] *= 100
    tensor[5000:5200] *= 1e-6
    return tensor.to(dtype)


def run_encode(tensor: torch.Tensor, codec: IntegerCodec, seed: int | None = None) -> Payload:
    payload = codec.encode(torch.ones_like(tensor))
    codes, scales, lows = (*payload.parts, None)[:3]
    kernels.encode_integers(tensor, codes, scales, lows, block=codec.block, is_rotated=codec.is_rotated, seed=seed)
    return payload


def run_decode(payload: Payload, codec: IntegerCodec) -> torch.Tensor:
    out = torch.empty(payload.size, dtype=payload.dtype)
    codes, scales, lows = (*payload.parts, None)[:3]
    kernels.decode_integers(codes, scales, lows, out, block=codec.block, is_rotated=codec.is_rotated)
    return out


def assert_close(left, right, *, slack=0.0):
    ulp = torch.finfo(left.dtype).eps if left.dtype is torch.bfloat16 else 0
    off = (left.double() - right.double()).abs()
    assert (off <= right.double().abs() * ulp + slack).all()


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.float16, 159), (torch.bfloat16, 9001)])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_integer_codes_are_those_of_the_torch_form(codec, dtype, count):
    tensor = data(dtype, max(count, 300))[:count]
    expected = codec.encode(tensor)
    payload = run_encode(tensor, codec)
    assert torch.equal(payload.parts[1], expected.parts[1])
    differ = (payload.parts[0] != expected.parts[0]).sum()
    # Sums in another order may fall on the other side of a half.
    assert differ <= (count // 500 if codec.is_rotated else 0)
    decoded, reference = run_decode(expected, codec), codec.decode(expected)
    assert_close(decoded, reference, slack=reference.abs().max().item() * 1e-3 if codec.is_rotated else 1e-5)


@pytest.mark.parametrize(
    ("codec", "bad"),
    zip(CODECS[:-1], itertools.cycle([float("nan"), float("inf"), -float("inf")]), strict=False),
    ids=str,
)
def test_what_is_no_number_makes_its_block_nan_and_no_other(codec, bad):
    tensor = torch.linspace(-1, 2, 1000)
    tensor[300] = bad
    decoded = run_decode(run_encode(tensor, codec), codec)
    block = 300 // codec.block
    here = slice(block * codec.block, (block + 1) * codec.block)
    assert decoded[here].isnan().all()
    assert decoded.isnan().sum() == codec.block


@pytest.mark.parametrize("family", [Int8, Int4])
@pytest.mark.parametrize("mode", ["symmetric", "affine"])
def test_stochastic_rounding_is_unbiased_and_depends_on_the_seed_alone(family, mode):
    codec = family(64, mode, "unrotated", "stochastic")
    tensor = torch.linspace(-1, 2, 256)
    first, again, other = (run_encode(tensor, codec, seed).parts[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    seeds = 25
    draws = torch.stack([codec.decode(run_encode(tensor, codec, seed)) for seed in range(seeds)]).double()
    step = run_encode(tensor, codec, 0).parts[1].double().repeat_interleave(codec.block)
    off = (draws.mean(0) - tensor.double()) / step  # a rounding error has a deviation of at most half a step
    assert off.abs().max() < 5 * 0.5 / seeds**0.5
    assert abs(float(off.mean())) < 5 * 0.5 / (seeds * tensor.numel()) ** 0.5


@pytest.mark.parametrize("count", [1, 127, 4097])
@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_codes_are_those_of_torch(dtype, count):
    codec, tensor = find_codec("fp8"), data(dtype)[:count]
    expected = codec.encode(tensor)
    codes, scales = (torch.empty_like(part) for part in expected.parts)
    kernels.encode_float8(tensor, codes.view(torch.uint8), scales, codec.block)
    assert torch.equal(codes.view(torch.uint8), expected.parts[0].view(torch.uint8))
    assert torch.equal(scales, expected.parts[1])
    decoded = torch.empty_like(tensor)
    kernels.decode_float8(codes.view(torch.uint8), scales, decoded, codec.block)
    assert_close(decoded, codec.decode(expected))


def test_every_float8_number_decodes_as_in_torch():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    decoded = torch.empty(codes.numel())
    kernels.decode_float8(codes, torch.ones(2, 1, dtype=torch.bfloat16), decoded, 128)
    assert torch.equal(decoded, codes.view(torch.float8_e4m3fn).float())


def test_what_is_no_number_makes_a_float8_block_nan():
    tensor = torch.ones(512)
    tensor[130] = float("inf")
    codes, scales = torch.empty(512, dtype=torch.uint8), torch.empty(4, 1, dtype=torch.bfloat16)
    kernels.encode_float8(tensor, codes, scales, 128)
    decoded = torch.empty_like(tensor)
    kernels.decode_float8(codes, scales, decoded, 128)
    assert decoded.isnan().tolist() == [False] * 128 + [True] * 128 + [False] * 256


@pytest.mark.parametrize("count", [1, 8, 4095, 9001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_are_those_of_the_torch_form(dtype, count):
    codec, tensor = find_codec("sign"), data(dtype)[:count]
    expected = codec.encode(tensor)
    packed, one = torch.empty_like(expected.parts[0]), torch.ones(1, dtype=dtype)
    kernels.pack_positive(tensor, packed, one)
    assert torch.equal(packed, expected.parts[0])
    decoded = torch.empty_like(tensor)
    kernels.unpack(packed, one, decoded)
    assert torch.equal(decoded, codec.decode(expected))


def test_a_nan_makes_every_positive_sign_nan():
    tensor = torch.tensor([1.0, -1.0, float("nan")])
    packed, one, decoded = torch.empty(1, dtype=torch.uint8), torch.ones(1), torch.empty(3)
    kernels.pack_positive(tensor, packed, one)
    kernels.unpack(packed, one, decoded)
    assert decoded.isnan().all()


@pytest.mark.parametrize("constant", [1, -7, 2**62 + 1])
def test_bits_of_integers_are_exact(constant):
    mask = torch.rand(1003, generator=torch.Generator().manual_seed(0)) < 0.4
    packed, decoded = torch.empty(126, dtype=torch.uint8), torch.empty(1003, dtype=torch.int64)
    kernels.pack_nonzero(mask.view(torch.int8), packed)
    kernels.unpack(packed, torch.tensor([constant]), decoded)
    assert torch.equal(decoded, mask * constant)
