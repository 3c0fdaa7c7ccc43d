"""One managed module: its forward, with the saved tensors under a plan.

A call whose signature is new is *recorded* (and already drops what the plan drops); later calls are *steady*: no dispatch
mode, two hooks, a guard. What cannot be recorded goes to ``torch.utils.checkpoint`` or is left alone.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.plan import RegionPlan
from plimsoll.artifacts.receipt import RegionOutcome
from plimsoll.engine.frame import Frame
from plimsoll.engine.program import Program
from plimsoll.engine.record import record_call
from plimsoll.engine.routing import saving_routes
from plimsoll.engine.shared import Shared
from plimsoll.engine.signature import SignatureReader, is_transparent
from plimsoll.errors import RanksDiffer
from plimsoll.tracing.local_tensors import version_of
from plimsoll.tracing.recorder.calling import call_tensors

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
        self._may_rerun = True
        self._routes = False
        self._peers: tuple[int, ...] = ()
        self._is_removed = False
        self.obstacle = compiled_inside(module)

    def install(self) -> None:
        self.module.forward = self
        self._is_removed = False

    def remove(self) -> None:
        """Put the module's forward back as it was found; where somebody has wrapped ours, only step aside."""
        self._is_removed = True
        if self.module.__dict__.get("forward") is not self:
            return
        if self._had_own:
            self.module.forward = self._original
        else:
            self.module.__dict__.pop("forward", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or self.obstacle or self._is_removed:
            return self._original(*args, **kwargs)
        if _is_somebody_elses_call():
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
        if service is None:
            return self._first(key, plan, args, kwargs)
        if service.engine is Engine.RECIPE:
            return self._steady(service, args, kwargs)
        return self._whole(service, args, kwargs)

    def outcomes(self) -> tuple[RegionOutcome, ...]:
        """One entry per call of a step and signature: what serves it, and what was and could be dropped."""
        found = []
        for key, service in self.services.items():
            program = service.program
            found.append(
                RegionOutcome(
                    name=self.name,
                    call=next(i for i, plan in enumerate(self._plans) if id(plan) == key[0]),
                    engine=service.engine,
                    reason=service.reason or ("" if program is None else _first_obstacle(program)),
                    activation_bytes=0 if program is None else program.activation_bytes,
                    droppable_bytes=0 if program is None else program.droppable_bytes,
                    dropped_bytes=0 if program is None else program.dropped_bytes,
                )
            )
        return tuple(found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module is not managed: it gets its plain forward back."""
        return _plain_forward(self._original, memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled module is not managed either."""
        return (_plain_forward, (None, self.module))

    def _first(self, key: tuple[Any, ...], plan: RegionPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(
            isinstance(t, FakeTensor) or t.is_meta for t in (*call_tensors(args, kwargs), *self.module.parameters())
        ):
            return self._original(*args, **kwargs)
        self._may_rerun &= is_transparent(args) and is_transparent(kwargs)
        if len(self.services) >= MAX_SIGNATURES:
            reason = f"more than {MAX_SIGNATURES} signatures"
            return self._whole(self._serve(key, Service(self._fallback, reason=reason)), args, kwargs)
        scalars = self._reader.scalars()
        output, recorded = record_call(
            self.name,
            self.module,
            self._original,
            plan,
            args,
            kwargs,
            shared=self._shared,
            device_type=self._device_type,
        )
        self._may_rerun &= recorded.may_rerun and self._reader.scalars() == scalars
        self._routes |= recorded.routes
        self._peers = tuple(sorted({*self._peers, *recorded.peers}))
        if recorded.program is not None:
            self.services[key] = Service(Engine.RECIPE, recorded.program)
        else:
            is_shared = bool(recorded.peers) and self._shared.repeats_collectives and self._may_rerun
            self._serve(key, Service(Engine.RERUN if is_shared else self._fallback, reason=recorded.obstacle))
        if recorded.peers and self._shared.repeats_collectives and self._shared.agree_on_service is not None:
            repeated = () if recorded.program is None else recorded.program.collectives
            self._shared.agree_on_service(
                self.name, recorded.peers, f"{self.services[key].engine} {', '.join(repeated)}"
            )
        return output

    @property
    def _fallback(self) -> Engine:
        """What serves calls that recipes cannot: a region that changes anything outside of itself must not run twice.

        It writes buffers or inputs, counts in an attribute, is given an object (a cache) that it may write to, or talks to
        other ranks, which would not answer a second time.
        """
        return Engine.RERUN if self._may_rerun and not self._peers else Engine.KEEP

    def _whole(self, service: Service, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region without recipes."""
        if service.engine is Engine.RERUN:
            context_fn = saving_routes if self._routes else noop_context_fn
            output = checkpoint(self._original, *args, use_reentrant=False, context_fn=context_fn, **kwargs)
        else:
            output = self._original(*args, **kwargs)
        self._shared.transfers.leave(output)
        return output

    def _serve(self, key: tuple[Any, ...], service: Service) -> Service:
        if all(other.engine is not service.engine for other in self.services.values()):
            self._warn(service)
        self.services[key] = service
        return service

    def _warn(self, service: Service) -> None:
        what = (
            "is re-run as a whole in backward (torch.utils.checkpoint)"
            if service.engine is Engine.RERUN
            else "keeps everything"
        )
        warnings.warn(f"plimsoll: region {self.name!r} {what}: {service.reason}", stacklevel=5)

    def _steady(self, service: Service, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        program = service.program
        assert program is not None
        if program.has_failed:
            if program.collectives:
                raise _left_alone(self.name, "a rebuilt value was not what forward made")
            service.engine, service.program = self._fallback, None
            service.reason = "a rebuilt value was not what forward made"
            return self._whole(service, args, kwargs)
        frame = Frame(program)
        pack = frame.pack
        if program.needs_states:
            pack = frame.pack_random
            program.take_entry_states(frame)
        inputs = call_tensors(args, kwargs) if program.needs_inputs else ()
        versions = [version_of(tensor) for tensor in inputs]
        before = torch._C._autograd._get_sequence_nr()
        try:
            with saved_tensors_hooks(pack, Frame.unpack):
                output = self._original(*args, **kwargs)
            nodes = torch._C._autograd._get_sequence_nr() - before
            self._shared.transfers.leave(output)
        except BaseException:
            frame.keep_all()
            raise
        link = self._shared.links.find(program, inputs) if program.choice.link is not None else None
        if (program.choice.link is not None and link is None) or not program.fits(frame, nodes):
            self._misfit(service, frame)
            return output
        cells = frame.cells
        frame.inspection = self._shared.inspector.inspect(program, frame.tensors)
        packed = program.finish(frame, inputs, versions, link)
        if packed is None:
            self._misfit(service, frame)
        else:
            self._shared.transfers.send(packed.values())
            self._shared.links.offer(program, frame, cells, packed, link, output)
        return output

    def _misfit(self, service: Service, frame: Frame) -> None:
        """This call did something else than the recorded one: it keeps everything, so it is right by construction.

        Raises:
            RanksDiffer: other ranks count on collectives in its recipes.
        """
        frame.keep_all()
        if service.program is not None and service.program.collectives:
            raise _left_alone(self.name, "this call saves other tensors than the recorded one")
        service.misfits += 1
        if service.misfits > MAX_MISFITS:
            service.engine, service.program = self._fallback, None
            service.reason = (
                "calls with the same signature save different tensors (shapes or control flow depend on data)"
            )
            self._warn(service)


def _is_somebody_elses_call() -> bool:
    """Whether saved tensors are not ours to manage: other hooks are active or forbidden, or a transform is at work."""
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]  # missing in the stub
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )


def _first_obstacle(program: Program) -> str:
    if program.refused:
        (name, form), times = next(iter(program.refused.items()))
        return f"{name} is kept: its codec {form} could not represent the data ({times} times)"
    return next((f"{name} is kept: {obstacle}" for name, obstacle in program.choice.obstacles.items()), "")


def compiled_inside(module: nn.Module) -> str:
    """Why a region with a compiled function in it is left alone: hooks around it would unpack everything at once."""
    for name, inner in module.named_modules():
        forward = inner.__dict__.get("forward", type(inner).forward)
        if (
            type(inner).__name__ == "OptimizedModule"
            or inner._compiled_call_impl is not None
            or any(map(_is_compiled, (forward, *_called_by(forward))))
        ):
            return f"{name or 'the module'} is compiled by torch.compile, which decides about its own saved tensors"
    return ""


def _is_compiled(function: Any) -> bool:
    return getattr(function, "_torchdynamo_orig_callable", None) is not None


def _called_by(forward: Any) -> Iterator[Any]:
    """What a forward may call by name: globals that its code mentions, and what it closes over."""
    function = inspect.unwrap(getattr(forward, "__func__", forward))
    code = getattr(function, "__code__", None)
    if code is None:
        return
    yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell that is still empty
            yield cell.cell_contents


def _plain_forward(original: Callable[..., Any] | None, module: nn.Module) -> Callable[..., Any]:
    if isinstance(original, types.MethodType):
        return types.MethodType(original.__func__, module)
    return types.MethodType(type(module).forward, module)


def _left_alone(region: str, reason: str) -> RanksDiffer:
    """The error of a call on this rank that cannot follow its recipes while other ranks count on its collectives."""
    rank = torch.distributed.get_rank()
    return RanksDiffer(
        f"Region {region!r} cannot be rebuilt on rank {rank} as it was recorded: {reason}.",
        why="its recipes repeat collectives, in which all ranks must take part; this one would leave the others waiting",
        next="nothing was stepped; give the region's calls equal shapes, or plan without 'collectives' in allow=",
        ranks=(rank,),
    )
