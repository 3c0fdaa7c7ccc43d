"""Puts a plan to work on a model, and takes it off again so that the model is exactly what it was."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar

import torch
from torch import nn

from plimsoll.artifacts.decision import Decision, Engine
from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import COLLECTIVES, Plan, RegionPlan, hiding
from plimsoll.artifacts.receipt import RegionOutcome
from plimsoll.engine.copies import ModelHook
from plimsoll.engine.inspection import Inspector
from plimsoll.engine.larger_calls import Listener
from plimsoll.engine.offload.open import open_link
from plimsoll.engine.offload.protocol import Link
from plimsoll.engine.offload.transfers import TransfersUnderWay
from plimsoll.engine.program import Shared
from plimsoll.engine.region import ManagedRegion, first_refusal
from plimsoll.engine.region_inputs import LinkTable
from plimsoll.engine.replay_rng import generators_of
from plimsoll.engine.sampling import SentinelPolicy
from plimsoll.engine.sensing import Sensor
from plimsoll.engine.stored_forms import Packer
from plimsoll.errors import PlanMismatch, PlanNotUsable
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.fsdp2 import emptied_after_forward
from plimsoll.tracing.refusals import uncompiled_regions

if TYPE_CHECKING:
    from plimsoll.engine.compiled.units import CompiledUnits, PackingCall

P = ParamSpec("P")
T = TypeVar("T")


class Removable(Protocol):
    """What is put on a model and can be taken off again."""

    def remove(self) -> None:
        """Undo it."""
        ...


class RemovedAtEnd(abc.ABC):
    """A context manager that takes itself off again when its block ends."""

    @abc.abstractmethod
    def remove(self) -> None:
        """Undo it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class Handle(RemovedAtEnd):
    """A plan at work on a model. Use it as a context manager, or call ``remove`` when done.

    Example:
        >>> import torch, plimsoll
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
        >>> plan = plimsoll.plan(model, torch.randn(4, 8), strategy="full", loss=lambda y: y.sum())
        >>> with plimsoll.apply(model, plan) as handle:
        ...     model(torch.randn(4, 8)).sum().backward()
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        shared: Shared,
        compiled: Collection[str] = (),
        *,
        original: nn.Module | None = None,
    ) -> None:
        self.model = model
        self._original = model if original is None else original
        """As the user has it, with the wrapper of torch.compile."""
        self._compiled = frozenset(compiled)
        """Regions that are left alone."""
        self._units: CompiledUnits | None = None
        self.regions: dict[str, ManagedRegion] = {}
        self._known: dict[str, ManagedRegion] = {}
        """The regions at work, and those that were under another plan."""
        self._shared = shared
        self._retry: Callable[..., Any] | None = None
        self._root_hooks: list[Any] = []
        self._others: list[Removable] = []
        self._begin(plan)

    def remove(self) -> None:
        """Undo everything: the model is as it was before ``apply``. Calling it twice is harmless."""
        self.pause()
        for hook in (*self._root_hooks, *self._others):
            hook.remove()
        self._root_hooks, self._others = [], []
        self._retry = None  # what is taken off plans no more
        self.regions, self._known = {}, {}

    def switch(self, plan: Plan) -> None:
        """Put another plan for this model to work, from its next call on. What regions have recorded stays: where they have met
        such a call before, under whatever plan, recipes serve it at once.

        Raises:
            PlanMismatch: the plan is another model's, or needs another link, or other leave to talk to other ranks, than the
                one at work.
        """
        shared = self._shared
        if plan.fingerprint != self._plan.fingerprint:
            raise PlanMismatch(
                f"This plan was made for another model: {plan.model} {plan.fingerprint}, not {self._plan.fingerprint}.",
                why="it decides about regions and values by name, and those of another model are others",
                next="plan this model",
            )
        if plan.link not in ("", self._plan.link) or (COLLECTIVES in plan.allow) is not shared.repeats_collectives:
            raise PlanMismatch(
                "This plan cannot take the place of the one at work.",
                why="its link, or whether its recipes repeat collectives, is another",
                next="call handle.remove() and apply the plan",
            )
        self.pause()
        self._begin(plan)

    def has_moved(self) -> bool:
        """Whether some region's path leads to another module by now."""
        modules = dict(self.model.named_modules())
        return any(modules.get(name) is not region.module for name, region in self.regions.items())

    def _begin(self, plan: Plan) -> None:
        """Let the plan decide about the regions that it manages."""
        shared, model = self._shared, self.model
        calls = _managed_regions(plan) if shared.sensor is None else _regions(plan)
        modules = dict(model.named_modules())
        managed = {name: modules[name] for name in calls}
        shared.links.serve(
            emptied_after_forward(model, managed),
            is_used=any(call.is_boundary_dropped for each in calls.values() for call in each),
        )
        for name, module in managed.items():
            if (
                name in self._known and self._known[name].module is module
            ):  # a list of layers may have been put in order anew
                self._known[name].use(calls[name])
            elif name not in self._compiled:
                self._known[name] = _region_class(plan, name)(name, module, calls[name], shared)
        self._plan = plan
        if self._units is not None:
            self._units.use(plan)
        elif plan.compiled:
            from plimsoll.engine.compiled.units import CompiledUnits  # inductor is imported where something is compiled

            self._units = CompiledUnits(self._original, plan, shared)
        self.regions = {name: self._known[name] for name in calls if name in self._known}
        shared.inspector.watch(tuple(self.regions))
        if self.regions and not self._root_hooks:
            self._root_hooks = [
                model.register_forward_pre_hook(ModelHook(model, lambda *_: self.begin_step()), prepend=True),
                # The last of all: what other hooks run (trials of plans) is another forward.
                model.register_forward_pre_hook(ModelHook(model, lambda *_: shared.inputs.begin())),
                model.register_forward_hook(ModelHook(model, lambda *_: self._forward_ended()), always_call=True),
            ]
        shared.inputs.begin()  # a hook may have put the plan to work in the call that is under way
        self.resume()

    def remove_with_me(self, hook: Removable) -> None:
        """Take out something else that belongs to this plan when the plan is taken off."""
        self._others.append(hook)

    def pause(self) -> None:
        """Take the wrappers out for a while; what was recorded is kept."""
        for region in self.regions.values():
            region.remove()
        if self._units is not None:
            self._units.pause()

    def resume(self) -> None:
        """Put the wrappers back in after ``pause``."""
        for region in self.regions.values():
            region.install()
        if self._units is not None:
            self._units.resume()

    def forget(self) -> None:
        """Let every region record anew; what is compiled stays so."""
        for region in self.regions.values():
            region.forget()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model unmanaged inside the block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one training step, ``function(*args, **kwargs)``; where it runs out of memory, go on with less.

        On ``torch.OutOfMemoryError`` everything is put back as it was before the step (parameters, optimizers, gradient
        scalers, gradients, buffers, attributes, random states), a plan that takes less is put to work, and the step is
        run again. So it has to be all of a step, and only that: the batch is made before it, and what it returns is
        logged after it. Several ranks (over gloo) call it alike: where one runs out of memory, all run the step again.

        Returns:
            What the function returns.

        Raises:
            BudgetBelowFloor: it runs out of memory under the plan with the lowest peak, too.
            torch.OutOfMemoryError: what the step wrote cannot be put back; a note of the error says what.
            RankFailed, RankMissing: the step failed on another rank, and no rank runs it again.

        Example:
            >>> def train(batch):  # doctest: +SKIP
            ...     loss = model(**batch).loss
            ...     loss.backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            ...     return loss.detach()
            >>> for batch in batches:  # doctest: +SKIP
            ...     print(handle.step(train, batch))
        """
        retry: Callable[..., T] | None = self._retry
        return function(*args, **kwargs) if retry is None else retry(function, *args, **kwargs)

    def retry_with(self, retry: Callable[..., Any]) -> None:
        """Steps are run by this from now on."""
        self._retry = retry

    def on_larger_calls(self, listener: Listener) -> None:
        """Call the listener before a region runs that receives a larger call than ever before, or runs in another order."""
        self._shared.larger.listener = listener

    @property
    def plan(self) -> Plan:
        """The plan at work."""
        return self._plan

    def outcomes(self) -> tuple[RegionOutcome, ...]:
        """How every region of the plan is served so far."""
        in_units = _in_units(self._plan)
        untouched = [
            _compiled_outcome(region, None if self._units is None else self._units.packing.get(region.name))
            if region.name in in_units and not region.is_untouched
            else RegionOutcome(name=region.name, call=region.call, engine=Engine.UNTOUCHED)
            for region in self._plan.regions
            if region.name not in self.regions
        ]
        return (*untouched, *(outcome for region in self.regions.values() for outcome in region.outcomes()))

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What inspected calls have shown so far."""
        return tuple(self._shared.inspector.faults)

    @property
    def inspected_calls(self) -> int:
        """How many calls of regions have been inspected so far."""
        return self._shared.inspector.inspected_calls

    @property
    def inspected_tensors(self) -> int:
        """How many rebuilt tensors have been compared with what forward saved."""
        return self._shared.inspector.inspected_tensors

    def inspecting(self) -> contextlib.AbstractContextManager[None]:
        """Inspect every region in every call inside the block."""
        return self._shared.inspector.everywhere()

    def obstacles(self) -> dict[str, dict[str, str]]:
        """Values that the plan drops but that are kept, by region, each with the reason."""
        found: dict[str, dict[str, str]] = {}
        for name, region in self.regions.items():
            for service in region.services.values():
                if service.program is not None and service.program.plan.choice.obstacles:
                    found.setdefault(name, {}).update(service.program.plan.choice.obstacles)
        return found

    def _forward_ended(self) -> None:
        self._shared.links.clear()
        self._shared.inputs.settle()
        self._shared.unmet.say(self._plan)

    def begin_step(self) -> None:
        """A new call of the model begins: calls of its regions are counted from zero."""
        self._shared.links.clear()
        self._shared.transfers.clear()
        self._shared.alarm.begin_step()
        self._shared.order.begin_step()
        if torch.is_grad_enabled():
            self._shared.inspector.begin_step()
        for region in self.regions.values():
            region.calls = 0


def apply_plan(
    model: nn.Module,
    plan: Plan,
    *,
    sentinel_every: int = 1,
    verify_every: int = 0,
    link: Link | None = None,
    sensor: Sensor | None = None,
    agree_on_service: Callable[[str, tuple[int, ...], str], None] | None = None,
    splits_backward: bool = False,
) -> Handle:
    """Manage the model's regions as the plan says. A region that keeps everything is not touched at all.

    ``sentinel_every`` and ``verify_every`` are as for `plimsoll.apply`. Offloaded values go over ``link``, whatever it
    is called; by default the plan's own link is opened. A sensor watches the first call of every region.
    ``agree_on_service`` is called where recipes repeat collectives, with the region's name, the ranks that it talks to
    and what serves it here, and raises where these differ; `plimsoll.session.manage` gives the one for real ranks.
    ``splits_backward``: hold what both halves of a zero-bubble schedule's backward read from the one to the other.

    Raises:
        PlanNotUsable: the plan's status says that it holds no decisions.
        PlanMismatch: a region of the plan is not in the model, or the model is managed already.
        OffloadFailed: the link cannot be opened.
        InvalidModel: the model, or every region that the plan manages, is compiled by torch.compile.
    """
    if not plan.status.is_usable:
        raise PlanNotUsable(
            f"This plan is {plan.status}.", why=plan.status.advice, next="plan again with a larger budget"
        )
    original, model = model, inner_module(model)
    modules = dict(model.named_modules())
    managed = _managed_regions(plan) if sensor is None else _regions(plan)
    for name in {region.name for region in plan.regions}:
        _check_module(model, modules, name, is_managed=name in managed)
    eager = {name: modules[name] for name in managed}
    compiled: set[str] = set()
    if eager or not plan.compiled:
        compiled = managed.keys() - uncompiled_regions(model if plan.compiled else original, eager).keys()
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    if link is None and plan.link:
        link = open_link(plan.link, device, host_budget=plan.host_budget_bytes, directory=None)
    shared = Shared(
        links=LinkTable(),
        packer=Packer(link, plan.link),
        transfers=TransfersUnderWay(),
        policy=SentinelPolicy(every=sentinel_every),
        inspector=Inspector(verify_every, device),
        generators=generators_of([parameter.device for parameter in parameters]),
        sensor=sensor,
        agree_on_service=agree_on_service,
        splits_backward=splits_backward,
        repeats_collectives=COLLECTIVES in plan.allow,
    )
    return Handle(model, plan, shared, compiled, original=original)


def _compiled_outcome(region: RegionPlan, packing: PackingCall | None) -> RegionOutcome:
    """How a region is served in which torch.compile does as the plan says: bytes are the plan's."""
    return RegionOutcome(
        name=region.name,
        call=region.call,
        engine=Engine.COMPILED,
        reason="" if packing is None else first_refusal(packing.refused),
        dropped_bytes=sum(each.bytes for each in region.decisions if each.decision is Decision.RECOMPUTE),
    )


def _region_class(plan: Plan, name: str) -> type[ManagedRegion]:
    """What a region is that runs eagerly, of its own or within what is compiled."""
    if not any(name.startswith(unit.path + ".") for unit in plan.compiled):
        return ManagedRegion
    from plimsoll.engine.compiled.units import RegionInCompiled  # inductor is imported where something is compiled

    return RegionInCompiled


def _in_units(plan: Plan) -> frozenset[str]:
    """The regions that lie in what torch.compile compiles."""
    return frozenset(name for unit in plan.compiled for name in unit.regions)


def _regions(plan: Plan) -> dict[str, tuple[RegionPlan, ...]]:
    """All calls of each region that runs eagerly."""
    grouped: dict[str, list[RegionPlan]] = {}
    in_units = _in_units(plan)
    for region in plan.regions:
        if region.name not in in_units:
            grouped.setdefault(region.name, []).append(region)
    return {name: tuple(calls) for name, calls in grouped.items()}


def _managed_regions(plan: Plan) -> dict[str, tuple[RegionPlan, ...]]:
    """The regions that get a wrapper: those that do not keep everything, those behind which transfers hide, and the first one.

    The input of the first region shows how large a call of the model becomes.
    """
    hides = hiding(plan.regions)
    regions = _regions(plan)
    found = {
        name: calls for name, calls in regions.items() if name in hides or not all(call.is_untouched for call in calls)
    }
    first = next(iter(regions), None)
    return found if not found or first is None else {first: regions[first], **found}


def _check_module(model: nn.Module, modules: Mapping[str, nn.Module], name: str, *, is_managed: bool) -> None:
    """Refuse a plan whose region the model does not have, or has under another plan."""
    if name not in modules:
        raise PlanMismatch(
            f"The plan decides about {name!r}, which {type(model).__name__} does not have.",
            why="it was made for another model",
            next="plan this model",
        )
    if is_managed and isinstance(modules[name].__dict__.get("forward"), ManagedRegion):
        raise PlanMismatch(
            f"{name!r} is managed by a plan already.",
            why="two plans cannot decide about the same tensors",
            next="call handle.remove() on the first one",
        )
