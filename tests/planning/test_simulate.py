"""The byte simulator against counts made by hand."""

from __future__ import annotations

import pytest

from planning.builders import OUT, StepBuilder, transformer
from plimsoll.planning.choice import Choice
from plimsoll.planning.describe import classes_at_peak, describe_peak, describe_timeline
from plimsoll.planning.replay_schedule import Unreachable, recipe_ops
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.step import StepIndex


def run(step: StepBuilder, kept: list[set[str]], dropped_boundaries: tuple[int, ...] = ()) -> Simulation:
    """Simulate with the named values kept (all others dropped)."""
    index = StepIndex(*step.finish())
    choices = [
        Choice(
            frozenset(v for v in view.droppable if view.graph.values[v].name in names),
            is_boundary_dropped=view.call.index in dropped_boundaries,
        )
        for view, names in zip(index.views, kept, strict=True)
    ]
    return run_choices(index, choices)


def chain(*, unsaved_input: bool = False, workspace: int = 0) -> StepBuilder:
    """One region: x (10) → a (20) → b (40) → out (5); every op saves its input."""
    step = StepBuilder()
    x = step.op("source", size=10)
    with step.region("block", x) as region:
        a = step.op("a", x, size=20, saves=() if unsaved_input else (x,), workspace=workspace)
        b = step.op("b", a, size=40, saves=(a,))
        out = step.op("c", b, size=5, saves=(b,))
        region.outputs = (out,)
    step.op("loss", out, size=1)
    return step


def test_kept_values_are_held_from_saving_to_release() -> None:
    simulation = run(chain(), [{"::a#0", "::b#1"}])
    # While the loss runs: x, a, b as slots, the output, the loss.
    assert simulation.curve[2 * 4 + 1] == 10 + 20 + 40 + 5 + 1
    assert simulation.seconds == simulation.index.base_seconds


def test_dropped_values_are_held_until_their_region_exits_and_no_longer() -> None:
    simulation = run(chain(), [set()])
    assert simulation.curve[2 * 3 + 1] == 10 + 20 + 40 + 5
    assert simulation.curve[2 * 4 + 1] == 10 + 5 + 1


def test_a_rebuilt_value_shares_the_peak_with_what_its_recipe_needs() -> None:
    simulation = run(chain(), [set()])
    # Before c's backward (tick 6): x is a slot, a and b are rebuilt, the gradient of the output waits.
    gradients = 5
    assert simulation.curve[2 * 6] == 10 + 20 + 40 + gradients
    assert simulation.replayed == ((0, 0), (0, 1))
    assert simulation.seconds == simulation.index.base_seconds + 2.0


def test_workspace_counts_while_an_op_runs_again() -> None:
    without, with_ = run(chain(), [set()]), run(chain(workspace=100), [set()])
    assert with_.curve[2 * 6] == without.curve[2 * 6] - 40 + 100


def test_an_input_that_no_slot_holds_is_copied_at_entry() -> None:
    kept = run(chain(unsaved_input=True), [{"::a#0", "::b#1"}])
    dropped = run(chain(unsaved_input=True), [set()])
    assert kept.curve[2 * 4 + 1] == 20 + 40 + 5 + 1
    assert dropped.curve[2 * 4 + 1] == 10 + 5 + 1
    assert dropped.curve[2 * 1 + 1] == kept.curve[2 * 1 + 1] + 10


def test_in_place_steps_take_over_the_replays_own_memory() -> None:
    step = StepBuilder()
    x = step.op("source", size=10)
    with step.region("block", x) as region:
        mask = step.op("empty", size=20)
        mask = step.op("bernoulli_", in_place=mask)
        out = step.op("mul", x, mask, size=10, saves=(mask,))
        region.outputs = (out,)
    step.op("loss", out, size=1)
    simulation = run(step, [set()])
    rebuilt = simulation.curve[2 * 6] - run(step, [{"::bernoulli_#1"}]).curve[2 * 6]
    assert rebuilt == 0
    assert simulation.replayed == ((0, 0), (0, 1))


def test_a_dropped_boundary_is_rebuilt_through_the_region_before() -> None:
    index = StepIndex(*transformer(2).finish())
    nothing = [Choice(frozenset()), Choice(frozenset())]
    held = run_choices(index, nothing)
    dropped = run_choices(index, [nothing[0], Choice(frozenset(), is_boundary_dropped=True)])
    loss = next(tick for tick, op in enumerate(index.trace.ops) if op.name == "loss")
    assert dropped.curve[2 * loss + 1] == held.curve[2 * loss + 1] - 64
    assert len(dropped.replayed) == len(set(dropped.replayed)) > len(held.replayed)
    assert dropped.seconds > held.seconds


def test_holders_and_classes_add_up_to_the_peak() -> None:
    index = StepIndex(*transformer(3).finish())
    for choices in ([Choice(frozenset(v.droppable)) for v in index.views], [Choice(frozenset())] * 3):
        simulation = run_choices(index, choices)
        assert sum(holder.bytes for holder in describe_peak(simulation).holders) == simulation.peak_bytes
        assert sum(classes_at_peak(simulation).values()) == simulation.peak_bytes


def test_the_timeline_is_short_and_contains_the_peak() -> None:
    index = StepIndex(*transformer(12, detail=3).finish())
    simulation = run_choices(index, [Choice(frozenset())] * 12)
    timeline = describe_timeline(simulation, 100)
    assert len(timeline) <= 100
    assert max(point.bytes for point in timeline) == simulation.peak_bytes
    assert all(sum(point.by_category.values()) == point.bytes for point in timeline)


def test_what_may_not_run_again_is_never_droppable() -> None:
    step = StepBuilder()
    x = step.op("source", size=10)
    with step.region("block", x) as region:
        a = step.op("a", x, size=20, saves=(x, OUT), obstacle="reads a value in Python")
        b = step.op("b", a, size=30, saves=(OUT,))
        region.outputs = (b,)
    step.op("loss", b, size=1)
    index = StepIndex(*step.finish())
    (view,) = index.views
    assert [view.graph.values[v].name for v in view.droppable] == ["::b#1"]
    blocked = next(v.id for v in view.graph.values if v.name == "::a#0")
    with pytest.raises(Unreachable):
        recipe_ops(view.graph, blocked, frozenset())
