"""One traced step: what is in it, and that nothing else has changed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import plimsoll
from metering import loss_of
from plimsoll.artifacts.receipt import ReceiptVerdict
from plimsoll.artifacts.trace import Category, Phase
from plimsoll.errors import InvalidBatch, InvalidLoss, InvalidModel, TracingFailed
from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.tracing.meters.workspaces import WorkspaceMeter
from plimsoll.tracing.trace import _Step, merged_timings, trace
from plimsoll.units import MIB
from tracing import zoo


class Raising(nn.Module):
    """Writes its buffer, its input and the random state, then raises."""

    def __init__(self, error: BaseException | None = None, where: str = "forward") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(2))
        self.register_buffer("count", torch.zeros(()))
        self.error = error
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x.mul_(2)
        x = torch.dropout(self.blocks[1](self.blocks[0](x)), 0.5, train=True)
        if self.error is not None and self.where == "forward":
            raise self.error
        if self.error is not None:
            x.register_hook(self._fail)
        return x.sum()

    def _fail(self, gradient: torch.Tensor) -> None:
        raise self.error


def state_of(model: nn.Module) -> dict[str, object]:
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "gradient objects": [id(p.grad) for p in model.parameters() if p.grad is not None],
        "flags": [module.training for module in model.modules()],
        "forwards": [module.__dict__.get("forward") for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "random": torch.get_rng_state(),
    }


def assert_same(one: object, other: object) -> None:
    if isinstance(one, dict):
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("name", ["gpt2", "conv net"])
@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("device_name", [None, "H100"])
def test_tracing_leaves_model_gradients_buffers_and_random_state(
    name: str, has_gradients: bool, device_name: str | None
):
    model, batch = zoo.ALL[name]()
    if has_gradients:
        loss_of(model(**batch)).backward()
    before = state_of(model)
    trace(model, batch, repeats=2, device_name=device_name)
    assert_same(before, state_of(model))


@pytest.mark.parametrize(
    ("error", "where", "expected"),
    [
        (ValueError("no"), "forward", InvalidBatch),
        (KeyboardInterrupt(), "forward", KeyboardInterrupt),
        (torch.OutOfMemoryError("full"), "forward", torch.OutOfMemoryError),
        (ValueError("no"), "backward", TracingFailed),
        (KeyboardInterrupt(), "backward", KeyboardInterrupt),
        (torch.OutOfMemoryError("full"), "backward", torch.OutOfMemoryError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__ if not isinstance(value, str) else value),
)
def test_exception_leaves_everything_as_it_was(error: BaseException, where: str, expected: type[BaseException]):
    model, x = Raising(error, where), torch.randn(2, 8)
    before, x_before = state_of(model), x.clone()
    with pytest.raises(expected):
        trace(model, x)
    assert_same(before, state_of(model))
    assert torch.equal(x, x_before)


def test_buffer_of_nans_and_an_input_that_the_model_overwrites_are_put_back():
    class Writing(zoo.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.data.zero_()  # no version counter shows this
            return super().forward(x)

    model = Writing()
    model.register_buffer("count", torch.tensor(torch.nan))
    trace(model, torch.randn(2, 8), repeats=1)
    assert model.count.isnan()
    x = torch.randn(2, 8)
    before = x.clone()
    trace(Raising(), x)
    assert torch.equal(x, before)


def test_traced_step_names_its_parts():
    model, batch = zoo.llama()
    step = trace(model, batch, optimizer=torch.optim.AdamW(model.parameters()), repeats=1)
    assert {op.phase for op in step.ops} == set(Phase)
    by_category = {category: sum(s.bytes for s in step.storages if s.category is category) for category in Category}
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert by_category[Category.PARAMETER] == by_category[Category.GRADIENT] == parameters
    assert 2 * parameters <= by_category[Category.OPTIMIZER_STATE] < 2.01 * parameters
    assert set(step.specs) == {op.cost_key for op in step.ops}
    assert not step.is_fake
    assert step.device == "cpu"


def test_storages_that_were_there_before_are_what_the_user_knows_and_ids_are_positions():
    model, batch = zoo.llama()
    step = trace(model, batch, repeats=1)
    assert {s.category for s in step.storages if s.born < 0} <= {Category.PARAMETER, Category.BUFFER, Category.INPUT}
    assert [storage.id for storage in step.storages] == list(range(len(step.storages)))
    for region in step.regions:
        assert all(value.bytes == step.storages[value.storage].bytes for value in region.graph.values)


def test_every_cost_key_of_a_real_step_has_seconds():
    model, batch = zoo.llama()
    step = trace(model, batch, repeats=3)
    assert {op.cost_key for op in step.ops} == set(step.timings)
    assert all(len(samples) >= 2 for samples in step.timings.values())


class Spacious(WorkspaceMeter):
    """Says that each op has a workspace of ``workspace_bytes``."""

    def __init__(self, workspace_bytes: int) -> None:
        super().__init__()
        self._workspace_bytes = workspace_bytes

    def run(self, key: str, call: Callable[[], Any]) -> Any:
        self.bytes[key] = self._workspace_bytes
        return call()


@pytest.mark.parametrize(("workspace_bytes", "runs"), [(0, 1), (64 * MIB, 0)])
def test_a_timed_run_holds_activations_only_if_workspaces_fit_into_the_limit_too(workspace_bytes: int, runs: int):
    model, batch = zoo.llama()
    with (
        mock.patch("plimsoll.tracing.trace.meter_for", return_value=Spacious(workspace_bytes)),
        mock.patch.object(_Step, "timed", autospec=True, side_effect=_Step.timed) as timed,
    ):
        trace(model, batch, repeats=2, limit_bytes=64 * MIB)
    assert timed.call_count == runs


def test_samples_of_all_runs_are_kept_together():
    assert merged_timings([{"a": [1.0], "b": [3.0]}, {"a": [2.0]}]) == {"a": (1.0, 2.0), "b": (3.0,)}


def test_progress_rises_to_one_in_every_stage():
    model, batch = zoo.llama()
    seen: dict[str, list[float]] = {}
    trace(model, batch, repeats=2, progress=lambda stage, share: seen.setdefault(stage, []).append(share))
    assert len(seen) == 2
    assert all(shares == sorted(shares) and shares[-1] == 1.0 for shares in seen.values())


@pytest.mark.parametrize(
    ("model", "batch", "error", "words"),
    [
        (nn.ReLU(), torch.ones(2), InvalidModel, "does not have parameters"),
        (nn.Linear(2, 1).requires_grad_(False), torch.ones(2), InvalidModel, "trainable"),
        (nn.LazyLinear(2), torch.ones(2), InvalidModel, "without a shape"),
        (nn.Linear(2, 1), torch.ones(2, device="meta"), InvalidBatch, "meta"),
        (nn.Linear(2, 1), torch.ones(2, 3), InvalidBatch, "cannot be multiplied"),
    ],
    ids=["without parameters", "frozen", "lazy", "batch without data", "batch of another width"],
)
def test_model_without_a_training_step_and_batch_that_does_not_fit_are_refused(
    model: nn.Module, batch: torch.Tensor, error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        trace(model, batch)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        chosen: torch.Tensor = torch.cond(hidden.sum() > 0, lambda h: self.second(h).tanh(), self.second, (hidden,))
        return chosen.sum()


def test_an_op_that_takes_functions_is_named():
    with pytest.raises(TracingFailed, match="runs torch's cond"):
        trace(Branching(), torch.ones(2, 2))


def test_switched_off_gradients_are_refused():
    with torch.no_grad(), pytest.raises(TracingFailed, match="switched off"):
        trace(nn.Linear(2, 1), torch.ones(2))


def test_output_that_is_no_scalar_asks_for_a_loss():
    with pytest.raises(InvalidLoss):
        trace(nn.Linear(2, 3), torch.ones(2))
    assert trace(nn.Linear(2, 3), torch.ones(2), loss=torch.sum, repeats=1).ops


@pytest.mark.filterwarnings("ignore:.*activation_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_model_that_checkpoints_its_layers_is_refused_and_told_how_to_stop(use_reentrant: bool):
    model, batch = zoo.llama()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with pytest.raises(InvalidModel) as caught:
        trace(model, batch)
    assert "gradient_checkpointing_disable" in caught.value.next


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_a_block_is_refused(use_reentrant: bool):
    class Checkpointed(zoo.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x.sum()

    with pytest.raises(InvalidModel, match="already checkpoints"):
        trace(Checkpointed(), torch.randn(2, 8, requires_grad=True))


def test_a_region_that_branches_on_data_can_be_planned():
    class Branching(zoo.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    model = nn.Sequential(Branching(), Branching())
    step = trace(model, torch.randn(2, 8), loss=torch.sum, repeats=1)
    assert [region.obstacle for region in step.regions] == ["", ""]
    assert all(slot.is_managed for region in step.regions for slot in region.graph.slots[:1])


def test_copy_of_a_traced_model_still_trains():
    model, batch = zoo.gpt2()
    trace(model, batch, repeats=1)
    loss_of(copy.deepcopy(model)(**batch)).backward()


def test_every_parameter_is_listed_with_shape_storage_and_whether_it_is_trained():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    model[1].weight.requires_grad_(requires_grad=False)
    step = trace(model, torch.ones(5, 4), loss=torch.sum)
    assert [(p.name, p.shape, p.dtype, p.bytes, p.is_trainable) for p in step.parameters] == [
        ("0.weight", (3, 4), "f32", 48, True),
        ("0.bias", (3,), "f32", 12, True),
        ("1.weight", (2, 3), "f32", 24, False),
    ]
    storages = [step.storages[p.storage] for p in step.parameters]
    assert all(storage.category is Category.PARAMETER for storage in storages)
    assert [storage.label for storage in storages] == ["parameter:0.weight", "parameter:0.bias", "parameter:1.weight"]


def test_a_tied_parameter_is_listed_once_with_its_other_names():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    step = trace(model, torch.ones(2, 4), loss=torch.sum)
    assert [(p.name, p.aliases) for p in step.parameters] == [("0.weight", ("1.weight",))]


def test_a_block_that_calls_itself_is_one_region():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(16, 16)

        def forward(self, x, depth=2):
            y = torch.tanh(self.line(x)) * torch.sin(x)
            return self(y, depth - 1) if depth else y

    model, x = nn.Sequential(Recursive(), Recursive()), torch.randn(8, 16)
    plan = plimsoll.plan(model, x, strategy="full", loss=torch.sum)
    assert [region.name for region in plan.regions] == ["0", "1"]
    assert plimsoll.verify(model, x, plan, loss=torch.sum).verdict is ReceiptVerdict.VERIFIED


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_traced_step_holds_less_than_the_step_itself(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    layers = [part for _ in range(8) for part in (nn.Linear(64, 64, dtype=dtype), nn.Tanh())]
    model, batch = nn.Sequential(*layers), torch.randn(4096, 64, dtype=dtype)
    measured: list[int] = []
    end = PeakMeter.__exit__

    def ended(self: PeakMeter, *error: Any) -> None:
        end(self, *error)
        measured.append(self.peak_bytes)

    monkeypatch.setattr(PeakMeter, "__exit__", ended)
    with PeakMeter("cpu"):
        model(batch).abs().square().mean().backward()
    model.zero_grad()
    trace(model, batch, loss=lambda output: output.abs().square().mean(), repeats=0)
    assert max(measured[1:]) < 0.5 * measured[0]


def test_copies_of_written_weights_are_freed_without_garbage_collection():
    class Averaging(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self[0].weight.mul_(0.9)
            return super().forward(x)

    def alive() -> int:
        return sum(isinstance(each, torch.Tensor) and each.shape == (37, 41) for each in gc.get_objects())

    model = Averaging(nn.Linear(41, 37), nn.Tanh())
    gc.collect()
    gc.disable()
    try:
        before = alive()
        trace(model, torch.randn(4, 41), loss=torch.sum, repeats=0)
        assert alive() == before
    finally:
        gc.enable()
