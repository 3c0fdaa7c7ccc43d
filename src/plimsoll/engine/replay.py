"""Rebuild dropped tensors in backward: run the recipes (recorded ops) of a region (a module that the plan decides about). Each
op runs at most once per backward pass.

A `CallReplay` belongs to one call. It does not own saved tensors: cells, the objects that autograd holds instead of tensors,
own them. The replay holds the other things that recipes need: the parameter objects that forward used and their memory, the
generator states, and rebuilt values that later reads of the same backward need.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.autograd import profiler
from torch.autograd.function import BackwardCFunction

from plimsoll.engine.hooks import Cell, Readable
from plimsoll.engine.replay_code import Code, SegmentFunction, copy_storage
from plimsoll.engine.replay_plan import ReplayPlan
from plimsoll.engine.sampling import Sampler
from plimsoll.engine.split_backward import Halves
from plimsoll.engine.stored_forms import check_reader_of_sign
from plimsoll.engine.torch_flags import flags_for, in_force
from plimsoll.errors import ReplayMismatch
from plimsoll.planning.replay_schedule import BOUNDARY
from plimsoll.tracing.local_tensors import local_of, version_of
from plimsoll.tracing.torch_internals import (
    below_autograd,
    count_function_modes,
    current_autograd_node,
    current_graph_task,
    is_autocast_on,
    is_profiled,
    without_torch_function,
)


class Examiner(Protocol):
    """Protocol of an object that compares each rebuilt tensor of one call with the original. Some calls are inspected in this
    way, to find wrong gradients.
    """

    def examine(self, replay: CallReplay, cell: Cell, value: torch.Tensor) -> torch.Tensor:
        """Check a rebuilt tensor, and return the tensor for backward: this one, or forward's if they differ."""
        ...


class Recipes:
    """The compiled recipes (ops that rebuild dropped tensors) for calls of one region with one signature (shapes, dtypes and
    other state). Code is generated for each order that backward has used to read the tensors.

    A slot is one saved tensor, numbered in the order of saving. ``halves`` holds tensors between the halves of a split
    backward, or is ``None`` if backward is not split. ``like`` are the recipes of calls with other numbers, whose backward
    reads in the same order.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        sampler: Sampler,
        halves: Halves | None,
        distrusted: set[str],
        like: Recipes | None = None,
    ) -> None:
        self.plan = plan
        self.sampler = sampler
        self.halves = halves
        self.signs = plan.signs
        self.is_learning: bool = like is None or like.is_learning
        self.code: Code = plan.compile(None if like is None or like.is_learning else like.code.order)
        self._distrusted = distrusted
        self.given_away: set[int] = set() if like is None else set(like.given_away)
        """The numbers of saved tensors (in the order of saving) that custom autograd functions read. Such a function gets a
        copy (see `CallReplay._given`).
        """
        self._boundary = self.code
        self._watched: tuple[list[int], Mapping[int, weakref.ref[Cell]]] = [], {}
        """The saved tensors (numbered in the order of saving) that the last watched backward has read, and a weak reference to
        each cell that it could read, by the same number.
        """
        self._solo: dict[int, SegmentFunction] = {}
        self._sources = tuple((source.place, source.is_copied) for _, source in plan.parameters)

    def bind(self, sources: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the parameters and buffers that recomputation of this call will read. Some of them are copies.

        They are collected during forward because the model may get other parameters under the same names before backward.
        Autograd must be off.
        """
        bound = []
        for place, is_copied in self._sources:
            found = sources[place]
            assert found is not None, "a call that lacks a parameter makes another stream of torch calls"
            # Copy in every call: a copy kept until the version changes would miss writes through ``.data``.
            bound.append(copy_storage(local_of(found)) if is_copied else found)
        return bound

    def distrust(self) -> None:
        """Note that a rebuilt tensor differs from forward's tensor. The region keeps everything from its next call on."""
        self._distrusted.add(self.plan.name)

    def use_order(self, order: tuple[int, ...]) -> None:
        """Generate code for ``order``: backward has just read the saved tensors in this order. Later calls use this code.

        A tensor that backward has read twice is there twice, so that the second read does not run its recipe again.
        """
        self.is_learning = False
        expected = self.code.order
        read = set(order)
        if order != expected and read <= set(expected):
            self._boundary = self.code = self.plan.compile(order)
            if len(read) < len(set(expected)):
                self.sampler.expect(order)

    def learn_from(self, seen: list[int], waiting: Mapping[int, weakref.ref[Cell]]) -> None:
        """Begin to watch a new call's backward, to learn the order of its reads. The saved tensors are numbered in the order of
        saving (slots). Each read adds a number to the list ``seen``. ``waiting`` maps each number to its cell, the object that
        autograd holds.

        The previous backward may have ended without reading all dropped slots, because some were saved for a detached part.
        Then later calls expect its order, and the slots that it did not read are not rebuilt in advance.
        """
        before, cells = self._watched
        if before and all(reference() is None for reference in cells.values()):
            self.use_order(tuple(before))
        self._watched = seen, waiting

    def boundary_code(self) -> Code:
        """Return the code for a backward that needs this region's outputs before it reads the region's saved tensors.

        This happens if the next region has dropped its input, which is an output of this region.
        """
        if self._boundary is self.code:
            self._boundary = self.plan.compile((BOUNDARY, *self.code.order))
        return self._boundary

    def alone(self, slot: int) -> SegmentFunction:
        """Return a function that rebuilds one saved tensor from stored tensors only, without tensors that were rebuilt earlier
        in this backward.
        """
        if slot not in self._solo:
            self._solo[slot] = self.plan.compile((slot,)).segments[0]
        return self._solo[slot]

    def fail(self, slot: int) -> NoReturn:
        """Report that a rebuilt tensor differs from forward's tensor. From now on, the region does not use recomputation.

        Raises:
            ReplayMismatch: always. The message says which op or which codec is the likely cause.
        """
        self.distrust()
        graph, packed, region = self.plan.graph, self.plan.choice.packed, self.plan.name
        value = graph.values[graph.slots[slot].value]
        again = (
            "run the step again: the optimizer has not stepped, and from now on the region keeps all its activations"
        )
        if value.id in packed:
            raise ReplayMismatch(
                f"{value.name!r} of region {region!r} was changed by {packed[value.id]!r}.",
                why="the codec or the link returned other bytes than it received in forward",
                next=again,
            )
        leaves = next(leaves for leaves, slots in self.plan.leaf_groups if slot in slots)
        forms = [f", or {packed[v]!r} changed {graph.values[v].name!r}" for v in packed if v in leaves]
        raise ReplayMismatch(
            f"Recomputing {value.name!r} of region {region!r} gave another tensor than forward.",
            why=f"op {graph.ops[value.producer].name!r} or an earlier op got other constants or data than when the region "
            "was recorded" + "".join(forms),
            next=again,
        )


class CallReplay:
    """Rebuilds, in backward, the tensors that one call of a region has dropped.

    ``waiting`` maps the number of each dropped tensor (in the order of saving) to a weak reference to its cell, the object that
    autograd holds. If autograd has freed the cell, its tensor need not be rebuilt.
    """

    __slots__ = (
        "_bound",
        "_code",
        "_early",
        "_env",
        "_examiner",
        "_is_special",
        "_position",
        "_seen",
        "_states",
        "_storages",
        "_task",
        "_versions",
        "_waiting",
        "recipes",
    )

    def __init__(
        self,
        recipes: Recipes,
        bound: Sequence[torch.Tensor],
        storages: Mapping[int, torch.UntypedStorage],
        states: Mapping[tuple[int, int], torch.Generator],
        waiting: Mapping[int, weakref.ref[Cell]],
        examiner: Examiner | None,
    ) -> None:
        self.recipes = recipes
        self._bound = bound
        self._storages = storages
        self._versions = [version_of(parameter) for parameter in bound]
        self._states = states
        self._waiting = waiting
        self._examiner = examiner
        self._seen: list[int] | None = [] if recipes.is_learning else None
        if self._seen is not None:
            recipes.learn_from(self._seen, waiting)
        self._code = recipes.code
        self._task = -2  # no graph task has this number: the first read begins a backward
        self._position = 0
        self._is_special = False
        """Whether backward runs under a profiler, under function modes, or under other torch flags than forward did."""

    def restore(self, cell: Cell) -> torch.Tensor:
        """Return the rebuilt tensor for a cell, the object that autograd holds instead of the tensor. For a DTensor, return the
        local shard.

        If a sample of the tensor was taken in forward, compare it with the rebuilt tensor.
        """
        recipes, index = self.recipes, cell.index
        if cell.tensor is not None:
            return self._given(index, cell.read())
        if recipes.signs:
            check_reader_of_sign(recipes.signs, index)
        halves = recipes.halves
        if halves is not None:
            held = halves.take(cell)
            if held is not None:
                return held
        value: torch.Tensor = self.run(index, cell.leaves)
        if self._examiner is not None:
            value = self._examiner.examine(self, cell, value)
        elif cell.sample is not None:
            recipes.sampler.check(index, cell.sample, value, recipes.fail)
        if halves is not None:
            halves.hold(cell, value)
        if self._seen is not None:
            self._observe(index)
        elif not recipes.given_away:  # the path of almost every read
            return value
        return self._given(index, value)

    def _given(self, slot: int, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor to hand to autograd.

        It is a copy if a backward written in Python reads it: that code may reuse the memory while ops that rebuild other
        tensors still need the value.
        """
        given_away = self.recipes.given_away
        if self._seen is not None and isinstance(current_autograd_node(), BackwardCFunction):
            given_away.add(slot)
        return copy_storage(value) if slot in given_away else value

    def run(self, slot: int, leaves: tuple[Readable, ...]) -> Any:
        """Run the ops that are needed to rebuild a dropped tensor and that have not run yet in this backward, and return the
        tensor. ``slot`` is its number in the order of saving, and ``leaves`` are the objects that the ops read.
        """
        code = self._code
        task = current_graph_task()
        if task != self._task or task == -1:  # -1: read outside of any backward, so assume nothing
            self._start(task)
        position = self._position
        if position < len(code.order) and code.order[position] == slot:
            self._position = position + 1
            return self._run(code.segments[position], leaves, self._env)
        if slot in self._early:
            return self._early.pop(slot)
        return self._out_of_order(slot, leaves)

    def use_boundary(self) -> None:
        """Note that backward will read this region's outputs before its saved tensors, because a later region has dropped its
        input, which is such an output.
        """
        self._code = self.recipes.boundary_code()

    def rebuild(self, slot: int) -> torch.Tensor | None:
        """Rebuild a saved tensor (``slot`` is its number) from stored tensors only, without what this backward has already
        rebuilt. Return ``None`` if autograd has freed the tensor's cell.
        """
        leaves = self.leaves_of(slot)
        if leaves is None:
            return None
        value: torch.Tensor = self._run(self.recipes.alone(slot), leaves, {})
        return value

    def leaves_of(self, slot: int) -> tuple[Readable, ...] | None:
        """Return the objects that the recipe of a dropped tensor (the ops that rebuild it) reads. Return ``None`` if autograd
        has freed the tensor's cell. For a recipe that only draws random numbers, the result is empty.
        """
        reference = self._waiting.get(slot)
        cell = None if reference is None else reference()
        return None if cell is None else cell.leaves

    def _start(self, task: int) -> None:
        """Prepare for a new backward pass (graph task): forget what an earlier pass has rebuilt."""
        self._task = task
        self._position = 0
        plan = self.recipes.plan
        self._is_special = is_profiled() or count_function_modes() > 0 or flags_for(plan.device_type) != plan.flags
        self._env: dict[int, torch.Tensor] = {}
        """Rebuilt values of this backward that are still needed for other saved tensors, by the value's id in the recorded
        graph.
        """
        self._early: dict[int, Any] = {}
        """Tensors that were rebuilt before autograd read them, by their number in the order of saving. This happens if backward
        reads in another order than expected.
        """
        if self._seen is not None and self._has_seen_all(self._seen):
            self._seen = None
        elif self._seen is not None:
            self._seen.clear()

    def _observe(self, slot: int) -> None:
        assert self._seen is not None
        self._seen.append(slot)
        # A custom function that accesses ``ctx.saved_tensors`` twice reads each of its tensors twice. Go on until this backward
        # ends: second reads may follow the first read of the last tensor.
        if self._has_seen_all(self._seen):
            self.recipes.use_order(tuple(self._seen))

    def _has_seen_all(self, seen: list[int]) -> bool:
        """Return True if the reads ``seen`` include each dropped tensor (a number in the order of saving) at least once."""
        return len(seen) >= len(self._waiting) and len(set(seen)) == len(self._waiting)

    def _out_of_order(self, slot: int, leaves: tuple[Readable, ...]) -> Any:
        """Return a rebuilt tensor that backward reads in another order than expected.

        Either run the code for all tensors up to this one in the expected order, or rebuild this tensor alone.
        """
        code = self._code
        if self._position == 0 and slot != BOUNDARY and code.order[:1] == (BOUNDARY,):
            self._code = self.recipes.code  # the later region did not need this region's outputs after all
            return self.run(slot, leaves)
        place = code.places.get(slot, -1)
        if place >= self._position:
            # Later segments read what earlier ones leave in ``_env``, so the segments between must run too, if their cells are
            # alive.
            between = [self._waiting.get(code.order[position]) for position in range(self._position, place)]
            cells = [None if reference is None else reference() for reference in between]
            if None not in cells:
                for position, cell in zip(range(self._position, place), cells, strict=True):
                    assert cell is not None
                    value = self._run(code.segments[position], cell.leaves, self._env)
                    if code.places[cell.index] == position:  # else it was read before, and may not be read again
                        self._early[cell.index] = value
                self._position = place + 1
                return self._run(code.segments[place], leaves, self._env)
            if self._seen is not None:
                # Freed cells will not be read again, neither in later calls: continue with recipes for the remaining slots.
                rest = [read for read in code.order[self._position :] if self.leaves_of(read) is not None]
                self._code, self._env, self._position = self.recipes.plan.compile(tuple(rest)), {}, 0
                return self.run(slot, leaves)
        return self._run(self.recipes.alone(slot), leaves, {})

    def _run(self, segment: SegmentFunction, leaves: tuple[Readable, ...], env: dict[int, torch.Tensor]) -> Any:
        """Run recorded ops as they ran in forward: below autograd, without autocast, and under forward's torch flags.

        An active profiler shows these ops under the name of their region.
        """
        with below_autograd():
            if not (self._is_special or torch.is_grad_enabled() or is_autocast_on()):
                return segment(env, leaves, self._bound, self._states, self._versions, self._storages)
            plan = self.recipes.plan
            with contextlib.ExitStack() as stack:
                stack.enter_context(in_force(plan.flags, plan.device_type))
                if count_function_modes():  # the backward of an unmanaged model calls nothing that function modes see
                    stack.enter_context(without_torch_function())
                if is_profiled():
                    stack.enter_context(profiler.record_function(f"plimsoll.recompute: {plan.name}"))
                if torch.is_grad_enabled():  # backward with create_graph=True: the ops were verified without grad mode
                    stack.enter_context(torch.no_grad())
                if torch.is_autocast_enabled(plan.device_type):
                    stack.enter_context(torch.autocast(plan.device_type, enabled=False))
                return segment(env, leaves, self._bound, self._states, self._versions, self._storages)
