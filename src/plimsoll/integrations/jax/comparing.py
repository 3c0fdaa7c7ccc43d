"""Compares plans for a JAX function with policies of ``jax.checkpoint``, measured in alternating rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from plimsoll.artifacts.comparison import Comparison
from plimsoll.integrations.comparing import TimedOn, Way, compare_ways
from plimsoll.integrations.jax.call import JaxCall, compiler_options
from plimsoll.integrations.jax.program import is_float


def compare(
    function: Callable[..., Any],
    *args: Any,
    ways: Mapping[str, Callable[..., Any]],
    argnums: int | Sequence[int] = 0,
    steps: int = 5,
) -> Comparison:
    """Compare several ways to run one function: XLA's temporary memory, seconds of a gradient, and the gradients.

    Args:
        function: the function without a plan.
        args: arrays to run it on.
        ways: by name, the same function under plans (``pj.wrap``) and under policies of ``jax.checkpoint``.
        argnums: the arguments to differentiate.
        steps: timed rounds; in each, every way runs once.

    Returns:
        A comparison with one row per way; ratios are medians over the rounds.

    Example:
        >>> ways = {"plan": pj.wrap(loss, plan), "nothing saveable": jax.checkpoint(loss)}  # doctest: +SKIP
        >>> print(pj.compare(loss, params, batch, ways=ways))  # doctest: +SKIP
    """

    def way(each: Callable[..., Any]) -> Way:
        call = JaxCall(each, args, {}, argnums, is_read=False)
        compiled, given = call.compiled(), call.split()
        gradient = [leaf for leaf in jax.tree.leaves(compiled(*given)[1]) if is_float(leaf)]
        return Way(
            run=lambda: jax.block_until_ready(compiled(*given)),
            gradient=gradient,
            peak_bytes=int(compiled.memory_analysis().temp_size_in_bytes),
        )

    arrays = JaxCall(function, args, {}, argnums, is_read=False).arrays
    place = TimedOn(
        clock=time.process_time if jax.default_backend() == "cpu" else time.perf_counter,
        device=jax.devices()[0].device_kind,
        versions={"jax": jax.__version__},
        signature=" ".join(f"{each.dtype}{list(each.shape)}" for each in arrays[-4:]),
        note=f"compiled with {compiler_options() or 'no options'}; peaks are XLA's temporary memory",
    )
    name = str(getattr(function, "__name__", type(function).__name__))
    return compare_ways(way(function), {each: way(run) for each, run in ways.items()}, place, model=name, steps=steps)
