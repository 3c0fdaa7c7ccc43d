"""An optimizer's state and step are part of the trace, and the optimizer is not touched."""

from __future__ import annotations

import copy

import pytest
import torch

from plimsoll.artifacts.trace import Category, Phase, Trace
from plimsoll.errors import InvalidModel, TracingFailed
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes
from plimsoll.tracing.optimizer import in_chunks, trace_optimizer
from plimsoll.tracing.trace import trace
from tracing import zoo

STATE = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
    "Adam": (torch.optim.Adam, 2),
    "AdamW": (torch.optim.AdamW, 2),
    "AdamW fused": (lambda p: torch.optim.AdamW(p, fused=True), 2),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
    "Adagrad": (torch.optim.Adagrad, 1),
    "RMSprop": (torch.optim.RMSprop, 1),
}


def step_of(make, device_name: str = "laptop-CPU") -> tuple[Trace, int]:
    model = zoo.Stack(width=64)
    bytes_ = sum(p.numel() * p.element_size() for p in model.parameters())
    return trace(model, torch.randn(2, 64), optimizer=make(model.parameters()), device_name=device_name), bytes_


def state_bytes(step: Trace) -> int:
    return sum(s.bytes for s in step.storages if s.category is Category.OPTIMIZER_STATE)


@pytest.mark.parametrize("name", sorted(STATE))
@pytest.mark.parametrize("device_name", ["laptop-CPU", "H100"])
def test_state_is_there_from_the_start_and_stays(name: str, device_name: str):
    make, copies = STATE[name]
    step, parameter_bytes = step_of(make, device_name)
    states = [s for s in step.storages if s.category is Category.OPTIMIZER_STATE]
    assert all(s.born == -1 and s.dies == len(step.ops) for s in states)
    assert state_bytes(step) == pytest.approx(copies * parameter_bytes, rel=0.01, abs=64)


def test_factored_state_is_small():
    step, parameter_bytes = step_of(torch.optim.Adafactor)
    assert 0 < state_bytes(step) < 0.2 * parameter_bytes


def test_temporaries_of_the_step_come_after_backward():
    step, _ = step_of(torch.optim.Adam)
    phases = [op.phase for op in step.ops]
    first = phases.index(Phase.OPTIMIZER)
    assert all(phase is Phase.OPTIMIZER for phase in phases[first:])
    assert any(s.born >= first and s.category is Category.TEMPORARY for s in step.storages)


def test_gpu_runs_all_parameters_at_once_and_needs_a_copy_for_it():
    cpu, parameter_bytes = step_of(torch.optim.Adam, "laptop-CPU")
    gpu, _ = step_of(torch.optim.Adam, "H100")

    def temporary_bytes(step: Trace) -> int:
        first = next(i for i, op in enumerate(step.ops) if op.phase is Phase.OPTIMIZER)
        born = [s for s in step.storages if s.born >= first]
        return max(sum(s.bytes for s in born if s.born <= t < s.dies) for t in range(first, len(step.ops)))

    assert temporary_bytes(cpu) < 0.6 * parameter_bytes
    assert temporary_bytes(gpu) == pytest.approx(parameter_bytes, rel=0.01)


@pytest.mark.parametrize("has_state", [False, True])
def test_optimizer_and_its_state_are_not_touched(has_state: bool):
    model = zoo.Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if has_state:
        model(torch.randn(2, 8)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict())
    with_state = trace(model, torch.randn(2, 8), optimizer=optimizer, repeats=1)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert before["state"].keys() == after["state"].keys()
    for index, state in before["state"].items():
        assert all(torch.equal(state[name], after["state"][index][name]) for name in state)
    assert state_bytes(with_state) > 0


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_fused_step_is_traced_without_memory_as_large_as_the_parameters(make: type[torch.optim.Optimizer]):
    model = torch.nn.Linear(1024, 1024)
    optimizer = make(model.parameters(), lr=0.1, fused=True)
    with PeakMeter() as meter:
        log = trace_optimizer(optimizer, model, frozenset(), on_gpu=False)
    assert log.ops()[-1].name.startswith("_fused_")
    assert meter.peak_bytes < 2**20 < storage_bytes(model.parameters())


def test_frozen_parameters_have_no_state():
    model = zoo.Stack(width=64)
    model.blocks[0].requires_grad_(False)
    step = trace(model, torch.randn(2, 64), optimizer=torch.optim.Adam(model.parameters()), repeats=1)
    trained = sum(p.numel() * 4 for p in model.blocks[1].parameters())
    assert state_bytes(step) == pytest.approx(2 * trained, rel=0.01)


def test_optimizer_of_another_model_is_refused():
    other = torch.optim.SGD(zoo.Stack().parameters(), lr=0.1)
    with pytest.raises(InvalidModel, match="does not hold any parameter of Stack"):
        trace(zoo.Stack(), torch.randn(2, 8), optimizer=other, repeats=1)


class Evaluating(torch.optim.SGD):
    """Cannot step without evaluating the model."""

    def step(self, closure):
        closure()
        return super().step()


def test_optimizer_that_needs_a_closure_is_refused():
    model = zoo.Stack()
    with pytest.raises(TracingFailed, match="Evaluating") as caught:
        trace(model, torch.randn(2, 8), optimizer=Evaluating(model.parameters()), repeats=1)
    assert "without optimizer=" in caught.value.next


@pytest.mark.parametrize(("search", "held"), [(None, 5), ("strong_wolfe", 11)])
def test_the_full_history_of_lbfgs_is_counted_before_it_is_there(search, held):
    model = zoo.Stack(width=32)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=3, line_search_fn=search)
    step = trace(model, torch.randn(2, 32), optimizer=optimizer, repeats=1)
    bytes_ = sum(parameter.nbytes for parameter in model.parameters())
    assert state_bytes(step) == (2 * 3 + 2 + held) * bytes_
    assert not optimizer.state


def test_memory_beside_the_step_stays_if_the_optimizer_steps_in_chunks(monkeypatch):
    # On a GPU, libraries hold workspaces during the whole step.
    monkeypatch.setattr("plimsoll.tracing.trace.release_library_workspaces", lambda device: 4096)
    model = zoo.Stack(width=64)
    optimizer = torch.optim.AdamW(model.parameters())
    whole = trace(model, torch.randn(2, 64), optimizer=optimizer, repeats=0)
    chunks = [[name] for name, _ in model.named_parameters()]
    parts = in_chunks(whole, optimizer, model, chunks)

    assert [s.id for s in parts.storages] == list(range(len(parts.storages)))
    for step in (whole, parts):
        assert [s.bytes for s in step.storages if s.category is Category.COMMUNICATION] == [4096]
    assert state_bytes(parts) == state_bytes(whole)
