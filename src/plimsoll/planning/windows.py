"""Splits a step into windows of time. Each window gives one linear constraint on the bytes that regions (module calls) add to
it.

A choice says which saved values of a region are kept, recomputed or stored in another form.

A window is a stretch of instants during which every region but at most one adds a constant. Then the peak of the window is a
sum over regions: the constants of the others, and for the active region the joint maximum of fixed bytes and its own curve. If
two regions are active at once (parallel branches), every instant is its own window, so the constraint stays exact. Waiting
micro-batches hold a multiple of the bytes added at the handover, in every window before the optimizer's.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plimsoll.planning.choices import ChoiceSet
from plimsoll.planning.effects import Effect, RegionFrame, Relief, frame_of
from plimsoll.planning.step import Ints, StepIndex


@dataclass(frozen=True, slots=True)
class Windows:
    """Data: the windows (stretches of time) of a step, and the bytes that each choice of each region adds to each window.

    A choice says what a region keeps and recomputes. ``fixed_bytes[w]`` plus the sum over regions r of ``added_bytes[r][w,
    choice]`` is the peak of window w. ``effects[r]`` are the choices of region r that no other choice equals or beats in
    seconds, error, bytes sent to host memory or disk, and in every window. ``is_held[r][w]`` is True if region r holds its
    retained bytes in window w: from the end of its forward to the end of its backward.
    """

    spans: tuple[tuple[int, int], ...]
    fixed_bytes: Ints
    effects: tuple[tuple[Effect, ...], ...]
    added_bytes: tuple[Ints, ...]
    is_held: tuple[tuple[bool, ...], ...]


def build_windows(index: StepIndex, sets: Sequence[ChoiceSet]) -> Windows:
    """Split a step into windows (stretches of time), and compute the bytes that each choice adds to each window.

    A choice says what a region keeps and recomputes.

    Args:
        index: the step.
        sets: the choices of every region, in the order of the trace.
    """
    frames = [frame_of(index, view) for view in index.views]
    unique = {id(choice_set): choice_set for choice_set in sets}
    stacks = {key: _Stack(choice_set.effects) for key, choice_set in unique.items()}
    spans = _split(index, frames, [stacks[id(choice_set)] for choice_set in sets])
    handover = next((w for w, (a, b) in enumerate(spans) if a <= index.handover < b), -1)
    waits = np.array([index.waiting if a < index.last_wait else 0 for a, _ in spans])
    fixed = np.array([int(index.fixed[a:b].max()) for a, b in spans], dtype=np.int64)
    effects, added = [], []
    for frame, choice_set in zip(frames, sets, strict=True):
        stack = stacks[id(choice_set)]
        keys = [stack.key(index, frame, a, b) for a, b in spans]
        left = stack.undominated(tuple(dict.fromkeys(keys)))
        effects.append(tuple(choice_set.effects[choice] for choice in left))
        rows = np.stack([stack.row(key)[left] for key in keys])
        waiting_bytes = np.ceil(np.outer(waits, rows[handover])).astype(np.int64) if index.waiting else 0
        added.append(rows + waiting_bytes)
    is_held = tuple(tuple(frame.exit <= a and b <= frame.stop for a, b in spans) for frame in frames)
    return Windows(tuple(spans), fixed, tuple(effects), tuple(added), is_held)


def _split(index: StepIndex, frames: Sequence[RegionFrame], stacks: Sequence[_Stack]) -> list[tuple[int, int]]:
    """Return the windows of a step as (first instant, end) pairs. A window is a stretch of the step.

    In a window all regions but at most one add constant bytes. If this is impossible, each instant is its own window.
    """
    cuts = {0, index.instants}
    if index.waiting:
        cuts |= {index.handover, index.handover + 1, index.last_wait}
    varying = []
    for frame, stack in zip(frames, stacks, strict=True):
        settled = frame.start + stack.settles
        cuts |= {frame.entry, frame.exit, frame.start, settled, frame.stop}
        if stack.has_exit_bytes:
            cuts.add(frame.exit - 1)
        cuts |= {at for relief in stack.reliefs for at in relief.span(frame)}
        if settled > frame.start:
            varying.append((frame.start, settled))
    # Between two cuts nothing begins or ends, so only curves of backward vary there.
    edges = sorted(cut for cut in cuts if 0 <= cut <= index.instants)
    spans = []
    for a, b in itertools.pairwise(edges):
        if sum(start < b and a < stop for start, stop in varying) > 1:
            spans += [(at, at + 1) for at in range(a, b)]
        else:
            spans.append((a, b))
    return spans


class _Stack:
    """Tables with the memory and time of all choices in one set, to find what each adds to a window.

    A window is a stretch of the step. The bytes that choices add to a window depend only on the window's ``key``. So regions
    that are alike share these bytes, and share which choices others beat.
    """

    def __init__(self, effects: Sequence[Effect]) -> None:
        self._copied = np.array([effect.copied_bytes for effect in effects], dtype=np.int64)
        self._exit = self._copied + np.array([effect.exit_bytes for effect in effects], dtype=np.int64)
        self._retained = np.array([effect.retained_bytes for effect in effects], dtype=np.int64)
        self._curves = np.stack([effect.backward for effect in effects])
        self._seconds = np.array([effect.seconds for effect in effects])
        self._shared = np.array([(effect.squared_error, effect.link_bytes) for effect in effects])
        self.reliefs: dict[Relief, Ints] = {}
        """Bytes that choices do not add during a part of the time between forward and backward. Maps each such part (a relief
        with size 0) to an array with the bytes for each choice.
        """
        for choice, effect in enumerate(effects):
            for relief in effect.relief:
                stretch = relief._replace(size=0)
                if stretch not in self.reliefs:
                    self.reliefs[stretch] = np.zeros_like(self._copied)
                self.reliefs[stretch][choice] += relief.size
        self.has_exit_bytes = any(effect.exit_bytes for effect in effects)
        changes = np.flatnonzero((np.diff(self._curves, axis=1) != 0).any(axis=0))
        self.settles = int(changes[-1]) + 1 if len(changes) else 0
        """For all choices: how many instants after backward begins their bytes stop to change."""
        self._rows: dict[Hashable, Ints] = {}
        self._undominated: dict[tuple[Hashable, ...], list[int]] = {}

    def key(self, index: StepIndex, frame: RegionFrame, a: int, b: int) -> Hashable:
        """Return a key that says where the window (stretch of the step) from instant a to b lies relative to a region.

        Equal keys mean that choices add equal bytes. The key contains the fixed bytes relative to their maximum, so that alike
        regions have equal keys.
        """
        if b <= frame.entry or a >= frame.stop:
            return ("nothing",)
        if b <= frame.exit:
            return ("exit",) if a >= frame.exit - 1 else ("copies",)
        if b > frame.start:
            fixed = index.fixed[a:b]
            return ("backward", a - frame.start, b - frame.start, (fixed - fixed.max()).tobytes())
        spans = {relief: relief.span(frame) for relief in self.reliefs}
        return ("between", *(relief for relief, (start, stop) in spans.items() if start <= a and b <= stop))

    def row(self, key: Hashable) -> Ints:
        """Return an array with the bytes that each choice adds to the windows (stretches of the step) that have this key."""
        if key not in self._rows:
            self._rows[key] = self._row(key)
        return self._rows[key]

    def _row(self, key: Any) -> Ints:
        if key[0] == "nothing":
            return np.zeros_like(self._copied)
        if key[0] == "copies":
            return self._copied
        if key[0] == "exit":
            return self._exit
        if key[0] == "between":
            return self._retained - sum((self.reliefs[relief] for relief in key[1:]), np.zeros_like(self._copied))
        _, first, last, below = key
        # A constant curve adds itself. A varying curve has to be added to the fixed bytes instant by instant.
        peaks: Ints = (self._curves[:, first:last] + np.frombuffer(below, dtype=np.int64)).max(axis=1)
        return peaks

    def undominated(self, keys: tuple[Hashable, ...]) -> list[int]:
        """Return the positions of the choices that no other choice dominates in these windows.

        ``keys`` give the windows (stretches of the step). A choice dominates another if it is at most as large in seconds,
        gradient error, bytes sent to host memory or disk, and bytes in each window.
        """
        if keys not in self._undominated:
            rows = np.stack([self.row(key) for key in keys])
            figures = np.ascontiguousarray(np.concatenate([rows.T, self._shared], axis=1))
            order = np.lexsort((figures.sum(axis=1), self._seconds))
            self._undominated[keys] = undominated(figures, order.tolist())
        return self._undominated[keys]


def undominated(figures: npt.NDArray[np.float64], order: Sequence[int]) -> list[int]:
    """Return the positions of those rows of a table that no row before them in ``order`` dominates.

    A row dominates another if it is at most as large in all columns. ``order`` lists the positions of all rows, the cheapest
    rows first; rows are considered in this order.
    """
    found: list[int] = []
    kept = np.empty_like(figures)
    for position in order:
        if not (kept[: len(found)] <= figures[position]).all(axis=1).any():
            kept[len(found)] = figures[position]
            found.append(position)
    return found
