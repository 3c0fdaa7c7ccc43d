"""Programs: after the forward of a region (a module that the plan decides about), a program drops or packs what the call saved,
so that backward rebuilds it with recorded ops.

A program is used for calls that make the same torch calls as a recorded call. To pack a value is to encode it with a codec or
to send it over a link (to host memory or disk).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plimsoll.engine.call_order import CallOrder
from plimsoll.engine.call_stream import Alarm
from plimsoll.engine.guards import Guard
from plimsoll.engine.hooks import OpenCall, Readable
from plimsoll.engine.inspection import Inspector
from plimsoll.engine.larger_calls import LargerCalls
from plimsoll.engine.learning import Pace
from plimsoll.engine.offload.transfers import TransfersUnderWay
from plimsoll.engine.open_numbers import Given
from plimsoll.engine.region_inputs import HeldInputs, LinkedInput, LinkTable
from plimsoll.engine.replay import CallReplay, Examiner, Recipes
from plimsoll.engine.replay_plan import ReplayPlan
from plimsoll.engine.sampling import Sampler, SentinelPolicy
from plimsoll.engine.sensing import Sensor
from plimsoll.engine.split_backward import Halves
from plimsoll.engine.stored_forms import Packer, RegionPacker
from plimsoll.engine.torch_calls import Number
from plimsoll.engine.unmet_names import UnmetNames
from plimsoll.tracing.local_tensors import settled, version_of
from plimsoll.tracing.recorder.storages import Geometry
from plimsoll.tracing.torch_internals import below_autograd


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """State that all regions of one managed model share.

    ``links`` are the connections between regions that rebuild each other's inputs. ``inputs`` are the inputs that regions hold.
    ``packer`` encodes values or sends them over the link, ``transfers`` are the transfers under way, ``policy`` says which
    calls are sampled, and ``inspector`` chooses the calls whose rebuilt tensors are all compared. ``generators`` are the random
    generators of the CPU and of the model's devices. ``alarm`` counts the steps with calls that made unknown torch calls.
    ``sensor`` measures in one step what lossy codecs would do, or is ``None``. ``larger`` reports calls that are larger than
    all before, and ``order`` notices when regions run in a new order.

    ``splits_backward`` says whether backward first computes the gradients of inputs and later the gradients of weights, from
    one graph (see ``split_backward``).
    """

    links: LinkTable
    packer: Packer
    transfers: TransfersUnderWay
    policy: SentinelPolicy
    inspector: Inspector
    generators: tuple[torch.Generator, ...]
    inputs: HeldInputs = field(default_factory=HeldInputs)
    alarm: Alarm = field(default_factory=Alarm)
    pace: Pace = field(default_factory=Pace)
    """Says which regions may be recorded in this step, if their calls could run again in backward instead."""
    sensor: Sensor | None = None
    repeats_collectives: bool = False
    """Whether the plan allows recomputation to repeat collectives, which communicate with other ranks."""
    agree_on_service: Callable[[str, tuple[int, ...], str], None] | None = None
    """A function that compares with other ranks how they handle a region whose recomputation repeats collectives. It raises if
    the ranks differ.

    Its arguments are the region's name, the ranks, and a description of the service.
    """
    splits_backward: bool = False
    unmet: UnmetNames = field(default_factory=UnmetNames)
    """Collects the names of values in the plan that no call of their region makes."""
    distrusted: set[str] = field(default_factory=set)
    """The names of the regions that have rebuilt a wrong tensor. They keep everything, under each signature (shapes, dtypes and
    other state) and each plan.
    """
    larger: LargerCalls = field(default_factory=LargerCalls)
    order: CallOrder = field(default_factory=CallOrder)
    recording: threading.Lock = field(default_factory=threading.Lock)
    """A lock that a thread holds while it records a region. Meanwhile, calls in other threads keep everything."""


class Program:
    """Drops, packs or keeps what calls of one region saved, for calls with one signature (shapes, dtypes and other state).

    It holds all that is needed to check such calls and to rebuild their tensors. ``node_counts`` is the range for the number of
    autograd nodes that such a call may make. ``shares`` maps the name of a packed value to the payload size that the plan
    assumed, as a share of the value's bytes. ``is_self_compiling`` says whether the region calls operators that take functions.
    ``like`` is the program of calls that differ from these only in numbers.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        node_counts: range,
        shares: Mapping[str, float],
        shared: Shared,
        *,
        is_self_compiling: bool = False,
        like: Program | None = None,
    ) -> None:
        self.plan = plan
        self.guard = Guard(plan, node_counts)
        self.packer = RegionPacker(plan, shared.packer, shares)
        self.sampler: Sampler = Sampler(plan, shared.policy, None if like is None else like.sampler)
        self.recipes: Recipes = Recipes(
            plan,
            self.sampler,
            Halves() if shared.splits_backward else None,
            shared.distrusted,
            None if like is None else like.recipes,
        )
        self.is_self_compiling = is_self_compiling
        self._shared = shared
        self._calls: int = 0 if like is None else like._calls

    @property
    def latest(self) -> Program:
        """This program itself (it drops and rebuilds a call's tensors). `OpenProgram` has a property of the same name, which is
        the last of its several programs.
        """
        return self

    def with_numbers(self, given: Given) -> Program | None:
        """Return this program, because its numbers are fixed. In `OpenProgram`, the method of the same name makes a program for
        given numbers.
        """
        return self

    def drop(
        self,
        call: OpenCall,
        inputs: Sequence[torch.Tensor],
        versions: Sequence[int],
        output: Any,
        link: LinkedInput | None,
        examiner: Examiner | None = None,
    ) -> bool:
        """Drop, pack or keep each tensor that a call saved, as the plan says. The call was already checked against the recorded
        call.

        ``inputs`` are the tensors that the region was called with (used only if the plan ``needs_inputs``), and ``versions``
        are their version counters at that time. ``link`` rebuilds an input that is not held, by recomputing the region that ran
        before. An ``examiner`` compares all rebuilt tensors of this call with forward's.

        Returns:
            True if the tensors were handled. False (and nothing was done) if an input that recipes need was modified since the
            region was entered.

        Raises:
            OffloadFailed: the link is full. Nothing was done.
        """
        plan = self.plan
        copies = self._hold_inputs(inputs, versions)
        if copies is None:
            return False
        self._calls += 1
        with below_autograd():
            samples = {} if examiner is not None else self.sampler.take(call.tensors, self._calls)
            bound = self.recipes.bind(call.sources)
        packed = self.packer.pack(call, self._calls)
        cells, tensors = call.cells, call.tensors
        for index in plan.kept_slots:
            cells[index].keep(tensors[index])
        readable: dict[int, Readable] = {value: cells[slot] for value, slot in plan.needed_cells}
        for value, slot in plan.outside_cells:
            tensor = tensors[slot]
            if tensor.requires_grad and tensor.is_leaf:
                readable[value] = cells[slot].alias()
        readable.update(copies)
        readable.update(packed)
        if plan.choice.link is not None:
            assert link is not None
            readable[plan.choice.link] = link
        references = call.references
        waiting = {slot: references[slot] for slot in plan.dropped_slots}
        replay = CallReplay(self.recipes, bound, call.storages, call.states, waiting, examiner)
        for leaves, slots in plan.leaf_groups:
            sources = tuple(readable[value] for value in leaves)
            for slot in slots:
                cells[slot].drop(sources, replay)
        if self.recipes.is_learning or self.recipes.given_away:
            for slot in plan.leaf_slots:
                cells[slot].restorer = replay
        for slot, sample in samples.items():
            cells[slot].sample = sample
        call.close()
        if packed:
            self._shared.transfers.send(packed.values())
        self._shared.links.offer(replay, cells, packed, link, output)
        return True

    def _hold_inputs(self, inputs: Sequence[torch.Tensor], versions: Sequence[int]) -> dict[int, Readable] | None:
        """Hold or copy the inputs that recomputation needs and that autograd did not save.

        Return a mapping from the input's id in the recorded graph to the held tensor, or ``None`` if one of the inputs was
        modified since the region was entered.
        """
        copies: dict[int, Readable] = {}
        for value, position in self.plan.unsaved_inputs:
            if version_of(inputs[position]) != versions[position]:
                return None
            tensor = settled(inputs[position]).detach()
            if Geometry.of(tensor) != self.plan.geometry_of(value):
                return None
            copies[value] = self._shared.inputs.hold(tensor, is_steady=value in self.plan.steady)
        return copies


class OpenProgram:
    """Handles calls that differ only in numbers (constants that change from call to call). It makes a `Program` for the numbers
    of each call.

    ``numbers`` is a function that derives the numbers in the recipes from the numbers among a call's arguments. ``make`` makes
    a program for them. ``example`` has the numbers of a recorded call.
    """

    def __init__(
        self,
        numbers: Callable[[Given], tuple[Number, ...] | None],
        make: Callable[[tuple[Number, ...]], Program],
        example: Given,
    ) -> None:
        self._numbers, self._make = numbers, make
        latest = numbers(example)
        assert latest is not None, "the numbers of recorded calls follow"
        self._latest_numbers = latest
        self.latest = make(latest)
        """The program that was made last, for the numbers of the most recent call."""

    def with_numbers(self, given: Given) -> Program | None:
        """Return the program (it drops and rebuilds tensors) for a call that passes the numbers ``given`` to torch. Return
        ``None`` if recomputation needs a number that does not follow from them.
        """
        numbers = self._numbers(given)
        if numbers is None:
            return None
        if numbers != self._latest_numbers:
            self._latest_numbers, self.latest = numbers, self._make(numbers)
        return self.latest
