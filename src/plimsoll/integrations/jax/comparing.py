"""Plans for a JAX function and policies of ``jax.checkpoint``, measured side by side in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.integrations.jax.call import JaxCall, compiler_options
from plimsoll.integrations.jax.program import is_float

_ROUNDING = 1e-6
"""Differences of the gradient up to this share of it come from sums in another order."""


def compare(
    function: Callable[..., Any],
    *args: Any,
    ways: Mapping[str, Callable[..., Any]],
    argnums: int | Sequence[int] = 0,
    steps: int = 5,
) -> Comparison:
    """Measure ways to run one function side by side: XLA's temporary memory, seconds of a gradient, and the gradients.

    Args:
        function: the unmanaged one.
        args: arrays to run it on.
        ways: the same function under plans (``pj.wrap``) and under policies of ``jax.checkpoint``, by what you call them.
        argnums: the arguments of which gradients are taken.
        steps: timed rounds; in each, every way runs once.

    Returns:
        A comparison with one row per way; ratios are medians of the rounds'.

    Example:
        >>> ways = {"plan": pj.wrap(loss, plan), "nothing saveable": jax.checkpoint(loss)}  # doctest: +SKIP
        >>> print(pj.compare(loss, params, batch, ways=ways))  # doctest: +SKIP
    """
    call = JaxCall(function, args, {}, argnums, is_read=False)
    every = {"": function, **ways}
    compiled = {name: JaxCall(each, args, {}, argnums, is_read=False).compiled() for name, each in every.items()}
    results = {name: jax.block_until_ready(each(*call.split())) for name, each in compiled.items()}
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in every}
    for number in range(max(steps, 1)):
        for name in list(every) if number % 2 else list(every)[::-1]:
            started = clock()
            jax.block_until_ready(compiled[name](*call.split()))
            seconds[name].append(clock() - started)
    rows = []
    for name in ways:
        apart = _apart(results[""][1], results[name][1])
        rows.append(
            ComparisonRow(
                strategy=name,
                measured_peak_bytes=int(compiled[name].memory_analysis().temp_size_in_bytes),
                measured_seconds=statistics.median(seconds[name]),
                measured_ratio=statistics.median(a / b for a, b in zip(seconds[name], seconds[""], strict=True)),
                is_bit_equal=apart == 0.0,
                is_rounding=apart <= _ROUNDING,
                gradient_error=apart,
            )
        )
    return Comparison(
        model=str(getattr(function, "__name__", type(function).__name__)),
        signature=" ".join(f"{each.dtype}{list(each.shape)}" for each in call.arrays[-4:]),
        device=jax.devices()[0].device_kind,
        versions={"jax": jax.__version__},
        steps=max(steps, 1),
        baseline_peak_bytes=int(compiled[""].memory_analysis().temp_size_in_bytes),
        measured_baseline_seconds=statistics.median(seconds[""]),
        rows=tuple(rows),
        notes=(f"compiled with {compiler_options() or 'no options'}; peaks are XLA's temporary memory",),
    )


def _apart(wanted: Any, found: Any) -> float:
    """‖Δg‖ / ‖g‖ of the whole gradient: of one array alone it says little where that is rounding, such as a key's bias."""
    pairs = [(a, b) for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True) if is_float(a)]
    length = sum(float(jax.numpy.vdot(a, a).real) for a, _ in pairs)
    return float((sum(float(jax.numpy.vdot(a - b, a - b).real) for a, b in pairs) / max(length, 1e-60)) ** 0.5)
