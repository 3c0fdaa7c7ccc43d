"""Apply a plan to the compiled parts of a model: recompile each unit with a partitioner for the plan.

A unit is a module that torch.compile compiles. Units whose regions (modules that the plan decides about) all keep everything
stay unchanged. Units with equal decisions share one compilation: equal blocks are compiled once per set of decisions.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from plimsoll.artifacts.plan import CompiledUnit, Plan, RegionPlan, hiding
from plimsoll.engine.compiled.partitioner import PlannedPartitioner
from plimsoll.engine.offload.transfers import TransfersUnderWay
from plimsoll.engine.program import Shared
from plimsoll.engine.region import ManagedRegion
from plimsoll.engine.stored_forms import Packer, Refused, SavingHook, Taking, read_saved
from plimsoll.errors import PlanMismatch
from plimsoll.tracing.compiled.units import CompileCall, PlannedCall, Unit, find_units, install_alone
from plimsoll.tracing.ddp import inner_module


class RegionInCompiled(ManagedRegion):
    """The wrapper of a managed region inside a module that torch.compile compiles. torch.compiler.disable excludes the region
    from the compilation, so that it runs eagerly.
    """

    __call__ = torch.compiler.disable(ManagedRegion.__call__)


class PackingCall:
    """Replaces the call of a compiled block that compresses or offloads some saved tensors, or that runs while the block before
    offloads.

    Autograd packs the saved tensors of compiled code when its forward ends, and unpacks all of them when its backward begins.
    The partitioner puts the tensors that are compressed or offloaded first (see ``partitioner``).
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        name: str,
        taking: Sequence[Taking],
        packer: Packer,
        transfers: TransfersUnderWay,
    ) -> None:
        """``taking`` are the tensors to compress or offload; the block saves them first. ``name`` seeds the random numbers of
        codecs.
        """
        self._compiled, self._name, self._taking = compiled, name, tuple(taking)
        self._packer, self._transfers = packer, transfers
        self._calls = 0
        self.refused: Counter[tuple[str, str]] = Counter()
        """How often a value was kept because its codec could not represent it.

        The key is a pair of value name and codec name.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._compiled(*args, **kwargs)
        self._calls += 1
        saving = SavingHook(self._taking, self._packer, f"{self._name}/{self._calls}")
        with saved_tensors_hooks(saving.pack, read_saved) if self._taking else contextlib.nullcontext():
            output = self._compiled(*args, **kwargs)
        for taking, readable in zip(self._taking, saving.packed, strict=False):
            if isinstance(readable, Refused):
                self.refused[taking.value, taking.form] += 1
        self._transfers.leave(output)
        self._transfers.send(saving.packed)
        return output


class CompiledUnits:
    """The compiled units of a plan (modules under torch.compile). The plan is active in them from `resume` until `pause`.

    Plans may alternate: compilations are kept and reused when an earlier plan returns.
    """

    def __init__(self, model: nn.Module, plan: Plan, shared: Shared) -> None:
        self._units = planned_units(model, plan.compiled)
        self._put_back: list[Callable[[], None]] = []
        self._made: dict[Any, Callable[..., Any]] = {}
        self._shared = shared
        self.use(plan)

    def use(self, plan: Plan) -> None:
        """Switch to the decisions of another plan for the same model. They become active with `resume`."""
        found: dict[Unit, Callable[..., Any]] = {}
        self.packing: dict[str, PackingCall] = {}
        """The compiled modules whose forward compresses or offloads values, or runs while the one before it offloads: a mapping
        from the module's path in the model to its call.
        """
        regions: defaultdict[str, list[RegionPlan]] = defaultdict(list)
        for region in plan.regions:
            regions[region.name].append(region)
        planned = {unit.path: unit for unit in plan.compiled}
        for unit in self._units:
            names = planned[unit.path].regions
            own = {unit.local(name): regions[name] for name in names}
            taking, packer = self._taking(own)
            packed = tuple(each.value for each in taking)
            hides = bool(hiding(plan.regions).intersection(names))
            call = self._compiled(unit, own, packed, planned[unit.path], hides=hides)
            if call is not None and (packed or hides):
                call = self.packing[unit.path] = PackingCall(call, unit.path, taking, packer, self._shared.transfers)
            if call is not None:
                found[unit] = PlannedCall(call, unit.module)
        self._calls = found

    def _taking(self, calls: Mapping[str, Sequence[RegionPlan]]) -> tuple[list[Taking], Packer]:
        """Return the values of a unit (a module under torch.compile) that are compressed or offloaded, in the order of names,
        and the packer: the object that encodes or sends them.

        If codecs are measured on this unit in this step, return all values to be measured, and the packer of the sensor that
        measures.
        """
        sensor = self._shared.sensor
        found: list[Taking] = []
        for region in (region for several in calls.values() for region in several):
            if sensor is not None:
                values = sensor.compiled.get((region.name, region.call), ())
                return [Taking(value, value) for value in values], sensor.packer((region.name, region.call))
            decided = {each.value: each for each in region.decisions if each.is_packed}
            shares = {value: each.held_bytes / max(each.bytes, 1) for value, each in decided.items()}
            found += [Taking(value, form, shares[value]) for value, form in sorted(region.packed.items())]
        return found, self._shared.packer

    def _compiled(
        self,
        unit: Unit,
        calls: Mapping[str, Sequence[RegionPlan]],
        packed: tuple[str, ...],
        planned: CompiledUnit,
        *,
        hides: bool,
    ) -> Callable[..., Any] | None:
        """Compile a unit for the decisions about its regions. Return the compiled call, or ``None`` if the user's compilation
        stays.

        All ``calls`` of a region share one compiled code. A unit that runs while transfers are under way is compiled anew even
        if it drops nothing: the user's torch.compile wrapper would also compile the code around the unit.
        """
        made = self._made
        is_watched = self._shared.sensor is not None  # then everything is saved
        dropped = {
            name: frozenset[str]() if is_watched else frozenset().union(*(region.dropped for region in regions))
            for name, regions in calls.items()
        }
        if not (packed or any(dropped.values()) or planned.copied_inputs):
            if not hides and (unit.module._compiled_call_impl is not None or unit.wrapper is not None):
                return None
            if unit not in made:
                made[unit] = unit.call.compile()
            return made[unit]
        what = sorted((name, tuple(sorted(values))) for name, values in dropped.items())
        key = (type(unit.module), unit.call.key, planned.is_in_order, planned.copied_inputs, packed, *what)
        if key not in made:
            known = {
                name: frozenset(each.value for region in regions for each in region.decisions)
                for name, regions in calls.items()
            }
            partitioner = PlannedPartitioner(
                dropped, known, packed=packed, changed=planned.copied_inputs, is_in_order=planned.is_in_order
            )
            made[key] = unit.call.compile(**partitioner.options)
        return made[key]

    def resume(self) -> None:
        """Install the compiled calls of all units (modules under torch.compile) in the model.

        A second call does nothing.
        """
        self._put_back = self._put_back or [install_alone(unit, function) for unit, function in self._calls.items()]

    def pause(self) -> None:
        """Put the user's own compilations back into the model."""
        for put_back in reversed(self._put_back):
            put_back()
        self._put_back = []


def planned_units(model: nn.Module, planned: Iterable[CompiledUnit]) -> tuple[Unit, ...]:
    """Return the units (modules under torch.compile) that a plan names. The user compiles them, or the plan says how to compile
    them.

    Raises:
        PlanMismatch: other modules are compiled than when the plan was made.
    """
    found = {unit.path: unit for unit in find_units(model)}
    modules: Mapping[str, nn.Module] = dict(inner_module(model).named_modules())
    units = []
    for each in planned:
        if each.path in found:
            units.append(found.pop(each.path))
        elif each.options is not None and each.path in modules:
            units.append(Unit(each.path, modules[each.path], CompileCall.of(each.options)))
        else:
            raise PlanMismatch(
                f"The plan expects that torch.compile compiles {each.path or 'the model'!r}, but here "
                + ("the model is compiled as a whole." if "" in found else "it is not compiled."),
                why="the plan was made for a compiled model, and compiled graphs save other tensors than eager code",
                next="compile the same modules as when the plan was made, or plan again",
            )
    if found:
        raise PlanMismatch(
            f"{next(iter(found)) or 'The model'!r} is compiled by torch.compile, but was not when the plan was made.",
            why="compiled code saves other tensors than the plan decides about",
            next="plan the compiled model",
        )
    return tuple(units)
