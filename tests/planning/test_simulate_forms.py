"""Bytes of packed values over time, against counts made by hand."""

from __future__ import annotations

import pytest

from planning.builders import OUT, StepBuilder
from planning.form_builders import compressed, forms_for, offloaded
from plimsoll.artifacts.forms import Form, LinkCost
from plimsoll.planning.choice import Choice
from plimsoll.planning.describe import describe_peak
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.step import StepIndex

LINK = LinkCost(name="host", out_bytes_per_second=1e9, in_bytes_per_second=1e9)


def chain(*, saved_output: bool = False) -> StepBuilder:
    """One region at ticks 1 to 3: x (10) → a (20) → b (40) → out (5); every op saves its input. The loss is tick 4."""
    step = StepBuilder()
    x = step.op("source", size=10)
    with step.region("block", x) as region:
        a = step.op("a", x, size=20, saves=(x,))
        b = step.op("b", a, size=40, saves=(a,))
        out = step.op("c", b, size=5, saves=(b, OUT) if saved_output else (b,))
        region.outputs = (out,)
    step.op("loss", out, size=1)
    return step


def two_blocks() -> StepBuilder:
    """Two regions (ticks 1 and 2, 3 and 4) that save 100 bytes each. Backward of the second is ticks 7 and 8."""
    step = StepBuilder()
    x = step.op("source", size=1)
    for number in range(2):
        with step.region(f"blocks.{number}", x) as region:
            a = step.op("up", x, size=100, saves=(OUT,))
            x = step.op("down", a, size=1)
            region.outputs = (x,)
    step.op("loss", x, size=1)
    return step


def run(
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
    kept = run(step, forms, [set() for _ in packed], dropped)
    return (run(step, forms, packed, dropped).curve - kept.curve).tolist()


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
    simulation = run(step, {name: compressed("int8", 7, workspace_bytes=900)}, [{name}])
    labels = {holder.label: holder.bytes for holder in describe_peak(simulation).holders}
    assert sum(labels.values()) == simulation.peak_bytes
    assert any("packing" in label or "int8" in label for label in labels)


def test_an_input_that_a_region_saves_may_be_packed_but_not_dropped() -> None:
    trace, costs = chain().finish()
    index = StepIndex(trace, costs, forms_for(trace, {"input:0": [compressed("bits", 2)]}))
    (view,) = index.views
    assert view.movable == (0,)
    assert view.nothing == {0}
    packed = run(chain(), {"input:0": compressed("bits", 2)}, [{"input:0"}])
    kept = run(chain(), {"input:0": compressed("bits", 2)}, [set()])
    assert packed.curve[2 * 4] == kept.curve[2 * 4] - 10 + 2
