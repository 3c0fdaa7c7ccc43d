"""One managed module: its forward, with the saved tensors under a plan.

A call whose signature is new is *recorded* (and already drops what the plan drops); later calls are *steady*: no dispatch
mode, two hooks, a guard. What cannot be recorded is left to the ``fallback``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Proxy
from torch.utils._pytree import tree_leaves

from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.plan import RegionPlan
from plimsoll.artifacts.receipt import RegionOutcome
from plimsoll.engine.copies import CopiedForward, calling_module
from plimsoll.engine.fallback import Fallback
from plimsoll.engine.guards import SignatureReader, is_somebody_elses_call, is_transparent
from plimsoll.engine.hooks import OpenCall, unpack
from plimsoll.engine.program import Program, Shared
from plimsoll.engine.record import record_call
from plimsoll.tracing.local_tensors import version_of
from plimsoll.tracing.recorder.calling import call_tensors
from plimsoll.tracing.refusals import compiled_part, refuse_compiler
from plimsoll.tracing.torch_internals import sequence_number

MAX_SIGNATURES = 8
"""More than this many signatures of one region are not recorded: the region is re-run as a whole."""

MAX_MISFITS = 2
"""A recorded signature whose calls do not fit it more often than this is re-run as a whole."""


@dataclass(slots=True)
class Service:
    """How calls of one signature are served, and why not by recipes where they are not."""

    engine: Engine
    program: Program | None = None
    reason: str = ""
    misfits: int = 0


class ManagedRegion:
    """Stands in for a module's ``forward``. ``install`` and ``remove`` put it in and take it out again."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        plans: tuple[RegionPlan, ...],
        shared: Shared,
    ) -> None:
        self.name = name
        self.module = module
        self.calls = 0
        self.services: dict[tuple[Any, ...], Service] = {}
        self._plans = plans
        self._shared = shared
        self._original: Callable[..., Any] = module.forward
        self.__wrapped__ = self._original  # so that inspect.signature shows the module's own
        self._had_own = "forward" in module.__dict__
        self._device_type = next((p.device.type for p in module.parameters()), "cpu")
        self._reader = SignatureReader(module, self._device_type)
        self._fallback = Fallback(name, self._original)
        self._is_removed = False
        self.obstacle = compiled_part(module)
        """The part of it that is compiled by torch.compile."""

    def _is_compiled(self) -> bool:
        """Whether the region is to be left alone, since hooks around compiled code would unpack everything at once."""
        self.obstacle = compiled_part(self.module)
        if self.obstacle:
            warnings.warn(
                f"plimsoll: region {self.name!r} is left alone: {self.obstacle} is compiled by torch.compile",
                stacklevel=6,
            )
        return bool(self.obstacle)

    def install(self) -> None:
        self.module.forward = self
        self._is_removed = False

    def remove(self) -> None:
        """Put the module's forward back as it was found; where somebody has wrapped ours, only step aside."""
        self._is_removed = True
        if self.module.__dict__.get("forward") is self:
            self._leave(self.module)

    def _leave(self, module: nn.Module) -> None:
        """Give the module, or a copy of it, back the forward that it had."""
        if self._had_own:
            module.forward = self._original
        else:
            del module.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            refuse_compiler(self.module)
            return self._original(*args, **kwargs)
        caller = calling_module()
        if caller is not None and caller is not self.module and caller.__dict__.get("forward") is self:
            self._leave(caller)  # a shallow copy of the module: it is not managed, and its weights may be others
            return caller.forward(*args, **kwargs)
        if not torch.is_grad_enabled() or self.obstacle or self._is_removed or is_somebody_elses_call():
            return self._original(*args, **kwargs)
        plan = self._plans[min(self.calls, len(self._plans) - 1)]
        self.calls += 1
        return self._managed(plan, args, kwargs)

    def _managed(self, plan: RegionPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run under the plan; what a region before has sent over the link is ended when this one's forward is through."""
        if plan.is_untouched and self._shared.sensor is None:
            output = self._original(*args, **kwargs)
            self._shared.transfers.leave(output)
            return output
        key = (id(plan), *self._reader.read(args, kwargs))
        service = self.services.get(key)
        if service is None and self._shared.recording.acquire(blocking=False):
            try:
                return self._first(key, plan, args, kwargs)
            finally:
                self._shared.recording.release()
        if service is None:
            return self._fallback.run(Engine.KEEP, args, kwargs)
        if service.program is not None:
            return self._steady(service, service.program, args, kwargs)
        return self._whole(service, args, kwargs)

    def outcomes(self) -> tuple[RegionOutcome, ...]:
        """One entry per call of a step and signature: what serves it, and what was and could be dropped."""
        found = []
        for key, service in self.services.items():
            program = service.program
            plan = None if program is None else program.plan
            found.append(
                RegionOutcome(
                    name=self.name,
                    call=next(i for i, plan in enumerate(self._plans) if id(plan) == key[0]),
                    engine=service.engine,
                    reason=service.reason or ("" if program is None else _first_obstacle(program)),
                    activation_bytes=0 if plan is None else plan.activation_bytes,
                    droppable_bytes=0 if plan is None else plan.droppable_bytes,
                    dropped_bytes=0 if plan is None else plan.dropped_bytes,
                )
            )
        return tuple(found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module is not managed: it gets its plain forward back."""
        if self._had_own:
            return copy.deepcopy(self._original, memo)
        return CopiedForward(memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled module is not managed either."""
        return (CopiedForward, (self.module,))

    def _first(self, key: tuple[Any, ...], plan: RegionPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = (*tree_leaves((args, kwargs)), *self.module.parameters())
        if any(isinstance(x, FakeTensor | Proxy) or (isinstance(x, torch.Tensor) and x.is_meta) for x in leaves):
            return self._original(*args, **kwargs)
        fallback, shared = self._fallback, self._shared
        fallback.may_rerun &= is_transparent(args) and is_transparent(kwargs)
        if len(self.services) >= MAX_SIGNATURES:
            reason = f"more than {MAX_SIGNATURES} signatures"
            return self._whole(self._serve(key, Service(fallback.engine, reason=reason)), args, kwargs)
        scalars = self._reader.scalars()
        output, recorded = record_call(
            self.name,
            self.module,
            self._original,
            plan,
            args,
            kwargs,
            shared=shared,
            device_type=self._device_type,
        )
        # A counter in an attribute would count twice if the region ran twice.
        fallback.may_rerun &= recorded.may_rerun and self._reader.scalars() == scalars
        fallback.routes |= recorded.routes
        fallback.peers = tuple(sorted({*fallback.peers, *recorded.peers}))
        if recorded.program is not None:
            self.services[key] = Service(Engine.RECIPE, recorded.program)
        else:
            is_shared = bool(recorded.peers) and shared.repeats_collectives and fallback.may_rerun
            self._serve(key, Service(Engine.RERUN if is_shared else fallback.engine, reason=recorded.obstacle))
        if recorded.peers and shared.repeats_collectives and shared.agree_on_service is not None:
            repeated = () if recorded.program is None else recorded.program.plan.collectives
            shared.agree_on_service(self.name, recorded.peers, f"{self.services[key].engine} {', '.join(repeated)}")
        return output

    def _whole(self, service: Service, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region without recipes."""
        output = self._fallback.run(service.engine, args, kwargs)
        self._shared.transfers.leave(output)
        return output

    def _serve(self, key: tuple[Any, ...], service: Service) -> Service:
        if all(other.engine is not service.engine for other in self.services.values()):
            self._fallback.warn(service.engine, service.reason)
        self.services[key] = service
        return service

    def _give_up(self, service: Service, reason: str) -> None:
        service.engine, service.program, service.reason = self._fallback.engine, None, reason

    def _steady(self, service: Service, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call like one that was recorded: hold what it saves, ask the guard, then drop."""
        plan, shared = program.plan, self._shared
        if program.recipes.has_failed:
            reason = "a rebuilt value was not what forward made"
            if plan.collectives:
                raise self._fallback.refusal(reason)
            self._give_up(service, reason)
            return self._whole(service, args, kwargs)
        call = program.open()
        pack = call.pack_random if plan.state_points else call.pack
        inputs = call_tensors(args, kwargs) if plan.needs_inputs else ()
        versions = [version_of(tensor) for tensor in inputs]
        before = sequence_number()
        try:
            with saved_tensors_hooks(pack, unpack):
                output = self._original(*args, **kwargs)
            nodes = sequence_number() - before
            shared.transfers.leave(output)
        except BaseException:
            call.keep_all()
            raise
        link = shared.links.find(plan, inputs)
        if (plan.choice.link is not None and link is None) or not program.guard.holds(call, nodes):
            self._misfit(service, program, call)
            return output
        examiner = shared.inspector.inspect(plan, call.tensors)
        if not program.drop(call, inputs, versions, output, link, examiner):
            self._misfit(service, program, call)
        return output

    def _misfit(self, service: Service, program: Program, call: OpenCall) -> None:
        """This call did something else than the recorded one: it keeps everything, so it is right by construction. Only
        where other ranks count on collectives in its recipes is that no way out.
        """
        call.keep_all()
        if program.plan.collectives:
            raise self._fallback.refusal("this call saves other tensors than the recorded one")
        if self._is_compiled():  # since it was recorded
            return
        service.misfits += 1
        if service.misfits > MAX_MISFITS:
            self._give_up(
                service, "calls with the same signature save different tensors (shapes or control flow depend on data)"
            )
            self._fallback.warn(service.engine, service.reason)


def _first_obstacle(program: Program) -> str:
    refused = program.packer.refused
    if refused:
        (name, form), times = next(iter(refused.items()))
        return f"{name} is kept: its codec {form} could not represent the data ({times} times)"
    return next((f"{name} is kept: {obstacle}" for name, obstacle in program.plan.choice.obstacles.items()), "")
