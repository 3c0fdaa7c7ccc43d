"""Plans which values of a JAX function are held for its gradient, under a budget of temporary memory.

    plan = pj.plan(loss, params, batch, budget="8GiB")
    step = jax.jit(jax.value_and_grad(pj.wrap(loss, plan)))

The planner is the one for PyTorch; values and costs come from the jaxpr of the function and of its reverse derivative.
``wrap`` puts ``jax.checkpoint`` around the regions of the function, with a policy that saves the values that the plan keeps:
each by its own name, so that of two equal operations one may be saved and the other not.

The budget is for what XLA calls temporary memory of the compiled gradient: arguments (parameters, batch) and results
(gradients) come on top. XLA decides about buffers once more, after the plan; so a plan is compiled before it is handed
over, and made again with what was wrong with it until what XLA reports is within the budget.

Source: ``jax.checkpoint`` and ``jax.ad_checkpoint.checkpoint_name`` are documented interfaces; the policies of MaxText and
of flax name whole kinds of values by hand. Known weakness: what XLA fuses is guessed, and one choice serves all iterations
of a scan.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.plan import Plan, RegionPlan
from plimsoll.errors import BudgetBelowFloor, InvalidOption, PlanMismatch
from plimsoll.integrations.jax_program import ArrayProgram, evaluate, is_float, naming, run_nodes, take, trace_program
from plimsoll.integrations.jax_regions import Region, find_regions
from plimsoll.integrations.jax_seconds import Clock, RooflineClock, TimedClock, key_of_shapes
from plimsoll.integrations.jax_trace import TracedStep, fingerprint, trace_step, value_name
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.solve import Planner, lowest_known, solve
from plimsoll.planning.step import StepIndex
from plimsoll.units import format_bytes, format_bytes_up, parse_bytes

FRAMEWORK = "jax"
_TRIALS = 4
"""Compilations at most; most plans take two."""
_CLOSE = 0.03
"""A plan that leaves less than this share of the budget unused is not tried again."""


def plan(
    function: Callable[..., Any],
    *args: Any,
    budget: str | int | None,
    argnums: int | Sequence[int] = 0,
    device: str | None = None,
) -> Plan:
    """Decide which values of a function are held for its gradient.

    Args:
        function: returns a scalar, or anything that ``jax.vjp`` takes; traced, never run.
        args: its arguments, or ``jax.ShapeDtypeStruct`` in their place. Leaves that are no arrays are held fixed.
        budget: bytes of XLA's temporary memory for the gradient, such as ``"8GiB"``; ``None`` for the fastest plan.
        argnums: the arguments of which gradients are taken.
        device: a name of the catalogue, whose roofline says what operations take; by default they are timed here.

    Returns:
        A plan for ``wrap``. ``predicted_peak_bytes`` is what XLA reported for the compiled gradient.

    Raises:
        BudgetBelowFloor: no plan that was compiled stays within the budget; the error names the smallest.
        InvalidOption: nothing of the arguments can be differentiated.

    Example:
        >>> plan = pj.plan(loss, params, batch, budget="8GiB")  # doctest: +SKIP
        >>> step = jax.jit(jax.value_and_grad(pj.wrap(loss, plan)))  # doctest: +SKIP
    """
    started = time.monotonic()
    call = _Call(function, args, {}, argnums)
    if not any(call.active):
        raise InvalidOption(
            "No argument of this function has a gradient.",
            why=f"argnums={argnums} names no array of floats",
            next="name the argument that holds the parameters with argnums=",
        )
    clock: Clock = TimedClock() if device is None else RooflineClock(find_device(device))
    step = trace_step(call.program, call.regions, clock, model=_name_of(function), signature=key_of_shapes(call.arrays))
    search = _Search(call, step, Planner(StepIndex(step.trace, step.costs)))
    found = search.run(None if budget is None else parse_bytes(budget))
    return msgspec.structs.replace(found, solve_seconds=time.monotonic() - started)


def wrap(function: Callable[..., Any], plan: Plan, *, argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """The same function, whose gradient holds what the plan says and computes the rest again.

    Values and gradients are those of the function. It may be jitted, differentiated and vectorised. Calls at other sizes
    follow the same decisions; the budget was checked for the plan's own sizes alone.

    Args:
        function: the one that was planned.
        plan: from ``plan``, or loaded from a file.
        argnums: as it was planned.

    Raises:
        PlanMismatch: at the first call: the plan was made for another function, or for another framework.

    Example:
        >>> jax.value_and_grad(pj.wrap(loss, plan))(params, batch)  # doctest: +SKIP
    """
    if plan.framework != FRAMEWORK:
        raise PlanMismatch(
            f"This plan was made for {plan.framework}, not for JAX.",
            why="its decisions name tensors of a PyTorch model, and a jaxpr has none of them",
            next="plan the function with plimsoll.integrations.jax.plan",
        )

    @functools.wraps(function)
    def managed(*args: Any, **kwargs: Any) -> Any:
        call = _Call(function, args, kwargs, argnums)
        return call.run(plan)

    return managed


def compiler_options() -> dict[str, str]:
    """What ``jax.jit(..., compiler_options=...)`` needs for a plan to hold in code without loops.

    On a CPU XLA removes the barriers that ``jax.checkpoint`` puts up, and then finds that what is computed again is there
    already. Elsewhere, and inside of ``lax.scan``, nothing is needed.
    """
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.default_backend() == "cpu" else {}


def temporary_bytes(function: Callable[..., Any], *args: Any, argnums: int | Sequence[int] = 0) -> int:
    """What XLA reports as temporary memory of the compiled gradient of a function.

    Args:
        function: wrapped by a plan or not.
        args: its arguments, or their shapes.
        argnums: the arguments of which gradients are taken.

    Example:
        >>> pj.temporary_bytes(pj.wrap(loss, plan), params, batch) <= 8 * 2**30  # doctest: +SKIP
        True
    """
    call = _Call(function, args, {}, argnums, is_read=False)
    return call.measure(call.flat)


class _Call:
    """A function with its arguments as a program of arrays; leaves that are no arrays belong to the program."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        argnums: int | Sequence[int],
        *,
        is_read: bool = True,
    ) -> None:
        wanted = {argnums} if isinstance(argnums, int) else set(argnums)
        self.function = function
        self.arrays: list[Any] = []
        self.active: list[bool] = []
        leaves: list[Any] = []
        self._trees = []
        for number, arg in enumerate((*args, dict(kwargs))):
            found, tree = jax.tree.flatten(arg)
            self._trees.append(tree)
            for leaf in found:
                is_array = isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
                leaves.append((len(self.arrays), None) if is_array else (-1, leaf))
                if is_array:
                    self.arrays.append(leaf)
                    self.active.append(number in wanted and number < len(args) and is_float(leaf))
        self._leaves = leaves
        if is_read:
            self.program, self._out = trace_program(self.flat, *self.arrays)
            self.regions = find_regions(self.program, self.active)

    def flat(self, *arrays: Any) -> Any:
        """The function of arrays alone."""
        leaves = iter(arrays[at] if at >= 0 else leaf for at, leaf in self._leaves)
        parts = [jax.tree.unflatten(tree, [next(leaves) for _ in range(tree.num_leaves)]) for tree in self._trees]
        return self.function(*parts[:-1], **parts[-1])

    def run(self, plan: Plan) -> Any:
        """Follow a plan."""
        found = fingerprint(self.regions)
        if found != plan.fingerprint:
            raise PlanMismatch(
                f"This plan was made for another function: {plan.fingerprint}, not {found}.",
                why="the jaxpr has other operations than the one that was planned, or argnums differ",
                next="plan this function, or call it as it was planned",
            )
        results = self.evaluate(plan.regions, *self.arrays)
        return jax.tree.unflatten(self._out, results)

    def evaluate(self, plans: Sequence[RegionPlan], *arrays: Any) -> list[Any]:
        """The function's results, with the regions checkpointed as planned; as it is if nothing is to be dropped."""
        held: dict[int, Any] = dict(zip(self.program.inputs, arrays, strict=True))
        by_name = {} if all(each.is_untouched for each in plans) else {each.name: each for each in plans}
        for region in self.regions:
            plan = by_name.get(region.name)
            if plan is None or (plan.is_untouched and not region.is_scan):
                run_nodes(self.program.nodes[region.first : region.stop], held, lambda node, inputs: node.bind(inputs))
            else:
                _run_region(self.program, region, plan, held)
        return [take(held, output) for output in self.program.outputs]

    def measure(self, flat: Callable[..., Any]) -> int:
        """Temporary bytes of the gradient of a function of the arrays."""
        active = [at for at, is_active in enumerate(self.active) if is_active]
        rest = [at for at, is_active in enumerate(self.active) if not is_active]

        def loss(chosen: Sequence[Any], others: Sequence[Any]) -> Any:
            arrays = dict(zip((*active, *rest), (*chosen, *others), strict=True))
            result = flat(*(arrays[at] for at in range(len(arrays))))
            return jax.tree.leaves(result)[0], result

        def gradient(chosen: Sequence[Any], others: Sequence[Any]) -> Any:
            first, pull, result = jax.vjp(lambda given: loss(given, others), chosen, has_aux=True)
            return result, pull(jax.numpy.ones_like(first))

        lowered = jax.jit(gradient).lower([self.arrays[at] for at in active], [self.arrays[at] for at in rest])
        compiled = lowered.compile(compiler_options=compiler_options())
        return int(compiled.memory_analysis().temp_size_in_bytes)


def _run_region(program: ArrayProgram, region: Region, plan: RegionPlan, held: dict[int, Any]) -> None:
    """Run one region under ``jax.checkpoint``, and save what the plan keeps."""
    kept = {each.value for each in plan.decisions if each.decision is Decision.KEEP}
    values = [value for node in region.part.nodes for value in node.writes]
    names = {value: f"{region.name}:{value}" for value in values if value_name(region, value) in kept}
    policy = jax.checkpoint_policies.save_only_these_names(*names.values())

    def part(*inputs: Any) -> list[Any]:
        return evaluate(region.part, inputs, naming(names))

    # A loop's body is compiled once for forward and once for backward, so nothing there can be found to be the same.
    checkpointed = jax.checkpoint(part, policy=policy, prevent_cse=not region.is_scan)
    if not region.is_scan:
        results = checkpointed(*(held[value] for value in region.inputs))
        held.update(zip(region.outputs, results, strict=True))
        return
    node = program.nodes[region.first]
    constants, carries = node.params["num_consts"], node.params["num_carry"]
    inputs = [take(held, read) for read in node.reads]

    def body(carry: Any, slices: Any) -> Any:
        results = checkpointed(*inputs[:constants], *carry, *slices)
        return results[:carries], results[carries:]

    carry, slices = jax.lax.scan(
        body,
        inputs[constants : constants + carries],
        inputs[constants + carries :],
        length=node.params["length"],
        reverse=node.params["reverse"],
        unroll=node.params["unroll"],
    )
    held.update(zip(node.writes, (*carry, *slices), strict=True))


class _Search:
    """Looks for the fastest plan whose compiled gradient is within the budget."""

    def __init__(self, call: _Call, step: TracedStep, planner: Planner) -> None:
        self.call, self.step, self.planner = call, step, planner
        self.measured: dict[tuple[object, ...], int] = {}
        self._at: dict[int, Plan] = {}
        """The fastest plan by the model at each peak that was asked."""

    def run(self, budget_bytes: int | None) -> Plan:
        excess_bytes, fitting = 0, None
        for _ in range(_TRIALS):
            found = self._choose(budget_bytes, excess_bytes)
            key = tuple(region.effect for region in found.regions)
            if key in self.measured:
                break
            taken = self._measure(found)
            if budget_bytes is None or taken <= budget_bytes:
                if fitting is None or found.predicted_seconds < fitting.predicted_seconds:
                    fitting = self._told(found, taken, budget_bytes)
                if budget_bytes is None or taken >= (1 - _CLOSE) * budget_bytes or self._is_fastest(found):
                    break
            excess_bytes = taken - found.predicted_peak_bytes
        if fitting is None:
            assert budget_bytes is not None, "without a budget every plan fits"
            fitting = self._floor(budget_bytes)
        return fitting

    def _choose(self, budget_bytes: int | None, excess_bytes: int) -> Plan:
        """The fastest plan by the model: holding less may take less time, so smaller peaks are asked for as well."""
        planner = self.planner
        room = planner.loosest.peak_bytes if budget_bytes is None else budget_bytes - excess_bytes
        peaks = {point.peak_bytes for point in planner.frontier() if point.peak_bytes <= room}
        for peak in {*peaks, room} - self._at.keys():
            self._at[peak] = self._timed(solve(planner, budget_bytes=peak, raise_below_floor=False))
        usable = [each for peak, each in self._at.items() if peak <= room and each.status.is_usable]
        if not usable:
            return self._timed(lowest_known(planner))
        return min(usable, key=lambda each: (each.predicted_seconds, each.predicted_peak_bytes))

    def _is_fastest(self, found: Plan) -> bool:
        return found.predicted_seconds <= self._choose(None, 0).predicted_seconds

    def _timed(self, found: Plan) -> Plan:
        """With what holding takes in time, for the plan and for the function as it is."""
        decisions = (each for region in found.regions for each in region.decisions)
        held = sum(each.bytes for each in decisions if each.decision is Decision.KEEP)
        unmanaged = sum(region.repeats * region.reading.residual_bytes for region in self.call.regions)
        price = self.step.store_seconds_per_byte
        return msgspec.structs.replace(
            found,
            predicted_seconds=found.predicted_seconds + price * held,
            baseline_seconds=found.baseline_seconds + price * unmanaged,
        )

    def _measure(self, found: Plan) -> int:
        key = tuple(region.effect for region in found.regions)
        self.measured[key] = taken = self.call.measure(functools.partial(self.call.evaluate, found.regions))
        return taken

    def _floor(self, budget_bytes: int) -> Plan:
        """The plan that takes least, if it is within the budget."""
        lowest = self._timed(lowest_known(self.planner))
        taken = self._measure(lowest)
        smallest = min(self.measured.values())
        if taken > budget_bytes:
            raise BudgetBelowFloor(
                f"budget {format_bytes(budget_bytes)} is below the smallest peak that XLA reached, {format_bytes(smallest)}.",
                why=f"{len(self.measured)} plans were compiled, the one that holds least among them",
                next=f"budget {format_bytes_up(smallest)}, or halve the batch, or put more layers into one lax.scan",
            )
        return self._told(lowest, taken, budget_bytes)

    def _told(self, found: Plan, taken: int, budget_bytes: int | None) -> Plan:
        """A plan with what XLA reported of it."""
        excess = taken - found.predicted_peak_bytes
        unmanaged = sum(region.repeats * region.reading.residual_bytes for region in self.call.regions)
        note = f"compiled: XLA reports {format_bytes(taken)}, the model said {format_bytes(found.predicted_peak_bytes)}"
        return msgspec.structs.replace(
            found,
            framework=FRAMEWORK,
            status=Status.FEASIBLE,
            budget_bytes=budget_bytes,
            predicted_peak_bytes=taken,
            floor_bytes=min(taken, max(found.floor_bytes + excess, 0)),
            baseline_peak_bytes=max(unmanaged, taken),
            notes=(*found.notes, note),
        )


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
