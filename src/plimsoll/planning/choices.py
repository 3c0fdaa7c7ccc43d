"""Generates the choices among which the solver picks for each kind of region, each with its exact effect.

Where there are few droppable values, every subset is one. Otherwise the vertices of the hull, and variants around them,
because the peak of a region's own backward is not monotone in what it keeps: values that sit at that peak are flipped one
by one, and the sweep is repeated with those values made dearer or cheaper. Where values have other forms, the sweep is
repeated at several prices of error, and with as much on the link as compute hides. Sets do not depend on the budget, so a
larger budget never has fewer choices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from plimsoll.planning.choice import Choice
from plimsoll.planning.cut import Prices
from plimsoll.planning.effects import Effect, Relief, frame_of, held_bytes, likeness, measure_effect
from plimsoll.planning.frontier import Hull, limit_offload, modes_of, packing_sweeps, sweep_prices
from plimsoll.planning.pins import pinned
from plimsoll.planning.step import Ints, RegionView, StepIndex, slot_stop

_ENUMERATED_CHOICES = 512
"""Regions with no more choices than this get all of them, so that plans can be proven optimal."""
_FLIPS_PER_CHOICE = 3
_PEAKS_REPRICED = 4
_PEAK_ROUNDS = 2
"""Variants of variants can lower a peak further; every round measures about as many choices as the one before."""
_DESCENTS_AT_MOST = 12
_PAIRED_VALUES = 10
"""Flips in pairs are tried among the largest values only: there are quadratically many."""


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
    seconds = tuple(index.replay_seconds(op.cost_key) for op in view.graph.ops)
    return Prices(held_bytes=dict(held_bytes(index, view)), op_seconds=seconds, modes=modes_of(view))


def generate_choices(
    index: StepIndex,
    extra: Iterable[tuple[Choice, ...]] = (),
    most_squared_error: float = 0.0,
    known: dict[Hashable, ChoiceSet] | None = None,
) -> tuple[ChoiceSet, ...]:
    """The choice set of every region of a step; regions that are alike share theirs.

    Args:
        index: the step.
        extra: choices to include, one per region each (those of the named strategies).
        most_squared_error: choices that cause more than this alone are left out.
        known: sets of regions of other steps with the same costs, such as other stages of a pipeline; new ones are added.
    """
    wanted = list(extra)
    by_likeness: dict[Hashable, ChoiceSet] = {} if known is None else known
    sets = []
    keys = [likeness(index, view) for view in index.views]
    for view, key in zip(index.views, keys, strict=True):
        if key not in by_likeness:
            regions = [v.call.index for v, k in zip(index.views, keys, strict=True) if k == key]
            given = {choices[region] for choices in wanted for region in regions}
            by_likeness[key] = _Generator(index, view, most_squared_error, len(regions)).generate(given)
        sets.append(by_likeness[key])
    return tuple(sets)


class _Generator:
    """Measures choices of one kind of region, each once."""

    def __init__(self, index: StepIndex, view: RegionView, most_squared_error: float, alike: int) -> None:
        self.index = index
        self.view = view
        self.alike = alike
        self.most_squared_error = most_squared_error
        self.prices = prices_of(index, view)
        self.known: dict[Choice, Effect] = {}

    def measure(self, choice: Choice) -> Effect:
        choice = pinned(self.view, choice)
        if choice not in self.known:
            self.known[choice] = measure_effect(self.index, self.view, choice)
        return self.known[choice]

    def generate(self, given: set[Choice]) -> ChoiceSet:
        """Every choice if they are few; else those without other forms, the more for each form, and their neighbours."""
        view = self.view
        every = _every_choice(view)
        if every is not None:
            hull = sweep_prices(view, self.prices)
            effects = [self.measure(choice) for choice in every]
            return ChoiceSet(self._usable(), hull, is_complete=all(effect.is_additive for effect in effects))
        for choice in (Choice(view.everything), Choice(view.nothing), *given):
            self.measure(choice)
        hull = self._explore(dataclasses.replace(self.prices, modes={}))
        if self.prices.modes:
            # What is allowed besides must not take away: without other forms there are the same choices as ever.
            hull = self._explore_forms()
        return ChoiceSet(self._usable(), hull, is_complete=False)

    def _explore(self, prices: Prices) -> Hull:
        """Measure the vertices of the hull and choices around them."""
        hull = self._sweep(prices)
        fixed = _fixed_backward(self.index, self.view)
        for _ in range(_PEAK_ROUNDS):
            for choice in _variants(self.index, self.view, prices, self._usable(), fixed):
                self.measure(choice)
        self._descend_beside_others(fixed)
        return hull

    def _explore_forms(self) -> Hull:
        """Measure the vertices of the hulls with other forms, at prices of what regions share, and choices around them."""
        known = set(self.known)
        hull = self._sweep(self.prices)
        lines = list(hull.lines)
        for sweep in packing_sweeps(self.prices, self.most_squared_error / self.alike):
            lines += sweep.lines(self._sweep(sweep.prices).lines)
        for limited in limit_offload(self.index, self.view, self.prices):
            self._sweep(limited)
        fixed = _fixed_backward(self.index, self.view)
        vertices = tuple(e for choice, e in self.known.items() if choice not in known and self._is_usable(e))
        for choice in _variants(self.index, self.view, self.prices, _undominated(list(vertices)), fixed):
            self.measure(choice)
        self._descend_beside_others(fixed)
        return Hull(hull.cuts, tuple(lines))

    def _descend_beside_others(self, fixed: Ints) -> None:
        # What alike regions hold counts beside this one's backward, but how many of them do is not known here: none, one,
        # all, or all of every micro-batch in flight.
        for others in sorted({0, 1, self.alike, self.alike * (self.index.waiting + 1)}):
            self._descend(fixed, others)

    def _sweep(self, prices: Prices) -> Hull:
        hull = sweep_prices(self.view, prices)
        for cut in hull.cuts:
            self.measure(cut.choice)
        return hull

    def _usable(self) -> tuple[Effect, ...]:
        """What has been measured, without what causes too large an error and what another choice beats."""
        return _undominated([effect for effect in self.known.values() if self._is_usable(effect)])

    def _is_usable(self, effect: Effect) -> bool:
        """Whether its error is small enough; never if it is infinite."""
        return effect.squared_error <= self.most_squared_error and not math.isinf(effect.squared_error)

    def _descend(self, fixed: Ints, others: int) -> None:
        """Flip values, one or a pair, as long as that lowers the peak of a region's backward beside ``others`` alike."""
        view = self.view

        def height(effect: Effect) -> tuple[int, float]:
            if not self._is_usable(effect):
                return sys.maxsize, effect.seconds
            peak = int((fixed + effect.backward).max()) if len(fixed) else 0
            return peak + others * effect.retained_bytes, effect.seconds

        by_size = sorted(view.droppable, key=lambda v: -view.graph.values[v].bytes)
        best = min(self.known.values(), key=height)
        for _ in range(_DESCENTS_AT_MOST):
            start = best
            for flips in (itertools.combinations(by_size, 1), itertools.combinations(by_size[:_PAIRED_VALUES], 2)):
                best = min((self.measure(_flip(best.choice, flip)) for flip in flips), key=height, default=best)
                if height(best) < height(start):
                    break
                best = start
            if best is start:
                return


def _every_choice(view: RegionView) -> Iterable[Choice] | None:
    """All choices of a region, if they are few."""
    states = [[("keep", v), *([("drop", v)] if v in view.droppable else [])] for v in view.decided]
    for value, options in zip(view.decided, states, strict=True):
        entry = view.forms.get(value)
        options += [(form.name, value) for form in (entry.forms if entry is not None else ())]
    if math.prod(map(len, states)) > _ENUMERATED_CHOICES:
        return None
    return (
        Choice(
            kept=frozenset(v for state, v in combination if state == "keep"),
            packed=frozenset((v, state) for state, v in combination if state not in ("keep", "drop")),
        )
        for combination in itertools.product(*states)
    )


def _keep(choice: Choice, values: Iterable[int]) -> Choice:
    """The same, but these values are kept."""
    wanted = frozenset(values)
    return Choice(choice.without(wanted).kept | wanted, choice.without(wanted).packed)


def _flip(choice: Choice, values: Iterable[int]) -> Choice:
    """The same, but of these values those that were kept are rebuilt, and the others kept."""
    wanted = frozenset(values)
    rest = choice.without(wanted)
    return Choice(rest.kept | (wanted - choice.kept), rest.packed)


def _fixed_backward(index: StepIndex, view: RegionView) -> Ints:
    frame = frame_of(index, view)
    return index.fixed[frame.start : frame.stop]


def _variants(
    index: StepIndex, view: RegionView, prices: Prices, effects: tuple[Effect, ...], fixed: Ints
) -> set[Choice]:
    """Choices near the given ones that differ in values alive at the highest instant of the region's backward."""
    frame = frame_of(index, view)
    found: set[Choice] = set()
    peaks: dict[int, None] = {}
    for effect in effects:
        if not len(fixed):
            continue
        instant = frame.start + int(np.argmax(fixed[: len(effect.backward)] + effect.backward))
        peaks.setdefault(instant)
        by_size = sorted(view.droppable, key=lambda v: -view.graph.values[v].bytes)
        alive = [v for v in by_size if v not in effect.choice.kept and _is_held(index, view, v, instant)]
        found.update(_keep(effect.choice, {v}) for v in alive[:_FLIPS_PER_CHOICE])
        waiting = [v for v in by_size if v in effect.choice.kept and _is_held(index, view, v, instant)]
        found.update(effect.choice.without(frozenset({v})) for v in waiting[:_FLIPS_PER_CHOICE])
    for instant in list(peaks)[:_PEAKS_REPRICED]:
        for factor in (0.0, 0.5, 2.0):
            weighted = {
                v: bytes_ * (factor if v in view.slots_of and _is_read_by(index, view, v, instant) else 1.0)
                for v, bytes_ in prices.held_bytes.items()
            }
            cuts = sweep_prices(view, dataclasses.replace(prices, held_bytes=weighted)).cuts
            found.update(cut.choice for cut in cuts)
    return found


def _is_held(index: StepIndex, view: RegionView, value: int, instant: int) -> bool:
    """Whether a kept value would be alive at an instant of backward."""
    return any(slot_stop(index.trace, slot) > instant for slot in view.slots_of[value])


def _is_read_by(index: StepIndex, view: RegionView, value: int, instant: int) -> bool:
    """Whether a value must be in memory at an instant whatever is decided."""
    return any(2 * slot.unpacked <= instant < slot_stop(index.trace, slot) for slot in view.slots_of[value])


def _undominated(effects: list[Effect]) -> tuple[Effect, ...]:
    """Drop choices that another one beats, or equals, in seconds, error, link bytes and at every instant."""
    order = sorted(
        effects,
        key=lambda e: (
            e.seconds,
            e.retained_bytes,
            int(e.backward.sum()),
            sorted(e.choice.kept),
            sorted(e.choice.packed),
        ),
    )
    if not order:
        return ()
    shared = [(e.squared_error, e.link_bytes, e.copied_bytes, e.exit_bytes, *_retained_range(e)) for e in order]
    figures = np.hstack([np.array(shared), np.stack([effect.backward for effect in order])])
    least, most = np.delete(figures, 5, axis=1), np.delete(figures, 4, axis=1)
    kept = np.empty_like(most)
    alike: dict[tuple[Relief, ...], list[int]] = {}
    left: list[int] = []
    for position, effect in enumerate(order):
        same = alike.setdefault(effect.relief, [])
        # Relieved at other times, one's most has to be compared with the other's least.
        if (kept[: len(left)] <= least[position]).all(axis=1).any():
            continue
        if (most[same] <= most[position]).all(axis=1).any():
            continue
        kept[len(left)] = most[position]
        left.append(position)
        same.append(position)
    return tuple(order[position] for position in left)


def _retained_range(effect: Effect) -> tuple[int, int]:
    """The least and the most bytes that a choice adds between forward and backward."""
    least = effect.retained_bytes - sum(relief.size for relief in effect.relief if relief.size > 0)
    return least, effect.retained_bytes - sum(relief.size for relief in effect.relief if relief.size < 0)
