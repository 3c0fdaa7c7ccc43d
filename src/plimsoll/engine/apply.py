"""Apply a plan to a model, and undo it so that the model is exactly what it was before."""

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
from plimsoll.artifacts.training_figures import ShowsFigures, TrainingFigures
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
from plimsoll.engine.tiles import Tiles
from plimsoll.errors import PlanMismatch, PlanNotUsable
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.fsdp2 import emptied_after_forward
from plimsoll.tracing.refusals import uncompiled_regions

if TYPE_CHECKING:
    from plimsoll.engine.compiled.units import CompiledUnits, PackingCall

P = ParamSpec("P")
T = TypeVar("T")


class Removable(Protocol):
    """An object that was put on a model, such as a hook, and that can be removed again."""

    def remove(self) -> None:
        """Remove this object, and restore what the model had before."""
        ...


class RemovedAtEnd(abc.ABC):
    """Base class of context managers that call `remove` when their block ends."""

    @abc.abstractmethod
    def remove(self) -> None:
        """Undo what this object has done to the model. Called at the end of the ``with`` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class Handle(ShowsFigures, RemovedAtEnd):
    """The handle of a plan that is applied to a model; ``plimsoll.apply`` returns it. Use it as a context manager, or call
    ``remove`` to take the plan off the model.

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
        """The user's model. If the user passed a wrapper of torch.compile, this is the wrapper, and ``model`` is the module
        inside.
        """
        self._compiled = frozenset(compiled)
        """Names of the regions (modules that the plan decides about) that the user compiles with torch.compile. The handle does
        not wrap these regions.
        """
        self._units: CompiledUnits | None = None
        self.regions: dict[str, ManagedRegion] = {}
        self._known: dict[str, ManagedRegion] = {}
        """All regions that were wrapped so far, by name, under the current plan or an earlier one (see `switch`)."""
        self._always: set[str] = set()
        """Names of regions that are wrapped even if the plan keeps everything there (see `keep_wrapped`)."""
        self._shared = shared
        self._tiles = Tiles(model, plan.tiles)
        self._retry: Callable[..., Any] | None = None
        self._peak_bytes: Callable[[], int] = lambda: 0
        self._root_hooks: list[Any] = []
        self._others: list[Removable] = []
        self._begin(plan)

    def remove(self) -> None:
        """Undo everything that ``apply`` did: afterwards the model is what it was before. A second call does nothing."""
        self.pause()
        for hook in (*self._root_hooks, *self._others):
            hook.remove()
        self._root_hooks, self._others = [], []
        self._retry = None  # a removed handle does not replan after OutOfMemoryError
        self.regions, self._known = {}, {}

    def switch(self, plan: Plan, *, is_for_this: bool = False) -> None:
        """Replace the plan by another plan for this model, from the model's next call on. ``is_for_this`` skips the check that
        the plan was made for this model, because the caller knows it.

        Regions keep their recordings. If a call was recorded before under any plan, recipes (recorded ops that rebuild dropped
        tensors) serve it at once.

        Raises:
            PlanMismatch: the plan was made for another model, or names another link than an earlier plan, or has another
                permission to repeat collectives than the current plan.
            OffloadFailed: the link that the plan names cannot be opened.
        """
        shared = self._shared
        if plan.fingerprint != self._plan.fingerprint and not is_for_this:
            raise PlanMismatch(
                f"This plan was made for another model: {plan.model} {plan.fingerprint}, not {self._plan.fingerprint}.",
                why="a plan names the regions and tensors that it decides about, and another model has other names",
                next="call plimsoll.plan for this model",
            )
        # The first plans of attach do not offload, and name no link. Once a link is open, the handle keeps it.
        packer = shared.packer
        needs_other_link = plan.link and packer.link_form not in ("", plan.link)
        if needs_other_link or (COLLECTIVES in plan.allow) is not shared.repeats_collectives:
            raise PlanMismatch(
                "This plan cannot replace the current plan while that plan is applied.",
                why="the two plans differ in their offload link, or in whether their recipes repeat collectives",
                next="call handle.remove(), then plimsoll.apply with the new plan",
            )
        if plan.link and not packer.link_form:
            packer.use_link(_opened(plan, _device_of(self.model)), plan.link)
        self.pause()
        if plan.tiles != self._plan.tiles:
            try:
                self._tiles = Tiles(self.model, plan.tiles)
            except BaseException:
                self.resume()
                raise
            # a region that is tiled itself runs another forward now, so its wrapper and its recordings do not fit any more
            tiled = {tile.path for tile in (*plan.tiles, *self._plan.tiles)}
            self._known = {name: region for name, region in self._known.items() if not _is_around(name, tiled)}
        self._begin(plan)

    def has_moved(self) -> bool:
        """Return whether the name of a managed region has stopped referring to the module that it referred to when the plan was
        applied.
        """
        modules = dict(self.model.named_modules())
        return any(modules.get(name) is not region.module for name, region in self.regions.items())

    def _begin(self, plan: Plan) -> None:
        """Start to use a plan: create or reuse the wrappers of the regions, and install them."""
        shared, model = self._shared, self.model
        self._tiles.install()  # a region may be a tiled module: its wrapper then calls the tiled forward
        calls = _managed_regions(plan) if shared.sensor is None else _regions(plan)
        if self._always:
            calls = {name: each for name, each in _regions(plan).items() if name in calls or name in self._always}
        modules = dict(model.named_modules())
        managed = {name: modules[name] for name in calls}
        shared.links.serve(
            emptied_after_forward(model, managed),
            is_used=any(call.is_boundary_dropped for each in calls.values() for call in each),
        )
        for name, module in managed.items():
            if (
                name in self._known and self._known[name].module is module
            ):  # the user may have reordered a list of layers
                self._known[name].use(calls[name])
            elif name not in self._compiled:
                self._known[name] = _region_class(plan, name)(name, module, calls[name], shared)
        self._plan = plan
        if self._units is not None:
            self._units.use(plan)
        elif plan.compiled:
            from plimsoll.engine.compiled.units import CompiledUnits  # import inductor only if something is compiled

            self._units = CompiledUnits(self._original, plan, shared)
        self.regions = {name: self._known[name] for name in calls if name in self._known}
        shared.inspector.watch(tuple(self.regions))
        if self.regions and not self._root_hooks:
            self._root_hooks = [
                model.register_forward_pre_hook(ModelHook(model, lambda *_: self.begin_step()), prepend=True),
                # Registered last, so it runs after the other pre-hooks: they may run another forward (trials of plans).
                model.register_forward_pre_hook(ModelHook(model, lambda *_: shared.inputs.begin())),
                model.register_forward_hook(ModelHook(model, lambda *_: self._forward_ended()), always_call=True),
            ]
        shared.inputs.begin()  # a hook may have applied the plan during the current call
        self.resume()

    def keep_wrapped(self, region: str) -> None:
        """Wrap this region (a module that plans decide about) from the next switch of plans on, even if a plan keeps everything
        there.

        A hook of the region may then switch plans, and the call that runs the hook already follows the new plan: torch looks up
        ``forward`` before it runs hooks.
        """
        self._always.add(region)

    def remove_with_me(self, hook: Removable) -> None:
        """Register a hook handle that belongs to the plan. `remove` then removes this hook together with the plan."""
        self._others.append(hook)

    def pause(self) -> None:
        """Remove the wrappers of all regions until `resume` installs them again. Recordings stay."""
        for region in self.regions.values():
            region.remove()
        self._tiles.remove()
        if self._units is not None:
            self._units.pause()

    def resume(self) -> None:
        """Install the wrappers of all regions again after `pause`."""
        self._tiles.install()
        for region in self.regions.values():
            region.install()
        if self._units is not None:
            self._units.resume()

    def forget(self) -> None:
        """Discard all recordings, so that each region records its next calls. Modules under torch.compile stay compiled."""
        for region in self.regions.values():
            region.forget()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager. Inside its block, the model runs without the plan."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one training step, ``function(*args, **kwargs)``. If the step runs out of memory, retry it with a plan that needs
        less memory.

        On ``torch.OutOfMemoryError`` the state from before the step is restored (parameters, optimizers, gradient scalers,
        gradients, buffers, attributes, random states), a plan with a lower peak is applied, and the step runs again. So the
        function must be the whole step and nothing else: make the batch before it, and log its result after it. With several
        ranks (over gloo), all ranks must call this method: if one rank runs out of memory, all ranks run the step again.

        Returns:
            The function's result.

        Raises:
            BudgetBelowFloor: the step runs out of memory even under the plan with the lowest peak.
            torch.OutOfMemoryError: something that the step wrote cannot be restored; a note on the error says what.
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
        """Run steps through the function ``retry`` from now on: `step` calls it with the step's function and arguments, so that
        it can run a step again after an out-of-memory error.
        """
        self._retry = retry

    def measure_with(self, peak_bytes: Callable[[], int]) -> None:
        """Set the function that returns the highest measured peak of the training's steps in bytes. `figures` reports this
        peak.
        """
        self._peak_bytes = peak_bytes

    @property
    def figures(self) -> TrainingFigures:
        """The figures of the training under this plan (budget, peaks, extra time). The measured peak is 0 if the plan was made
        without a budget.
        """
        return TrainingFigures.of(self._plan, measured_peak_bytes=self._peak_bytes())

    def headline(self) -> str:
        """Return one line that names the model and the plan."""
        return f"plimsoll.apply({type(self.model).__name__}, plan {self._plan.strategy!r})"

    def _shown_plan(self) -> Plan:
        return self._plan

    def on_larger_calls(self, listener: Listener) -> None:
        """Set a listener, a function that is called before a region runs with larger inputs than in any earlier call, or before
        regions run in another order than in earlier steps.
        """
        self._shared.larger.listener = listener

    @property
    def plan(self) -> Plan:
        """The plan that is applied now."""
        return self._plan

    def outcomes(self) -> tuple[RegionOutcome, ...]:
        """Return how the calls of each region were handled so far: with recomputation, or everything kept."""
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
        """All differences between rebuilt tensors and forward's tensors that inspected calls have found so far."""
        return tuple(self._shared.inspector.faults)

    def take_other_step(self) -> bool:
        """Return whether calls have made values that the plan does not name, since this method was last called."""
        found, self._shared.unmet.is_other_step = self._shared.unmet.is_other_step, False
        return found

    @property
    def recorded_calls(self) -> int:
        """The number of region calls (calls of modules that the plan decides about) that have been recorded so far."""
        return self._shared.alarm.recorded_calls

    @property
    def inspected_calls(self) -> int:
        """The number of region calls (calls of modules that the plan decides about) that have been inspected so far. An
        inspected call compares rebuilt tensors in full.
        """
        return self._shared.inspector.inspected_calls

    @property
    def inspected_tensors(self) -> int:
        """The number of rebuilt tensors that inspected calls have compared with the tensors that forward saved."""
        return self._shared.inspector.inspected_tensors

    def inspecting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager. Inside its block, each call of each region is inspected: rebuilt tensors are compared in
        full.
        """
        return self._shared.inspector.everywhere()

    def obstacles(self) -> dict[str, dict[str, str]]:
        """Return the values that the plan wants to drop but that are kept: for each region, the value's name and the reason."""
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
        """Prepare for a new call of the model: clear the previous call's state, and count the calls of each region from 0
        again.
        """
        self._shared.links.clear()
        self._shared.transfers.clear()
        self._shared.alarm.begin_step()
        self._shared.pace.begin_step()
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
    """Apply a plan: wrap the model's regions and return the handle that undoes this. A region that keeps everything is not
    touched at all.

    ``sentinel_every`` and ``verify_every`` mean the same as in `plimsoll.apply`. Offloaded values go over ``link`` (the way to
    host memory or disk), even if the plan names another link. Without ``link``, the link that the plan names is opened. A
    ``sensor`` watches the first call of each region and measures what lossy codecs would do to the tensors that the region
    saves. If recipes repeat collectives, ``agree_on_service`` is called with the region's name, the ranks that the region
    communicates with, and a text that says how this rank handles the region. The function raises if the ranks' descriptions
    differ. `plimsoll.session.manage` passes such a function for real ranks. If ``splits_backward``, backward runs in two halves
    (a zero-bubble schedule): a tensor that both halves read is kept from the first half to the second.

    Raises:
        PlanNotUsable: the plan's status says that it holds no decisions.
        PlanMismatch: a region of the plan is not in the model, or the model is managed already.
        OffloadFailed: the link cannot be opened.
        InvalidModel: the model, or every region that the plan manages, is compiled by torch.compile.
    """
    if not plan.status.is_usable:
        raise PlanNotUsable(
            f"The plan cannot be applied: its status is {plan.status}.",
            why=plan.status.advice,
            next="plan again with a larger budget",
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
    device = _device_of(model)
    if link is None and plan.link:
        link = _opened(plan, device)
    shared = Shared(
        links=LinkTable(),
        packer=Packer(link, plan.link),
        transfers=TransfersUnderWay(),
        policy=SentinelPolicy(every=sentinel_every),
        inspector=Inspector(verify_every, device),
        generators=generators_of([parameter.device for parameter in model.parameters()]),
        sensor=sensor,
        agree_on_service=agree_on_service,
        splits_backward=splits_backward,
        repeats_collectives=COLLECTIVES in plan.allow,
    )
    return Handle(model, plan, shared, compiled, original=original)


def _device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, or the CPU for a model without parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _opened(plan: Plan, device: torch.device) -> Link:
    """Open and return the link that the plan names (the way to host memory or disk), with as much host memory as the plan may
    use.
    """
    return open_link(plan.link, device, host_budget=plan.host_budget_bytes, directory=None)


def _is_around(region: str, paths: Collection[str]) -> bool:
    """Return whether one of the module paths is the path of the region or of a module inside it."""
    return any(path == region or path.startswith(f"{region}.") for path in paths)


def _compiled_outcome(region: RegionPlan, packing: PackingCall | None) -> RegionOutcome:
    """Return how the calls of a region were handled, for a region inside a compiled unit (a part of the model under
    torch.compile).

    The bytes in the outcome come from the plan and are not measured.
    """
    return RegionOutcome(
        name=region.name,
        call=region.call,
        engine=Engine.COMPILED,
        reason="" if packing is None else first_refusal(packing.refused),
        dropped_bytes=sum(each.bytes for each in region.decisions if each.decision is Decision.RECOMPUTE),
    )


def _region_class(plan: Plan, name: str) -> type[ManagedRegion]:
    """Return the class of the wrapper for a region: `RegionInCompiled` if a compiled unit contains the region, else
    `ManagedRegion`.
    """
    if not any(name.startswith(unit.path + ".") for unit in plan.compiled):
        return ManagedRegion
    from plimsoll.engine.compiled.units import RegionInCompiled  # import inductor only if something is compiled

    return RegionInCompiled


def _in_units(plan: Plan) -> frozenset[str]:
    """Return the names of the regions that torch.compile compiles under this plan."""
    return frozenset(name for unit in plan.compiled for name in unit.regions)


def _regions(plan: Plan) -> dict[str, tuple[RegionPlan, ...]]:
    """Return the regions that run eagerly: a mapping from the region's name to the plan for each of its calls in a step."""
    grouped: dict[str, list[RegionPlan]] = {}
    in_units = _in_units(plan)
    for region in plan.regions:
        if region.name not in in_units:
            grouped.setdefault(region.name, []).append(region)
    return {name: tuple(calls) for name, calls in grouped.items()}


def _managed_regions(plan: Plan) -> dict[str, tuple[RegionPlan, ...]]:
    """Return the regions that get a wrapper: a mapping from the region's name to the plan for each of its calls in a step.

    These are three kinds: the regions that do not keep everything under the plan, the regions that run while offloads are under
    way, and the first region. The first region is wrapped because its inputs show how large a call of the model will be.
    """
    hides = hiding(plan.regions)
    regions = _regions(plan)
    found = {
        name: calls for name, calls in regions.items() if name in hides or not all(call.is_left_alone for call in calls)
    }
    first = next(iter(regions), None)
    return found if not found or first is None else {first: regions[first], **found}


def _check_module(model: nn.Module, modules: Mapping[str, nn.Module], name: str, *, is_managed: bool) -> None:
    """Raise ``PlanMismatch`` if the model does not have the module that a plan decides about, or if another plan already
    manages this module.
    """
    if name not in modules:
        raise PlanMismatch(
            f"The plan decides about {name!r}, which {type(model).__name__} does not have.",
            why="the plan was made for another model",
            next="call plimsoll.plan for this model",
        )
    if is_managed and isinstance(modules[name].__dict__.get("forward"), ManagedRegion):
        raise PlanMismatch(
            f"A plan already manages {name!r}.",
            why="two plans cannot decide about the same tensors",
            next="call remove() on the handle of the first plan",
        )
