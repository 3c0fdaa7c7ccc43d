"""One kind of region in, the choices that the solver may take for it out, each with its exact effect.

Where there are few droppable values, every subset is one. Otherwise the vertices of the hull, and variants around them,
because the peak of a region's own backward is not monotone in what it keeps: values that sit at that peak are flipped one
by one, and the sweep is repeated with those values made dearer or cheaper. Sets do not depend on the budget, so a larger
budget never has fewer choices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from plimsoll.planning.cut import Prices
from plimsoll.planning.effects import Effect, frame_of, held_bytes, likeness, measure_effect
from plimsoll.planning.frontier import Hull, sweep_prices
from plimsoll.planning.step import Ints, RegionView, StepIndex, slot_stop

_ENUMERATED_VALUES = 9
_FLIPS_PER_CHOICE = 3
_PEAK_ROUNDS = 2
_DESCENTS_AT_MOST = 12
_PAIRED_VALUES = 16


@dataclass(frozen=True, slots=True)
class ChoiceSet:
    """The choices of all regions that are alike.

    ``is_complete`` if every other choice is equalled by one of these, and the effects of all are exact.
    """

    effects: tuple[Effect, ...]
    hull: Hull
    is_complete: bool


def prices_of(index: StepIndex, view: RegionView) -> Prices:
    """What the cut weighs for a region."""
    seconds = tuple(index.op_seconds(op.cost_key) + index.costs.replay_seconds for op in view.graph.ops)
    return Prices(held_bytes=dict(held_bytes(index, view)), op_seconds=seconds)


def generate_choices(index: StepIndex, extra: Iterable[tuple[frozenset[int], ...]] = ()) -> tuple[ChoiceSet, ...]:
    """The choice set of every region of a step; regions that are alike share theirs.

    Args:
        index: the step.
        extra: choices to include, one set of kept values per region each (those of the named strategies).
    """
    wanted = list(extra)
    by_likeness: dict[object, ChoiceSet] = {}
    sets = []
    keys = [likeness(index, view) for view in index.views]
    for view, key in zip(index.views, keys, strict=True):
        if key not in by_likeness:
            regions = [v.call.index for v, k in zip(index.views, keys, strict=True) if k == key]
            given = {kept[region] for kept in wanted for region in regions}
            by_likeness[key] = _choose(index, view, given, len(regions))
        sets.append(by_likeness[key])
    return tuple(sets)


def _choose(index: StepIndex, view: RegionView, given: set[frozenset[int]], alike: int) -> ChoiceSet:
    prices = prices_of(index, view)
    hull = sweep_prices(view, prices)
    everything = frozenset(view.droppable)
    if len(view.droppable) <= _ENUMERATED_VALUES:
        subsets = itertools.chain.from_iterable(
            itertools.combinations(view.droppable, size) for size in range(len(view.droppable) + 1)
        )
        effects = [measure_effect(index, view, frozenset(kept)) for kept in subsets]
        return ChoiceSet(effects=_undominated(effects), hull=hull, is_complete=all(e.is_additive for e in effects))
    known: dict[frozenset[int], Effect] = {}

    def measure(kept: frozenset[int]) -> Effect:
        if kept not in known:
            known[kept] = measure_effect(index, view, kept)
        return known[kept]

    measure(everything)
    measure(frozenset())
    for kept in given:
        measure(kept)
    for cut in hull.cuts:
        measure(cut.kept)
    fixed = _fixed_backward(index, view)
    for _ in range(_PEAK_ROUNDS):
        for kept in _variants(index, view, prices, _undominated(list(known.values())), fixed):
            measure(kept)
    for others in sorted({0, 1, alike}):
        _descend(view, measure, list(known.values()), fixed, others)
    return ChoiceSet(effects=_undominated(list(known.values())), hull=hull, is_complete=False)


def _descend(
    view: RegionView, measure: Callable[[frozenset[int]], Effect], known: list[Effect], fixed: Ints, others: int
) -> None:
    """Flip values, one or a pair, as long as that lowers the peak of a region's backward beside ``others`` of its like."""

    def height(effect: Effect) -> tuple[int, float]:
        peak = int((fixed + effect.backward).max()) if len(fixed) else 0
        return peak + others * effect.retained_bytes, effect.seconds

    by_size = sorted(view.droppable, key=lambda v: -view.graph.values[v].bytes)
    best = min(known, key=height)
    for _ in range(_DESCENTS_AT_MOST):
        start = best
        for flips in (itertools.combinations(by_size, 1), itertools.combinations(by_size[:_PAIRED_VALUES], 2)):
            best = min((measure(best.kept ^ frozenset(flip)) for flip in flips), key=height, default=best)
            if height(best) < height(start):
                break
            best = start
        if best is start:
            return


def _fixed_backward(index: StepIndex, view: RegionView) -> Ints:
    frame = frame_of(index, view)
    return index.fixed[frame.start : frame.stop]


def _variants(
    index: StepIndex, view: RegionView, prices: Prices, effects: tuple[Effect, ...], fixed: Ints
) -> set[frozenset[int]]:
    """Choices near the given ones that differ in values alive at the highest instant of the region's backward."""
    frame = frame_of(index, view)
    found: set[frozenset[int]] = set()
    peaks: dict[int, None] = {}
    for effect in effects:
        if not len(fixed):
            continue
        instant = frame.start + int(np.argmax(fixed[: len(effect.backward)] + effect.backward))
        peaks.setdefault(instant)
        dropped = [v for v in view.droppable if v not in effect.kept]
        by_size = sorted(dropped, key=lambda v: -view.graph.values[v].bytes)
        alive = [v for v in by_size if _is_held(index, view, v, instant)]
        found.update(effect.kept | {v} for v in alive[:_FLIPS_PER_CHOICE])
        kept = sorted(effect.kept, key=lambda v: -view.graph.values[v].bytes)
        waiting = [v for v in kept if _is_held(index, view, v, instant)]
        found.update(effect.kept - {v} for v in waiting[:_FLIPS_PER_CHOICE])
    for instant in list(peaks)[:4]:
        for factor in (0.0, 0.5, 2.0):
            weighted = {
                v: bytes_ * (factor if v in view.slots_of and _is_read_by(index, view, v, instant) else 1.0)
                for v, bytes_ in prices.held_bytes.items()
            }
            found.update(cut.kept for cut in sweep_prices(view, Prices(weighted, prices.op_seconds)).cuts)
    return found


def _is_held(index: StepIndex, view: RegionView, value: int, instant: int) -> bool:
    """Whether a kept value would be alive at an instant of backward."""
    return any(slot_stop(index.trace, slot) > instant for slot in view.slots_of[value])


def _is_read_by(index: StepIndex, view: RegionView, value: int, instant: int) -> bool:
    """Whether a value must be in memory at an instant whatever is decided."""
    return any(2 * slot.unpacked <= instant < slot_stop(index.trace, slot) for slot in view.slots_of[value])


def _undominated(effects: list[Effect]) -> tuple[Effect, ...]:
    """Drop choices that another one beats, or equals, in seconds and at every instant."""
    order = sorted(effects, key=lambda e: (e.seconds, e.retained_bytes, int(e.backward.sum()), sorted(e.kept)))
    figures = np.array([(e.copied_bytes, *_retained_range(e), *e.backward.tolist()) for e in order])
    least, most = np.delete(figures, 2, axis=1), np.delete(figures, 1, axis=1)
    left: list[int] = []
    for position, effect in enumerate(order):
        alike = [other for other in left if order[other].relief == effect.relief]
        # Relieved at other times, one's most has to be compared with the other's least.
        is_beaten = (most[alike] <= most[position]).all(axis=1).any() or (most[left] <= least[position]).all(
            axis=1
        ).any()
        if not is_beaten:
            left.append(position)
    return tuple(order[position] for position in left)


def _retained_range(effect: Effect) -> tuple[int, int]:
    """The least and the most bytes that a choice adds between forward and backward."""
    return effect.retained_bytes - sum(size for _, _, size in effect.relief), effect.retained_bytes
