"""Inputs of a region (a module that the plan decides about) that recomputation needs and that autograd has not saved. Such an
input is held, copied, or rebuilt by the region that ran before.

*Held*: autograd does not check such a tensor, and other code that holds it may write to it before backward. If forward has made
an input and does not write to it again, the input is held without a copy. After forward, it is copied if other code still holds
it. All other inputs are copied at once.

*Linked*: if a region's input is the output of the region before, the plan may hold neither the output nor the input. The next
region then starts its recipes from a `LinkedInput`, which makes the region before rebuild its outputs. (These links have
nothing to do with the links to host memory or disk in ``offload``.)

The input is recognised as that output by its storage (a weak reference proves that it is still alive), offset, sizes, strides,
dtype and version. The tensor object may change on the way (FSDP wraps it), but the storage does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from plimsoll.engine.hooks import Cell, Readable
from plimsoll.engine.replay import CallReplay
from plimsoll.engine.replay_code import copy_storage
from plimsoll.engine.replay_plan import ReplayPlan
from plimsoll.errors import SavedTensorModified
from plimsoll.planning.replay_schedule import BOUNDARY
from plimsoll.tracing.local_tensors import local_of, version_of
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.recorder.storages import Geometry, is_plain
from plimsoll.tracing.torch_internals import count_holders


class HeldInput:
    """Holds an input of a region until backward, so that recomputation can read it. It is the tensor itself or a copy."""

    __slots__ = ("__weakref__", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.take(tensor)

    def take(self, tensor: torch.Tensor) -> None:
        """Hold this tensor from now on instead of the earlier one, for example a copy instead of the original."""
        self.tensor, self._version = tensor, tensor._version

    @property
    def is_as_it_was(self) -> bool:
        """Whether the tensor is unchanged: nothing has written to it since this object began to hold it."""
        return self.tensor._version == self._version

    def read(self) -> torch.Tensor:
        if not self.is_as_it_was:
            raise SavedTensorModified(
                f"An in-place operation has changed a region's input of shape {tuple(self.tensor.shape)}, and backward needs "
                "the original.",
                why="the operation did not run in the step that was planned, so the input was not copied",
                next="run the step again: from now on such inputs are copied, and the plan does not count the copies; to stay "
                "within the budget, replace the in-place operation (x += y becomes x = x + y), or attach again with a batch "
                "that runs it",
            )
        return self.tensor


class HeldInputs:
    """The inputs that regions hold without a copy while forward runs.

    After forward has once written to such an input, all inputs are copied from then on.
    """

    def __init__(self) -> None:
        self._held: list[weakref.ref[HeldInput]] = []
        self._is_open = self._is_written_to = False

    def begin(self) -> None:
        """Start a forward of the model: from now on, inputs may be held without a copy."""
        self.settle()
        self._is_open = True

    def hold(self, tensor: torch.Tensor, *, is_steady: bool) -> HeldInput:
        """Hold an input that recomputation needs until backward, and return the `HeldInput`.

        The input is copied, unless ``is_steady`` (forward made it and does not write to it again) and forward is running. An
        input that was made under ``torch.inference_mode`` is always copied, because torch does not count writes to it.
        """
        if not (is_steady and self._is_open) or self._is_written_to or tensor.is_inference():
            return HeldInput(copy_storage(tensor))
        held = HeldInput(tensor)
        self._held.append(weakref.ref(held))
        return held

    def settle(self) -> None:
        """After forward, copy the held inputs that other code still holds, because that code may write to them. Regions that
        hold the same input share one copy.
        """
        shared: dict[int, list[HeldInput]] = {}
        for each in self._held:
            held = each()
            if held is None:
                continue
            if not held.is_as_it_was:
                self._is_written_to = True
            else:
                shared.setdefault(held.tensor.untyped_storage()._cdata, []).append(held)
        self._held, self._is_open = [], False
        # Counting adds holders of its own; a fresh tensor, which has one holder, shows how many.
        nobodys = count_holders(torch.empty(0)) - 1 if shared else 0
        for holders in shared.values():
            first = holders[0].tensor
            if count_holders(first) - len(holders) > nobodys:
                copied = copy_storage(first)
                for held in holders:
                    held.take(Geometry.of(held.tensor).view_on(copied))


class LinkedInput:
    """Takes the place of an input that is not held. Reading it rebuilds the output of the region that ran before, because that
    output is this input.
    """

    __slots__ = ("_leaves", "_position", "_replay")

    def __init__(self, replay: CallReplay, leaves: tuple[Readable, ...], position: int) -> None:
        self._replay = replay
        self._leaves = leaves
        self._position = position
        replay.use_boundary()

    def read(self) -> torch.Tensor:
        tensor = self._replay.run(BOUNDARY, self._leaves)[self._position]
        assert isinstance(tensor, torch.Tensor)
        return tensor


@dataclass(frozen=True, slots=True)
class _Offer:
    reference: StorageWeakRef
    geometry: Geometry
    version: int
    replay: CallReplay
    leaves: tuple[Readable, ...]
    position: int


class LinkTable:
    """A table of the outputs of the region that returned last. The next region looks up whether one of its inputs is such an
    output and need not be held.

    Regions in ``silent`` do not offer outputs: their parameters may be freed before backward (a sharded model frees what it
    gathered).
    """

    def __init__(self) -> None:
        self.is_used = False
        self._silent: frozenset[str] = frozenset()
        self._offers: list[_Offer] = []

    def serve(self, silent: Collection[str], *, is_used: bool) -> None:
        """Begin to work for a plan. ``is_used`` says whether the plan drops inputs of regions that are outputs of the region
        before.
        """
        self._silent, self.is_used = frozenset(silent), is_used

    def offer(
        self,
        replay: CallReplay,
        cells: Sequence[Cell],
        packed: Mapping[int, Readable],
        link: LinkedInput | None,
        output: Any,
    ) -> None:
        """Store the outputs of a region that has returned, so that the next region can have them rebuilt instead of holding
        them.
        """
        if not self.is_used:
            return
        plan = replay.recipes.plan
        leaves = plan.boundary_leaves(cells, packed, link)
        self._offers = []
        if leaves is None or plan.name in self._silent:
            return
        for position, tensor in enumerate(output_tensors(output)):
            if plan.recording.output_refs[position] is not None:  # else no recipe can rebuild it
                local = local_of(tensor)
                reference = StorageWeakRef(local.untyped_storage())
                offer = _Offer(reference, Geometry.of(local), version_of(tensor), replay, leaves, position)
                self._offers.append(offer)

    def find(self, plan: ReplayPlan, inputs: Sequence[torch.Tensor]) -> LinkedInput | None:
        """Return the object that rebuilds the first input of a region, which this plan does not hold.

        Return ``None`` if the plan holds all inputs, or if the region before did not make this input.
        """
        return None if plan.choice.link is None else self.link_to(inputs[plan.link_position])

    def has_made_first(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether the first of these arguments is an output of the region that ran before, so that recomputing that
        region rebuilds it.
        """
        return bool(self._offers and inputs) and is_plain(local_of(inputs[0])) and self.link_to(inputs[0]) is not None

    def link_to(self, tensor: torch.Tensor) -> LinkedInput | None:
        """Return an object that rebuilds this tensor by recomputing the region that returned last. Return ``None`` if the
        tensor is not an output of that region.
        """
        local = local_of(tensor)
        storage = local.untyped_storage()._cdata
        for offer in self._offers:
            if (
                not offer.reference.expired()
                and offer.reference.cdata == storage
                and offer.geometry == Geometry.of(local)
                and offer.version == version_of(tensor)
            ):
                return LinkedInput(offer.replay, offer.leaves, offer.position)
        return None

    def clear(self) -> None:
        """Forget the outputs of the region that returned last, because a new step begins."""
        self._offers = []
