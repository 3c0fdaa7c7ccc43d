"""One managed module (region): its forward runs as before, and its saved tensors are treated as the plan says.

The first call of a signature is *recorded*, and already drops what the plan drops. Later calls are *steady*: they cost two
hooks and a guard, without a dispatch mode. If a steady call differs from all recorded calls, it keeps everything, and the next
calls are recorded again (see ``service``). Calls that cannot be recorded keep everything too (see ``fallback``).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Proxy
from torch.utils._pytree import tree_leaves

from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.plan import RegionPlan
from plimsoll.artifacts.receipt import RegionOutcome
from plimsoll.engine.any_size import Recordings
from plimsoll.engine.call_stream import StreamGuard, references
from plimsoll.engine.copies import ReplacedForward, calling_module
from plimsoll.engine.fallback import Fallback
from plimsoll.engine.guards import Entry, SignatureReader, is_somebody_elses_call
from plimsoll.engine.hooks import OpenCall, unpack
from plimsoll.engine.larger_calls import LargestCall
from plimsoll.engine.learning import Learning
from plimsoll.engine.modes import Modes
from plimsoll.engine.program import Program, Shared
from plimsoll.engine.record import RegionForward, record_again, record_call
from plimsoll.engine.rerun import Entrance, Rerun
from plimsoll.engine.service import Service
from plimsoll.tracing.local_tensors import version_of
from plimsoll.tracing.recorder.calling import call_tensors
from plimsoll.tracing.refusals import compiled_part, refuse_compiler
from plimsoll.tracing.torch_internals import sequence_number, without_torch_function

T = TypeVar("T")

MAX_SIGNATURES = 64
"""How many signatures (shapes, dtypes and other state of a call) of one region may have recipes (the ops that rebuild dropped
tensors). When there are more, the least recently used signature is discarded.
"""


class ManagedRegion(ReplacedForward):
    """The wrapper that replaces the ``forward`` of a region (a module that the plan decides about) while a plan is applied.

    ``plans`` has one plan for each call of the region in a step.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        plans: tuple[RegionPlan, ...],
        shared: Shared,
    ) -> None:
        super().__init__(module)
        self.name = name
        self.calls = 0
        self.services: dict[tuple[Any, ...], Service] = {}
        self._recordings = Recordings(MAX_SIGNATURES)
        self.learning = Learning()
        self._writes_buffers = False
        """Whether a call has written to buffers, so that second runs need copies from before forward."""
        self._clock = 0
        self._decisions: dict[object, RegionPlan] = {}
        self._shared = shared
        self.use(plans)
        device_type = next((p.device.type for p in module.parameters()), "cpu")
        self._subject = RegionForward(name, module, self._original, device_type)
        self._reader = SignatureReader(module, device_type)
        self._fallback = Fallback(name)
        self._largest = LargestCall(name)
        self.obstacle = compiled_part(module)
        """The name of the part of this module that torch.compile or TorchScript compiles, or "" if no part is compiled."""

    def _is_compiled(self) -> bool:
        """Return whether the region contains compiled code. If so, stop managing the region.

        The reason: saved-tensor hooks around compiled code would unpack all saved tensors at once.
        """
        self.obstacle = compiled_part(self.module)
        if self.obstacle:
            reason = f"{self.obstacle} is compiled"
            for service in self.services.values():
                service.give_up(reason)
            self._fallback.say_keeps(reason)
        return bool(self.obstacle)

    def use(self, plans: tuple[RegionPlan, ...]) -> None:
        """Use the decisions of these plans from the next call on.

        Recordings stay. Programs for decisions that were in use before stay too.
        """
        # If a later region may rebuild from this region's outputs, programs hold copies of more parameters.
        effects = [(plan.effect, self._shared.links.is_used) for plan in plans]
        self._decisions |= {
            effect: copy.copy(plan)  # a separate object: services are keyed by its id
            for effect, plan in zip(effects, plans, strict=True)
            if effect not in self._decisions
        }
        self._plans = tuple(map(self._decisions.__getitem__, effects))
        self._untouched = {id(plan) for plan in self._plans if plan.is_left_alone}

    def forget(self) -> None:
        """Discard all recordings of this region's calls, so that the next calls are recorded again, even if the region has
        rebuilt a wrong tensor before.
        """
        self._shared.distrusted.discard(self.name)
        self.services.clear()
        self._recordings = Recordings(MAX_SIGNATURES)
        self.learning = Learning()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            refuse_compiler(self.module)
            return self._original(*args, **kwargs)
        caller = calling_module(self)
        if caller is not None and caller is not self.module:
            self._leave(caller)  # a shallow copy of the module: it is not managed, because its weights may differ
            return caller.forward(*args, **kwargs)
        if not torch.is_grad_enabled() or self.obstacle or self._is_removed or is_somebody_elses_call():
            return self._original(*args, **kwargs)
        plan = self._plans[min(self.calls, len(self._plans) - 1)]
        self.calls += 1
        self._shared.order.called(self.name, self._shared.larger)
        try:
            return self._managed(plan, args, kwargs)
        except BaseException:
            self.calls -= 1  # the plan counts only calls that return: a model may catch the error and call again
            raise

    def _managed(self, plan: RegionPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region's forward under the plan, and return its output.

        When forward has returned, wait for the offloads that the previous region started.
        """
        if id(plan) in self._untouched and self._shared.sensor is None:
            self._largest.note((), call_tensors(args, kwargs), self._shared.larger)
            output = self._original(*args, **kwargs)
            self._shared.transfers.leave(output)
            return output
        entry = self._reader.read(args, kwargs)
        key = (id(plan), *entry.signature)
        service = self.services.get(key)
        if service is None:
            if self._is_fake(args, kwargs):
                return self._original(*args, **kwargs)
            service = self._admit(key, plan, entry)
        if service.engine is not Engine.RECIPE:
            return self._keeping(args, kwargs)
        if self.name in self._shared.distrusted:
            # Other regions may have the same fault, and their samples may not have caught it yet.
            self._shared.alarm.has_wrong_number |= any(each.is_open for each in self.services.values())
            self._recordings = Recordings(MAX_SIGNATURES)
            self._give_up(service, "a rebuilt tensor differs from the tensor of forward")
            return self._keeping(args, kwargs)
        if self._shared.alarm.has_wrong_number and service.is_open:
            service.close()
        self._clock += 1
        service.last_call = self._clock
        if not service.is_watched(self._reader.scalars) or (service.may_wait and not self._may_record()):
            return self._steady(service, entry, args, kwargs)
        if not self._shared.recording.acquire(blocking=False):
            return self._keeping(args, kwargs)
        try:
            return self._watched(service, entry, args, kwargs)
        finally:
            self._shared.recording.release()

    def _may_record(self) -> bool:
        """Return whether a call is recorded that could run again in backward instead."""
        return self.learning.pays() and self._shared.pace.take()

    def outcomes(self) -> tuple[RegionOutcome, ...]:
        """Return how the calls of this region have been handled: one outcome for each signature (shapes and dtypes) and each
        call of a step.

        An outcome names the engine that serves the call (recipes, or keep everything), and the bytes that were and could be
        dropped.
        """
        found = []
        for service in self.services.values():
            if not any(service.plan is plan for plan in self._plans):
                continue
            program = service.program
            plan = None if program is None else program.plan
            found.append(
                RegionOutcome(
                    name=self.name,
                    call=service.plan.call,
                    engine=service.engine,
                    reason=service.reason or ("" if program is None else _first_obstacle(program)),
                    activation_bytes=0 if plan is None else plan.activation_bytes,
                    droppable_bytes=0 if plan is None else plan.droppable_bytes,
                    dropped_bytes=0 if plan is None else plan.dropped_bytes,
                    streams=service.streams,
                    reruns=service.reruns,
                )
            )
        return tuple(found)

    def _is_fake(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        leaves = (*tree_leaves((args, kwargs)), *self.module.parameters())
        return any(isinstance(x, FakeTensor | Proxy) or (isinstance(x, torch.Tensor) and x.is_meta) for x in leaves)

    def _admit(self, key: tuple[Any, ...], plan: RegionPlan, entry: Entry) -> Service:
        """Make and return the `Service` for this signature under this plan. A service decides how calls with one signature
        (shapes, dtypes and other state) are handled: recomputed, or everything kept.

        It is called when the signature is new, was discarded, or has not been met under this plan. If earlier recordings show
        what such calls do, recipes serve the call at once.
        """
        modules, _, _, trained, *_ = entry.signature
        self._largest.note((modules, trained), entry.inputs, self._shared.larger)
        if len(self.services) >= MAX_SIGNATURES:
            del self.services[min(self.services, key=lambda other: self.services[other].last_call)]
        latest = max(self.services.values(), key=lambda other: other.last_call, default=None)
        service = self.services[key] = Service(plan, self._shared.alarm, self.learning)
        known = self._recordings.at(entry.signature)
        if known and latest is not None:
            is_linked = self._shared.links.has_made_first(entry.inputs)
            for recording in known:
                service.learn(recording.stream, recording.program(plan, self._shared, is_linked=is_linked))
            service.follow(latest)
            self._open_numbers(service, entry.signature, is_linked=is_linked)
        if latest is not None:
            service.resume(latest)
        return service

    def _watched(self, service: Service, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record a call of the region, and return its output.

        The call already drops what the plan drops, even if its torch calls differ from those of earlier calls.
        """
        shared = self._shared
        shared.alarm.recorded_calls += 1
        output, recorded = record_call(self._subject, service, entry, self._reader, args, kwargs, shared)
        program = recorded.program
        self._writes_buffers |= recorded.writes_buffers
        is_new = service.find(recorded.stream) is None
        if program is None:
            self._give_up(service, recorded.obstacle)
        else:
            service.learn(recorded.stream, program)
            service.watched(self._reader.scalars(), is_new=is_new)
            if recorded.is_misfit:
                self._misfit(service)
            # A recording with collectives is not reused for other signatures: all ranks must agree on it when it is recorded.
            if recorded.peers:
                service.obstacle = "it communicates with other ranks, which do not run again"
            elif recorded.recording is not None:
                if recorded.recording.is_opaque:
                    service.obstacle = (
                        "code runs in it that PyTorch does not call (TorchScript, an extension, an operator, a mode)"
                    )
                self._recordings.add(entry.signature, recorded.recording)
                self._open_numbers(service, entry.signature, is_linked=shared.links.has_made_first(entry.inputs))
            if recorded.reads_values or service.reads_values:
                service.read_values(recorded.stream)
        # Do not ask for agreement on a known stream again: a surprise in another region can make this rank alone record again.
        if is_new and recorded.peers and shared.repeats_collectives and shared.agree_on_service is not None:
            repeated = () if program is None else program.plan.collectives
            shared.agree_on_service(self.name, recorded.peers, f"{service.engine} {', '.join(repeated)}")
        return output

    def _open_numbers(self, service: Service, signature: tuple[Any, ...], *, is_linked: bool) -> None:
        """Let recipes serve calls that were not recorded, if recorded calls of this signature differ only in numbers that
        follow from the arguments.

        ``is_linked`` says whether the region that ran before this one can rebuild the first argument.
        """
        if self._shared.alarm.has_wrong_number:
            return  # such calls are recorded from now on
        for opened in self._recordings.opened(signature):
            if not service.knows(opened.stream):
                service.open(opened.stream, opened.program(service.plan, self._shared, is_linked=is_linked))

    def _keeping(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region so that everything that the call saves is kept, and return its output."""
        output = self._original(*args, **kwargs)
        self._shared.transfers.leave(output)
        return output

    def _give_up(self, service: Service, reason: str) -> None:
        """Stop recomputing in the calls of this service, and warn the user once.

        If the recipes contain collectives that other ranks wait for, raise instead.
        """
        program = service.program
        if program is not None and program.plan.collectives:
            raise self._fallback.refusal(reason)
        service.give_up(reason)
        if all(other is service or other.engine is not Engine.KEEP for other in self.services.values()):
            self._fallback.say_keeps(reason)

    def _steady(self, service: Service, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that looks like a recorded call (the same shapes and state), and return the output of the region.

        The saved tensors are held until forward has returned. Then the guards check that the call did the same as the recorded
        call, and what the plan drops is dropped.
        """
        may_rerun = service.reads_values and not service.obstacle
        entrance = None
        if may_rerun:
            entrance = Entrance(self._subject, entry, self._reader, args, kwargs, writes_buffers=self._writes_buffers)
        opened = _unseen(entry.modes, self._open, service, entry, args, kwargs, entrance)
        call, guard = opened.call, opened.guard
        pack = call.pack_random if service.points else call.pack
        before = sequence_number()
        try:
            with saved_tensors_hooks(pack, unpack), guard:
                output = service.run(self._original, args, kwargs)
        except BaseException:
            call.keep_all()
            raise
        _unseen(entry.modes, self._close, service, opened, output, sequence_number() - before)
        return output

    def _open(
        self,
        service: Service,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        entrance: Entrance | None,
    ) -> _Opened:
        """Prepare a call that looks like a recorded call, before its forward: create its `OpenCall` and its guard, and note the
        version counters of the inputs.
        """
        call = OpenCall(service.points, entry.sources, entry.memory(service.held))
        inputs = call_tensors(args, kwargs) if service.needs_inputs else []
        versions = [version_of(tensor) for tensor in inputs]
        guard = StreamGuard(service.known, references((*entry.sources, *entry.inputs)), call.references)
        return _Opened(call, inputs, versions, guard, entrance)

    def _close(self, service: Service, opened: _Opened, output: Any, nodes: int) -> None:
        """Finish a call that looked like a recorded call, after its forward: drop what the plan drops, or keep everything if
        the call differs from all recorded calls.

        ``nodes`` is the number of autograd nodes that the forward created.
        """
        shared, call, guard, inputs = self._shared, opened.call, opened.guard, opened.inputs
        try:
            call.end()
            shared.transfers.leave(output)
        except BaseException:
            call.keep_all()
            raise
        known = guard.program
        program: Program | None = None if known is None else known.with_numbers(guard.numbers)
        if program is None:
            obstacle = self._rerun(service, opened)
            if obstacle is not None:
                call.keep_all()
                self._surprise(service, guard, obstacle)
            return
        plan = program.plan
        link = shared.links.find(plan, inputs)
        fits = (plan.choice.link is None or link is not None) and program.guard.holds(call, nodes)
        if fits:
            examiner = shared.inspector.inspect(plan, call.tensors)
            fits = program.drop(call, inputs, opened.versions, output, link, examiner)
            self.learning.served += fits
        if not fits and self._rerun(service, opened) is not None:
            call.keep_all()
            if plan.collectives:
                raise self._fallback.refusal("this call saves other tensors than the recorded call")
            self._misfit(service)

    def _rerun(self, service: Service, opened: _Opened) -> str | None:
        """Drop everything that a call saved, so that backward runs its forward again. Return ``None`` if that was done.

        Otherwise return the reason. It is "" if the region does not read values of tensors: then a new stream means that Python
        state has changed, and a second run would start from the changed state.
        """
        entrance, program = opened.entrance, service.program
        if not service.reads_values or (program is not None and program.plan.collectives):
            return ""
        obstacle = service.obstacle
        if entrance is not None:
            obstacle = entrance.obstacle(opened.call)
            self._writes_buffers |= entrance.writes_new_buffers
        # The next call copies its buffers, so it may run again.
        service.may_rerun = not obstacle or (entrance is not None and entrance.writes_new_buffers)
        if entrance is None or obstacle:
            return obstacle
        record = None
        partly_unset = opened.guard.partly_unset
        # Under a recorder, ctc_loss saves other tensors than without, so a recipe would never fit.
        if not partly_unset and service.may_learn and self._may_record():
            is_linked = self._shared.links.has_made_first(entrance.entry.inputs)
            signature = entrance.entry.signature
            record = functools.partial(self._record_again, service=service, signature=signature, is_linked=is_linked)
        distrust = functools.partial(self._shared.distrusted.add, self.name)
        Rerun(entrance, distrust, record).drop(opened.call, partly_unset)
        service.reruns += 1
        return None

    def _record_again(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        service: Service,
        signature: tuple[Any, ...],
        is_linked: bool,
    ) -> list[torch.Tensor] | None:
        """Run forward a second time, in backward, and record it for later calls.

        Return the tensors that it saved, by slot, or ``None`` if another thread is recording.
        """
        shared = self._shared
        if not shared.recording.acquire(blocking=False):
            return None
        try:
            entry = self._reader.read(args, kwargs)
            saved, recording = record_again(self._subject, entry, self._reader, args, kwargs, shared)
            self.learning.recordings += 1
            if recording is None or entry.signature != signature:
                service.may_learn = False
                return saved
            self._recordings.add(signature, recording)
            service.learn(recording.stream, recording.program(service.plan, shared, is_linked=is_linked))
            self._open_numbers(service, signature, is_linked=is_linked)
            return saved
        finally:
            shared.recording.release()

    def _misfit(self, service: Service) -> None:
        """Handle a call of the region whose torch calls are known, but that saved other tensors than the recorded call.

        Its shapes depend on data. The next calls are watched (recorded again), unless the region turns out to be compiled.
        """
        if self._is_compiled():  # it may have been compiled after it was recorded
            return
        service.misfit()

    def _surprise(self, service: Service, guard: StreamGuard, obstacle: str) -> None:
        """Handle a call of the region whose torch calls differ from those of all recorded calls. The call kept everything, so
        its gradients are correct.

        The next calls of all regions are recorded again, and a warning is raised. If the recipes contain collectives, other
        ranks wait for them, so raise an error instead.
        """
        program = service.program
        if program is not None and program.plan.collectives:
            raise self._fallback.refusal("this call makes other torch calls than the recorded call")
        if self._is_compiled():  # it may have been compiled after it was recorded
            return
        self._shared.alarm.sound()
        self._fallback.say_surprise(guard, service.watch_length, obstacle)


class _Opened(NamedTuple):
    """Data of a steady call in progress: its saved tensors, its inputs with their versions at the start, its guard, and what a
    second run would start from.
    """

    call: OpenCall
    inputs: list[torch.Tensor]
    versions: list[int]
    guard: StreamGuard
    entrance: Entrance | None


def _unseen(modes: Modes | None, function: Callable[..., T], *args: Any) -> T:
    """Call one of our functions in such a way that the user's function modes do not see its torch calls. Return its result."""
    if modes is None:
        return function(*args)
    with without_torch_function():
        return function(*args)


def _first_obstacle(program: Program) -> str:
    refusal = first_refusal(program.packer.refused)
    return refusal or next((f"{name} is kept: {why}" for name, why in program.plan.choice.obstacles.items()), "")


def first_refusal(refused: Mapping[tuple[str, str], int]) -> str:
    """Return a sentence about the first value that a codec could not represent, or "" if all values could be represented.

    ``refused`` maps the value's name and the codec's name to the number of failures.
    """
    for (name, form), times in refused.items():
        return f"{name} is kept: the codec {form} could not represent its data ({times} times)"
    return ""
