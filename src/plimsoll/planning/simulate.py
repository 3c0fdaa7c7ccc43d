"""Simulates a step under a plan: the exact bytes at each instant, and the seconds of the step.

A choice says which saved values of a region (module call) are kept, recomputed or stored in another form.

All plans of the solver are simulated here, and the simulated figures decide. See ``step`` for instants and fixed bytes, and
``replay`` for the memory of recomputation. Not modelled: fragmentation, and memory that no traced op allocates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.artifacts.plan import RegionPlan
from plimsoll.planning.choice import Choice, link_bytes, packing_seconds, step_error
from plimsoll.planning.replay import Replay, replay
from plimsoll.planning.step import Ints, RegionView, Span, StepIndex, boundary_values, merge, provider_of, subtract

_REPLAYS_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Simulation:
    """Data: the memory and time of one step under one plan.

    ``curve`` has the bytes alive at each instant (two instants for each op). ``replayed`` lists the (region, op) pairs that run
    again. ``peak_instant`` is the first instant at which ``peak_bytes`` are alive. ``squared_error`` is the square of the
    relative gradient error that packed (compressed or offloaded) values are expected to cause. ``link_bytes`` is the largest
    number of bytes at the other end of the link.
    """

    index: StepIndex
    choices: tuple[Choice, ...]
    curve: Ints
    peak_bytes: int
    peak_instant: int
    seconds: float
    replayed: tuple[tuple[int, int], ...]
    squared_error: float = 0.0
    link_bytes: int = 0


def choices_of(index: StepIndex, regions: Sequence[RegionPlan]) -> tuple[Choice, ...]:
    """Translate region plans into one choice (what to keep or recompute) for each region of the trace. A region without a plan
    keeps everything.
    """
    plans = {(plan.name, plan.call): plan for plan in regions}
    choices = []
    for view in index.views:
        plan = plans.get((view.call.name, view.call.call))
        if plan is None:
            choices.append(Choice(view.everything))
            continue
        names = {value: view.graph.values[value].name for value in view.decided}
        dropped, forms = plan.dropped, plan.packed
        packed = frozenset((value, forms[name]) for value, name in names.items() if name in forms)
        kept = frozenset(v for v, name in names.items() if name not in forms and name not in dropped)
        choices.append(Choice(kept, packed, plan.is_boundary_dropped))
    return tuple(choices)


def run_choices(index: StepIndex, choices: Sequence[Choice]) -> Simulation:
    """Simulate a step with one choice for each region.

    An input that is dropped cannot be compressed or offloaded too; if the choice says so, the input counts as kept. All calls
    of a compiled block run the same code, so a value that one call drops is dropped in all calls.
    """
    choices = _as_one_code(index, choices)
    linked = links_of(index, choices)
    choices = [choice.as_is(linked.get(region, frozenset())) for region, choice in enumerate(choices)]
    replays = StepReplays(index, choices)
    curve = replays.held()
    for outcome in replays.outcomes:
        _add_levels(curve, outcome)
    peak_instant = int(np.argmax(curve))
    ops = tuple(op for outcome in replays.outcomes for op in outcome.ops)
    return Simulation(
        index=index,
        choices=tuple(choices),
        curve=curve,
        peak_bytes=int(curve[peak_instant]),
        peak_instant=peak_instant,
        seconds=index.base_seconds + replay_seconds(index, dict(enumerate(choices)), ops),
        replayed=ops,
        squared_error=step_error(index, choices, linked),
        link_bytes=sum(link_bytes(view, choice) for view, choice in zip(index.views, choices, strict=True)),
    )


def _as_one_code(index: StepIndex, choices: Sequence[Choice]) -> Sequence[Choice]:
    """Return the choices, changed so that all calls of a compiled region take the same decision about each value.

    If one call does not keep a value, the value is dropped in all calls, because they run the same code.
    """
    choices = list(choices)
    for calls in index.compiled_together:
        names = {
            at: {value: index.views[at].graph.values[value].name for value in index.views[at].decided} for at in calls
        }
        dropped = {name for at in calls for value, name in names[at].items() if value not in choices[at].kept}
        for at in calls:
            choices[at] = choices[at].without(frozenset(value for value, name in names[at].items() if name in dropped))
    return choices


class StepReplays:
    """The simulated recomputation of all regions of one step, and the memory that it takes.

    There is one choice for each region. Regions are replayed together if one drops its input and the other rebuilds it.
    ``watch`` is an instant at which the replays list their live buffers (see ``replay``); -1 for none.
    """

    def __init__(self, index: StepIndex, choices: Sequence[Choice], watch: int = -1) -> None:
        self.index = index
        self.linked = links_of(index, choices)
        self.chains = _chains(index, choices, self.linked)
        self.outcomes = [_replayed(index, chain, self.linked, watch) for chain in self.chains]
        self.holds: dict[int, list[Span]] = {}
        for outcome in self.outcomes:
            for storage, spans in outcome.holds.items():
                self.holds.setdefault(storage, []).extend(spans)

    def cover(self, storage: int) -> list[Span]:
        """Return the spans of instants at which a storage of the trace is in memory if regions follow these choices.

        It is alive by itself, or a region holds it. Buffers of recomputation do not count.
        """
        cover = actual_cover(self.index, storage, self.linked)
        return merge([*cover, *self.holds[storage]]) if storage in self.holds else cover

    def is_alive(self, storage: int, instant: int) -> bool:
        """Return True if a storage of the trace is in memory at an instant, by itself or because a region holds it."""
        for spans in (actual_cover(self.index, storage, self.linked), self.holds.get(storage, ())):
            for start, stop in spans:
                if start <= instant < stop:
                    return True
        return False

    def held(self) -> Ints:
        """Return an array with, for each instant, the bytes alive without rebuilt values.

        They are the bytes that no decision changes, the bytes that choices hold, and those of waiting micro-batches.
        """
        added = np.cumsum(_storage_changes(self))[:-1]
        return self.index.fixed + added + self.index.waits(int(added[self.index.handover]))

    def extras(self) -> Iterator[tuple[Span, int, str]]:
        """Yield (span of instants, bytes, label) for each copy of an input, each payload of a packed value, and the memory for
        making payloads. A packed value is compressed or offloaded.
        """
        for outcome in self.outcomes:
            yield from outcome.copies
            yield from outcome.payloads
            yield from outcome.packing


def _replayed(
    index: StepIndex, chain: Mapping[int, Choice], linked: Mapping[int, frozenset[int]], watch: int
) -> Replay:
    """Return the simulated recomputation of linked regions, from a cache if only one region is recomputed.

    Regions are linked if one drops its input and the other rebuilds it. Single regions are cached, because plans for other
    budgets change only a few regions.
    """
    if len(chain) > 1:
        return replay(index, chain, linked, watch)
    [key] = chain.items()
    if key not in index.replays:
        if len(index.replays) >= _REPLAYS_KEPT:
            index.replays.clear()
        index.replays[key] = replay(index, chain, linked)
    known: Replay = index.replays[key]
    if watch >= 0 and known.has_rebuilt(watch):
        return replay(index, chain, linked, watch)
    return known


def replay_seconds(index: StepIndex, choices: Mapping[int, Choice], ops: Sequence[tuple[int, int]]) -> float:
    """Return the seconds that the given regions add to the step under these choices.

    They are the seconds of the recomputed ``ops`` ((region, op) pairs), of encoding, decoding and waiting for transfers, and of
    Plimsoll's own work in the regions that it changes.
    """
    seconds = sum(index.replay_seconds(index.views[r].graph.ops[o].cost_key) for r, o in ops)
    seconds += sum(packing_seconds(index, index.views[r], choice) for r, choice in choices.items() if choice.packed)
    touched = [index.views[r] for r, choice in choices.items() if is_touched(index.views[r], choice)]
    return seconds + sum(engine_seconds(index, view) for view in touched)


def engine_seconds(index: StepIndex, view: RegionView) -> float:
    """Return the seconds of Plimsoll's own work in one call of a module that it changes: a hook runs for each saved tensor."""
    if view.call.is_compiled:
        return 0.0
    return index.costs.region_seconds + len(view.graph.slots) * index.costs.slot_seconds


def is_touched(view: RegionView, choice: Choice) -> bool:
    """Return True if Plimsoll has to change how a region runs, because its choice does not simply keep everything."""
    return choice.is_boundary_dropped or len(choice.kept) < len(view.decided)


def _chains(
    index: StepIndex, choices: Sequence[Choice], linked: Mapping[int, frozenset[int]]
) -> list[dict[int, Choice]]:
    """Group the regions that are recomputed together into chains; each chain maps regions to their choices.

    Regions are in the same chain if one drops its input and the other rebuilds it.
    """
    chain_of: dict[int, dict[int, Choice]] = {}
    found: list[dict[int, Choice]] = []
    for view, choice in zip(index.views, choices, strict=True):
        region = view.call.index
        provider = provider_of(index, view, linked.get(region, frozenset()))
        if provider >= 0:
            chain = chain_of.get(provider)
            if chain is None:
                chain = {provider: choices[provider]}
                chain_of[provider] = chain
                found.append(chain)
            chain[region] = choice
            chain_of[region] = chain
        elif region not in chain_of and view.decided:
            chain_of[region] = {region: choice}
            found.append(chain_of[region])
    return found


def links_of(index: StepIndex, choices: Sequence[Choice]) -> dict[int, frozenset[int]]:
    """Return a mapping from each region that drops its input to the inputs that are not held.

    An input that cannot be rebuilt stays held, so it is not included.
    """
    linked = {
        view.call.index: boundary_values(index, view)
        for view, choice in zip(index.views, choices, strict=True)
        if choice.is_boundary_dropped
    }
    return {region: values for region, values in linked.items() if values}


def _storage_changes(replays: StepReplays) -> Ints:
    """Return an array with, for each instant, the change of the bytes that choices add to the fixed bytes.

    Dropped inputs of regions are subtracted. The running sum of the array is the number of bytes added at each instant.
    """
    index = replays.index
    change = np.zeros(index.instants + 1, dtype=np.int64)
    for (start, stop), size, _ in replays.extras():
        change[start] += size
        change[max(start, stop)] -= size
    linked = {index.views[r].graph.values[v].storage for r, values in replays.linked.items() for v in values}
    for storage in replays.holds.keys() | linked:
        size = index.trace.storages[storage].bytes
        fixed, actual = index.covered(storage), replays.cover(storage)
        for start, stop in subtract(actual, fixed):
            change[start] += size
            change[stop] -= size
        for start, stop in subtract(fixed, actual):
            change[start] -= size
            change[stop] += size
    return change


def actual_cover(index: StepIndex, storage: int, linked: Mapping[int, frozenset[int]]) -> list[Span]:
    """Return the spans of instants when a storage is alive under any plan that drops the inputs in ``linked``.

    They are the spans of ``StepIndex.covered``, which are for plans that hold inputs, with one difference. A saved tensor that
    is a dropped input holds its storage only until the forward of its region ends.
    """
    if not linked:
        return index.covered(storage)
    spans = [index.life(storage)]
    for region, start, stop in index.forced_spans.get(storage, ()):
        call = index.views[region].call
        is_linked = any(call.graph.values[v].storage == storage for v in linked.get(region, ()))
        spans.append((start, min(stop, 2 * call.forward[1]) if is_linked else stop))
    return merge(spans)


def _add_levels(curve: Ints, outcome: Replay) -> None:
    """Add the bytes of rebuilt values during one recomputation to the array with the bytes at each instant."""
    levels = dict(outcome.levels)
    instants = sorted(levels)
    for instant, following in zip(instants, [*instants[1:], len(curve)][: len(instants)], strict=True):
        if levels[instant]:
            curve[instant:following] += levels[instant]
