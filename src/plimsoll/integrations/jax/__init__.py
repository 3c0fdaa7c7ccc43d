"""Plan which values of a JAX function are held for its gradient, under a budget of temporary memory.

    plan = pj.plan(loss, params, batch, budget="8GiB")
    step = jax.jit(jax.value_and_grad(pj.wrap(loss, plan)))

The planner is the same as for PyTorch. Values and costs come from the jaxpr of the function and of its reverse derivative.
``wrap`` puts ``jax.checkpoint`` around the regions (the parts that a plan manages) of the function, with a policy that saves
the values that the plan keeps. Each value has its own name, so that of two equal operations one may be saved and the other not.

The budget is for the compiled gradient's temporary memory, in XLA's terms. Arguments (parameters, batch) and results
(gradients) are not included. XLA decides about buffers after the plan was made. So a plan is compiled before it is returned,
and corrected by the difference until XLA reports a peak within the budget.

Source: ``jax.checkpoint`` and ``jax.ad_checkpoint.checkpoint_name`` are documented interfaces; the policies of MaxText and of
flax name whole kinds of values by hand. Known weakness: XLA's fusion is only estimated, and one choice serves all iterations of
a scan.
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

__all__ = ["PlanMismatch", "compare", "compiler_options", "estimate", "fit", "plan", "temporary_bytes", "wrap"]


def wrap(function: Callable[..., Any], plan: Plan, *, argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """Return a function that does the same as the given function, but whose gradient holds only the values that the plan keeps,
    and recomputes the rest.

    Values and gradients are equal to those without a plan. The result may be jitted, differentiated and vectorised. Calls at
    other sizes follow the same decisions, but the budget was checked only for the plan's own sizes.

    Args:
        function: the planned function.
        plan: from ``plan``, or loaded from a file.
        argnums: the same as for ``plan``.

    Raises:
        InvalidOption: ``plan`` is not a `Plan`, but for example the path of a saved plan.
        PlanMismatch: the plan was made for another framework or, at the first call, for another function.

    Example:
        >>> jax.value_and_grad(pj.wrap(loss, plan))(params, batch)  # doctest: +SKIP
    """
    check_plan(plan, FRAMEWORK, "JAX")

    @functools.wraps(function)
    def managed(*args: Any, **kwargs: Any) -> Any:
        call = JaxCall(function, args, kwargs, argnums)
        return call.run(plan)

    return managed


def temporary_bytes(function: Callable[..., Any], *args: Any, argnums: int | Sequence[int] = 0) -> int:
    """Return the bytes of temporary memory of a function's compiled gradient, as XLA reports them.

    Args:
        function: wrapped by a plan or not.
        args: its arguments, or their shapes.
        argnums: the arguments to differentiate.

    Example:
        >>> pj.temporary_bytes(pj.wrap(loss, plan), params, batch) <= 8 * 2**30  # doctest: +SKIP
        True
    """
    call = JaxCall(function, args, {}, argnums, is_read=False)
    return call.measure(call.flat)
