"""Cuts of regions whose values have other forms, against all choices and against counts by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from planning.builders import StepBuilder, random_step, transformer
from planning.form_builders import block_forms, compressed, forms_for, random_forms
from plimsoll.artifacts.forms import Form
from plimsoll.planning.choice import Choice
from plimsoll.planning.choices import prices_of
from plimsoll.planning.cut import Mode, Prices, solve_cut
from plimsoll.planning.frontier import modes_of, sweep_prices
from plimsoll.planning.replay_schedule import recipe_ops
from plimsoll.planning.step import RegionView, StepIndex

PRICES = (0.0, 0.02, 0.1, 0.3, 2.0)
ERROR_PRICES = (0.0, 10.0, 1000.0)
CHOICES_AT_MOST = 600


@dataclasses.dataclass(frozen=True)
class Weighed:
    held_bytes: float
    seconds: float
    squared_error: float


def weigh(view: RegionView, prices: Prices, choice: Choice) -> Weighed | None:
    """What a choice takes; ``None`` if a recipe would need what only a value's own slots can be made of."""
    modes = {value: _mode(prices, value, form) for value, form in choice.packed}
    held = view.leaves | choice.kept | modes.keys()
    ops: set[int] = set()
    copied: set[int] = set()
    for value in set(view.decided) - choice.kept - modes.keys():
        recipe, leaves = recipe_ops(view.graph, value, held)
        if any(leaf in modes and modes[leaf].is_private for leaf in leaves):
            return None
        ops.update(recipe)
        copied.update(view.copied.intersection(leaves))
    return Weighed(
        sum(prices.held_bytes[v] for v in choice.kept | copied) + sum(mode.held_bytes for mode in modes.values()),
        sum(prices.op_seconds[op] for op in ops) + sum(mode.seconds for mode in modes.values()),
        sum(mode.squared_error for mode in modes.values()),
    )


def _mode(prices: Prices, value: int, form: str) -> Mode:
    return next(mode for mode in prices.modes[value] if mode.form == form)


def every_choice(view: RegionView, prices: Prices) -> list[Choice]:
    states = [
        ["keep", *(["drop"] if value in view.droppable else []), *(mode.form for mode in prices.modes.get(value, ()))]
        for value in view.decided
    ]
    if math.prod(map(len, states)) > CHOICES_AT_MOST:
        return []
    return [
        Choice(
            frozenset(v for v, state in zip(view.decided, taken, strict=True) if state == "keep"),
            frozenset(
                (v, state) for v, state in zip(view.decided, taken, strict=True) if state not in ("keep", "drop")
            ),
        )
        for taken in itertools.product(*states)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_cut_with_modes_and_a_price_of_error_is_the_best_of_all_choices(seed: int) -> None:
    trace, costs = random_step(seed, ops=6).finish()
    index = StepIndex(trace, costs, random_forms(trace, costs, seed))
    for view in index.views:
        prices = prices_of(index, view)
        weighed = [w for w in (weigh(view, prices, choice) for choice in every_choice(view, prices)) if w is not None]
        for error_price, price in itertools.product(ERROR_PRICES, PRICES) if weighed else ():
            cut = solve_cut(view, dataclasses.replace(prices, error_price=error_price), price)
            best = min(price * w.held_bytes + w.seconds + error_price * w.squared_error for w in weighed)
            assert price * cut.held_bytes + cut.seconds == pytest.approx(best, abs=1e-5)
            assert cut.lower_value <= best + 1e-9
            own = weigh(view, prices, cut.choice)
            assert own is not None
            value = price * own.held_bytes + own.seconds + error_price * own.squared_error
            assert value == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_lines_of_the_hull_bound_every_choice_from_below(seed: int) -> None:
    trace, costs = random_step(seed, ops=6).finish()
    index = StepIndex(trace, costs, random_forms(trace, costs, seed))
    for view in index.views:
        prices = prices_of(index, view)
        lines = sweep_prices(view, prices).lines
        for choice in every_choice(view, prices):
            weighed = weigh(view, prices, choice)
            if weighed is not None:
                assert all(
                    weighed.seconds >= line.value_seconds - line.price_seconds_per_byte * weighed.held_bytes - 1e-9
                    for line in lines
                )


def relu_step() -> StepBuilder:
    """relu's output (100) is saved by relu itself and read by an op whose output (60) is saved too."""
    step = StepBuilder()
    x = step.op("source", size=10)
    with step.region("block", x) as region:
        up = step.op("up", x, size=100, saves=(x,), seconds=9.0)
        relu = step.op("relu", up, size=100, saves=(-1,), seconds=9.0)
        down = step.op("down", relu, size=60, saves=(-1,), seconds=1.0)
        region.outputs = (down,)
    step.op("loss", down, size=1, seconds=1.0)
    return step


def relu_view(*more: Form) -> tuple[RegionView, Prices]:
    trace, costs = relu_step().finish()
    forms = forms_for(trace, {"::relu#1": (compressed("sign", 4, 0.1, is_private=True), *more)})
    index = StepIndex(trace, costs, forms)
    return index.views[0], prices_of(index, index.views[0])


def names(view: RegionView, choice: Choice) -> tuple[set[str], dict[str, str]]:
    name = {value.id: value.name for value in view.graph.values}
    return {name[v] for v in choice.kept}, {name[v]: form for v, form in choice.packed}


def test_a_private_form_is_taken_where_no_recipe_needs_the_value() -> None:
    view, prices = relu_view()
    kept, packed = names(view, solve_cut(view, prices, 0.01).choice)
    assert packed == {"::relu#1": "sign"}
    assert kept == {"::down#2"}


def test_what_would_be_rebuilt_from_a_private_form_is_held_or_the_value_is() -> None:
    view, prices = relu_view()
    # Dropping ``down`` too needs relu itself: its 100 bytes, or 18 seconds. Holding down's 60 bytes beside the sign is less.
    for price in (0.05, 0.1, 0.2):
        cut = solve_cut(view, prices, price)
        assert names(view, cut.choice) == ({"::down#2"}, {"::relu#1": "sign"})
    # At last even the 4 bytes of the sign are too dear.
    cut = solve_cut(view, prices, 50.0)
    assert names(view, cut.choice) == (set(), {})
    assert len(cut.ops) == 3


def test_a_form_that_recipes_can_read_is_weighed_against_the_private_one() -> None:
    view, prices = relu_view(compressed("bits", 8, 0.1))
    kept, packed = names(view, solve_cut(view, prices, 0.1).choice)
    assert (kept, packed) == (set(), {"::relu#1": "bits"})


def test_a_lossy_form_of_a_value_that_must_be_exact_is_never_weighed() -> None:
    trace, costs = relu_step().finish()
    forms = {"::relu#1": (compressed("int4", 1, noise=0.1), compressed("bits", 50))}
    index = StepIndex(trace, costs, forms_for(trace, forms, sensitivity=math.inf))
    assert [[mode.form for mode in modes] for modes in modes_of(index.views[0]).values()] == [["bits"]]


def test_the_hull_of_a_block_with_forms_lies_below_the_one_without() -> None:
    trace, costs = transformer(2).finish()
    plain, rich = StepIndex(trace, costs), StepIndex(trace, costs, block_forms(trace, costs))
    above = sweep_prices(plain.views[0], prices_of(plain, plain.views[0]))
    below = sweep_prices(rich.views[0], prices_of(rich, rich.views[0]))
    for cut in above.cuts:
        cheapest = min(c.seconds for c in below.cuts if c.held_bytes <= cut.held_bytes)
        assert cheapest <= cut.seconds + 1e-9
