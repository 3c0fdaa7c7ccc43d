"""Puts a plan to work on the compiled parts of a model: each unit is compiled anew, with a partitioner of its own.

Units whose regions all keep everything stay as they are. Units with equal decisions share one compilation: equal blocks are
compiled once for each way in which the plan treats them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.plan import CompiledUnit, Plan
from plimsoll.engine.compiled.partitioner import PlannedPartitioner
from plimsoll.engine.region import ManagedRegion
from plimsoll.errors import PlanMismatch
from plimsoll.tracing.compiled.units import CompileCall, PlannedCall, Unit, find_units, install
from plimsoll.tracing.ddp import inner_module


class RegionInCompiled(ManagedRegion):
    """A region that torch.compiler.disable keeps out of what is compiled around it; so it stays under a plan."""

    __call__ = torch.compiler.disable(ManagedRegion.__call__)


class CompiledUnits:
    """The units of a plan, at work from ``resume`` until ``pause``.

    Plans may take turns: what one has had compiled is there when it comes back.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._units = planned_units(model, plan.compiled)
        self._put_back: list[Callable[[], None]] = []
        self._made: dict[Any, Callable[..., Any]] = {}
        self.use(plan)

    def use(self, plan: Plan) -> None:
        """Follow another plan for the same model, from ``resume`` on."""
        self._calls = self._compiled(plan)

    def _compiled(self, plan: Plan) -> dict[Unit, Callable[..., Any]]:
        dropped = {region.name: region.dropped for region in plan.regions}
        decided = {region.name: frozenset(each.value for each in region.decisions) for region in plan.regions}
        planned = {unit.path: unit for unit in plan.compiled}
        made = self._made
        found: dict[Unit, Callable[..., Any]] = {}
        for unit in self._units:
            regions = {unit.local(name): dropped.get(name, frozenset()) for name in planned[unit.path].regions}
            if not any(regions.values()):
                if unit.module._compiled_call_impl is None and unit.wrapper is None:
                    if unit not in made:
                        made[unit] = unit.call.compile()
                    found[unit] = PlannedCall(made[unit], unit.module)
                continue
            is_in_order = planned[unit.path].is_in_order
            key = (
                type(unit.module),
                unit.call.key,
                is_in_order,
                *sorted((name, tuple(sorted(v))) for name, v in regions.items()),
            )
            if key not in made:
                known = {unit.local(name): decided.get(name, frozenset()) for name in planned[unit.path].regions}
                partitioner = PlannedPartitioner(regions, known, is_in_order=is_in_order)
                made[key] = unit.call.compile(**partitioner.options)
            found[unit] = PlannedCall(made[key], unit.module)
        return found

    def resume(self) -> None:
        """Put the units' own compilations to work; harmless when called twice, or what was there before would be lost."""
        self._put_back = self._put_back or [install(unit, function) for unit, function in self._calls.items()]

    def pause(self) -> None:
        """Put back what the user's torch.compile made."""
        for put_back in reversed(self._put_back):
            put_back()
        self._put_back = []


def planned_units(model: nn.Module, planned: Iterable[CompiledUnit]) -> tuple[Unit, ...]:
    """The units of a plan in a model, as the user has compiled them or as the plan does.

    Raises:
        PlanMismatch: something else is compiled than the plan was made for.
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
                f"The plan decides about {each.path or 'the model'!r} compiled by torch.compile, and here it is not compiled.",
                why="it was made for a compiled model, whose graphs save other tensors",
                next="compile it as it was when the plan was made, or plan this model",
            )
    if found:
        raise PlanMismatch(
            f"{next(iter(found)) or 'The model'!r} is compiled by torch.compile, and it was not when the plan was made.",
            why="compiled code saves other tensors than the plan decides about",
            next="plan this model as it is compiled",
        )
    return tuple(units)
