"""The byte simulator against counts made by hand: kept, rebuilt and packed values over time."""

from __future__ import annotations

import msgspec
import pytest

from planning.builders import OUT, StepBuilder, in_regions, transformer
from planning.form_builders import compressed, forms_for, offloaded
from plimsoll.artifacts.forms import Form, LinkCost
from plimsoll.planning.choice import Choice
from plimsoll.planning.describe import classes_at_peak, describe_peak, describe_timeline
from plimsoll.planning.measuring import Measuring
from plimsoll.planning.replay_schedule import Unreachable, recipe_ops
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.step import StepIndex

LINK = LinkCost(name="host", out_bytes_per_second=1e9, in_bytes_per_second=1e9)


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


def chain(*, unsaved_input: bool = False, saved_output: bool = False, workspace: int = 0) -> StepBuilder:
    """One region at ticks 1 to 3: x (10) → a (20) → b (40) → out (5); every op saves its input. The loss is tick 4."""

    def body(step: StepBuilder, x: int) -> int:
        a = step.op("a", x, size=20, saves=() if unsaved_input else (x,), workspace=workspace)
        b = step.op("b", a, size=40, saves=(a,))
        return step.op("c", b, size=5, saves=(b, OUT) if saved_output else (b,))

    return in_regions(body)


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


def test_a_steady_input_that_no_slot_holds_is_held_as_it_is() -> None:
    trace, costs = chain(unsaved_input=True).finish()
    [call] = trace.regions
    values = tuple(msgspec.structs.replace(v, is_steady=v.producer < 0) for v in call.graph.values)
    graph = msgspec.structs.replace(call.graph, values=values)
    trace = msgspec.structs.replace(trace, regions=(msgspec.structs.replace(call, graph=graph),))
    index = StepIndex(trace, costs)
    dropped = run_choices(index, [Choice(frozenset())])
    copied = run(chain(unsaved_input=True), [set()])
    held = [10 * (index.life(graph.values[0].storage)[1] > 2 * tick + 1) for tick in (1, 4)]
    assert [copied.curve[2 * tick + 1] - dropped.curve[2 * tick + 1] for tick in (1, 4)] == held
    [effect] = Measuring(index, index.views[0]).measure([Choice(frozenset())])
    assert effect.copied_bytes == 0


def test_in_place_steps_take_over_the_replays_own_memory() -> None:
    def body(step: StepBuilder, x: int) -> int:
        mask = step.op("bernoulli_", in_place=step.op("empty", size=20))
        return step.op("mul", x, mask, size=10, saves=(mask,))

    step = in_regions(body)
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
    def body(step: StepBuilder, x: int) -> int:
        a = step.op("a", x, size=20, saves=(x, OUT), obstacle="reads a value in Python")
        return step.op("b", a, size=30, saves=(OUT,))

    index = StepIndex(*in_regions(body).finish())
    (view,) = index.views
    assert [view.graph.values[v].name for v in view.droppable] == ["::b#1"]
    blocked = next(v.id for v in view.graph.values if v.name == "::a#0")
    with pytest.raises(Unreachable):
        recipe_ops(view.graph, blocked, frozenset())


def two_blocks() -> StepBuilder:
    """Two regions (ticks 1 and 2, 3 and 4) that save 100 bytes each. Backward of the second is ticks 7 and 8."""
    block = lambda step, x: step.op("down", step.op("up", x, size=100, saves=(OUT,)), size=1)  # noqa: E731
    return in_regions(block, block, source_bytes=1)


def run_packed(
    step: StepBuilder, forms: dict[str, Form], packed: list[set[str]], dropped: frozenset[str] = frozenset()
) -> Simulation:
    """Everything is kept but what is dropped and, per region, packed."""
    trace, costs = step.finish()
    index = StepIndex(trace, costs, forms_for(trace, {name: [form] for name, form in forms.items()}, link=LINK))
    choices = []
    for view, names in zip(index.views, packed, strict=True):
        name = {v: view.graph.values[v].name for v in view.decided}
        choices.append(
            Choice(
                frozenset(v for v, n in name.items() if n not in names and n not in dropped),
                frozenset((v, forms[n].name) for v, n in name.items() if n in names),
            )
        )
    return run_choices(index, choices)


def added(
    step: StepBuilder, forms: dict[str, Form], packed: list[set[str]], dropped: frozenset[str] = frozenset()
) -> list[int]:
    """What packing changes at every instant."""
    kept = run_packed(step, forms, [set() for _ in packed], dropped)
    return (run_packed(step, forms, packed, dropped).curve - kept.curve).tolist()


def test_a_payload_is_held_from_the_regions_exit_until_the_slot_lets_go() -> None:
    difference = added(chain(), {"::b#1": compressed("int8", 7)}, [{"::b#1"}])
    exit_, read, released = 2 * 4, 2 * 6, 2 * 7
    assert difference[: exit_ - 1] == [0] * (exit_ - 1)
    assert difference[exit_ - 1] == 7  # the payload beside what it is made of
    assert difference[exit_:read] == [7 - 40] * (read - exit_)
    assert difference[read:released] == [7, 7]  # brought back: beside the payload
    assert difference[released:] == [0] * len(difference[released:])


def test_workspaces_count_where_values_are_packed_and_where_they_come_back() -> None:
    difference = added(chain(), {"::b#1": compressed("int8", 7, workspace_bytes=50)}, [{"::b#1"}])
    assert difference[2 * 4 - 1] == 7 + 50
    assert difference[2 * 6] == 7 + 50
    assert difference[2 * 6 + 1] == 7


def test_values_are_packed_one_after_the_other_each_source_let_go_at_once() -> None:
    forms = {"::b#1": compressed("int8", 10), "::a#0": compressed("int8", 15)}
    # b saves more and goes first: +10, then -40 +15.
    assert added(chain(), forms, [{"::a#0", "::b#1"}])[2 * 4 - 1] == 10
    with_workspace = {"::b#1": compressed("int8", 10), "::a#0": compressed("int8", 15, workspace_bytes=30)}
    assert added(chain(), with_workspace, [{"::a#0", "::b#1"}])[2 * 4 - 1] == 10 - 40 + 15 + 30


def test_a_source_that_lives_on_anyway_stays_while_others_are_packed() -> None:
    forms = {"::c#2": compressed("int8", 1), "::b#1": compressed("int8", 39, workspace_bytes=20)}
    # The output is packed first (it saves 4), but the loss still needs it.
    assert added(chain(saved_output=True), forms, [{"::b#1", "::c#2"}])[2 * 4 - 1] == 1 + 39 + 20


def test_a_payload_stays_until_the_last_slot_that_is_rebuilt_from_it() -> None:
    difference = added(chain(), {"::a#0": compressed("int8", 7)}, [{"::a#0"}], frozenset({"::b#1"}))
    # b is rebuilt from a before tick 6; a itself is read at tick 7 and let go before tick 8.
    assert difference[2 * 4 : 2 * 6] == [7 - 20] * 4
    assert difference[2 * 6 : 2 * 8] == [7] * 4
    assert difference[2 * 8] == 0


def test_an_offloaded_value_leaves_after_the_next_forward_and_is_back_for_its_own_backward() -> None:
    difference = added(two_blocks(), {"::up#0": offloaded(100)}, [{"::up#0"}, set()])
    gone, back, released = 2 * 5, 2 * 7, 2 * 11
    assert difference[:gone] == [0] * gone  # the source waits until the second block's forward has ended
    assert difference[gone:back] == [-100] * (back - gone)
    assert difference[back:released] == [0] * (released - back)  # the buffer, from the second block's backward on


@pytest.mark.parametrize("name", ["::b#1", "::a#0"])
def test_holders_at_the_peak_name_payloads_and_what_is_brought_back(name: str) -> None:
    step = chain()
    step.ops[-1].saves = ()
    simulation = run_packed(step, {name: compressed("int8", 7, workspace_bytes=900)}, [{name}])
    labels = {holder.label: holder.bytes for holder in describe_peak(simulation).holders}
    assert sum(labels.values()) == simulation.peak_bytes
    assert any("packing" in label or "int8" in label for label in labels)


def test_an_input_that_a_region_saves_may_be_packed_but_not_dropped() -> None:
    trace, costs = chain().finish()
    index = StepIndex(trace, costs, forms_for(trace, {"input:0": [compressed("bits", 2)]}))
    (view,) = index.views
    assert view.movable == (0,)
    assert view.nothing == {0}
    packed = run_packed(chain(), {"input:0": compressed("bits", 2)}, [{"input:0"}])
    kept = run_packed(chain(), {"input:0": compressed("bits", 2)}, [set()])
    assert packed.curve[2 * 4] == kept.curve[2 * 4] - 10 + 2
