"""Real steps of real architectures, profiled here: everything is attributed, the parts add up, nothing is left behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import plimsoll
from long_cases import some
from plimsoll.analysis.diagnose.profiling import named_calls
from plimsoll.artifacts.finding import Finding, OverheadCause, WorkPhase
from plimsoll.errors import InvalidModel, PlanFileError, PlanMismatch, TracingFailed
from plimsoll.planning.choice import Choice
from plimsoll.planning.strategies import choose_full, choose_none
from plimsoll.tracing.recorder.calling import scalar_loss
from searchless import plan_without_search
from steps import CheckpointedStack, Step, conv_net, gpt2, llama, mean_square, stack, vit
from unchanged import unchanged

MODELS: dict[str, Callable[[], Step]] = {"llama": llama, "gpt2": gpt2, "vit": vit, "conv_net": conv_net}


def diagnose(
    step: Step, choose: Callable[..., tuple[Choice, ...]] = choose_full, *, steps: int = 1, **how: Any
) -> Finding:
    model, batch, loss = step
    plan = plan_without_search(step, choose)
    return plimsoll.diagnose(model, batch, plan, loss=loss, steps=steps, **how)


@pytest.fixture(scope="module")
def findings() -> Callable[[str], Finding]:
    """Each model is profiled once, under a plan that recomputes every block."""
    return functools.cache(lambda name: diagnose(MODELS[name](), steps=2))


def parts_add_up(finding: Finding) -> bool:
    return abs(sum(part.seconds for part in finding.parts) - finding.overhead_seconds) <= 1e-9


@pytest.mark.parametrize("name", some(MODELS, 2))
def test_every_op_is_attributed_and_the_parts_add_up(name: str, findings: Callable[[str], Finding]):
    finding = findings(name)
    for side in (finding.baseline, finding.plan):
        assert side.steps == 2
        assert side.attributed_share >= 0.99
        assert side.phased_share >= 0.99
        assert side.module_share >= 0.5  # the loss is outside, and on a busy machine any op may take long
        assert side.busy_seconds + side.idle_seconds == pytest.approx(side.step_seconds)
    assert parts_add_up(finding)
    assert abs(finding.seconds_of(OverheadCause.UNEXPLAINED)) <= 0.02 * abs(finding.overhead_seconds)
    assert finding.measured_baseline_seconds
    assert finding.are_layers_modules


def test_recomputation_is_found_in_the_layers_that_the_plan_recomputes(findings: Callable[[str], Finding]):
    finding = findings("llama")
    assert finding.seconds_of(OverheadCause.RECOMPUTE) > 0
    assert WorkPhase.RECOMPUTE not in {use.phase for use in finding.baseline.phases}
    assert {row.name for row in finding.layers if row.recompute_seconds} == {"model.layers.0", "model.layers.1"}
    rows = {row.name: row for row in finding.layers}
    assert rows["model.layers.0"].plan_count > rows["model.layers.0"].baseline_count
    assert rows["lm_head"].plan_count == rows["lm_head"].baseline_count


def test_a_plan_that_keeps_everything_adds_no_work_and_leaves_no_trace():
    step = stack()
    with unchanged(step[0]):
        finding = diagnose(step, choose_none)
    assert finding.kernel_ratio == 1.0
    assert finding.seconds_of(OverheadCause.RECOMPUTE) == finding.seconds_of(OverheadCause.ADDED) == 0.0


def export(model: nn.Module, batch: Any, loss: Any, path: Path, *, with_stack: bool = False) -> Path:
    """A trace as a user makes one: without Plimsoll."""

    def run() -> None:
        output = model(**batch) if isinstance(batch, dict) else model(batch)
        scalar_loss(output, loss).backward()
        model.zero_grad()

    run()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=with_stack) as profiler:
        for number in range(2):
            with record_function(f"ProfilerStep#{number}"):
                run()
    profiler.export_chrome_trace(str(path))
    return path


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputation_by_torch_checkpoint_is_told_from_backward(tmp_path: Path, is_reentrant: bool):
    torch.manual_seed(0)
    model, batch = CheckpointedStack(), torch.randn(48, 32, requires_grad=True)
    model.is_on, model.is_reentrant = False, is_reentrant
    baseline = export(model, batch, mean_square, tmp_path / "baseline.json", with_stack=True)
    model.is_on = True
    finding = plimsoll.diagnose(baseline, export(model, batch, mean_square, tmp_path / "plan.json", with_stack=True))
    phases = {use.phase: use for use in finding.plan.phases}
    # Norm, two products, GELU, three ops of dropout, and the addition that ends a block; that one is run again only by the
    # reentrant form: the other stops once everything is there.
    assert phases[WorkPhase.RECOMPUTE].count == 3 * (8 if is_reentrant else 7)
    assert phases[WorkPhase.BACKWARD].busy_seconds > 0
    assert finding.seconds_of(OverheadCause.RECOMPUTE) > 0
    assert finding.plan.attributed_share >= 0.99
    assert parts_add_up(finding)
    assert {row.name.rpartition(".")[2] for row in finding.layers if row.recompute_seconds} == {
        f"Block_{index}" for index in range(3)
    }


def test_traces_of_transformers_with_gradient_checkpointing_are_attributed(tmp_path: Path):
    model, batch, loss = llama()
    baseline = export(model, batch, loss, tmp_path / "baseline.json")
    model.gradient_checkpointing_enable()
    finding = plimsoll.diagnose(baseline, export(model, batch, loss, tmp_path / "plan.json"))
    assert finding.plan.attributed_share >= 0.99
    assert finding.plan.phased_share >= 0.99
    assert finding.seconds_of(OverheadCause.RECOMPUTE) > 0
    assert not finding.are_layers_modules
    assert any("do not contain modules" in note for note in finding.notes)


def test_kept_traces_give_the_same_parts(tmp_path: Path):
    step = stack()
    with unchanged(step[0]):
        finding = diagnose(step, keep_traces=tmp_path / "traces")
    again = plimsoll.diagnose(tmp_path / "traces/baseline.trace.json.gz", tmp_path / "traces/plan.trace.json.gz")
    assert again.parts == finding.parts
    assert again.plan.steps == finding.plan.steps == 1


def test_replays_carry_their_regions_name_while_a_profiler_is_on(tmp_path: Path):
    model, batch, loss = stack()
    plan = plimsoll.plan(model, batch, strategy="full", loss=loss)
    with plimsoll.apply(model, plan):
        for _ in range(2):
            loss(model(batch)).backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss(model(batch)).backward()
    names = {event.name for event in profiler.events()}
    assert {f"plimsoll.recompute: blocks.{index}" for index in range(3)} <= names


def test_module_ranges_are_closed_when_a_forward_raises():
    model, batch, _ = stack()
    with unchanged(model), pytest.raises(RuntimeError), named_calls(model):
        model(batch[:, :3])
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad(), named_calls(model):
        with pytest.raises(RuntimeError):
            model(batch[:, :3])
        model.blocks[0].up(batch)
    spans = {event.name: event.time_range for event in profiler.events() if event.name.startswith("plimsoll.module")}
    assert spans["plimsoll.module: blocks.0"].end <= spans["plimsoll.module: blocks.0.up"].start


def test_a_failed_call_leaves_the_model_as_it_was(tmp_path: Path):
    model, batch, loss = stack()
    plan = plan_without_search((model, batch, loss))
    other = conv_net()[0]
    occupied = tmp_path / "file"
    occupied.write_text("")
    with unchanged(model), unchanged(other):
        for error, subject, rows, how in (
            (PlanMismatch, other, batch, {}),
            (PlanMismatch, model, batch[:3], {}),
            (PlanFileError, model, batch, {"keep_traces": occupied}),
            (InvalidModel, nn.Linear(2, 2, device="meta"), batch, {}),
        ):
            with pytest.raises(error):
                plimsoll.diagnose(subject, rows, plan, loss=loss, **how)
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(TracingFailed):
        plimsoll.diagnose(model, batch, plan, loss=loss)
