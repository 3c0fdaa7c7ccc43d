"""Codecs on a device, where they may run as kernels: what the CPU's torch form gives, without waiting for the device."""

from collections.abc import Iterator

import pytest
import torch

from plimsoll.engine.codecs.protocol import Payload
from plimsoll.engine.codecs.registry import find_codec
from plimsoll.engine.replay_rng import generators_of

NAMES = [
    "fp8",
    "int8",
    "int8:affine",
    "int8:unrotated",
    "int4",
    "int4:symmetric",
    "int4:unrotated",
    "int8:block=4096",
    "sign",
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def without_waiting(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        pytest.skip("nothing waits for a CPU")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


def data(dtype: torch.dtype, count: int = 300_007) -> torch.Tensor:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 3
    tensor[400::500] *= 100
    return tensor.to(dtype)


def on_cpu(payload: Payload) -> Payload:
    return Payload(tuple(part.cpu() for part in payload.parts), payload.size, payload.stride, payload.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_payloads_are_those_of_the_cpu(name, dtype, device):
    codec, tensor = find_codec(name), data(dtype)
    expected = codec.encode(tensor)
    payload = codec.encode(tensor.to(device))
    assert payload.bytes == expected.bytes
    for got, want in zip(on_cpu(payload).parts, expected.parts, strict=True):
        # A product that falls next to the half between two codes may go either way, a scale to either neighbour.
        assert (got.view(torch.uint8) != want.view(torch.uint8)).double().mean() < 0.01
    decoded, reference = codec.decode(payload).cpu().double(), codec.decode(on_cpu(payload)).double()
    largest = reference.abs().max()
    assert (decoded - reference).abs().max() <= largest * max(1e-5, torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sign"])
def test_what_is_no_number_makes_its_block_nan_and_no_other(name, device):
    codec = find_codec(name)
    tensor = data(torch.float32).to(device)
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensor[5000] = bad
        if (payload := codec.encode(tensor)) is None:  # where looking at the data costs no waiting, it is kept as it is
            assert device.type == "cpu"
            continue
        is_nan = codec.decode(payload).isnan()
        assert is_nan.sum() == codec.block
        assert is_nan[5000 - 5000 % codec.block :][: codec.block].all()


def test_a_nan_makes_every_positive_sign_nan(device):
    tensor = data(torch.float32).to(device)
    tensor[77] = float("nan")
    codec = find_codec("sign")
    payload = codec.encode(tensor)
    assert device.type == "cpu" if payload is None else codec.decode(payload).isnan().all()


@pytest.mark.usefixtures("without_waiting")
@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_the_device(name, device):
    codec = find_codec(name)
    codec.decode(codec.encode(torch.ones(5000, device=device)))


def test_bool_masks_come_back(device):
    mask = (torch.rand(100_003, generator=torch.Generator().manual_seed(0)) < 0.3).to(device)
    codec = find_codec("bits")
    assert torch.equal(codec.decode(codec.encode(mask)), mask)
    scaled = mask * 1.25
    assert torch.equal(codec.decode(codec.encode(scaled)), scaled)


@pytest.mark.parametrize("name", ["int8:stochastic", "int4:stochastic", "int4:unrotated:stochastic"])
def test_stochastic_rounding_depends_on_the_seed_alone_and_is_unbiased(name, device):
    codec, tensor = find_codec(name), torch.linspace(-1, 2, 4096, device=device)
    states = [generator.get_state() for generator in generators_of([device])]
    first, again, other = (codec.encode(tensor, seed=seed).parts[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert all(map(torch.equal, states, (generator.get_state() for generator in generators_of([device]))))
    off = torch.stack([codec.decode(codec.encode(tensor, seed=seed)) for seed in range(400)]).mean(0) - tensor
    once = codec.decode(codec.encode(tensor)) - tensor
    assert off.norm() < 1.5 * once.norm() / 400**0.5


def test_other_strides_take_the_torch_form(device):
    tensor = data(torch.float32, 60_000).to(device).view(200, 300)
    codec = find_codec("int8")
    for view in (tensor.t(), tensor[:, 3:50], tensor[:1].expand(4, 300)):
        decoded = codec.decode(codec.encode(view))
        assert decoded.shape == view.shape
        assert (decoded - view).norm() < 0.02 * view.norm()
