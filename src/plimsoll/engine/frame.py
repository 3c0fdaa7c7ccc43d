"""One call of a managed region: open cells while it runs, then the replay of what was dropped.

The frame owns no saved tensor once the region has returned: cells do. It holds what a replay needs besides: the objects
that forward used as parameters, the generator states, and the rebuilt values that later slots of the same backward read.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import profiler

from plimsoll.engine.cells import Cell, Readable
from plimsoll.engine.stored_forms import check_reader_of_sign
from plimsoll.planning.replay_schedule import BOUNDARY
from plimsoll.tracing.local_tensors import unwrapped, version_of

if TYPE_CHECKING:
    from plimsoll.engine.compile import SegmentFunction
    from plimsoll.engine.inspection import Inspection
    from plimsoll.engine.program import Code, Program


class Frame:
    """The saved tensors of one call, in the order of saving; of DTensors the local shards."""

    __slots__ = (
        "_bound",
        "_code",
        "_early",
        "_position",
        "_seen",
        "_task",
        "_versions",
        "_waiting",
        "cells",
        "env",
        "inspection",
        "program",
        "sharded",
        "states",
        "tensors",
    )

    def __init__(self, program: Program | None) -> None:
        self.program = program
        self.cells: list[Cell] = []
        self.tensors: list[torch.Tensor] = []
        self.sharded = 0
        """How many of them are shards."""
        self.states: dict[tuple[int, int], torch.Tensor] = {}
        self.env: dict[int, torch.Tensor] = {}
        self.inspection: Inspection | None = None
        self._bound: tuple[torch.Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._code: Code | None = None
        self._seen: list[int] | None = None
        self._waiting: dict[int, weakref.ref[Cell]] = {}
        self._early: dict[int, Any] = {}
        self._task = -2
        self._position = 0

    def pack(self, tensor: torch.Tensor) -> Cell:
        """The pack hook: hold the tensor until the region returns."""
        cells = self.cells
        if type(tensor) is torch.Tensor or type(tensor) is nn.Parameter:
            cell = Cell(self, len(cells), tensor._version)
        else:
            version = version_of(tensor)
            tensor, shell = unwrapped(tensor)
            cell = Cell(self, len(cells), version, shell)
            self.sharded += shell is not None
        cells.append(cell)
        self.tensors.append(tensor)
        return cell

    def pack_random(self, tensor: torch.Tensor) -> Cell:
        """The pack hook of a region that will repeat random ops: also take the generator's state where one starts."""
        assert self.program is not None
        index = len(self.cells)
        for position, generator in self.program.state_points.get(index, ()):
            self.states[position, index] = generator.get_state()
        return self.pack(tensor)

    def lies_like(self, layouts: Mapping[int, Any]) -> bool:
        """Whether the same slots are DTensors, each with the same mesh, placements and global shape."""
        if self.sharded != len(layouts):
            return False
        shells = ((self.cells[index].shell, layout) for index, layout in layouts.items())
        return all(shell is not None and shell.layout == layout for shell, layout in shells)

    @staticmethod
    def unpack(cell: Cell) -> torch.Tensor:
        """The unpack hook: the kept tensor, or the one that its recipe makes."""
        value = Frame.restore(cell)
        return value if cell.shell is None else cell.show(value)

    @staticmethod
    def restore(cell: Cell) -> torch.Tensor:
        """The saved tensor; of a DTensor the local shard."""
        if cell.tensor is not None:
            return cell.read()
        frame = cell.frame
        assert frame is not None
        if frame.program is None or cell.index < len(frame.tensors):
            return frame.tensors[cell.index]
        if frame.program.signs:
            check_reader_of_sign(frame.program.signs, cell.index)
        halves = frame.program.halves
        if halves is not None:
            held = halves.take(cell)
            if held is not None:
                return held
        value: torch.Tensor = frame.replay(cell.index, cell.leaves)
        if frame._seen is not None:
            frame._observe(cell.index)
        if frame.inspection is not None:
            value = frame.inspection.examine(cell, value)
        elif cell.sample is not None:
            frame.program.check_sample(cell.index, cell.sample, value)
        if halves is not None:
            halves.hold(cell, value)
        return value

    def keep_all(self) -> None:
        """Every cell keeps its tensor, as if the region were not managed."""
        for cell, tensor in zip(self.cells, self.tensors, strict=True):
            cell.keep(tensor)
        self.close()

    def close(self) -> None:
        """The region has returned and every cell is kept or dropped: let go of the tensors."""
        self.cells = []
        self.tensors = []

    def bind(self, parameters: tuple[torch.Tensor, ...], waiting: dict[int, weakref.ref[Cell]]) -> None:
        """What forward used as parameters and buffers, and the dropped cells."""
        program = self.program
        assert program is not None
        self._bound = parameters
        self._versions = tuple([version_of(parameter) for parameter in parameters])
        self._waiting = waiting
        self._code = program.code
        self._seen = [] if program.is_learning else None

    def use_boundary(self) -> None:
        """A later region will ask for the outputs, before this one's slots are read."""
        assert self.program is not None
        self._code = self.program.boundary_code()

    def replay(self, slot: int, leaves: tuple[Readable, ...]) -> Any:
        """Run what the slot needs and has not run yet in this backward."""
        program, code = self.program, self._code
        assert program is not None
        assert code is not None
        task = torch._C._current_graph_task_id()
        if task != self._task or task == -1:
            self._start(task)
        position = self._position
        if position < len(code.order) and code.order[position] == slot:
            self._position = position + 1
            return self._run(code.segments[position], leaves, self.env)
        if slot in self._early:
            return self._early.pop(slot)
        return self._out_of_order(slot, leaves)

    def rebuild(self, slot: int) -> torch.Tensor | None:
        """The slot made once more from what is held, whatever this backward has made; ``None`` if its cell is gone."""
        leaves = self.leaves_of(slot)
        if leaves is None:
            return None
        assert self.program is not None
        value: torch.Tensor = self._run(self.program.alone(slot), leaves, {})
        return value

    def leaves_of(self, slot: int) -> tuple[Readable, ...] | None:
        """What a dropped slot's recipe starts from (nothing, for random numbers); ``None`` if its cell is gone."""
        reference = self._waiting.get(slot)
        cell = None if reference is None else reference()
        return None if cell is None else cell.leaves

    def _start(self, task: int) -> None:
        """A new backward pass: nothing is rebuilt yet."""
        self._task = task
        self._position = 0
        self.env.clear()
        self._early.clear()
        if self._seen is not None:
            self._seen.clear()

    def _observe(self, slot: int) -> None:
        assert self.program is not None
        assert self._seen is not None
        self._seen.append(slot)
        if len(self._seen) == len(self._waiting):
            self.program.learn(tuple(self._seen))
            self._seen = None

    def _out_of_order(self, slot: int, leaves: tuple[Readable, ...]) -> Any:
        """Backward reads in another order than expected: run ahead to the slot, or rebuild it on its own."""
        program, code = self.program, self._code
        assert program is not None
        assert code is not None
        if self._position == 0 and slot != BOUNDARY and code.order[:1] == (BOUNDARY,):
            self._code = program.code  # the later region turned out not to need this one's outputs
            return self.replay(slot, leaves)
        place = code.places.get(slot, -1)
        if place >= self._position:
            between = [self._waiting.get(code.order[position]) for position in range(self._position, place)]
            cells = [None if reference is None else reference() for reference in between]
            if None not in cells:
                for position, cell in zip(range(self._position, place), cells, strict=True):
                    assert cell is not None
                    self._early[cell.index] = self._run(code.segments[position], cell.leaves, self.env)
                self._position = place + 1
                return self._run(code.segments[place], leaves, self.env)
        return self._run(program.alone(slot), leaves, {})

    def _run(self, segment: SegmentFunction, leaves: tuple[Readable, ...], env: dict[int, torch.Tensor]) -> Any:
        """Run a recipe; a profiler that is on sees it under its region's name."""
        if not profiler._is_profiler_enabled:
            return self._run_below(segment, leaves, env)
        assert self.program is not None
        with profiler.record_function(f"plimsoll.recompute: {self.program.name}"):
            return self._run_below(segment, leaves, env)

    def _run_below(self, segment: SegmentFunction, leaves: tuple[Readable, ...], env: dict[int, torch.Tensor]) -> Any:
        """Run below autograd and outside of autocast, as the ops were recorded."""
        assert self.program is not None
        device_type = self.program.device_type
        with torch._C._AutoDispatchBelowAutograd():
            if torch.is_grad_enabled():  # a backward that makes a graph: the ops were verified without
                with torch.no_grad():
                    return self._run_below(segment, leaves, env)
            if not torch.is_autocast_enabled(device_type):
                return segment(env, leaves, self._bound, self.states, self._versions)
            with torch.autocast(device_type, enabled=False):
                return segment(env, leaves, self._bound, self.states, self._versions)


class Link:
    """The input of a region whose boundary was dropped: the region before makes it again."""

    __slots__ = ("_frame", "_leaves", "_position")

    def __init__(self, frame: Frame, leaves: tuple[Readable, ...], position: int) -> None:
        self._frame = frame
        self._leaves = leaves
        self._position = position
        frame.use_boundary()

    def read(self) -> torch.Tensor:
        tensor = self._frame.replay(BOUNDARY, self._leaves)[self._position]
        assert isinstance(tensor, torch.Tensor)
        return tensor
