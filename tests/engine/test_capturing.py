"""What a plan does while a CUDA graph is captured: it works, or refuses in words. The capture is a fake on a CPU."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll
from contracts.harness import Stack, differences, manage, plain_step, train
from engine.offload.simulated import SimulatedLink
from plimsoll.engine import capturing
from plimsoll.engine.codecs.registry import FAMILIES, find_codec
from plimsoll.engine.replay_rng import take_states
from plimsoll.engine.sampling import Sampler
from plimsoll.errors import CaptureRefused
from steps import Stack as Blocks
from steps import mean_square


class Capture:
    """Pretends that a CPU captures graphs, and forbids meanwhile what a capture forbids: the host must not read a value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on = False
        self.asked = 0
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", self._answer)

    def _answer(self) -> bool:
        self.asked += 1
        return self.is_on

    def __enter__(self) -> None:
        self._monkeypatch.setattr(capturing, "_CAPTURED", frozenset({"cuda", "cpu"}))
        self._mode = ReadsNothing()
        self._mode.__enter__()
        self.is_on = True

    def __exit__(self, *error: Any) -> None:
        self.is_on = False
        self._mode.__exit__(*error)


class ReadsNothing(torch.utils._python_dispatch.TorchDispatchMode):
    __module__ = "torch.cuda"  # under a mode of the user regions would be recorded anew

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero"), func
        return func(*args, **(kwargs or {}))


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    return Capture(monkeypatch)


def blocks(*inner: nn.Module) -> Stack:
    torch.manual_seed(0)
    return Stack(*(Residual(each) for each in inner))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(16, 32), inner, nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inner(torch.tanh(self.up(x)).exp()))


def captured_step(model: nn.Module, capture: Capture) -> list[dict[str, torch.Tensor]]:
    def step(model: nn.Module, index: int) -> Any:
        with capture:
            return plain_step(model, index)

    return train(model, step, 1)


def test_a_region_that_was_recorded_can_be_captured_and_takes_no_samples(capture, monkeypatch):
    samples = []
    take = Sampler.take

    def noting(self: Sampler, *args: Any) -> Any:
        samples.append(take(self, *args))
        return samples[-1]

    monkeypatch.setattr(Sampler, "take", noting)

    def step(model: nn.Module, index: int) -> Any:
        with capture if index == 3 else contextlib.nullcontext():
            return plain_step(model, index)

    expected = train(blocks(nn.GELU(), nn.GELU()), plain_step, 4)
    model = blocks(nn.GELU(), nn.GELU())
    with manage(model, verify_every=3) as handle:
        assert differences(expected, train(model, step, 4)) == []
        assert handle.inspected_calls == 2  # in the second step and in the third
        assert all(outcome.dropped_bytes for outcome in handle.outcomes())
    assert len(samples) == 6  # of two regions in four steps, but for the calls that are inspected
    assert [bool(each) for each in samples] == [True] * (len(samples) - 2) + [False] * 2


def test_a_call_that_was_not_recorded_is_refused_before_it_runs(capture):
    model = blocks(nn.GELU())
    ran = []
    model.blocks[0].inner.register_forward_hook(lambda *_: ran.append(1))
    with manage(model), pytest.raises(CaptureRefused) as caught:
        captured_step(model, capture)
    assert ran == []
    assert "'blocks.0'" in caught.value.found
    assert "recording" in caught.value.why
    assert "three training steps" in caught.value.next


def test_offloading_and_codecs_that_look_at_the_data_are_refused(capture):
    for form, link in (("topk", None), ("int8:stochastic", None), ("simulated", SimulatedLink())):
        model = blocks(nn.GELU())
        with manage(model, packs={"exp#0": form}, link=link) as handle:
            train(model, plain_step, 2)
            with pytest.raises(CaptureRefused, match=form):
                captured_step(model, capture)
            handle.remove()


def test_a_codec_that_always_does_the_same_can_be_captured(capture, monkeypatch):
    model = blocks(nn.GELU())
    # On a GPU blocks that hold NaN are not looked for.
    monkeypatch.setattr("plimsoll.engine.codecs.integers.are_representable", lambda scales: True)
    with manage(model, packs={"exp#0": "int8"}):
        train(model, plain_step, 2)
        assert "gradient head.weight" in captured_step(model, capture)[0]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_codec_that_says_that_it_can_be_captured_reads_nothing_on_a_gpu(family, capture, monkeypatch):
    codec = find_codec(family)
    dtype = next(each for each in (torch.float32, torch.int64) if codec.accepts(each))
    if not codec.is_capturable(dtype):
        dtype = torch.bool
    if not (codec.accepts(dtype) and codec.is_capturable(dtype)):
        pytest.skip("is refused")
    tensor = torch.ones(300, device="meta").to(dtype)
    codec.decode(codec.encode(tensor))  # a meta tensor raises if a value is read


def test_a_random_op_that_runs_again_is_refused_and_attention_without_dropout_is_not(capture):
    generator = SimpleNamespace(device=torch.device("cuda", 0), clone_state=lambda: "state")
    states: dict[Any, Any] = {}
    points = {-1: ((1, generator),)}
    take_states(points, -1, states)
    assert states == {(1, -1): "state"}
    with capture, pytest.raises(CaptureRefused, match="dropout"):
        take_states(points, -1, states)
    with capture:
        take_states({}, -1, states)


def test_a_budget_is_attached_before_the_capture_not_during_it(capture):
    torch.manual_seed(0)
    model, x = Blocks(2), torch.randn(16, 32)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    handle = plimsoll.attach(model, budget="2MiB")

    def step(x: torch.Tensor) -> None:
        mean_square(model(x)).backward()
        model.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with capture, pytest.raises(CaptureRefused, match="without a plan"):
            step(x)
        for _ in range(3):
            step(x)
        with capture:
            step(x)
            with pytest.raises(CaptureRefused, match="without a plan"):
                step(torch.randn(4, 32))
    handle.remove()


def test_a_cpu_is_never_asked_for_a_capture(capture):
    model = blocks(nn.GELU())
    with manage(model):
        train(model, plain_step, 3)
    assert capture.asked == 0
