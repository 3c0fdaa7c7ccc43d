"""What every codec promises, for all of them: a new family is found here by its line in the registry."""

import functools
from typing import Any

import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from plimsoll.engine.codecs import layout
from plimsoll.engine.codecs.layout import CHUNK
from plimsoll.engine.codecs.protocol import Codec, Payload
from plimsoll.engine.codecs.registry import FAMILIES, find_codec
from plimsoll.tracing.meters.memory import PeakMeter

VARIANTS = [
    "topk:share=0.03",
    "fp8:block=32",
    "int8:affine",
    "int8:unrotated",
    "int8:block=32:affine:unrotated:stochastic",
    "int8:stochastic",
    "int4:symmetric",
    "int4:block=32",
    "int4:symmetric:unrotated:stochastic",
    "int4:stochastic",
]
NAMES = [*FAMILIES, *(name for name in VARIANTS if find_codec(name).name not in FAMILIES)]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTS, torch.bool)
ACCEPTED = [(name, dtype) for name in NAMES for dtype in DTYPES if find_codec(name).accepts(dtype)]
LOSSY = [(name, dtype) for name, dtype in ACCEPTED if not find_codec(name).is_lossless]
STOCHASTIC = [name for name in NAMES if "stochastic" in name]
SHAPES = {
    "a scalar": lambda base: base[0],
    "nothing": lambda base: base[:0].view(3, 0, 2),
    "one": lambda base: base[:1],
    "flat": lambda base: base[:1000],
    "odd": lambda base: base[:999].view(3, 9, 37),
    "transposed": lambda base: base[:3000].view(10, 300).t(),
    "channels last": lambda base: base[:2400].view(2, 4, 10, 30).permute(0, 3, 1, 2),
    "sliced": lambda base: base[:3000].view(3, 20, 50)[:, 1:18:2, 3:],
    "expanded": lambda base: base[:70].view(7, 1, 10).expand(7, 5, 10),
    "two chunks and a bit": lambda base: base,
    "two chunks and a bit, sliced": lambda base: base.repeat_interleave(2).view(-1, 2)[:, 0],
}
COUNT = 2**18 + 12_345


@functools.cache
def data_for(name: str, dtype: torch.dtype, count: int = COUNT, seed: int = 0) -> torch.Tensor:
    """A flat tensor that this codec can represent, with a few numbers that are hard to."""
    generator = torch.Generator().manual_seed(seed)
    family = name.split(":")[0]
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.3
    if family == "bits":
        return (torch.rand(count, generator=generator) < 0.3).to(dtype) * 3
    if not dtype.is_floating_point:
        whole = torch.randint(-100 if dtype.is_signed else 0, 100, (count,), generator=generator)
        return (whole * (torch.rand(count, generator=generator) < (0.2 if family == "zeros" else 1))).to(dtype)
    real = torch.randn(count, generator=generator, dtype=torch.float64)
    if family == "zeros":
        real *= torch.rand(count, generator=generator) < 0.2
    real[3::777] *= 100
    real[100:300] = 0
    real[400:500] = 1e-42  # below the smallest normal float32
    real[600:800] += 50
    return real.to(dtype)


def encode(name: str, tensor: torch.Tensor, **options: int) -> tuple[Codec, Payload]:
    codec = find_codec(name)
    payload = codec.encode(tensor, **options)
    assert payload is not None, f"{name} refused the data"
    return codec, payload


def expected_from_lossless(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    return (tensor > 0).to(tensor.dtype) if codec.keeps_sign_only else tensor


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    size = left.dtype.itemsize
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return torch.equal(left.contiguous().view(integer), right.contiguous().view(integer))


def error_bound(name: str, flat: torch.Tensor) -> torch.Tensor:
    """The stated bound of each element's error: half a step (a whole one if stochastic), and rounding to the dtype.

    In a rotated basis a group's error has the norm that it had there: at most that of 32 bounds.
    """
    wide = flat.double()
    rounding = wide.abs() * torch.finfo(flat.dtype).eps * 1.01
    if name == "bf16":
        return rounding + wide.abs() * 2**-8 + 2.0**-133
    codec = find_codec(name)
    if name.startswith("topk"):
        smallest_kept = wide.abs().sort(descending=True).values[: codec.kept(flat.numel())][-1:]
        return torch.where(wide.abs() > smallest_kept, 0, wide.abs())
    is_rotated = getattr(codec, "basis", "") == "rotated"
    if is_rotated:
        whole = flat.numel() - flat.numel() % 32
        matrix = torch.from_numpy(scipy.linalg.hadamard(32)).double() / 32**0.5
        wide = torch.cat([(wide[:whole].view(-1, 32) @ matrix).flatten(), wide[whole:]])
    padding = -flat.numel() % codec.block
    most, least = (
        torch.nn.functional.pad(wide, (0, padding), value=sign * -torch.inf).view(-1, codec.block).mul(sign).amax(1)
        * sign
        for sign in (1, -1)
    )
    farthest = torch.maximum(most, -least)
    if name.startswith("fp8"):
        step, share = farthest / 448 * 2**-9, 1.0
        rounding = rounding + wide.abs() * 2**-4 * 1.001
    else:
        codes = 2 ** int(name[3])
        is_affine = codec.mode == "affine"
        step = (most - least + farthest * 2**-7) / (codes - 1) if is_affine else farthest / (codes // 2 - 1)
        share = 1.001 if codec.rounding == "stochastic" else 0.501
    step = (step * (1 + 2**-7)).clamp(min=2.0**-126)
    bound = step * share + farthest * (2**-20 + torch.finfo(flat.dtype).eps)
    return rounding + (bound * (32**0.5 if is_rotated else 1)).repeat_interleave(codec.block)[: flat.numel()]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_makes_a_codec_of_that_name(name):
    codec = find_codec(name)
    assert codec == find_codec(codec.name)
    assert find_codec(codec.name).name == codec.name
    hash(codec)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        (name, dtype, shape)
        for shape in SHAPES
        for name, dtype in ACCEPTED
        if "chunks" not in shape or dtype in (torch.float32, torch.int64, torch.bool)
    ],
)
def test_size_strides_and_dtype_come_back_with_the_values(name, dtype, shape):
    tensor = SHAPES[shape](data_for(name, dtype, COUNT if "chunk" in shape else 3000))
    before = tensor.clone()
    codec, payload = encode(name, tensor)
    decoded = codec.decode(payload)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
    assert payload.size == tuple(decoded.shape)
    assert payload.stride == decoded.stride()
    if shape not in ("sliced", "expanded", "two chunks and a bit, sliced"):
        assert decoded.stride() == tensor.stride()
    assert same_bits(tensor, before)
    if codec.is_lossless:
        assert same_bits(decoded, expected_from_lossless(codec, tensor))
    else:
        order = torch.empty_like(decoded).copy_(tensor)  # the same values in the order that blocks are made in
        flat, got = (t.as_strided((t.numel(),), (1,)) for t in (order, decoded))
        assert ((got.double() - flat.double()).abs() <= error_bound(name, flat)).all()


@pytest.mark.parametrize(("name", "dtype"), ACCEPTED)
def test_payload_bytes_are_what_the_storages_have(name, dtype):
    for count in (0, 1, 7, 8, 127, 128, 129, 4000):
        codec, payload = encode(name, data_for(name, dtype, count))
        assert payload.bytes == sum(part.untyped_storage().nbytes() for part in payload.parts)
        assert codec.payload_bytes(count, dtype) in (payload.bytes, None)
        assert len({part.untyped_storage().data_ptr() for part in payload.parts if part.numel()}) == sum(
            bool(part.numel()) for part in payload.parts
        )


@pytest.mark.parametrize(("name", "dtype"), ACCEPTED)
def test_a_payload_above_most_bytes_is_not_made(name, dtype):
    tensor = data_for(name, dtype, 4000)
    codec, payload = encode(name, tensor)
    assert codec.encode(tensor, most_bytes=payload.bytes) is not None
    assert codec.encode(tensor, most_bytes=payload.bytes - 1) is None


@pytest.mark.parametrize(("name", "dtype"), ACCEPTED)
def test_nobody_elses_random_numbers_are_touched(name, dtype):
    before = torch.get_rng_state()
    encode(name, data_for(name, dtype, 300), seed=5)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_payload(name):
    dtype = next(dtype for dtype in DTYPES if find_codec(name).accepts(dtype))
    tensor = data_for(name, dtype, COUNT)
    first, second = (encode(name, tensor, seed=11)[1] for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(first.parts, second.parts, strict=True))


@pytest.mark.parametrize("name", STOCHASTIC)
def test_another_seed_rounds_otherwise(name):
    tensor = data_for(name, torch.float32, 3000)
    first, second = (encode(name, tensor, seed=seed)[1] for seed in (1, 1 + 2**40))
    assert not torch.equal(first.parts[0], second.parts[0])


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_is_unbiased(name):
    tensor = torch.linspace(-1, 2, 512)
    seeds = 400
    draws = []
    for seed in range(seeds):
        codec, payload = encode(name, tensor, seed=seed)
        draws.append(codec.decode(payload).double())
    stack = torch.stack(draws)
    off = stack.mean(0) - tensor.double()
    spread = stack.std(0).clamp(min=1e-7)
    z = off / (spread / seeds**0.5)
    # Elements next to a code hardly ever leave it: their spread is an estimate from few events.
    is_spread = spread > 0.1 * spread.max()
    assert z[is_spread].abs().max() < 5
    assert abs(float(z[is_spread].mean())) < 5 / is_spread.sum() ** 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 5000, COUNT - 1])
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_never_become_numbers(name, where, bad):
    codec = find_codec(name)
    for dtype in (dtype for dtype in (torch.float32, torch.bfloat16) if codec.accepts(dtype)):
        tensor = data_for(name, dtype).clone()
        tensor[where] = bad
        payload = codec.encode(tensor)
        if not codec.is_lossless:
            assert payload is None
        elif payload is not None:
            decoded = codec.decode(payload)
            assert not (codec.keeps_sign_only and bad != bad)
            assert same_bits(decoded, expected_from_lossless(codec, tensor))


@pytest.mark.parametrize(("name", "dtype"), LOSSY)
def test_numbers_never_become_nan_or_infinity(name, dtype):
    codec = find_codec(name)
    limits = torch.finfo(dtype)
    for extreme in (limits.max, limits.min, limits.max * 0.98, limits.tiny, limits.smallest_normal / 4):
        for other in (0.0, -extreme, extreme / 3):
            tensor = torch.tensor([extreme, other, 0.0, 1.0, other], dtype=dtype)
            payload = codec.encode(tensor)
            assert payload is None or torch.isfinite(codec.decode(payload)).all()


@pytest.mark.parametrize(("name", "dtype"), ACCEPTED)
def test_temporaries_stay_within_the_workspace(name, dtype):
    codec = find_codec(name)
    many = data_for(name, dtype)
    few = many[:900]
    with_gaps = many[: COUNT - COUNT % 5].view(-1, 5)[:, 1:]
    with PeakMeter("cpu") as meter:
        for case, tensor in {"few": few, "many": many, "with gaps": with_gaps}.items():
            meter.mark(f"encode {case}")
            payload = codec.encode(tensor)
            meter.mark(f"decode {case}")
            decoded = codec.decode(payload)
            decoded_bytes, payload_bytes = decoded.untyped_storage().nbytes(), payload.bytes
            workspace_bytes = codec.workspace_bytes(tensor.numel(), dtype)
            meter.mark(f"{workspace_bytes} {payload_bytes} {decoded_bytes}")
            del payload, decoded
    for encode, decode, sizes in zip(*(iter(meter.windows[1:]),) * 3, strict=True):
        workspace_bytes, payload_bytes, decoded_bytes = map(int, sizes.name.split())
        assert encode.peak_bytes - payload_bytes <= workspace_bytes, encode.name
        assert decode.peak_bytes - payload_bytes - decoded_bytes <= workspace_bytes, decode.name
    assert workspace_bytes <= 5 * 2**20
    assert codec.workspace_bytes(COUNT * 1000, dtype) == codec.workspace_bytes(COUNT, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_need_gradients_are_encoded_as_they_are(name):
    codec = find_codec(name)
    if codec.accepts(torch.float32):
        tensor = data_for(name, torch.float32, 500).clone().requires_grad_()
        decoded = codec.decode(codec.encode(tensor))
        assert not decoded.requires_grad


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([name for name in NAMES if find_codec(name).accepts(torch.float32)]),
    values=st.lists(st.floats(width=32), min_size=0, max_size=300),
    seed=st.integers(-(2**70), 2**70),
)
def test_any_float32_comes_back_within_the_bound_or_is_refused(name, values, seed):
    tensor = torch.tensor(values, dtype=torch.float32)
    codec = find_codec(name)
    payload = codec.encode(tensor, seed=seed)
    if payload is None:
        return
    decoded = codec.decode(payload)
    if codec.is_lossless:
        assert same_bits(decoded, expected_from_lossless(codec, tensor))
    else:
        assert ((decoded.double() - tensor.double()).abs() <= error_bound(name, tensor)).all()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([name for name in NAMES if find_codec(name).accepts(torch.int64)]),
    values=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300), max_size=40),
)
def test_any_int64_comes_back_or_is_refused(name, values):
    tensor = torch.tensor(values, dtype=torch.int64)
    codec = find_codec(name)
    payload = codec.encode(tensor)
    assert payload is None or torch.equal(codec.decode(payload), tensor)


class Waits(TorchFunctionMode):
    """Counts how often the host reads what is on a device."""

    READS = ("tolist", "item", "__bool__", "__int__", "__float__", "masked_select", "nonzero", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__ in self.READS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["zeros", "narrow", "bits"])
def test_on_a_gpu_the_host_waits_once_to_encode_a_tensor_and_never_to_decode_it(name, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(3 * CHUNK + 77, generator=generator) < 0.4
    mask[CHUNK // 4 : CHUNK] = False  # chunks with nothing in them
    tensor = {"zeros": mask * torch.randn(mask.shape, generator=generator), "bits": mask / 0.9}.get(
        name, torch.randint(-5, 100, mask.shape, generator=generator)
    )
    codec = find_codec(name)
    on_cpu = codec.encode(tensor)
    monkeypatch.setattr(layout, "host_waits", lambda device: True)
    for case in (tensor, torch.zeros_like(tensor), tensor[:5], tensor[:0]):
        with Waits() as waits:
            payload = codec.encode(case)
        assert waits.count <= 1
        with Waits() as waits:
            decoded = codec.decode(payload)
        assert waits.count == 0
        assert same_bits(decoded, case.clone())
    payload = codec.encode(tensor)
    assert all(torch.equal(one, other) for one, other in zip(payload.parts, on_cpu.parts, strict=True))
    if name == "bits":
        tensor[-1] = 0.5
        assert codec.encode(tensor) is None
