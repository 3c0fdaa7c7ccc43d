"""What training a JAX function takes on a device of the catalogue, which need not be here.

Arguments, gradients and the optimizer's state are counted exactly. Temporary memory is what XLA reports for the gradient that
it compiles *here*; the compiler of another device fuses otherwise, so the figure has a wide error. Seconds are the roofline's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.estimate import BudgetItem, Estimate, StageEstimate, StageSeconds, Throughput
from plimsoll.artifacts.job import Layout, ModelFacts
from plimsoll.artifacts.plan import Holder, Peak, Plan
from plimsoll.artifacts.trace import Phase
from plimsoll.errors import BudgetBelowFloor
from plimsoll.estimator.budget import COUNTED_ERROR, framework_items
from plimsoll.integrations.jax.call import JaxCall
from plimsoll.integrations.jax.planning import Searched
from plimsoll.integrations.jax.program import aval_bytes
from plimsoll.integrations.jax.reading import flops_of
from plimsoll.planning.costing.devices import find_device
from plimsoll.units import format_bytes, parse_bytes

_TEMPORARY_ERROR = 0.3
"""Assumed: the planner's own model of fusion, made from the same jaxpr, was 14 to 36% off XLA for CPUs."""
SECONDS_ERROR = 0.3


class FixedSizes:
    """Bytes of a function's training that no plan changes."""

    def __init__(self, call: JaxCall, params: Any, optimizer: Any) -> None:
        pairs = list(zip(call.arrays, call.active, strict=True))
        self.parameters = sum(aval_bytes(each) for each, is_active in pairs if is_active)
        self.count = sum(each.size for each, is_active in pairs if is_active)
        self.batch = sum(aval_bytes(each) for each, is_active in pairs if not is_active)
        state = [] if optimizer is None else jax.tree.leaves(jax.eval_shape(optimizer.init, _arrays(params)))
        self.state = sum(aval_bytes(each) for each in state)
        shapes = [each.shape for each, is_active in pairs if not is_active and each.shape]
        self.rows = int(shapes[0][0]) if shapes else 1

    @property
    def total(self) -> int:
        """Parameters, as many bytes of gradients, the optimizer's state and the batch."""
        return 2 * self.parameters + self.state + self.batch


def _arrays(tree: Any) -> Any:
    """A tree without what is no array, as optimizers take it."""
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else None, tree)


def parameters_of(args: Sequence[Any], argnums: int | Sequence[int]) -> Any:
    return args[argnums] if isinstance(argnums, int) else tuple(args[number] for number in argnums)


def estimate(
    function: Callable[..., Any],
    *args: Any,
    device: str = "H100-SXM",
    optimizer: Any = None,
    budget: str | int | None = None,
    argnums: int | Sequence[int] = 0,
) -> Estimate:
    """Say what training a function takes on a device of the catalogue: memory item by item, and speed.

    Args:
        function: as for ``plan``.
        args: as for ``plan``; shapes will do.
        device: from the catalogue of devices.
        optimizer: with optax's ``init``, whose state is counted.
        budget: bytes for everything, to plan within; by default nothing is planned.
        argnums: as for ``plan``.

    Returns:
        An estimate of one stage with one rank.

    Raises:
        BudgetBelowFloor: what no plan changes takes the budget, or no plan that was compiled leaves room for it.

    Example:
        >>> print(pj.estimate(loss, params, batch, optimizer=optax.adamw(1e-3)))  # doctest: +SKIP
    """
    started = time.monotonic()
    searched = Searched(function, args, argnums, device)
    sizes = FixedSizes(searched.call, parameters_of(args, argnums), optimizer)
    unmanaged = searched.call.measure(searched.call.flat)
    limit = None if budget is None else parse_bytes(budget)
    plan = None if limit is None or unmanaged + sizes.total <= limit else searched.plan(room_in(limit, sizes))
    taken = unmanaged if plan is None else plan.predicted_peak_bytes
    stage = _stage(searched, sizes, (taken, unmanaged), plan, device)
    seconds = stage.seconds.forward_seconds + stage.seconds.backward_seconds + stage.seconds.recompute_seconds
    return Estimate(
        target=searched.name,
        model=searched.name,
        device=find_device(device).name,
        device_bytes=find_device(device).memory_bytes,
        precision="as the function's arrays",
        optimizer=type(optimizer).__module__.partition(".")[0] if optimizer is not None else "none",
        strategy="auto" if plan is not None else "none",
        budget_bytes=limit,
        layout=Layout(),
        facts=ModelFacts(name=searched.name, architecture="jax", batch=sizes.rows, parameters=sizes.count),
        stages=(stage,),
        throughput=Throughput(
            step_seconds=seconds,
            samples_per_second=sizes.rows / seconds if seconds else 0.0,
            tokens_per_second=None,
            mfu=_utilisation(searched, device, seconds),
            relative_error=SECONDS_ERROR,
            basis=Basis.MODELLED,
            note="forward and backward by the roofline; the optimizer's step is not in it",
        ),
        notes=("The first array without a gradient says how many samples there are.",),
        total_seconds=time.monotonic() - started,
    )


def room_in(limit: int, sizes: FixedSizes) -> int:
    """What a budget for everything leaves to temporaries."""
    if sizes.total >= limit:
        raise BudgetBelowFloor(
            f"budget {format_bytes(limit)} is below what no plan changes, {format_bytes(sizes.total)}.",
            why="parameters, gradients, the optimizer's state and the batch are there whatever is recomputed",
            next="take a smaller model or optimizer state, or a device with more memory",
        )
    return limit - sizes.total


def _stage(
    searched: Searched, sizes: FixedSizes, taken: tuple[int, int], plan: Plan | None, device: str
) -> StageEstimate:
    def exact(name: str, bytes_: int) -> BudgetItem:
        return BudgetItem(name=name, bytes=bytes_, relative_error=COUNTED_ERROR, basis=Basis.EXACT)

    note = f"compiled by XLA for {jax.default_backend()}; for another device XLA decides anew"
    items = (
        exact("parameters", sizes.parameters),
        exact("gradients", sizes.parameters),
        exact("optimizer state", sizes.state),
        exact("batch", sizes.batch),
        BudgetItem(name="temporaries", bytes=taken[0], relative_error=_TEMPORARY_ERROR, basis=Basis.ASSUMED, note=note),
    )
    # The workspaces are torch's way with cuBLAS.
    outside = tuple(each for each in framework_items(find_device(device), Layout()) if each.name != "cuBLAS workspaces")
    allocated = sizes.total + taken[0]
    holders = tuple(Holder(label=each.name, bytes=each.bytes or 0) for each in items)
    spent = dict.fromkeys(Phase, 0.0)
    for op in searched.step.trace.ops:
        spent[op.phase] += searched.step.costs.ops[op.cost_key].seconds
    lowest = min([*searched.search.measured.values(), taken[0]])
    return StageEstimate(
        stage=0,
        ranks=1,
        regions=searched.name,
        in_flight=1,
        items=(*items, *outside),
        allocated_bytes=allocated,
        reserved_bytes=None,
        unmanaged_bytes=sizes.total + taken[1],
        recomputed_bytes=sizes.total + lowest,
        peak=Peak(moment="gradient", bytes=allocated, holders=tuple(sorted(holders, key=lambda each: -each.bytes))),
        seconds=StageSeconds(
            forward_seconds=spent[Phase.FORWARD],
            backward_seconds=spent[Phase.BACKWARD],
            weight_gradient_seconds=0.0,
            recompute_seconds=0.0 if plan is None else max(plan.predicted_seconds - plan.baseline_seconds, 0.0),
            communication_seconds=0.0,
            exposed_seconds=0.0,
            optimizer_seconds=0.0,
        ),
        bubble_share=0.0,
        plans=() if plan is None else (plan,),
    )


def _utilisation(searched: Searched, device: str, seconds: float) -> float | None:
    flops, dtype = 0, "f32"
    for region in searched.call.regions:
        own = [(node, region.part) for node in region.part.nodes]
        own += [(node, region.reading.joint) for node in region.reading.backward] if region.reading.is_moving else []
        flops += region.repeats * sum(flops_of(node, program) for node, program in own)
    widths = {
        str(each.dtype) for each, is_active in zip(searched.call.arrays, searched.call.active, strict=True) if is_active
    }
    if widths == {"bfloat16"} or widths == {"float16"}:
        dtype = "bf16"
    return flops / seconds / find_device(device).flops_per_second(dtype) if seconds else None
