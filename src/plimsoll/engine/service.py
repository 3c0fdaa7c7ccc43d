"""How calls of one signature are served: by recipes, one program per stream of torch calls, or by keeping everything.

A call with a new stream keeps everything. The next calls are *watched*: they are recorded again, which is correct and within
the budget whatever they do, and their programs are added. When all streams have been known for a while, the region becomes
steady again. Each further surprise in the model makes that while four times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.plan import RegionPlan
from plimsoll.engine.call_stream import Alarm, Junction
from plimsoll.engine.open_numbers import numbers_in
from plimsoll.engine.program import OpenProgram, Program
from plimsoll.engine.replay_rng import StatePoints
from plimsoll.engine.torch_calls import Stream

MAX_STREAMS = 16
"""At most this many programs of one signature are held; the least recently learned is discarded first."""
FIRST_WATCH = 16
"""Number of calls to watch after the first surprise; each further surprise multiplies it by 4."""
MAX_IDLE_CHANGES = 3
"""After this many changes of scalar attributes (counters) without a change of the stream, stop watching for such changes."""


class Service:
    """Serves the calls of one signature under one region plan. ``reason`` says why, if recipes do not serve all of them."""

    def __init__(self, plan: RegionPlan, alarm: Alarm) -> None:
        self.plan = plan
        self.engine = Engine.RECIPE
        self.reason = ""
        self.last_call = 0
        """The number of the region's call that it served last."""
        self._misfits = 0
        self.known = Junction()
        self.points: StatePoints = {}
        """Where steady calls record generator states, for any of the programs."""
        self.needs_inputs = False
        self.held: tuple[int, ...] = ()
        """Places of the parameters and buffers whose memory calls must hold for recipes."""
        self._programs: dict[Stream, Program] = {}
        self._open: dict[Stream, OpenProgram] = {}
        """Programs by streams with open numbers (see `OpenProgram`)."""
        self._watch = 1
        self._alarm = alarm
        self._heard = alarm.count
        self._is_self_compiling = False
        self._scalars: tuple[Any, ...] | None = None
        self._idle_changes = 0

    @property
    def program(self) -> Program | None:
        """The program that drops most; ``None`` if recipes serve nothing."""
        return max(self._all(), key=lambda program: program.plan.dropped_bytes, default=None)

    def _all(self) -> list[Program]:
        return [*self._programs.values(), *(each.latest for each in self._open.values())]

    def has_failed(self) -> bool:
        """Whether some recipe has made something else than forward did."""
        return any(program.recipes.has_failed for program in self._all())

    def is_watched(self, scalars: Callable[[], tuple[Any, ...]]) -> bool:
        """Whether to record the call that begins: a recent call of the model was a surprise, or a scalar attribute of the
        region's modules has changed.
        """
        if self._heard != self._alarm.count:
            self._heard = self._alarm.count
            self._watch = self.watch_length
        return self._watch > 0 or (self._idle_changes < MAX_IDLE_CHANGES and scalars() != self._scalars)

    def find(self, stream: Stream) -> Program | None:
        """The program for a recorded stream, or ``None``."""
        known = self._programs.get(stream)
        if known is not None:
            return known
        for pattern, program in self._open.items():
            given = numbers_in(stream, pattern)
            if given is not None:
                return program.with_numbers(given)
        return None

    def learn(self, stream: Stream, program: Program) -> None:
        """Store the program of a recorded call under its stream."""
        if self.find(stream) is program:
            if self._programs.pop(stream, None) is not None:
                self._programs[stream] = program
            return
        if len(self._programs) >= MAX_STREAMS:
            del self._programs[next(iter(self._programs))]
        self._open = {pattern: each for pattern, each in self._open.items() if numbers_in(stream, pattern) is None}
        self._programs[stream] = program
        self._grow_tree()

    def open(self, pattern: Stream, program: OpenProgram) -> None:
        """Add a program for all calls that differ from the pattern only in its open numbers, and stop watching."""
        self._programs = {
            stream: known for stream, known in self._programs.items() if numbers_in(stream, pattern) is None
        }
        self._open[pattern] = program
        self._watch, self._heard, self._idle_changes = 0, self._alarm.count, MAX_IDLE_CHANGES
        self._grow_tree()

    @property
    def is_open(self) -> bool:
        """Whether any of its programs has open numbers."""
        return bool(self._open)

    def close(self) -> None:
        """Discard the programs with open numbers."""
        self._open.clear()
        self._grow_tree()

    def knows(self, pattern: Stream) -> bool:
        """Whether it has a program for this stream with open numbers."""
        return pattern in self._open

    def _grow_tree(self) -> None:
        self.known = Junction()
        points: dict[int, dict[int, Any]] = {}
        known: dict[Stream, Program | OpenProgram] = {**self._programs, **self._open}
        for its_stream, each in known.items():
            self.known.add(its_stream, each)
            for point, generators in each.latest.plan.state_points.items():
                points.setdefault(point, {}).update(generators)
        self.points = {point: tuple(found.items()) for point, found in points.items()}
        programs = self._all()
        self._is_self_compiling |= any(each.is_self_compiling for each in programs)
        self.held = tuple({place for each in programs for place in each.plan.held_places})
        self.needs_inputs = any(each.plan.needs_inputs for each in programs)

    def follow(self, other: Service) -> None:
        """Copy the watch state of the region's most recently called service, which has another signature."""
        self._watch, self._heard = other._watch, other._heard
        self._scalars, self._idle_changes = other._scalars, other._idle_changes

    def watched(self, scalars: tuple[Any, ...], *, is_new: bool) -> None:
        """Note that a watched call has ended. ``is_new``: its stream was not known."""
        has_changed = self._scalars is not None and scalars != self._scalars
        self._scalars = scalars
        self._idle_changes = 0 if is_new else self._idle_changes + has_changed
        self._watch = max(self._watch - 1, self.watch_length if is_new else 0)

    def misfit(self) -> None:
        """Note that a call of a known stream saved other tensors than the recorded call: its shapes depend on data."""
        self._misfits += 1
        self._watch = FIRST_WATCH * 4 ** (self._misfits - 1)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the region's forward under the guard. If it calls operators that take functions, force eager: they compile
        themselves when they are called, and Dynamo cannot trace through the guard.
        """
        if not self._is_self_compiling:
            return forward(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):
            return forward(*args, **kwargs)

    def give_up(self, reason: str) -> None:
        """Stop serving calls with recipes."""
        self.engine, self.reason = Engine.KEEP, reason
        self._programs.clear()
        self._open.clear()
        self.known = Junction()

    @property
    def watch_length(self) -> int:
        """How many calls to watch after a surprise."""
        return int(FIRST_WATCH * 4 ** (self._alarm.count - 1)) if self._alarm.count else 0
