"""Effects of all regions in, one linear constraint per window of the step out: who adds how much, when.

A window is a stretch of instants in which every region but at most one adds a constant. Then the peak of the window is a
sum over regions: constants of the others, and for the active one the joint maximum of fixed bytes and its own curve. Where
two regions are active at once (parallel branches), every instant is a window of its own, so the constraint stays exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.planning.choices import ChoiceSet
from plimsoll.planning.effects import Effect, Frame, frame_of
from plimsoll.planning.step import Ints, StepIndex


@dataclass(frozen=True, slots=True)
class Windows:
    """``fixed_bytes[w]`` plus the sum over regions r of ``added_bytes[r][w, choice]`` is the peak of window w.

    ``is_between[r][w]`` says that window w lies between forward and backward of region r.
    """

    spans: tuple[tuple[int, int], ...]
    fixed_bytes: Ints
    added_bytes: tuple[Ints, ...]
    is_between: tuple[tuple[bool, ...], ...]


def build_windows(index: StepIndex, sets: Sequence[ChoiceSet]) -> Windows:
    """Split a step into windows.

    Args:
        index: the step.
        sets: the choices of every region, in the order of the trace.
    """
    frames = [frame_of(index, view) for view in index.views]
    spans = _split(index, frames, sets)
    fixed = np.array([int(index.fixed[a:b].max()) for a, b in spans], dtype=np.int64)
    stacks = {id(choice_set): np.stack([effect.backward for effect in choice_set.effects]) for choice_set in sets}
    added = tuple(
        np.stack([_added(index, frame, stacks[id(choice_set)], choice_set.effects, a, b) for a, b in spans])
        for frame, choice_set in zip(frames, sets, strict=True)
    )
    is_between = tuple(tuple(frame.exit <= a and b <= frame.start for a, b in spans) for frame in frames)
    return Windows(spans=tuple(spans), fixed_bytes=fixed, added_bytes=added, is_between=is_between)


def _split(index: StepIndex, frames: Sequence[Frame], sets: Sequence[ChoiceSet]) -> list[tuple[int, int]]:
    cuts = {0, index.instants}
    varying = []
    for frame, choice_set in zip(frames, sets, strict=True):
        settled = frame.start + _settles(choice_set.effects)
        cuts |= {frame.entry, frame.exit, frame.start, settled, frame.stop}
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


def _added(index: StepIndex, frame: Frame, curves: Ints, effects: Sequence[Effect], a: int, b: int) -> Ints:
    """What each choice adds to the fixed peak of one window; ``curves`` has one row per choice."""
    if b <= frame.entry or a >= frame.stop:
        return np.zeros(len(effects), dtype=np.int64)
    if b <= frame.exit:
        return np.array([effect.copied_bytes for effect in effects], dtype=np.int64)
    if b <= frame.start:
        return np.array([_retained(effect, frame, a, b) for effect in effects], dtype=np.int64)
    fixed = index.fixed[a:b]
    # A constant adds itself; only a varying curve meets the fixed bytes instant by instant.
    peaks: Ints = (curves[:, a - frame.start : b - frame.start] + fixed).max(axis=1) - fixed.max()
    return peaks


def _retained(effect: Effect, frame: Frame, a: int, b: int) -> int:
    relief = sum(size for start, stop, size in effect.relief if frame.exit + start <= a and b <= frame.exit + stop)
    return effect.retained_bytes - relief
