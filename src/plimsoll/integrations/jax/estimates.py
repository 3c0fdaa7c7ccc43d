"""Estimates the training of a JAX function on a device of the catalogue, and finds the largest batch that fits.

The device may be absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.fit import Fit
from plimsoll.integrations.estimates import FixedSizes, estimate_step, fit_steps
from plimsoll.integrations.jax.planning import Searched
from plimsoll.integrations.jax.program import aval_bytes


def estimate(
    function: Callable[..., Any],
    *args: Any,
    device: str = "H100-SXM",
    optimizer: Any = None,
    budget: str | int | None = None,
    argnums: int | Sequence[int] = 0,
) -> Estimate:
    """Estimate the training of a function on a device of the catalogue: memory item by item, and speed.

    Args:
        function: as for ``plan``.
        args: as for ``plan``; they may be shapes.
        device: the name of a device from the catalogue.
        optimizer: an object with an ``init`` like optax's. The state that ``init`` returns is counted.
        budget: if given, the step is planned to fit into these bytes, which cover everything. By default nothing is planned.
        argnums: as for ``plan``.

    Returns:
        An estimate of one stage with one rank.

    Raises:
        BudgetBelowFloor: the bytes that do not depend on the plan exceed the budget, or no compiled plan fits in the rest.

    Example:
        >>> print(pj.estimate(loss, params, batch, optimizer=optax.adamw(1e-3)))  # doctest: +SKIP
    """
    started = time.monotonic()
    step = Searched(function, args, argnums, device)
    name = type(optimizer).__module__.partition(".")[0] if optimizer is not None else "none"
    sizes = _sizes(step, args, argnums, optimizer)
    return estimate_step(step, sizes, device=device, optimizer=name, budget=budget, started=started)


def fit(
    function: Callable[..., Any],
    args_of: Callable[[int], Sequence[Any]],
    budget: str | int,
    *,
    device: str | None = None,
    optimizer: Any = None,
    argnums: int | Sequence[int] = 0,
    most_batch: int = 1024,
) -> Fit:
    """Find the batch with the most samples per second whose training fits into the budget. The budget covers everything.

    Batches are doubled until no plan fits. The middle between the last two batches is tried as well.

    Args:
        function: as for ``plan``.
        args_of: returns the arguments for a number of samples; they may be shapes.
        budget: bytes of parameters, gradients, optimizer state, batch and temporaries together.
        device: as for ``plan``.
        optimizer: as for ``estimate``.
        argnums: as for ``plan``.
        most_batch: the largest batch to try.

    Returns:
        All batches that were tried, and the plan for the best batch.

    Raises:
        InvalidOption: ``most_batch`` is less than 1.

    Example:
        >>> found = pj.fit(loss, lambda rows: (params, batch[:rows]), "16GiB", device="H100-SXM")  # doctest: +SKIP
    """

    def at(rows: int) -> tuple[Searched, FixedSizes]:
        args = args_of(rows)
        step = Searched(function, args, argnums, device)
        return step, _sizes(step, args, argnums, optimizer)

    return fit_steps(at, budget, most_batch=most_batch)


def _sizes(step: Searched, args: Sequence[Any], argnums: int | Sequence[int], optimizer: Any) -> FixedSizes:
    chosen = args[argnums] if isinstance(argnums, int) else tuple(args[number] for number in argnums)
    # Optimizers expect a tree with arrays only.
    arrays = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else None, chosen)
    pairs = list(zip(step.call.arrays, step.call.active, strict=True))
    return sizes_of(
        parameters=[each for each, is_active in pairs if is_active],
        state=None if optimizer is None else jax.eval_shape(optimizer.init, arrays),
        batch=[each for each, is_active in pairs if not is_active],
    )


def sizes_of(*, parameters: Any, state: Any, batch: Any, others: Any = None) -> FixedSizes:
    """Return the bytes that do not depend on the plan, from trees of arrays or shapes.

    ``others`` are parameters without a gradient.
    """
    taken = sum(map(aval_bytes, jax.tree.leaves(parameters)))
    shapes = [each.shape for each in jax.tree.leaves(batch) if each.shape]
    return FixedSizes(
        parameters=taken + sum(map(aval_bytes, jax.tree.leaves(others))),
        gradients=taken,
        state=sum(map(aval_bytes, jax.tree.leaves(state))),
        batch=sum(map(aval_bytes, jax.tree.leaves(batch))),
        count=sum(each.size for each in jax.tree.leaves((parameters, others))),
        rows=int(shapes[0][0]) if shapes else 1,
    )
