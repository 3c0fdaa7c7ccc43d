"""A function of jax with its arguments, as a program of arrays that can run under a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan, RegionPlan
from plimsoll.errors import PlanMismatch
from plimsoll.integrations.jax.arguments import Arguments
from plimsoll.integrations.jax.names import evaluate, naming, run_nodes
from plimsoll.integrations.jax.program import ArrayProgram, take, trace_program
from plimsoll.integrations.jax.regions import Region, find_regions
from plimsoll.integrations.jax.trace import INSIDE, fingerprint, value_name

PINNED = "pinned_host"
"""jax's name for host memory that the device can read directly."""


def compiler_options() -> dict[str, str | int]:
    """Return the ``compiler_options`` that ``jax.jit`` needs for a plan to have an effect in code without loops.

    On a CPU, XLA removes the barriers of ``jax.checkpoint``, and then merges the recomputation with the original computation.
    Inside of ``lax.scan``, options are not needed. Devices other than CPUs do not need them either.
    """
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.default_backend() == "cpu" else {}


@functools.cache
def _looking_options() -> dict[str, str | int]:
    """Return compiler options that make a compilation faster if it only serves to count bytes.

    XLA assigns buffers before it generates code, and on a CPU code generation takes most of the time. XLA's older code for
    fusions is the fastest to generate. Of 21 gradients, seven took 192 bytes more with this code, and the others the same.
    """
    if jax.default_backend() != "cpu":
        return {}
    plain: dict[str, str | int] = {"xla_backend_optimization_level": 0}
    shorter = plain | {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda x: x + 1).lower(0.0).compile(compiler_options=shorter)
    except jax.errors.JaxRuntimeError:  # another version of XLA may not know the option
        return plain
    return shorter


class JaxCall:
    """A JAX function with its arguments, as a program of arrays. Arguments that are not arrays become part of the program."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        argnums: int | Sequence[int],
        *,
        is_read: bool = True,
    ) -> None:
        self.function = function
        self._given = Arguments(args, kwargs, argnums)
        self.arrays, self.active = self._given.arrays, self._given.active
        if is_read:
            self.program, self._out = trace_program(self.flat, *self.arrays)
            self.regions = find_regions(self.program, self.active)

    def flat(self, *arrays: Any) -> tuple[Any, dict[int, Any]]:
        """Call the function with other arrays in place of those in its arguments.

        Return the result, and what the function changed in its arguments, as a mapping from the array's index to the new value.
        """
        positional, named, objects = self._given.rebuilt(arrays)
        result = self.function(*positional, **named)
        return result, self._given.changed(arrays, objects)

    def run(self, plan: Plan) -> Any:
        """Run the function under a plan, and return the function's result."""
        found = fingerprint(self.regions)
        if found != plan.fingerprint:
            raise PlanMismatch(
                f"This plan was made for another function: {plan.fingerprint}, not {found}.",
                why="its jaxpr has other operations than the planned jaxpr, argnums differ, or an argument was a Python number "
                "in one case and an array in the other (jit turns numbers into arrays)",
                next="plan this function, call it with the kinds of arguments it was planned with, or plan with arrays "
                "instead of numbers",
            )
        result, changed = jax.tree.unflatten(self._out, self.evaluate(plan.regions, *self.arrays))
        self._given.write(changed)
        return result

    def evaluate(self, plans: Sequence[RegionPlan], *arrays: Any) -> list[Any]:
        """Return the function's results. Its regions (the parts that a plan manages) run under ``jax.checkpoint`` as planned.

        A region is checkpointed even if the plan keeps all of its values. Without a checkpoint, jax would also hold values that
        only the derivative makes.
        """
        held: dict[int, Any] = dict(zip(self.program.inputs, arrays, strict=True))
        by_name = {each.name: each for each in plans}
        for region in self.regions:
            plan = by_name.get(region.name)
            if plan is None or _is_left_alone(plan):
                run_nodes(self.program.nodes[region.first : region.stop], held, lambda node, inputs: node.bind(inputs))
            else:
                _run_region(self.program, region, plan, held)
        return [take(held, output) for output in self.program.outputs]

    @property
    def unmanaged_bytes(self) -> int:
        """The bytes that jax itself, without a plan, holds from the function's forward to its derivative."""
        return sum(region.repeats * region.reading.residual_bytes for region in self.regions)

    def taken(self, plans: Sequence[RegionPlan]) -> int:
        """Return the temporary bytes of the compiled gradient under these plans, one plan for each region (part of the function
        that a plan manages).
        """
        return self.measure(functools.partial(self.evaluate, plans))

    def measure(self, flat: Callable[..., Any]) -> int:
        """Return the temporary bytes of the compiled gradient of a function of arrays."""
        compiled = self._lowered(flat).compile(compiler_options=compiler_options() | _looking_options())
        return int(compiled.memory_analysis().temp_size_in_bytes)

    def compiled(self) -> Any:
        """Compile the gradient and return it. Its arguments are the two lists of arrays that ``split`` returns."""
        return self._lowered(self.flat).compile(compiler_options=compiler_options())

    def split(self) -> tuple[list[Any], list[Any]]:
        """Return the arrays among the arguments as two lists: the arrays to differentiate, and the others."""
        pairs = list(zip(self.arrays, self.active, strict=True))
        return [each for each, is_active in pairs if is_active], [each for each, is_active in pairs if not is_active]

    def _lowered(self, flat: Callable[..., Any]) -> Any:
        order = sorted(range(len(self.arrays)), key=lambda at: not self.active[at])

        def loss(chosen: Sequence[Any], others: Sequence[Any]) -> Any:
            arrays = dict(zip(order, (*chosen, *others), strict=True))
            result = flat(*(arrays[at] for at in range(len(arrays))))
            return jax.tree.leaves(result)[0], result

        def gradient(chosen: Sequence[Any], others: Sequence[Any]) -> Any:
            first, pull, result = jax.vjp(lambda given: loss(given, others), chosen, has_aux=True)
            return result, pull(jax.numpy.ones_like(first))

        return jax.jit(gradient).lower(*self.split())


def _is_left_alone(plan: RegionPlan) -> bool:
    """Return whether a region (a part of the function that a plan manages) runs without ``jax.checkpoint``, so that jax holds
    all that it would hold without a plan.
    """
    return any(each.value == INSIDE and each.decision is Decision.KEEP for each in plan.decisions)


def _run_region(program: ArrayProgram, region: Region, plan: RegionPlan, held: dict[int, Any]) -> None:
    """Run one region (a part of the function that a plan manages) under ``jax.checkpoint``, which saves the values that the
    plan keeps.

    The results are added to ``held``.
    """
    decided = {each.value: each.decision for each in plan.decisions if each.decision is not Decision.RECOMPUTE}
    values = [value for node in region.part.nodes for value in node.writes]
    names = {value: f"{region.name}:{value}" for value in values if value_name(region, value) in decided}
    away = [name for value, name in names.items() if decided[value_name(region, value)] is Decision.OFFLOAD]
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name in names.values() if name not in away],
        names_which_can_be_offloaded=away,
        offload_src="device",
        offload_dst=PINNED,
    )

    def part(*inputs: Any) -> list[Any]:
        return evaluate(region.part, inputs, naming(names))

    # A loop's body is compiled separately for forward and backward, so common subexpressions cannot be merged between them.
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
