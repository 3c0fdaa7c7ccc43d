"""The gradient error that choices are expected to cause, counted by hand."""

from __future__ import annotations

import math

import pytest

from planning.builders import OUT, StepBuilder, in_regions
from planning.form_builders import compressed
from plimsoll.artifacts.forms import Form, Forms, RegionForms, ValueForms
from plimsoll.planning.choice import Choice, Limits, choice_error
from plimsoll.planning.decisions import decide
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import RegionView, StepIndex

LOSSY = compressed("int8", 2, noise=0.1)
SENSITIVITY = {"::a#0": 1.0, "::b#1": 2.0, "::c#2": 3.0}


def chain() -> StepBuilder:
    """x → a → b → c, every op saves its output."""

    def body(step: StepBuilder, x: int) -> int:
        a = step.op("a", x, size=20, saves=(x, OUT))
        b = step.op("b", a, size=20, saves=(OUT,))
        return step.op("c", b, size=20, saves=(OUT,))

    return in_regions(body)


def view_of(
    forms: dict[str, Form], sensitivity: dict[str, float] | None = None, step: StepBuilder | None = None
) -> tuple[StepIndex, RegionView]:
    trace, costs = (step or chain()).finish()
    known = SENSITIVITY if sensitivity is None else sensitivity
    regions = []
    for call in trace.regions:
        names = [value.name for value in call.graph.values if value.name in known]
        values = tuple(
            ValueForms(value=n, sensitivity=known[n], forms=(forms[n],) if n in forms else ()) for n in names
        )
        regions.append(RegionForms(name=call.name, call=call.call, values=values))
    index = StepIndex(trace, costs, Forms(regions=tuple(regions)))
    return index, index.views[0]


def choice_of(view: RegionView, kept: set[str], packed: dict[str, str]) -> Choice:
    ids = {view.graph.values[v].name: v for v in view.decided}
    return Choice(frozenset(ids[n] for n in kept), frozenset((ids[n], form) for n, form in packed.items()))


INT4, BITS = compressed("int4", 1, noise=0.3), compressed("bits", 3)
SIGN = compressed("sign", 1, is_private=True)


@pytest.mark.parametrize(
    ("forms", "kept", "squared_error"),
    [
        ({"::a#0": LOSSY}, {"::b#1", "::c#2"}, 0.1**2),  # through its own slots alone
        ({"::a#0": LOSSY}, set(), 0.1**2 * (1 + 4 + 9)),  # everything that is rebuilt from it errs too
        ({"::a#0": LOSSY}, {"::b#1"}, 0.1**2),
        ({"::a#0": LOSSY, "::b#1": BITS}, set(), 0.1**2),  # what lies between stops the noise
        ({"::a#0": LOSSY, "::b#1": INT4}, set(), 0.1**2 * 1 + 0.3**2 * (4 + 9)),  # noises add as squares
        ({"::a#0": SIGN}, {"::b#1", "::c#2"}, 0.0),  # nothing is rebuilt from a private form
        ({"::a#0": SIGN}, {"::b#1"}, 0.0),
        ({"::a#0": SIGN}, {"::c#2"}, math.inf),
    ],
)
def test_a_lossy_form_errs_through_its_own_slots_and_all_that_is_rebuilt_from_it(
    forms: dict[str, Form], kept: set[str], squared_error: float
) -> None:
    _, view = view_of(forms)
    choice = choice_of(view, kept, {value: form.name for value, form in forms.items()})
    assert choice_error(view, choice) == pytest.approx(squared_error)


@pytest.mark.parametrize("sensitivity", [{"::a#0": 1.0, "::b#1": 2.0}, {**SENSITIVITY, "::c#2": math.inf}])
def test_what_must_be_exact_is_never_rebuilt_from_a_lossy_value(sensitivity: dict[str, float]) -> None:
    _, view = view_of({"::a#0": LOSSY}, sensitivity)
    assert math.isinf(choice_error(view, choice_of(view, set(), {"::a#0": "int8"})))
    assert math.isfinite(choice_error(view, choice_of(view, {"::c#2"}, {"::a#0": "int8"})))


def test_no_limit_allows_an_infinite_error() -> None:
    assert not Limits(math.inf).allow(math.inf, 0)
    assert Limits(math.inf).allow(1e9, 0)


def test_errors_of_decisions_add_up_to_that_of_the_plan() -> None:
    index, view = view_of({"::a#0": LOSSY, "::b#1": INT4})
    simulation = run_choices(index, [choice_of(view, set(), {"::a#0": "int8", "::b#1": "int4"})])
    (region,) = decide(simulation, [0.0])
    assert sum(d.error**2 for d in region.decisions) == pytest.approx(simulation.squared_error)
    assert {d.value: d.is_lossy for d in region.decisions if d.form} == {"::a#0": True, "::b#1": True}


def two_regions() -> StepBuilder:
    """Two regions of two ops; the second one saves its input, which the first one made."""
    return in_regions(*[lambda step, x: step.op("b", step.op("a", x, size=20, saves=(x, OUT)), size=20)] * 2)


@pytest.mark.parametrize(("form", "squared_error"), [(LOSSY, 0.1**2 * (1 + 1 + 4)), (SIGN, math.inf)])
def test_noise_passes_through_a_dropped_boundary(form: Form, squared_error: float) -> None:
    # In the first region ``a`` itself errs; in the second ``a`` and the input (2) are rebuilt through it.
    index, first = view_of({"::a#0": form}, {"::a#0": 1.0, "input:0": 2.0}, two_regions())
    second = index.views[1]
    choices = [choice_of(first, set(), {"::a#0": form.name}), Choice(frozenset(), is_boundary_dropped=True)]
    assert run_choices(index, choices).squared_error == pytest.approx(squared_error)
    held = [choices[0], Choice(second.everything)]
    assert run_choices(index, held).squared_error == pytest.approx(0.1**2 if form.noise else 0.0)


def test_an_input_that_a_dropped_boundary_lets_go_takes_no_other_form() -> None:
    trace, costs = two_regions().finish()
    values = (ValueForms(value="input:0", sensitivity=1.0, forms=(compressed("int8", 2, 0.5, noise=0.1),)),)
    forms = Forms(regions=tuple(RegionForms(name=f"blocks.{n}", call=0, values=values) for n in range(2)))
    index = StepIndex(trace, costs, forms)
    first, second = index.views
    assert second.movable
    packed = frozenset((value, "int8") for value in second.movable)
    asked = run_choices(index, [Choice(first.everything), Choice(frozenset(), packed, is_boundary_dropped=True)])
    plain = run_choices(index, [Choice(first.everything), Choice(second.nothing, is_boundary_dropped=True)])
    assert asked.seconds == plain.seconds
    assert asked.squared_error == 0.0
    assert asked.curve.tolist() == plain.curve.tolist()
