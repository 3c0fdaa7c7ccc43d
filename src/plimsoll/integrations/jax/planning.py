"""Plans which values of a JAX function are held for its gradient: ``plan``, and `Searched`, which estimates use too."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgspec

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan, RegionPlan, ValueDecision
from plimsoll.errors import InvalidOption
from plimsoll.integrations.jax.call import PINNED, JaxCall
from plimsoll.integrations.jax.reading import flops_of
from plimsoll.integrations.jax.seconds import clock_for, key_of_shapes
from plimsoll.integrations.jax.trace import INSIDE, trace_step
from plimsoll.integrations.search import PlanMeter, PlanSearch

FRAMEWORK = "jax"


def plan(
    function: Callable[..., Any],
    *args: Any,
    budget: str | int | None,
    argnums: int | Sequence[int] = 0,
    device: str | None = None,
    offload: Sequence[str] = (),
) -> Plan:
    """Decide which values of a function are held for its gradient; the others are recomputed.

    Args:
        function: returns a scalar, or anything that ``jax.vjp`` accepts; traced, never run.
        args: its arguments, or ``jax.ShapeDtypeStruct`` in their place. Leaves that are not arrays are constants.
        budget: bytes of XLA's temporary memory for the gradient, such as ``"8GiB"``; ``None`` for the fastest plan.
        argnums: the arguments to differentiate; of an object of flax.nnx, its ``nnx.Param``.
        device: a device of the catalogue, whose roofline prices operations; by default they are timed on this machine.
        offload: patterns of value names in plans (``"*dot_general"``). Matching values go to the host's pinned memory if the
            plan would hold them. XLA reports the resulting bytes; the model of time does not include the link.

    Returns:
        A plan for ``wrap``. ``predicted_peak_bytes`` is what XLA reported for the compiled gradient.

    Raises:
        BudgetBelowFloor: every plan that was compiled exceeds the budget; the error names the smallest peak.
        InvalidOption: none of the arguments can be differentiated.

    Example:
        >>> plan = pj.plan(loss, params, batch, budget="8GiB")  # doctest: +SKIP
        >>> step = jax.jit(jax.value_and_grad(pj.wrap(loss, plan)))  # doctest: +SKIP
    """
    return Searched(function, args, argnums, device, offload).plan(budget)


class Searched:
    """A JAX function with its arguments, as a step that can be planned. It remembers the plans that were compiled."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        argnums: int | Sequence[int],
        device: str | None,
        offload: Sequence[str] = (),
    ) -> None:
        if not callable(function):
            raise InvalidOption(
                f"The first argument has the type {type(function).__name__}, which is not a function.",
                why="plans are made for functions of arrays",
                next="pass the loss function first, then its arguments",
            )
        self.call = JaxCall(function, args, {}, argnums)
        if not any(self.call.active):
            raise InvalidOption(
                "This function is not differentiated with respect to any argument.",
                why=f"argnums={argnums} does not select an array of floats",
                next="set argnums= to the position of the argument that holds the parameters",
            )
        clock = clock_for(device)
        self._offload = offload
        self.name = str(getattr(function, "__name__", type(function).__name__))
        step = trace_step(
            self.call.program, self.call.regions, clock, model=self.name, signature=key_of_shapes(self.call.arrays)
        )
        meter = PlanMeter(
            framework=FRAMEWORK, name="XLA", measure=self._taken, unmanaged_bytes=self.call.unmanaged_bytes
        )
        self.search = PlanSearch(step, meter)
        self.counted_by = f"compiled by XLA for {jax.default_backend()}"

    def plan(self, budget: int | str | None) -> Plan:
        """Return the fastest plan whose compiled gradient is within the budget."""
        found = self.search.run(budget)
        regions = self._moved(found.regions)
        away = [each.bytes for region in regions for each in region.decisions if each.decision is Decision.OFFLOAD]
        link = "host" if away else ""
        return msgspec.structs.replace(found, regions=regions, link=link, offloaded_bytes=sum(away))

    def unmanaged_taken(self) -> int:
        """Return the temporary bytes of the gradient without a plan."""
        return self.call.measure(self.call.flat)

    @property
    def flops(self) -> int:
        """The number of floating-point operations of the function and of its derivative."""
        total = 0
        for region in self.call.regions:
            own = [(node, region.part) for node in region.part.nodes]
            own += [(node, region.reading.joint) for node in region.reading.backward]
            total += region.repeats * sum(flops_of(node, program) for node, program in own)
        return total

    @property
    def dtype(self) -> str:
        """The dtype of the function's matrix products, in the terms of the device catalogue."""
        kinds = {str(each.dtype) for each, is_on in zip(self.call.arrays, self.call.active, strict=True) if is_on}
        return "bf16" if kinds in ({"bfloat16"}, {"float16"}) else "f32"

    def _taken(self, plans: Sequence[RegionPlan]) -> int:
        return self.call.taken(self._moved(plans))

    def _moved(self, plans: Sequence[RegionPlan]) -> tuple[RegionPlan, ...]:
        """Return the same plans with offloads added: held values that match the user's patterns are moved to the host."""
        if not self._offload:
            return tuple(plans)
        return tuple(
            msgspec.structs.replace(region, decisions=tuple(map(self._sent, region.decisions))) for region in plans
        )

    def _sent(self, decided: ValueDecision) -> ValueDecision:
        """Return the decision for a value. It becomes an offload if the value is held and matches one of the user's patterns.

        Values that jax holds inside of a region (a part of the function that a plan manages) do not have names, so they cannot
        be offloaded.
        """
        is_held = decided.decision is Decision.KEEP and decided.value != INSIDE
        if not (is_held and any(fnmatch.fnmatch(decided.value, each) for each in self._offload)):
            return decided
        return msgspec.structs.replace(decided, decision=Decision.OFFLOAD, form=PINNED)
