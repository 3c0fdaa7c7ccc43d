"""Plans inside of torch.compile: whole models and blocks, budgets kept, gradients bit for bit, and everything put back."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import torch
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler

import plimsoll
import zoo
from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.decision import Decision, Engine
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import ReceiptVerdict
from plimsoll.engine.compiled.partitioner import GraphOrder, PlannedPartitioner
from plimsoll.errors import InvalidModel, InvalidOption, InvalidStrategy, PlanMismatch, PlimsollError
from plimsoll.session.compiled import CompiledPlanner, planned_parts, trace_compiled
from plimsoll.session.forms import sense_compiled
from plimsoll.session.options import PlanOptions
from plimsoll.session.step_planner import StepPlanner
from plimsoll.session.step_watch import StepWatch
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import TrainingStep
from plimsoll.session.trial import TrialRun
from plimsoll.tracing.compiled.units import CompileCall, find_units, split_regions

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")

Model = tuple[nn.Module, dict[str, Any]]


@pytest.fixture(scope="module")
def blocks() -> Iterator[Model]:
    """A GPT-2 with dropout whose blocks are compiled one by one."""
    model = zoo.build("gpt2")
    for block in model.transformer.h:
        block.compile(dynamic=False)
    yield model, zoo.words(rows=8, tokens=32)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def plan(blocks: Model) -> Plan:
    model, batch = blocks
    unmanaged = plimsoll.plan(model, batch, strategy="none").predicted_peak_bytes
    lowest = plimsoll.plan(model, batch, strategy="full").predicted_peak_bytes
    return plimsoll.plan(model, batch, (unmanaged + lowest) // 2)


@pytest.mark.long
def test_a_compiled_model_keeps_to_its_budget_with_the_bits_of_the_default_partition(blocks: Model, plan: Plan) -> None:
    model, batch = blocks
    receipt = plimsoll.verify(model, batch, plan, steps=2)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert not receipt.gradient_mismatches
    assert plan.budget_bytes is not None
    assert receipt.measured_peak_bytes <= plan.budget_bytes < receipt.measured_baseline_peak_bytes
    assert receipt.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.05)
    assert {region.engine for region in receipt.regions} <= {Engine.COMPILED, Engine.UNTOUCHED}
    assert any("torch's default partition" in note for note in receipt.notes)


@pytest.mark.long
def test_masks_of_dropout_are_drawn_again_from_the_seeds_that_forward_drew(blocks: Model) -> None:
    model, batch = blocks
    plan = plimsoll.plan(model, batch, strategy="full")
    masks = [decision for region in plan.regions for decision in region.decisions if ":gt" in decision.value]
    assert {mask.decision for mask in masks} == {Decision.RECOMPUTE}
    receipt = plimsoll.verify(model, batch, plan, steps=2)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert not receipt.gradient_mismatches
    assert receipt.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.05)


@pytest.mark.long
def test_taking_a_plan_off_puts_back_what_the_user_compiled(blocks: Model, plan: Plan, tmp_path: Any) -> None:
    model, batch = blocks
    before = [block._compiled_call_impl for block in model.transformer.h]
    plan.save(tmp_path / "plan.json")
    with plimsoll.apply(model, plimsoll.load(tmp_path / "plan.json")) as handle:
        assert [block._compiled_call_impl for block in model.transformer.h] != before
        with handle.paused():
            assert [block._compiled_call_impl for block in model.transformer.h] == before
        model(**batch).loss.backward()
    model.zero_grad()
    assert [block._compiled_call_impl for block in model.transformer.h] == before


@pytest.mark.long
def test_the_step_that_compiles_does_not_have_others_metered(
    blocks: Model, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = blocks
    meter, metered = StepWatch.meter, []

    def noted(*call: Any, with_optimizer: bool = False) -> None:
        metered.append(with_optimizer)  # samples of known steps are metered with the optimizer's step
        meter(*call, with_optimizer=with_optimizer)

    monkeypatch.setattr(StepWatch, "meter", noted)
    with plimsoll.apply(model, plan):
        for _ in range(6):
            model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    assert metered.count(False) <= 2  # the first step, and the first one that begins with gradients


@pytest.mark.long
def test_planning_compiled_blocks_takes_none_of_the_numbers_that_training_draws(blocks: Model) -> None:
    model, batch = blocks
    before = torch.get_rng_state()
    plimsoll.plan(model, batch, strategy="none")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.long
def test_a_wrong_gradient_of_compiled_code_is_found(blocks: Model, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(PlannedPartitioner):
        def uuid(self) -> str:
            return uuid4().hex  # not from torch's caches: None is a key like another

        def __call__(self, *args: Any, **options: Any) -> Any:
            forward, backward = super().__call__(*args, **options)
            product = next(node for node in backward.graph.nodes if node.target is torch.ops.aten.mm.default)
            with backward.graph.inserting_after(product):
                scaled = backward.graph.call_function(torch.ops.aten.mul.Tensor, (product, 1.01))
            scaled.meta.update(product.meta)
            product.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
            backward.recompile()
            return forward, backward

    monkeypatch.setattr("plimsoll.engine.compiled.units.PlannedPartitioner", Wrong)
    model, batch = blocks
    receipt = plimsoll.verify(model, batch, plan, steps=1)
    assert receipt.verdict is ReceiptVerdict.GRADIENTS_DIFFER
    assert receipt.exit_code


@pytest.mark.long
def test_torchs_memory_budgets_are_compared_with_plans_and_draw_other_masks(blocks: Model) -> None:
    model, batch = blocks
    found = plimsoll.compare(model, batch, ["full", "memory-budget:0"], steps=1)
    ours, torchs = found.rows
    assert ours.is_bit_equal
    assert ours.measured_peak_bytes == pytest.approx(ours.predicted_peak_bytes, rel=0.1)
    assert (torchs.status, torchs.predicted_peak_bytes) == (None, None)
    assert torchs.measured_peak_bytes is not None
    assert torchs.measured_peak_bytes < found.baseline_peak_bytes
    assert torchs.is_wrong
    assert found.exit_code == 1
    assert "DIFFER" in str(found)
    with pytest.raises(InvalidStrategy, match="memory-budget:2"):
        plimsoll.compare(model, batch, ["memory-budget:2"])


@pytest.mark.long
def test_peaks_of_torchs_own_methods_count_the_state_that_the_optimizer_has_not_made_yet() -> None:
    model, batch = _mixed(lambda model: model.compile(dynamic=False)), torch.randn(64, 32)
    state_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    peaks = []
    for optimizer in (None, torch.optim.AdamW(model.parameters(), foreach=False)):
        found = plimsoll.compare(model, batch, ["checkpoint"], loss=torch.sum, optimizer=optimizer, steps=1)
        peaks.append((found.baseline_peak_bytes, found.rows[0].measured_peak_bytes))
    for before, after in zip(*peaks, strict=True):
        assert after - before >= state_bytes


@pytest.mark.long
def test_checkpointing_under_torch_compile_is_compared_with_plans(blocks: Model) -> None:
    model, batch = blocks
    forwards = [block.__dict__.get("forward") for block in model.transformer.h]
    _assert_saves(plimsoll.compare(model, batch, ["checkpoint:selective", "checkpoint"], steps=1))
    assert [block.__dict__.get("forward") for block in model.transformer.h] == forwards


@pytest.mark.long
def test_checkpointing_the_regions_of_a_model_compiled_as_a_whole_is_compared() -> None:
    model = _mixed(lambda model: model.compile(dynamic=False))
    _assert_saves(plimsoll.compare(model, torch.randn(512, 32), ["checkpoint"], loss=torch.sum, steps=1))


def _assert_saves(found: Comparison) -> None:
    for row in found.rows:
        assert row.is_bit_equal
        assert row.measured_peak_bytes is not None
        assert row.measured_peak_bytes < 0.9 * found.baseline_peak_bytes
    assert found.exit_code == 0


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x  # torch refuses a side effect inside of a checkpoint
        return self.down(self.up(x).relu()).sum()


@pytest.mark.long
def test_what_torch_cannot_compile_under_checkpointing_is_a_row_that_says_so() -> None:
    model = Remembering()
    model.compile(fullgraph=True)
    kept, refused = plimsoll.compare(model, torch.ones(64, 16), ["none", "checkpoint"], steps=1).rows
    assert kept.is_bit_equal
    assert refused.measured_peak_bytes is None
    assert refused.note.startswith("torch cannot compile it: ")


@pytest.mark.long
def test_the_peak_of_a_compiled_step_is_explained_as_its_kernels(blocks: Model, plan: Plan) -> None:
    model, batch = blocks
    unmanaged = plimsoll.plan(model, batch, strategy="none").predicted_peak_bytes
    found = plimsoll.explain(model, batch)
    assert found.setup == "torch.compile's default partition"
    assert found.peak.bytes == pytest.approx(unmanaged, rel=0.02)
    assert found.plain_peak is not None
    assert found.peak.bytes < found.plain_peak.bytes
    assert any(holder.label.startswith("transformer.h.0.") for holder in found.peak.holders)
    assert "strategy full" in {change.name for change in found.changes}
    planned = plimsoll.explain(model, batch, plan, optimizer=torch.optim.AdamW(model.parameters()))
    without_state = planned.peak.bytes - sum(part.bytes for part in planned.parts if part.name == "optimizer state")
    assert without_state == pytest.approx(plan.predicted_peak_bytes, rel=0.05)
    assert "optimizer with foreach=False" in {change.name for change in planned.changes}
    with pytest.raises(InvalidOption, match="sqrt"):
        plimsoll.explain(model, batch, "sqrt")


@pytest.mark.long
def test_advice_on_a_compiled_step_is_about_compiled_plans(blocks: Model) -> None:
    model, batch = blocks
    found = plimsoll.advise(model, batch, target="job.py:step")
    assert {"none", "full", "auto (recompute)"} <= {each.name for each in found.candidates}
    assert all(layer.backward_seconds > 0 for layer in found.layers)
    assert "compiled already" in found.compiler.note


@pytest.mark.long
def test_a_compiled_plan_is_diagnosed_beside_the_default_partition(blocks: Model, plan: Plan) -> None:
    model, batch = blocks
    found = plimsoll.diagnose(model, batch, plan, steps=1)
    assert found.strategy == plan.strategy
    assert any("inside of kernels" in note for note in found.notes)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Eagerly(nn.Module):
    """What torch.compile leaves out of the graph around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y


def _every_second(model: nn.Sequential) -> None:
    for block in model[1::2]:
        block.compile(dynamic=False)


def _a_part_of_each(model: nn.Sequential) -> None:
    for block in model:
        block.body.compile(dynamic=False)


def _broken(model: nn.Sequential) -> None:
    for block in model:
        block.body = Eagerly(block.body)
        block.compile(dynamic=False)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.body = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
        self.gate = nn.Sequential(nn.Linear(32, 32), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.body(self.norm(x)) * self.gate(x)
        return y


def _mixed(mix: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual() for _ in range(4)])
    mix(model)
    return model


@pytest.mark.long
@pytest.mark.parametrize("mix", [_every_second, _a_part_of_each, _broken])
def test_compiled_parts_and_eager_regions_share_one_plan(mix: Any) -> None:
    model, batch = _mixed(mix), torch.randn(512, 32)
    before = [(module._compiled_call_impl, dict(module.__dict__)) for module in model.modules()]
    step = TrainingStep(model, (batch,), {}, loss=torch.sum)
    step.run()
    peak = step.measure_peak()
    budget = peak.static_bytes + int(0.85 * (peak.peak_bytes - peak.static_bytes))
    plan = plimsoll.plan(model, batch, budget, loss=torch.sum)
    receipt = plimsoll.verify(model, batch, plan, loss=torch.sum, steps=1)
    # A tanh that is made again in the kernel of its derivative may round otherwise.
    assert receipt.verdict in (ReceiptVerdict.VERIFIED, ReceiptVerdict.WITHIN_ROUNDING)
    assert receipt.measured_peak_bytes <= budget
    assert receipt.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.1)
    engines = {region.engine for region in receipt.regions}
    assert Engine.COMPILED in engines
    assert Engine.RECIPE in engines or mix is _a_part_of_each  # whose eager parts save next to nothing
    assert before == [(module._compiled_call_impl, dict(module.__dict__)) for module in model.modules()]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


@pytest.fixture(scope="module")
def deep() -> Iterator[nn.Module]:
    """Ten equal blocks, compiled one by one."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Wide() for _ in range(10)])
    for block in model:
        block.compile(dynamic=False)
    yield model
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def free(deep: nn.Module) -> Plan:
    """The plan that keeps everything in those blocks."""
    return plimsoll.plan(deep, torch.randn(512, 32), strategy="none", loss=_squares)


@pytest.mark.long
def test_offloading_between_compiled_blocks_reaches_below_the_lowest_peak_of_recomputing(
    deep: nn.Module, free: Plan, tmp_path: Any
) -> None:
    batch, budget = torch.randn(512, 32), free.floor_bytes - 100 * 1024
    plimsoll.plan(deep, batch, budget, loss=_squares, allow="recompute,offload").save(tmp_path / "plan.json")
    plan = plimsoll.load(tmp_path / "plan.json")
    assert plan.link == "disk"
    assert plan.offloaded_bytes > 0
    receipt = plimsoll.verify(deep, batch, plan, loss=_squares, steps=2)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert receipt.measured_peak_bytes <= budget
    assert receipt.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


@pytest.mark.long
def test_a_budget_is_attached_that_compiled_blocks_reach_by_offloading(deep: nn.Module, free: Plan) -> None:
    budget = free.floor_bytes - 100 * 1024
    handle = plimsoll.attach(deep, budget, allow="recompute,offload")
    for rows in (512, 512, 64):
        handle.step(lambda rows=rows: _squares(deep(torch.randn(rows, 32))).backward())
        deep.zero_grad()
    assert handle.plan is not None
    assert handle.plan.link == "disk"
    assert 0 < handle.peak_bytes <= budget
    handle.remove()


@pytest.mark.long
def test_masks_of_dropout_are_compressed_between_compiled_blocks(blocks: Model) -> None:
    model, batch = blocks
    unmanaged = plimsoll.plan(model, batch, strategy="none").predicted_peak_bytes
    plan = plimsoll.plan(model, batch, unmanaged - 64 * 1024, allow="compress")
    forms = {
        (each.value.rpartition(":")[2], each.form) for region in plan.regions for each in region.decisions if each.form
    }
    assert ("gt", "bits") in forms
    receipt = plimsoll.verify(model, batch, plan, steps=1)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert receipt.measured_peak_bytes == plan.predicted_peak_bytes


@pytest.mark.long
def test_lossy_codecs_between_compiled_blocks_keep_to_their_error(deep: nn.Module, free: Plan) -> None:
    batch, budget = torch.randn(512, 32), int(0.85 * free.predicted_peak_bytes)
    plan = plimsoll.plan(deep, batch, budget, loss=_squares, allow="compress", max_error=0.01)
    assert not plan.is_lossless
    assert plan.measured_error == pytest.approx(plan.predicted_error, rel=0.3)
    receipt = plimsoll.verify(deep, batch, plan, loss=_squares, steps=1)
    assert receipt.verdict is ReceiptVerdict.WITHIN_ERROR
    assert receipt.measured_peak_bytes == plan.predicted_peak_bytes


@pytest.mark.long
def test_scores_of_a_compiled_softmax_stay_exact(blocks: Model) -> None:
    model, batch = blocks
    options = PlanOptions.read(allow="compress", max_error=0.01)
    task = TrainingTask.read(model, batch, loss=None, optimizer=None, compile=None)
    with task.compiled():
        planner = CompiledPlanner(planned_parts(task, None), *trace_compiled(task, options), options, 1)
        forms = sense_compiled(
            task.step(), planner.trace, planner.costs, planner.solve(None, "none"), planner.options
        ).forms
    entries = {entry.value: entry for entry in forms.regions[0].values}
    scores, product = entries["attn:bmm"], entries["mlp.c_fc:addmm"]
    assert scores.sensitivity == float("inf")
    assert all("exponent" in dict(scores.refused)[name] for name in ("bf16", "int8"))
    assert 0 < product.sensitivity < float("inf")
    assert "bf16" in {form.name for form in product.forms}


@pytest.mark.long
def test_inductor_orders_a_plan_where_that_keeps_to_the_budget() -> None:
    model, batch = _blocks(2), torch.randn(512, 32)
    free = plimsoll.plan(model, batch, strategy="none", loss=_squares)
    budget = (free.predicted_peak_bytes + free.floor_bytes) // 2
    plan = plimsoll.plan(model, batch, budget, loss=_squares)
    assert not any(unit.is_in_order for unit in plan.compiled)
    receipt = plimsoll.verify(model, batch, plan, loss=_squares, steps=1)
    assert receipt.exit_code == 0
    assert receipt.measured_peak_bytes == plan.predicted_peak_bytes <= budget


@pytest.mark.long
@pytest.mark.parametrize("share", [0.9, 1.1])
def test_where_inductors_own_order_takes_too_much_a_plan_that_drops_more_is_held_against_that_of_the_graph(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = _blocks(4), torch.randn(512, 32)
    free = plimsoll.plan(model, batch, strategy="none", loss=_squares)
    budget = (3 * free.predicted_peak_bytes + free.floor_bytes) // 4
    run, tried = StepPlanner.run, list[Plan]()

    def first_over(planner: StepPlanner, step: TrainingStep, plan: Plan, **how: Any) -> TrialRun:
        told = run(planner, step, plan, **how)
        tried.extend([] if plan.compiled[0].is_in_order else [plan])
        return dataclasses.replace(told, peak_bytes=budget + 4096) if tried == [plan] else told

    def measured(_: object, __: TrainingStep, *plans: Plan) -> float:
        assert [plan.compiled[0].is_in_order for plan in plans] == [False, True]
        return share

    monkeypatch.setattr(StepPlanner, "run", first_over)
    monkeypatch.setattr(CompiledPlanner, "_share_of_seconds", measured)
    plan = plimsoll.plan(model, batch, budget, loss=_squares)
    assert {unit.is_in_order for unit in plan.compiled} == {share > 1}
    assert plan.regions == (tried[0] if share > 1 else tried[1]).regions
    held = [sum(region.retained_bytes for region in each.regions) for each in tried]
    assert held[1] < held[0]
    assert plan.predicted_peak_bytes <= budget


def _blocks(count: int) -> nn.Sequential:
    model = nn.Sequential(*(Block() for _ in range(count)))
    for block in model:
        block.compile(dynamic=False)
    return model


class Attending(nn.Module):
    """Backward meets a wide layer first, whose bias has a gradient that nothing waits for, and its highest moment later."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(48) for _ in range(2))
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)
        self.up, self.down = nn.Linear(48, 192), nn.Linear(192, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.qkv(self.norms[0](x)).unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.norms[1](x))))


@pytest.mark.long
def test_sums_that_nothing_waits_for_do_not_hold_what_they_sum_up() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*[Attending() for _ in range(2)]), torch.randn(4, 200, 48)
    for block in model:
        block.compile(dynamic=False)
    task = TrainingTask.read(model, batch, loss=_squares)
    options = PlanOptions.read(strategies="auto", allow=("recompute",))
    traced, costs = trace_compiled(task, options)
    planner = CompiledPlanner(planned_parts(task, options.regions), traced, costs, options, None)
    floor = planner.solve(planner.solve(None, "none").floor_bytes)
    assert planner.run(task.step(), floor).peak_bytes == pytest.approx(floor.predicted_peak_bytes, rel=0.01)


class Halved(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        torch._dynamo.graph_break()
        return x + self.down(y)


@pytest.mark.long
def test_a_region_of_two_graphs_is_planned_with_the_inputs_of_both() -> None:
    model, batch = nn.Sequential(Halved(), Halved()), torch.randn(256, 32)
    for block in model:
        block.compile(dynamic=False)
    plan = plimsoll.plan(model, batch, strategy="full", loss=_squares)
    receipt = plimsoll.verify(model, batch, plan, loss=_squares, steps=1)
    assert receipt.verdict in (ReceiptVerdict.VERIFIED, ReceiptVerdict.WITHIN_ROUNDING)
    assert all(region.dropped for region in plan.regions)


@pytest.mark.long
@pytest.mark.parametrize("verb", ["apply", "attach"])
def test_a_step_that_runs_out_of_memory_is_run_again_under_a_tighter_plan(verb: str) -> None:
    model, batch = _mixed(_every_second), torch.randn(512, 32)
    step = TrainingStep(model, (batch,), {}, loss=torch.sum)
    step.run()
    budget = step.measure_peak().peak_bytes - 128 * 1024
    seen: list[int] = []

    def train() -> float:
        model.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        assert handle.plan is not None
        seen.append(handle.plan.predicted_peak_bytes)
        if len(seen) == 2:
            raise torch.OutOfMemoryError("another program has taken what was left")
        return loss.item()

    if verb == "attach":
        handle: Any = plimsoll.attach(model, budget)
    else:
        handle = plimsoll.apply(model, plimsoll.plan(model, batch, budget, loss=torch.sum))
    with handle:
        assert handle.step(train) == handle.step(train)
        assert any(region.dropped for region in handle.plan.regions if region.name in ("1", "3"))
    assert seen[0] == seen[1] > seen[2]


@pytest.mark.parametrize(
    ("mix", "held", "eager"),
    [
        (_every_second, {"1": ("1",), "3": ("3",)}, ["0", "2"]),
        (
            _a_part_of_each,
            {f"{at}.body": (f"{at}.body",) for at in range(4)},
            [f"{at}.{part}" for at in range(4) for part in ("norm", "gate.0")],
        ),
        (_broken, {f"{at}": (f"{at}",) for at in range(4)}, [f"{at}.body" for at in range(4)]),
    ],
)
def test_what_is_around_compiled_parts_and_kept_out_of_them_runs_eagerly(mix: Any, held: Any, eager: list[str]) -> None:
    model = _mixed(mix)
    found = split_regions(model, find_units(model), None)
    assert (found[0], sorted(found[1])) == (held, sorted(eager))


def test_what_only_the_eager_engine_does_leaves_compiled_parts_alone() -> None:
    model, batch = _mixed(_every_second), torch.randn(64, 32)
    with pytest.warns(UserWarning, match="compiled parts keep what they save"):
        plan = plimsoll.plan(model, batch, strategy="sqrt", loss=torch.sum)
    assert {region.name for region in plan.regions} == {"0", "2"}


@pytest.mark.long
@pytest.mark.parametrize("is_whole", [False, True], ids=["blocks", "whole"])
def test_attach_plans_for_every_shape_and_compiles_each_plan_once(is_whole: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[Block() for _ in range(4)])
    before = [] if is_whole else [block.compile() or block._compiled_call_impl for block in model]
    model = torch.compile(model, dynamic=True) if is_whole else model
    batches = {rows: torch.randn(rows, 32) for rows in (128, 384)}
    steps = {rows: TrainingStep(model, (batch,), {}, loss=_squares) for rows, batch in batches.items()}
    losses = {rows: _squares(model(batch)).item() for rows, batch in batches.items()}
    budget = steps[384].measure_peak().peak_bytes - 300 * 1024
    drops, compiled = [], []
    with plimsoll.attach(model, budget) as attached:
        for rows in (128, 384, 128, 384):
            assert steps[rows].run() == losses[rows]
            assert steps[rows].measure_peak().peak_bytes <= budget
            assert attached.plan is not None
            drops.append(any(region.dropped for region in attached.plan.regions))
            compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert drops == [False, True, False, True]  # the short batch runs as torch.compile partitions it
    assert compiled[1] == compiled[-1]
    assert is_whole or before == [block._compiled_call_impl for block in model]
    assert {rows: _squares(model(batch)).item() for rows, batch in batches.items()} == losses


def _squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def _own_backend(module: torch.fx.GraphModule, _: Any) -> Any:
    return module.forward


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"backend": "aot_eager"}, InvalidModel, "aot_eager"),
        ({"backend": "cudagraphs"}, InvalidModel, "cudagraphs"),
        ({"backend": _own_backend}, InvalidModel, "_own_backend"),
        ({"options": {"custom_partitioner_fn": PlannedPartitioner({})}}, InvalidModel, "custom_partitioner_fn"),
    ],
)
def test_what_takes_no_partitioner_of_ours_is_refused_by_name(
    options: dict[str, Any], error: type[PlimsollError], says: str
) -> None:
    model, batch = zoo.sample("llama")
    model.compile(**options)
    for call in (lambda: plimsoll.plan(model, batch, "1GiB"), lambda: plimsoll.attach(model, "1GiB")):
        with pytest.raises(error, match=says):
            call()


def test_the_compilers_own_budget_is_refused() -> None:
    model, batch = zoo.sample("llama")
    model.compile()
    with (
        torch._functorch.config.patch(activation_memory_budget=0.5),
        pytest.raises(InvalidModel, match="activation_memory_budget"),
    ):
        plimsoll.plan(model, batch, "1GiB")


@pytest.mark.parametrize(
    "wish",
    [
        {"allow": "recompute,compress"},
        {"allow": "recompute,offload"},
        {"device_profile": "H100-SXM"},
        {"strategy": "sqrt"},
    ],
    ids=["compress", "offload", "elsewhere", "sqrt"],
)
def test_what_compiled_code_cannot_do_is_refused_in_words(wish: dict[str, Any]) -> None:
    model, batch = zoo.sample("llama")
    model.compile()
    with pytest.raises(InvalidOption, match=r"is not supported with torch\.compile"):
        plimsoll.plan(model, batch, "1GiB", **wish)


def test_a_partitioner_of_the_whole_process_is_refused() -> None:
    model, batch = zoo.sample("llama")
    model.compile()
    with (
        torch._inductor.config.patch(custom_partitioner_fn=PlannedPartitioner({})),
        pytest.raises(InvalidModel, match="custom_partitioner_fn"),
    ):
        plimsoll.plan(model, batch, "1GiB")


@pytest.mark.long
def test_a_missing_compiler_is_named(blocks: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    model, batch = blocks
    with pytest.raises(InvalidModel, match=r"cannot find a C\+\+ compiler") as found:
        plimsoll.plan(model, batch, "1GiB")
    assert "CXX" in found.value.next


def test_a_graph_that_may_not_break_and_does_is_named() -> None:
    model = nn.Sequential(Halved(), Halved())
    for block in model:
        block.compile(fullgraph=True)
    with pytest.raises(InvalidModel, match=r"(?s)fullgraph=True.*forward \(test_compiled.py:\d+\)"):
        plimsoll.plan(model, torch.randn(4, 32), "1GiB", loss=torch.sum)


@pytest.mark.long
def test_a_compiler_that_is_switched_off_is_named(blocks: Model, plan: Plan) -> None:
    model, batch = blocks
    with torch.compiler.set_stance("force_eager"):
        with pytest.raises(InvalidModel, match="switched off"):
            plimsoll.plan(model, batch, "1GiB")
        with plimsoll.apply(model, plan), pytest.warns(UserWarning, match="switched off"):
            model(**batch)


@pytest.mark.long
@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
def test_what_a_plan_compiles_is_not_run_uncompiled_past_the_recompile_limit(limit: str) -> None:
    compiled, found = CompileCall(dynamic=False).compile(), torch._dynamo.utils.counters["stats"]
    with torch._dynamo.config.patch({limit: 1}):
        for rows in (4, 5, 6):
            before = found["unique_graphs"]
            compiled(Block(), torch.randn(rows, 32))
            assert found["unique_graphs"] == before + 1


def test_options_of_the_user_stay_beside_those_of_a_plan() -> None:
    own = {"allow_buffer_reuse": True, "_pre_fusion_custom_pass": GraphOrder()}
    partitioner = PlannedPartitioner({"0": frozenset(), "1": frozenset()})
    compiled = CompileCall(options=own).compile(**partitioner.options)
    assert CompileCall.read(compiled).options == {**own, "custom_partitioner_fn": partitioner}
    with torch._inductor.config.patch(_pre_fusion_custom_pass=GraphOrder()):
        assert "_pre_fusion_custom_pass" not in partitioner.options
    free = PlannedPartitioner({"0": frozenset(), "1": frozenset()}, is_in_order=False)
    assert free.options == {"custom_partitioner_fn": free}
    assert free.uuid() != partitioner.uuid()


def test_compile_without_options_means_the_same_everywhere() -> None:
    tasks = [TrainingTask.read(Block(), torch.randn(4, 32), compile=wish) for wish in (True, {}, False, None)]
    assert [(len(task.units), task.compile_options) for task in tasks] == [(1, {}), (1, {}), (0, None), (0, None)]


@pytest.mark.long
def test_a_plan_that_compiles_the_model_itself_is_one_for_the_model_that_the_user_compiles() -> None:
    model, batch = nn.Sequential(Block(), Block()), torch.randn(512, 32)
    plan = plimsoll.plan(model, batch, strategy="full", loss=_squares, compile={"dynamic": False})
    model.compile(dynamic=False)
    assert plimsoll.verify(model, batch, plan, loss=_squares, steps=1).exit_code == 0


@pytest.mark.long
@pytest.mark.parametrize("is_whole", [False, True])
def test_torch_compile_around_a_compiled_plan_is_refused(is_whole: bool) -> None:
    model, batch = nn.Sequential(Block(), Block()) if is_whole else _blocks(2), torch.randn(512, 32)
    plan = plimsoll.plan(model, batch, strategy="full", loss=_squares, compile=is_whole)
    with plimsoll.apply(model, plan):
        _squares(model(batch)).backward()
        with pytest.raises(InvalidModel, match="not at all if the plan compiles the model"):
            torch.compile(model)(batch)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            torch.compile(model)(batch)
    assert not any(module._forward_pre_hooks for module in model.modules())
    for each in (model, copied):
        _squares(torch.compile(each)(batch)).backward()


@pytest.mark.long
def test_threads_may_call_a_block_while_one_of_them_compiles_it() -> None:
    model, batch = _blocks(1), torch.randn(512, 32)
    plan = plimsoll.plan(model, batch, strategy="full", loss=_squares)
    torch._dynamo.reset()
    with plimsoll.apply(model, plan), ThreadPoolExecutor(3) as threads:
        found = [threads.submit(model, batch) for _ in range(12)]
        assert all(torch.equal(each.result(), found[0].result()) for each in found)


def test_compile_asks_for_torchs_own_keywords_on_a_plain_model() -> None:
    model, batch = zoo.sample("llama")
    with pytest.raises(InvalidOption, match="speed"):
        plimsoll.plan(model, batch, "1GiB", compile={"speed": "high"})
    with pytest.raises(InvalidOption, match="fastest"):
        plimsoll.plan(model, batch, "1GiB", compile={"mode": "fastest"})
    for wrong in ({"options": 3}, {"dynamic": "yes"}, {"fullgraph": "no"}):
        with pytest.raises(InvalidOption, match="is not valid") as found:
            plimsoll.plan(model, batch, "1GiB", compile=wrong)
        assert f"{next(iter(wrong))} cannot have type" in found.value.why
    model.compile()
    with pytest.raises(InvalidModel, match="already"):
        plimsoll.plan(model, batch, "1GiB", compile=True)


@pytest.mark.long
def test_a_plan_is_refused_where_other_parts_are_compiled(blocks: Model, plan: Plan) -> None:
    plain = zoo.build("gpt2")
    with pytest.raises(PlanMismatch, match="not compiled"):
        plimsoll.apply(plain, plan)
    plain.compile()
    with pytest.raises(PlanMismatch):
        plimsoll.apply(plain, plan)


@pytest.mark.long
def test_a_graph_without_the_plans_values_is_named(blocks: Model, plan: Plan) -> None:
    model, batch = blocks
    renamed = [_renamed(region) for region in plan.regions]
    other = msgspec.structs.replace(plan, regions=tuple(renamed))
    with plimsoll.apply(model, other), pytest.raises(Exception, match="which the plan does not know"):
        model(**batch).loss.backward()


def _renamed(region: Any) -> Any:
    decisions = tuple(msgspec.structs.replace(each, value=f"other {each.value}") for each in region.decisions)
    return msgspec.structs.replace(region, decisions=decisions)
