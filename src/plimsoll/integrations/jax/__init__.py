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
from collections.abc import Callable, Sequence
from typing import Any

from plimsoll.artifacts.plan import Plan
from plimsoll.errors import PlanMismatch
from plimsoll.integrations.jax.call import JaxCall, compiler_options
from plimsoll.integrations.jax.comparing import compare
from plimsoll.integrations.jax.estimates import estimate, fit
from plimsoll.integrations.jax.planning import FRAMEWORK, plan
from plimsoll.integrations.search import check_plan

__all__ = ["compare", "compiler_options", "estimate", "fit", "plan", "temporary_bytes", "wrap"]


def wrap(function: Callable[..., Any], plan: Plan, *, argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """The same function, whose gradient holds what the plan says and computes the rest again.

    Values and gradients are those of the function. It may be jitted, differentiated and vectorised. Calls at other sizes
    follow the same decisions; the budget was checked for the plan's own sizes alone.

    Args:
        function: the one that was planned.
        plan: from ``plan``, or loaded from a file.
        argnums: as it was planned.

    Raises:
        InvalidOption: ``plan`` is no plan, such as the path of one.
        PlanMismatch: the plan was made for another framework or, at the first call, for another function.

    Example:
        >>> jax.value_and_grad(pj.wrap(loss, plan))(params, batch)  # doctest: +SKIP
    """
    check_plan(plan)
    if plan.framework != FRAMEWORK:
        raise PlanMismatch(
            f"This plan was made for {plan.framework}, not for JAX.",
            why="its decisions name tensors or layers of another framework, and a jaxpr has none of them",
            next="plan the function with plimsoll.integrations.jax.plan",
        )

    @functools.wraps(function)
    def managed(*args: Any, **kwargs: Any) -> Any:
        call = JaxCall(function, args, kwargs, argnums)
        return call.run(plan)

    return managed


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
    call = JaxCall(function, args, {}, argnums, is_read=False)
    return call.measure(call.flat)
