"""Effects of all regions in, one linear constraint per window of the step out: who adds how much, when.

A window is a stretch of instants in which every region but at most one adds a constant. Then the peak of the window is a
sum over regions: constants of the others, and for the active one the joint maximum of fixed bytes and its own curve. Where
two regions are active at once (parallel branches), every instant is a window of its own, so the constraint stays exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.planning.choices import ChoiceSet
from plimsoll.planning.effects import Effect, Frame, frame_of
from plimsoll.planning.step import Ints, StepIndex


@dataclass(frozen=True, slots=True)
class Windows:
    """``fixed_bytes[w]`` plus the sum over regions r of ``added_bytes[r][w, choice]`` is the peak of window w.

    ``effects[r]`` are the choices of region r that no other one equals or beats in seconds, error, bytes on the link and in
    every window.
    ``is_held[r][w]`` says that what region r retains is held in window w: from its forward to the end of its backward.
    """

    spans: tuple[tuple[int, int], ...]
    fixed_bytes: Ints
    effects: tuple[tuple[Effect, ...], ...]
    added_bytes: tuple[Ints, ...]
    is_held: tuple[tuple[bool, ...], ...]


def build_windows(index: StepIndex, sets: Sequence[ChoiceSet]) -> Windows:
    """Split a step into windows.

    Args:
        index: the step.
        sets: the choices of every region, in the order of the trace.
    """
    frames = [frame_of(index, view) for view in index.views]
    spans = _split(index, frames, sets)
    fixed = np.array([int(index.fixed[a:b].max()) for a, b in spans], dtype=np.int64)
    stacks = {id(choice_set): _Stack(choice_set.effects) for choice_set in sets}
    effects, added = [], []
    for frame, choice_set in zip(frames, sets, strict=True):
        rows = _Rows(index, frame, stacks[id(choice_set)], spans)
        left = _undominated(choice_set.effects, np.stack(list(rows.distinct.values())))
        effects.append(tuple(choice_set.effects[choice] for choice in left))
        added.append(np.stack([rows.distinct[key][left] for key in rows.keys]))
    is_held = tuple(tuple(frame.exit <= a and b <= frame.stop for a, b in spans) for frame in frames)
    return Windows(tuple(spans), fixed, tuple(effects), tuple(added), is_held)


def _undominated(effects: Sequence[Effect], rows: Ints) -> list[int]:
    """Choices (columns of ``rows``) that no other one equals or beats in seconds, error, link bytes and in every row."""
    more = np.array([(effect.squared_error, effect.link_bytes) for effect in effects])
    figures = np.ascontiguousarray(np.concatenate([rows.T, more], axis=1))
    order = sorted(range(len(effects)), key=lambda c: (effects[c].seconds, float(figures[c].sum())))
    left: list[int] = []
    for choice in order:
        if not (figures[left] <= figures[choice]).all(axis=1).any():
            left.append(choice)
    return left


def _split(index: StepIndex, frames: Sequence[Frame], sets: Sequence[ChoiceSet]) -> list[tuple[int, int]]:
    cuts = {0, index.instants}
    varying = []
    for frame, choice_set in zip(frames, sets, strict=True):
        settled = frame.start + _settles(choice_set.effects)
        cuts |= {frame.entry, frame.exit, frame.start, settled, frame.stop}
        if any(effect.exit_bytes for effect in choice_set.effects):
            cuts.add(frame.exit - 1)
        cuts |= {frame.exit + at for effect in choice_set.effects for a, b, _ in effect.relief for at in (a, b)}
        if settled > frame.start:
            varying.append((frame.start, settled))
    edges = sorted(cut for cut in cuts if 0 <= cut <= index.instants)
    spans = []
    for a, b in itertools.pairwise(edges):
        if sum(start < b and a < stop for start, stop in varying) > 1:
            spans += [(at, at + 1) for at in range(a, b)]
        else:
            spans.append((a, b))
    return spans


def _settles(effects: Sequence[Effect]) -> int:
    """From this position on no choice's curve changes any more."""
    varies = np.any([np.diff(effect.backward) != 0 for effect in effects], axis=0)
    changes = np.flatnonzero(varies)
    return int(changes[-1]) + 1 if len(changes) else 0


class _Stack:
    """The effects of one choice set as arrays with one entry per choice."""

    def __init__(self, effects: Sequence[Effect]) -> None:
        self.copied = np.array([effect.copied_bytes for effect in effects], dtype=np.int64)
        self.exit = self.copied + np.array([effect.exit_bytes for effect in effects], dtype=np.int64)
        self.retained = np.array([effect.retained_bytes for effect in effects], dtype=np.int64)
        self.curves = np.stack([effect.backward for effect in effects])
        self.reliefs = [
            (choice, start, stop, size) for choice, effect in enumerate(effects) for start, stop, size in effect.relief
        ]


class _Rows:
    """What each choice of one region adds to every window: ``keys`` per window, ``distinct`` the row of each key."""

    def __init__(self, index: StepIndex, frame: Frame, stack: _Stack, spans: Sequence[tuple[int, int]]) -> None:
        self._frame, self._stack = frame, stack
        self.keys: list[Hashable] = []
        self.distinct: dict[Hashable, Ints] = {}
        for a, b in spans:
            key = self._key(a, b)
            self.keys.append(key)
            if key not in self.distinct:
                self.distinct[key] = self._row(index, key)

    def _key(self, a: int, b: int) -> Hashable:
        frame = self._frame
        if b <= frame.entry or a >= frame.stop:
            return ("nothing",)
        if b <= frame.exit:
            return ("exit",) if a >= frame.exit - 1 else ("copies",)
        if b > frame.start:
            return ("backward", a, b)
        first, last = a - frame.exit, b - frame.exit
        return ("between", *(x for x in self._stack.reliefs if x[1] <= first and last <= x[2]))

    def _row(self, index: StepIndex, key: Any) -> Ints:
        stack = self._stack
        if key[0] == "nothing":
            return np.zeros_like(stack.copied)
        if key[0] == "copies":
            return stack.copied
        if key[0] == "exit":
            return stack.exit
        if key[0] == "between":
            row = stack.retained.copy()
            for choice, _, _, size in key[1:]:
                row[choice] -= size
            return row
        _, a, b = key
        fixed = index.fixed[a:b]
        # A constant adds itself; only a varying curve meets the fixed bytes instant by instant.
        curves = stack.curves[:, a - self._frame.start : b - self._frame.start]
        peaks: Ints = (curves + fixed).max(axis=1) - fixed.max()
        return peaks
