"""The minimum cut and the hull against networkx, against all choices and against counts by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math

import networkx
import numpy as np
import pytest

from long_cases import some
from planning.builders import StepBuilder, random_step, sweep_prices, transformer
from planning.every_choice import region_choices
from planning.form_builders import block_forms, compressed, forms_for, random_forms
from plimsoll.artifacts.forms import Form
from plimsoll.planning.choice import Choice
from plimsoll.planning.choices import prices_of
from plimsoll.planning.cut import SINK, SOURCE, Cut, Mode, Network, Offers, Prices, solve_cuts
from plimsoll.planning.frontier import modes_of
from plimsoll.planning.replay_schedule import recipe_ops
from plimsoll.planning.step import RegionView, StepIndex

PRICES = (0.0, 0.003, 0.02, 0.1, 0.3, 0.7, 5.0)
ERROR_PRICES = (0.0, 10.0, 1000.0)
CHOICES_AT_MOST = 600


def solve_cut(view: RegionView, prices: Prices, price: float) -> Cut:
    [[cut]] = solve_cuts(Network(view), [(Offers(view, prices), np.array([price]))])
    return cut


def value_by_networkx(view: RegionView, prices: Prices, price: float) -> float:
    network = Network(view)
    [capacities] = network.capacities(Offers(view, prices), np.array([price]))
    graph = networkx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    for tail, head, capacity in zip(network.tails, network.heads, capacities, strict=True):
        known = graph.get_edge_data(tail, head, {"capacity": 0.0})["capacity"]
        graph.add_edge(tail, head, capacity=min(known + capacity, 1e12))
    return float(networkx.minimum_cut_value(graph, SOURCE, SINK))


@pytest.mark.parametrize("price", PRICES)
def test_cut_equals_the_one_of_networkx(price: float) -> None:
    index = StepIndex(*transformer(2, detail=2).finish())
    view, prices = index.views[0], prices_of(index, index.views[0])
    cut = solve_cut(view, prices, price)
    assert price * cut.held_bytes + cut.seconds == pytest.approx(value_by_networkx(view, prices, price), abs=1e-5)


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


def random_views(seed: int, *, with_forms: bool) -> list[tuple[RegionView, Prices, list[tuple[Choice, Weighed]]]]:
    """Regions of a random step, and what every choice of theirs takes (nothing where choices are too many)."""
    trace, costs = random_step(seed, ops=6).finish()
    index = StepIndex(trace, costs, random_forms(trace, costs, seed) if with_forms else None)
    found = []
    for view in index.views:
        prices = prices_of(index, view)
        # Forms that no cut may weigh are no choices of it.
        known = {(value, mode.form) for value, modes in prices.modes.items() for mode in modes}
        choices = [choice for choice in region_choices(view, CHOICES_AT_MOST) if choice.packed <= known]
        weighed = ((choice, weigh(view, prices, choice)) for choice in choices)
        found.append((view, prices, [(choice, taken) for choice, taken in weighed if taken is not None]))
    return found


@pytest.mark.parametrize("with_forms", [False, True])
@pytest.mark.parametrize("seed", some(range(60), 10))
def test_cut_is_the_best_of_all_choices_at_every_price_of_memory_and_error(seed: int, with_forms: bool) -> None:
    for view, prices, weighed in random_views(seed, with_forms=with_forms):
        for error_price, price in itertools.product(ERROR_PRICES if with_forms else (0.0,), PRICES) if weighed else ():
            cut = solve_cut(view, dataclasses.replace(prices, error_price=error_price), price)
            best = min(price * w.held_bytes + w.seconds + error_price * w.squared_error for _, w in weighed)
            assert price * cut.held_bytes + cut.seconds == pytest.approx(best, abs=1e-5)
            assert cut.lower_value <= best + 1e-9
            own = weigh(view, prices, cut.choice)
            assert own is not None
            value = price * own.held_bytes + own.seconds + error_price * own.squared_error
            assert value == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_solved_side_by_side_are_those_solved_alone(seed: int) -> None:
    for view, prices, _ in random_views(seed, with_forms=True):
        dear = dataclasses.replace(prices, error_price=10.0)
        requests = [(Offers(view, each), np.array(PRICES)) for each in (prices, dear)]
        together = solve_cuts(Network(view), requests)
        assert together == [[solve_cut(view, each, price) for price in PRICES] for each in (prices, dear)]


@pytest.mark.parametrize("with_forms", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_lines_of_the_hull_bound_every_choice_from_below(seed: int, with_forms: bool) -> None:
    for view, prices, weighed in random_views(seed, with_forms=with_forms):
        for line in sweep_prices(view, prices).lines:
            least = (line.value_seconds - line.price_seconds_per_byte * w.held_bytes - w.seconds for _, w in weighed)
            assert max(least, default=0.0) <= 1e-9


def test_hull_is_convex_and_starts_at_keeping_everything() -> None:
    index = StepIndex(*transformer(1, detail=3).finish())
    hull = sweep_prices(index.views[0], prices_of(index, index.views[0]))
    assert hull.cuts[0].seconds == 0.0
    points = [(cut.held_bytes, cut.seconds) for cut in hull.cuts]
    slopes = [(s2 - s1) / (b1 - b2) for (b1, s1), (b2, s2) in itertools.pairwise(points) if b1 > b2]
    assert len(slopes) > 3
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(slopes))


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


def test_what_would_be_rebuilt_from_a_private_form_is_held_or_the_value_is() -> None:
    view, prices = relu_view()
    # Dropping ``down`` too needs relu itself: its 100 bytes, or 18 seconds. Holding down's 60 bytes beside the sign is less.
    for price in (0.01, 0.05, 0.1, 0.2):
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
