"""Compiled blocks that do more than return a value: they change buffers, call opaque ops, or run several times in a step."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.receipt import ReceiptVerdict

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Averaging(nn.Module):
    """Scales by a running average of its own values, as it was before this call or as it is after."""

    def __init__(self, *, is_before: bool) -> None:
        super().__init__()
        self.up, self.down, self.is_before = nn.Linear(32, 128), nn.Linear(128, 32), is_before
        self.register_buffer("average", torch.full((128,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        before = self.average.clone()
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        scale = before if self.is_before else self.average.clone()
        y: torch.Tensor = x + self.down(torch.tanh(hidden * scale) * torch.sigmoid(hidden - scale))
        return y


class Normalized(nn.Module):
    """A layer whose weight is divided by its spectral norm, which every forward estimates better."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 128))
        self.down = nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


@pytest.mark.long
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("kind", ["before", "after", "spectral"])
def test_what_is_computed_again_reads_buffers_as_forward_read_them(kind: str, is_whole: bool) -> None:
    torch.manual_seed(0)
    block = Normalized() if kind == "spectral" else Averaging(is_before=kind == "before")
    model, batch = nn.Sequential(block, copy.deepcopy(block)), torch.randn(512, 32)
    expected = _gradients(copy.deepcopy(model), batch)
    for part in [model] if is_whole else model:
        part.compile(dynamic=False)
    plan = plimsoll.plan(model, batch, strategy="full", loss=_squares)
    again = [each for region in plan.regions for each in region.decisions if each.decision is Decision.RECOMPUTE]
    assert again
    with plimsoll.apply(model, plan):
        gradients = _gradients(model, batch)
    for step, (given, wanted) in enumerate(zip(gradients, expected, strict=True)):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-6, msg=f"step {step}")


class Taught(nn.Module):
    """Blocks with a gate that a frozen teacher makes of a detached input, and teachers that are averaged before backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks, self.how = nn.ModuleList([Gated(), Gated()]), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            for block in self.blocks:
                teacher = block.teacher.weight if self.how == "parameter" else block.kept
                source = teacher.data if self.how == "data" else teacher
                source.mul_(0.5).add_(block.up.weight.detach(), alpha=0.5)
        return x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.teacher = nn.Linear(32, 128, bias=False).requires_grad_(False)
        self.register_buffer("kept", torch.randn(128, 32))
        self.register_buffer("mixed", torch.eye(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.tanh(self.teacher(x.detach()) + x.detach() @ self.kept.T) @ self.mixed
        y: torch.Tensor = x + self.down(self.up(x) * gate)
        return y


@pytest.mark.long
@pytest.mark.parametrize("how", ["parameter", "buffer", "data"])
def test_what_is_computed_again_reads_what_is_changed_between_forward_and_backward_as_it_was(how: str) -> None:
    torch.manual_seed(0)
    model, batch = Taught(how), torch.randn(512, 32)
    expected = _gradients(copy.deepcopy(model), batch)
    for block in model.blocks:
        block.compile(dynamic=False)
    plan = plimsoll.plan(model, batch, strategy="full", loss=_squares)
    assert any(each.decision is Decision.RECOMPUTE for region in plan.regions for each in region.decisions)
    assert plimsoll.verify(model, batch, plan, loss=_squares, steps=1).verdict is ReceiptVerdict.VERIFIED
    with plimsoll.apply(model, plan):
        gradients = _gradients(model, batch)
    for step, (given, wanted) in enumerate(zip(gradients, expected, strict=True)):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-6, msg=f"step {step}")


def test_a_check_that_gives_nothing_is_no_kernel() -> None:
    model, batch = nn.Sequential(Choosing(), Choosing()), torch.randn(512, 32)
    for block in model:
        block.compile(dynamic=False)
    plan = plimsoll.plan(model, batch, strategy="full", loss=_squares)
    assert plimsoll.verify(model, batch, plan, loss=_squares, steps=1).verdict is ReceiptVerdict.VERIFIED


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = nn.functional.one_hot(x.detach().argmax(-1), 32)  # checks its classes on the device
        y: torch.Tensor = x + self.down(torch.tanh(self.up(x))) * chosen
        return y


@pytest.mark.long
def test_where_torchs_default_partition_reads_a_changed_buffer_a_receipt_says_that_the_plan_is_right() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Averaging(is_before=True) for _ in range(2))), torch.randn(512, 32)
    for block in model:
        block.compile(dynamic=False)
    receipt = plimsoll.verify(
        model, batch, plimsoll.plan(model, batch, strategy="full", loss=_squares), loss=_squares, steps=1
    )
    assert receipt.verdict is ReceiptVerdict.WITHIN_ROUNDING
    assert any("its gradients are wrong" in note for note in receipt.notes)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.tanh(scale))  # for backward alone
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


class Rescaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.register_buffer("scale", torch.full((128,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = Scaled.apply(self.up(x), self.scale)
        y: torch.Tensor = x + self.down(torch.tanh(hidden))
        self.scale.mul_(0.5).add_(hidden.detach().mean(0))
        return y


class Looking(nn.Module):
    """A block is given a view of a table, which is changed through ``.data`` before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Masked(), Masked()])
        self.register_buffer("table", torch.randn(64, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.table[:32])
        self.table.data.mul_(0.5)
        return x


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        gate = torch.tanh(x.detach() @ rows)
        y: torch.Tensor = x + self.down(self.up(x) * (gate @ torch.eye(128)))
        return y


@pytest.mark.long
@pytest.mark.parametrize("kind", [Rescaling, Looking])
def test_what_only_backward_reads_and_what_views_show_is_read_as_it_was(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, batch = kind() if kind is Looking else nn.Sequential(kind(), kind()), torch.randn(128, 32)
    expected = _gradients(copy.deepcopy(model), batch)
    for block in model.blocks if isinstance(model, Looking) else model:
        block.compile(dynamic=False)
    plan = plimsoll.plan(model, batch, strategy="full", loss=_squares)
    assert any(each.decision is Decision.RECOMPUTE for region in plan.regions for each in region.decisions)
    with plimsoll.apply(model, plan):
        gradients = _gradients(model, batch)
    for step, (given, wanted) in enumerate(zip(gradients, expected, strict=True)):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-6, msg=f"step {step}")


@torch.library.custom_op("plimsoll_tests::noise", mutates_args=())
def _noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


@_noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        noise = _noise(hidden.detach())  # drawn where torch is not told of it
        y: torch.Tensor = x + self.down(torch.tanh(hidden * noise))
        return y


@pytest.mark.long
def test_a_custom_op_is_never_run_again() -> None:
    model, batch = nn.Sequential(Noisy(), Noisy()), torch.randn(512, 32)
    for block in model:
        block.compile(dynamic=False)
    plan = plimsoll.plan(model, batch, strategy="full", loss=_squares)
    decided = {each.value: each for each in plan.regions[0].decisions}
    assert decided[":noise"].decision is Decision.KEEP
    assert "custom op" in decided[":noise"].reason
    assert any(each.decision is Decision.RECOMPUTE for each in decided.values())
    assert plimsoll.verify(model, batch, plan, loss=_squares, steps=1).verdict is ReceiptVerdict.VERIFIED


class Repeating(nn.Module):
    """Comes through two blocks three times. The first call of the first one has an input without a gradient: another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Averaging(is_before=False), Normalized()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return x


@pytest.mark.long
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_blocks_that_are_called_several_times_have_one_code_and_are_planned_so(share: float) -> None:
    torch.manual_seed(0)
    model, batch = Repeating(), torch.randn(512, 32)
    for block in model.blocks:
        block.compile(dynamic=False)
    lowest = plimsoll.plan(model, batch, strategy="full", loss=_squares)
    spare = lowest.baseline_peak_bytes - lowest.predicted_peak_bytes
    plan = plimsoll.plan(model, batch, lowest.predicted_peak_bytes + int(share * spare), loss=_squares)
    dropped = {
        name: {region.dropped for region in plan.regions if region.name == name} for name in ("blocks.0", "blocks.1")
    }
    assert [len(each) for each in dropped.values()] == [1, 1]
    receipt = plimsoll.verify(model, batch, plan, loss=_squares, steps=1)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert receipt.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


def _squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of three steps, one vector each."""
    steps = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        _squares(model(batch)).backward()
        steps.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return steps
