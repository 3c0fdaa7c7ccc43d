"""Generates the choices that the solver picks from for each region (module call), and the memory and time that each choice
adds.

A choice says which saved values a region keeps, recomputes, or stores in another form (compressed, offloaded). If a region has
few such values, all combinations are choices. Otherwise the choices are the vertices of the lower convex hull of bytes held and
seconds of recomputation (see ``frontier``), and variants around them. Variants are needed because keeping less may raise or
lower the peak of a region's own backward. So values alive at that peak are flipped one by one (kept if they were dropped, and
the reverse), and the search for the hull is repeated with these values dearer or cheaper. If values have other forms, the
search is repeated at several prices of error, and with as many bytes on the link (to host memory or disk) as compute hides.
Choices do not depend on the budget, so a larger budget never has fewer choices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.planning.choice import Choice
from plimsoll.planning.cut import Prices
from plimsoll.planning.effects import Effect, Relief, held_bytes, likeness, program, structure
from plimsoll.planning.frontier import Hull, Sweeper, limit_offload, modes_of, packing_sweeps
from plimsoll.planning.measuring import Measuring
from plimsoll.planning.pins import pinned
from plimsoll.planning.step import RegionView, StepIndex, slot_stop

_ENUMERATED_CHOICES = 512
"""If a region has at most this many possible choices (ways to treat its saved values), all of them are generated. Then plans
can be proven optimal.
"""
_FLIPS_PER_CHOICE = 3
_PEAKS_REPRICED = 4
_PEAK_ROUNDS = 2
"""How often variants of the choices are made; the second round makes variants of variants. They can lower a peak further, but
each round measures about as many choices as the round before.
"""
_DESCENTS_AT_MOST = 12
_TELLING = 12
"""To compare two curves of bytes quickly, about this many of their points are compared first, and whole curves only if these
points do not decide."""
_LEAST_RETAINED, _MOST_RETAINED = 4, 5
"""Numbers of two columns in the table that compares choices (what to keep or recompute).

They are the least and the most bytes that a choice holds between forward and backward.
"""
_FLIPPED_VALUES = 64
"""To flip a value is to drop it if it is kept, and the reverse. Values are flipped one by one only among this many largest
values. A region with more of them (a recurrent layer has hundreds of equal size) would measure a thousand choices to save a
thousandth of its bytes; there values of one kind of op are also kept or dropped together.
"""
_PAIRED_VALUES = 10
"""Flips of two values together are tried only among this many largest values, because the number of pairs is quadratic."""


@dataclass(frozen=True, slots=True)
class ChoiceSet:
    """Data: all choices of one region, with the memory and time of each.

    These are its ``effects``. Regions that are alike share one set. With ``is_complete``, every possible choice that is missing
    has the same effect as one in the set, or is worse. All effects are then exact.
    """

    effects: tuple[Effect, ...]
    hull: Hull
    is_complete: bool


def prices_of(index: StepIndex, view: RegionView) -> Prices:
    """Return the bytes that holding each value of a region costs, and the seconds to run each op again.

    The minimum cut of the module ``cut`` weighs them against each other.
    """
    seconds = tuple(index.replay_seconds(op.cost_key) for op in view.graph.ops)
    return Prices(held_bytes=dict(held_bytes(index, view)), op_seconds=seconds, modes=modes_of(view))


def generate_choices(
    index: StepIndex,
    extra: Iterable[tuple[Choice, ...]] = (),
    most_squared_error: float = 0.0,
    known: dict[Hashable, ChoiceSet] | None = None,
) -> tuple[ChoiceSet, ...]:
    """Return, for each region of a step, the set of its choices.

    The sets are in the order of regions; regions that are alike share one set.

    Args:
        index: the step.
        extra: choices to include, from named strategies: each entry has one choice for each region.
        most_squared_error: leave out choices that exceed this error by themselves.
        known: sets of regions of other steps with the same costs, such as other stages of a pipeline; new sets are added.
    """
    wanted = list(extra)
    by_likeness: dict[Hashable, ChoiceSet] = {} if known is None else known
    sweepers: dict[Hashable, Sweeper] = {}
    explored: dict[Hashable, dict[Choice, None]] = {}
    sets = []
    keys = [likeness(index, view) for view in index.views]
    for view, key in zip(index.views, keys, strict=True):
        if key not in by_likeness:
            regions = [v.call.index for v, k in zip(index.views, keys, strict=True) if k == key]
            given = dict.fromkeys(choices[region] for choices in wanted for region in regions)
            generator = _Generator(index, view, sweepers.setdefault(program(view), Sweeper(view)), len(regions))
            generator.most_squared_error = most_squared_error
            # Regions that differ only in costs, or in other live tensors, have much the same choices: start from these.
            near = explored.setdefault(structure(view), {})
            by_likeness[key] = generator.generate(given, near)
            near.update((effect.choice, None) for effect in by_likeness[key].effects)
        sets.append(by_likeness[key])
    return tuple(sets)


class _Generator:
    """Generates the choices (ways to treat saved values) of one kind of region, and computes each choice's effect once.

    The effect of a choice is the memory and the time that it adds to the step.
    """

    most_squared_error = 0.0

    def __init__(self, index: StepIndex, view: RegionView, sweeper: Sweeper, alike: int) -> None:
        self.index = index
        self.view = view
        self.sweeper = sweeper
        self.alike = alike
        self.prices = prices_of(index, view)
        self.measuring = Measuring(index, view)
        self.fixed = index.fixed[self.measuring.frame.start : self.measuring.frame.stop]
        self.by_size = sorted(view.droppable, key=lambda v: -view.graph.values[v].bytes)
        self.kinds = _kinds(view) if len(self.by_size) > _FLIPPED_VALUES else []
        """Sets of saved values that the search keeps or drops together; empty if the search changes each value alone."""
        self.known: dict[Choice, Effect] = {}
        self._left: tuple[Effect, ...] = ()
        self._weighed = 0
        """How many of the measured choices have already been compared to find those that no other choice beats (``_left``)."""
        self.peaks: dict[Choice, int] = {}
        """Maps each measured choice (a way to treat the region's saved values) to a peak in bytes: the highest during the
        region's own backward, if nothing is held for other regions.
        """

    def measure(self, choices: Iterable[Choice]) -> None:
        """Compute and store the effects (added memory and time) of these choices.

        Choices that were measured before are skipped.
        """
        new = [c for c in dict.fromkeys(pinned(self.view, choice) for choice in choices) if c not in self.known]
        effects = self.measuring.measure(new)
        self.known.update(zip(new, effects, strict=True))
        if len(self.fixed):
            self.peaks.update((e.choice, int((self.fixed + e.backward).max())) for e in effects)

    def generate(self, given: Iterable[Choice], explored: Collection[Choice]) -> ChoiceSet:
        """Return the set of choices for this kind of region.

        If there are few possible choices, the set has all of them. Otherwise it has the choices on lower convex hulls of bytes
        held and seconds, and choices near them. One hull is found without other forms, and one with compressed and offloaded
        values.

        ``given`` are choices to include. ``explored`` are the choices of similar regions: if they exist, fewer variants are
        measured, because little would be new.
        """
        view = self.view
        every = _every_choice(view)
        if every is not None:
            self.measure(every)
            is_complete = all(effect.is_additive for effect in self.known.values())
            return ChoiceSet(self._usable(), self.sweeper.sweep([self.prices])[0], is_complete)
        self.measure([Choice(view.everything), Choice(view.nothing), *given, *explored])
        hull = self._explore(dataclasses.replace(self.prices, modes={}), 0 if explored else _PEAK_ROUNDS)
        if self.prices.modes:
            # First explored without forms, now with them: allowing a form only adds choices and never removes one.
            hull = self._explore_forms()
        return ChoiceSet(self._usable(), hull, is_complete=False)

    def _explore(self, prices: Prices, rounds: int) -> Hull:
        """Measure choices on and near the lower convex hull of bytes held and seconds, and return this hull.

        ``prices`` are the bytes and seconds that the search weighs. ``rounds`` says how often variants of the choices are made.
        """
        # All ops take the same time here, so that the lowest peak found does not depend on measured times.
        timeless = dataclasses.replace(prices, op_seconds=(1e-6,) * len(prices.op_seconds))
        hull, _ = self._sweep([prices, timeless])
        for _ in range(rounds):
            self.measure(self._variants(prices, self._usable()))
        self._descend()
        return hull

    def _explore_forms(self) -> Hull:
        """Measure choices that compress or offload values, on and near lower convex hulls; return one hull for all of them.

        A hull is the lower convex hull of (bytes held, seconds). One is found for each of several prices of gradient error and
        of bytes on the link, because all regions share both. The returned hull has the lines of all these hulls; the lines
        bound all choices from below.
        """
        known = set(self.known)
        sweeps = list(packing_sweeps(self.prices, self.most_squared_error / self.alike))
        limited = limit_offload(self.index, self.view, self.prices)
        hull, *others = self._sweep([self.prices, *(sweep.prices for sweep in sweeps), *limited])
        lines = list(hull.lines)
        for sweep, other in zip(sweeps, others, strict=False):
            lines += sweep.lines(other.lines)
        vertices = [e for choice, e in self.known.items() if choice not in known and self._is_usable(e)]
        self.measure(self._variants(self.prices, _undominated(vertices)))
        self._descend()
        return Hull(hull.cuts, tuple(lines))

    def _sweep(self, prices: Sequence[Prices]) -> list[Hull]:
        """Find the lower convex hull of (bytes held, seconds) for each entry of ``prices``, and measure the choices on it.

        Return a list with these hulls.
        """
        hulls = self.sweeper.sweep(prices)
        self.measure(cut.choice for hull in hulls for cut in hull.cuts)
        return hulls

    def _usable(self) -> tuple[Effect, ...]:
        """Return the effects (added memory and time) of the measured choices that are worth giving to the solver.

        Their gradient error is small enough, and no other choice is at least as good in everything.
        """
        new = itertools.islice(self.known.values(), self._weighed, None)
        self._left = _undominated([*self._left, *(effect for effect in new if self._is_usable(effect))])
        self._weighed = len(self.known)
        return self._left

    def _is_usable(self, effect: Effect) -> bool:
        """Return True if the gradient error of one choice, taken from its effect, is finite and within the limit."""
        return effect.squared_error <= self.most_squared_error and not math.isinf(effect.squared_error)

    def _variants(self, prices: Prices, effects: tuple[Effect, ...]) -> dict[Choice, None]:
        """Return variants of the given choices: each treats values differently that are in memory at the peak of backward.

        A choice says what to keep and what to recompute. ``effects`` belong to the given choices. The result is a dict without
        values, used as an ordered set.
        """
        view = self.view
        if not len(self.fixed):
            return {}
        stops = {v: max(slot_stop(self.index.trace, slot) for slot in view.slots_of[v]) for v in view.droppable}
        found: dict[Choice, None] = {}
        peaks: dict[int, None] = {}
        for effect in effects:
            instant = self.measuring.frame.start + int(np.argmax(self.fixed + effect.backward))
            peaks.setdefault(instant)
            alive = [v for v in self.by_size if stops[v] > instant]
            dropped = [v for v in alive if v not in effect.choice.kept]
            found.update((_keep(effect.choice, {v}), None) for v in dropped[:_FLIPS_PER_CHOICE])
            waiting = [v for v in alive if v in effect.choice.kept]
            found.update((effect.choice.without(frozenset({v})), None) for v in waiting[:_FLIPS_PER_CHOICE])
        weighed = []
        for instant in list(peaks)[:_PEAKS_REPRICED]:
            read = {v for v in view.slots_of if v in prices.held_bytes and _is_read_by(self.index, view, v, instant)}
            for factor in (0.0, 0.5, 2.0):
                weights = {v: bytes_ * (factor if v in read else 1.0) for v, bytes_ in prices.held_bytes.items()}
                weighed.append(dataclasses.replace(prices, held_bytes=weights))
        found.update((cut.choice, None) for hull in self.sweeper.sweep(weighed) for cut in hull.cuts)
        return found

    def _descend(self) -> None:
        """Measure choices on the way to a low peak: flip a value, a pair, or a kind of values, as long as this lowers the peak.

        To flip a value means to drop it if it is kept, and to keep it otherwise. Here the peak is the peak of the region's
        backward plus the bytes that other regions of this kind hold. How many regions hold bytes is not known here, so several
        counts are tried: none, one, all, and all regions of all micro-batches in flight. These descents run side by side, so
        that one call measures the next flips of all of them.
        """
        # Keeping less does not always lower the peak, because rebuilt values take memory too: on one Llama block, keeping
        # nothing had the same peak in backward as keeping everything, and keeping products and attention had a lower one
        # (docs/project/lab-notes.md). So peaks are computed, not assumed to fall.
        others = sorted({0, 1, self.alike, round(self.alike * (self.index.waiting + 1))})
        best = {many: min(self.known, key=lambda choice: self._height(choice, many)) for many in others}
        moving = others
        for _ in range(_DESCENTS_AT_MOST):
            left, moving = moving, []
            for moves in (self._flips_of_one_or_a_kind, self._flips_of_pairs):
                near = {many: moves(best[many]) for many in left}
                self.measure(choice for choices in near.values() for choice in choices)
                stuck = []
                for many, choices in near.items():
                    lowest = min(
                        (pinned(self.view, c) for c in choices), key=lambda c: self._height(c, many), default=best[many]
                    )
                    if self._height(lowest, many) < self._height(best[many], many):
                        best[many] = lowest
                        moving.append(many)
                    else:
                        stuck.append(many)
                left = stuck

    def _flips_of_one_or_a_kind(self, choice: Choice) -> list[Choice]:
        """Return copies of the choice. Each copy flips one value (keeps it instead of dropping it, or the reverse), or keeps or
        drops all values of a kind.
        """
        found = [_flip(choice, {value}) for value in self.by_size[:_FLIPPED_VALUES]]
        for values in self.kinds:
            found += [_keep(choice, values), choice.without(values)]
        return found

    def _flips_of_pairs(self, choice: Choice) -> list[Choice]:
        """Return copies of the choice with two of the largest values flipped: kept instead of dropped, or the reverse."""
        return [_flip(choice, pair) for pair in itertools.combinations(self.by_size[:_PAIRED_VALUES], 2)]

    def _height(self, choice: Choice, others: int) -> tuple[int, float]:
        """Return the peak in bytes under one choice, and the seconds that the choice adds to the step.

        The peak counts ``others`` further regions of this kind that hold their bytes too. A choice with too large an error has
        the largest number as its peak.
        """
        effect = self.known[choice]
        if not self._is_usable(effect):
            return sys.maxsize, effect.seconds
        return self.peaks.get(choice, 0) + others * effect.retained_bytes, effect.seconds


def _every_choice(view: RegionView) -> Iterable[Choice] | None:
    """Return an iterable of all possible choices of a region; ``None`` if there are more than 512."""
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


def _kinds(view: RegionView) -> list[frozenset[int]]:
    """Return sets of droppable values: for each kind of op all values that it made, and each quarter of these in program order.

    A kind is the name of an op and the number of its result.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for value in view.droppable:
        producer = view.graph.values[value].producer
        if producer >= 0:
            op = view.graph.ops[producer]
            groups.setdefault((op.name, op.writes.index(value)), []).append(value)
    quarters = (
        values[len(values) * at // 4 : len(values) * (at + 1) // 4] for values in groups.values() for at in range(4)
    )
    return [frozenset(values) for values in (*groups.values(), *quarters) if values]


def _keep(choice: Choice, values: Iterable[int]) -> Choice:
    """Return a copy of the choice that keeps these values unchanged, whatever the choice did with them before."""
    wanted = frozenset(values)
    return Choice(choice.without(wanted).kept | wanted, choice.without(wanted).packed)


def _flip(choice: Choice, values: Iterable[int]) -> Choice:
    """Return a copy of the choice with these values flipped: kept values are recomputed, all others are kept."""
    wanted = frozenset(values)
    rest = choice.without(wanted)
    return Choice(rest.kept | (wanted - choice.kept), rest.packed)


def _is_read_by(index: StepIndex, view: RegionView, value: int, instant: int) -> bool:
    """Return True if backward needs a value's saved tensor at an instant, so that any choice has the value in memory then."""
    return any(2 * slot.unpacked <= instant < slot_stop(index.trace, slot) for slot in view.slots_of[value])


def _undominated(effects: list[Effect]) -> tuple[Effect, ...]:
    """Return the effects of the choices that no other choice dominates.

    A choice dominates another if it is at most as large in seconds, in gradient error, in bytes on the link, and in added bytes
    at each instant.
    """
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
    curves = np.stack([effect.backward for effect in order])
    # Drop an instant at which every curve has the same value as at the instant before.
    curves = curves[:, (np.diff(curves, axis=1, prepend=-1) != 0).any(axis=0)]
    # The most decisive columns come first: few rows have to be compared in the others.
    samples = curves[:, :: max(curves.shape[1] // _TELLING, 1)]
    figures = np.hstack([np.array(shared), samples, curves])
    telling = len(shared[0]) - 1 + samples.shape[1]
    least, most = np.delete(figures, _MOST_RETAINED, axis=1), np.delete(figures, _LEAST_RETAINED, axis=1)
    # The decisive figures are stored by columns: one comparison runs over all rows left so far.
    told, rest = np.empty((telling, len(order)), dtype=most.dtype), np.empty_like(most[:, telling:])
    numbers: dict[tuple[Relief, ...], int] = {}
    reliefs = np.array([numbers.setdefault(effect.relief, len(numbers)) for effect in order])
    left = np.zeros(len(order), dtype=np.int64)
    count = 0
    for position, (row, least_retained) in enumerate(zip(most, least[:, _LEAST_RETAINED], strict=True)):
        before = told[:, :count]
        # If two choices have different reliefs, the most that one retains must not exceed the least of the other.
        is_comparable = before[_LEAST_RETAINED] <= least_retained
        is_comparable |= reliefs[left[:count]] == reliefs[position]
        near = np.flatnonzero(is_comparable & (before <= row[:telling, None]).all(axis=0))
        if len(near) and (rest[near] <= row[telling:]).all(axis=1).any():
            continue
        told[:, count], rest[count], left[count] = row[:telling], row[telling:], position
        count += 1
    return tuple(order[position] for position in left[:count].tolist())


def _retained_range(effect: Effect) -> tuple[int, int]:
    """Return two numbers: the least and the most bytes that a choice adds between forward and backward of a region."""
    least = effect.retained_bytes - sum(relief.size for relief in effect.relief if relief.size > 0)
    return least, effect.retained_bytes - sum(relief.size for relief in effect.relief if relief.size < 0)
