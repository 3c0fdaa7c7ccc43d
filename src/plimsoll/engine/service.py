"""Decides how calls of one region (a module that the plan decides about) with one signature (shapes, dtypes, modes of the
inputs) are handled: dropped tensors are rebuilt by recorded ops, or everything is kept.

A program holds the recipes: the recorded ops that rebuild dropped tensors in backward. There is one program for each *stream*,
which is the sequence of torch calls that the region makes. Without a program, a call keeps everything that it saves.

A call with a new stream keeps everything. The next calls are *watched*: they are recorded again, which is correct and within
the budget whatever they do, and their programs are added. When all streams have been known for a while, Plimsoll stops
recording calls. A surprise is a call with a stream that was not known. After each further surprise in the model, regions are
watched for four times as many calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.plan import RegionPlan
from plimsoll.engine.call_stream import Alarm, Junction
from plimsoll.engine.learning import FIRST_RECORDINGS, Learning
from plimsoll.engine.open_numbers import numbers_in
from plimsoll.engine.program import OpenProgram, Program
from plimsoll.engine.replay_rng import StatePoints
from plimsoll.engine.torch_calls import Stream

MAX_STREAMS = 16
"""How many programs are held at most for one signature (shapes, dtypes and other state of a call). A program rebuilds the
dropped tensors of calls that make one sequence of torch calls. The one that was learned longest ago is discarded first.
"""
FIRST_WATCH = 16
"""How many calls are recorded again after the first surprise, which is a call with an unknown sequence of torch calls.

Each further surprise multiplies the number by 4.
"""
LEAST_WATCH = 3
"""How many calls of a region that reads values of tensors are recorded. Three recordings show which numbers come from these
values.
"""
MAX_IDLE_CHANGES = 3
"""How many changes in a row of scalar attributes (such as counters) lead to a new recording although the torch calls stay the
same.

After this many, such changes no longer lead to a recording.
"""


class Service:
    """Decides how calls of one region with one signature (shapes, dtypes and other state) are handled under a plan, and holds
    the programs that rebuild their dropped tensors.

    ``engine`` says how: with recipes (recorded ops run again), or everything kept. If something is kept because it cannot be
    rebuilt, ``reason`` says why. ``learning`` counts the recordings of the region under all its signatures.
    """

    def __init__(self, plan: RegionPlan, alarm: Alarm, learning: Learning) -> None:
        self.plan = plan
        self.learning = learning
        self.engine = Engine.RECIPE
        self.reason = ""
        self.last_call = 0
        """When this service handled its last call, as a number on the region's clock. The region discards the service with the
        oldest call first.
        """
        self._misfits = 0
        self.known = Junction()
        self.points: StatePoints = {}
        """The points in forward where calls record the states of random generators, because backward will repeat a random op.
        """
        self.needs_inputs = False
        self.held: tuple[int, ...] = ()
        """The indices of the parameters and buffers whose memory a call must hold until backward, because recomputation reads
        it.
        """
        self._programs: dict[Stream, Program] = {}
        self._open: dict[Stream, OpenProgram] = {}
        """Programs for calls that differ only in numbers (see `OpenProgram`), by their sequence of torch calls."""
        self._watch = 1
        self._alarm = alarm
        self._heard = alarm.count
        self._is_self_compiling = False
        self._scalars: tuple[Any, ...] | None = None
        self._idle_changes = 0
        self.reads_values = False
        """Whether a recorded call has read values of tensors, so that any call may make other torch calls."""
        self.may_rerun = True
        """Whether backward could run the forward of the last unknown call again. A call is unknown if its torch calls, or the
        tensors that it saved, match no recording.
        """
        self.obstacle = ""
        """The reason why backward may not run the forward of any call of this region again, or ""."""
        self.may_learn = True
        """Whether a forward that backward runs again can be recorded at that time."""
        self.reruns = 0
        """The number of calls with an unknown sequence of torch calls whose forward backward runs again."""

    @property
    def program(self) -> Program | None:
        """The known program that drops the most bytes (each program drops and rebuilds tensors). ``None`` if no program is
        known.
        """
        return max(self._all(), key=lambda program: program.plan.dropped_bytes, default=None)

    @property
    def streams(self) -> int:
        """The number of known sequences of torch calls. Sequences that differ only in numbers that change from call to call
        count as one.
        """
        return len(self._programs) + len(self._open)

    def _all(self) -> list[Program]:
        return [*self._programs.values(), *(each.latest for each in self._open.values())]

    def is_watched(self, scalars: Callable[[], tuple[Any, ...]]) -> bool:
        """Return whether the call of the region that begins now shall be recorded.

        This is so if a recent call of the model made an unknown sequence of torch calls, or if a scalar attribute of the
        region's modules has changed. ``scalars`` returns these attributes.
        """
        if self._heard != self._alarm.count:
            self._heard = self._alarm.count
            # Once backward has run an unknown call again, it will do so with the next one.
            if not (self.may_wait and self.reruns):
                self._watch = self.watch_length
        return self._watch > 0 or (self._idle_changes < MAX_IDLE_CHANGES and scalars() != self._scalars)

    def find(self, stream: Stream) -> Program | None:
        """Return the program (it drops and rebuilds a call's tensors) for this sequence of torch calls (``stream``), or
        ``None`` if the sequence is not known.
        """
        known = self._programs.get(stream)
        if known is not None:
            return known
        for pattern, program in self._open.items():
            given = numbers_in(stream, pattern)
            if given is not None:
                return program.with_numbers(given)
        return None

    def learn(self, stream: Stream, program: Program) -> None:
        """Store the program that was made from a recorded call. Later calls that make the same torch calls use it."""
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
        """Add a program for all calls whose torch calls match ``pattern``, a sequence with placeholders for changing numbers.
        Stop recording calls.
        """
        self._programs = {
            stream: known for stream, known in self._programs.items() if numbers_in(stream, pattern) is None
        }
        self._open[pattern] = program
        self._watch, self._heard, self._idle_changes = 0, self._alarm.count, MAX_IDLE_CHANGES
        self._grow_tree()

    @property
    def is_open(self) -> bool:
        """Whether any program (it drops and rebuilds tensors) handles calls that differ in numbers (see `OpenProgram`)."""
        return bool(self._open)

    def close(self) -> None:
        """Discard the programs (they drop and rebuild tensors) for calls that differ in numbers (see `OpenProgram`)."""
        self._open.clear()
        self._grow_tree()

    def knows(self, pattern: Stream) -> bool:
        """Return whether `open` has added a program for this pattern, a sequence of torch calls with placeholders for changing
        numbers.
        """
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
        """Take over the number of calls that are still to be recorded from ``other``, the service of the same region that was
        called last.
        """
        self._watch, self._heard = other._watch, other._heard
        self._scalars, self._idle_changes = other._scalars, other._idle_changes

    def watched(self, scalars: tuple[Any, ...], *, is_new: bool) -> None:
        """Note that a call has been recorded as intended, so that one call less is left to record.

        ``is_new`` says whether its sequence of torch calls was unknown; then more calls are recorded.
        """
        has_changed = self._scalars is not None and scalars != self._scalars
        self._scalars = scalars
        self._idle_changes = 0 if is_new else self._idle_changes + has_changed
        self._watch = max(self._watch - 1, self.watch_length if is_new else 0)

    def read_values(self, stream: Stream) -> None:
        """Note that a recorded call has read values of tensors. Record the next call too, if it may make other torch calls.

        A size or an index that comes from data is different in nearly every call, until a program accepts any number in its
        place. Other values have an effect only if Python code passes them to torch, which three recordings show.
        """
        self.reads_values = True
        self.learning.recordings += 1
        is_open = any(numbers_in(stream, pattern) is not None for pattern in self._open)
        if not is_open and self.learning.recordings < min(LEAST_WATCH * len(self._programs), FIRST_RECORDINGS):
            self._watch = max(self._watch, 1)

    @property
    def may_wait(self) -> bool:
        """Whether a call need not be recorded although its torch calls may be unknown, because backward can run it again."""
        return self.reads_values and self.may_rerun and not self.obstacle

    def resume(self, other: Service) -> None:
        """Take over from the service of the last call of the region what is known about reading values of tensors.

        Regions whose inputs have other sizes in each call need a service for each of them.
        """
        if other.reads_values:
            self.reads_values, self.obstacle = True, other.obstacle
            self.may_rerun, self.may_learn = other.may_rerun, other.may_learn

    def misfit(self) -> None:
        """Note a call that made known torch calls but saved other tensors than the recorded call, because its shapes depend on
        data.

        Backward runs the forward of such a call again, and records it. If that is not possible, the next calls are recorded:
        after each further such call, four times as many.
        """
        self._misfits += 1
        self.reads_values = True
        if not self.may_rerun:
            self._watch = FIRST_WATCH * 4 ** (self._misfits - 1)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the region's forward under the guard, the mode that compares torch calls with recorded ones, and return its
        output.

        If the region calls operators that take functions, run them eagerly: such operators compile themselves when they are
        called, and Dynamo cannot trace through the guard.
        """
        if not self._is_self_compiling:
            return forward(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):
            return forward(*args, **kwargs)

    def give_up(self, reason: str) -> None:
        """Stop recomputing for these calls, and keep everything from now on. ``reason`` is shown to the user."""
        self.engine, self.reason = Engine.KEEP, reason
        self._programs.clear()
        self._open.clear()
        self.known = Junction()

    @property
    def watch_length(self) -> int:
        """How many calls are recorded after a call with unknown torch calls. It grows with the number of such calls so far, and
        is 0 before the first.
        """
        return int(FIRST_WATCH * 4 ** (self._alarm.count - 1)) if self._alarm.count else 0
