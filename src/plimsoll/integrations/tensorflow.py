"""Plans which layers of a TensorFlow function run again for its gradient, under a budget of what a step allocates.

    plan = ptf.plan(loss, x, y, layers=blocks, budget="8GiB")
    managed = tf.function(ptf.wrap(loss, plan, layers=blocks))

``tf.recompute_grad`` takes whole functions, so the decision is one per layer. What a layer holds for its gradient is read
from the graph of a traced ``tf.function``: the tensors that the layer's operations make and those of the gradient read. A
plan is run before it is handed over, and what it allocates is compared with the budget.

Known weakness: on a CPU TensorFlow counts no tensor of less than 256 KiB. Time is arithmetic and traffic at two rates that
are measured here. A layer that writes variables or draws random numbers is never run again: it would do so twice.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import tensorflow as tf

from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import InvalidOption
from plimsoll.integrations.comparing import TimedOn, Way, compare_ways
from plimsoll.integrations.layers import LayerPlans, calling, check_fingerprint, kinds_of, rerun_layers, rerun_meter
from plimsoll.integrations.layers_in_graph import rates_of, read_layers
from plimsoll.units import parse_bytes

FRAMEWORK = "tensorflow"
_MOST_RUNS = 16
"""Runs of one step in which its peak is looked for."""


def plan(step: Callable[..., Any], *args: Any, layers: Sequence[Any], budget: str | int | None) -> Plan:
    """Decide which layers run again for the gradient of a step.

    Args:
        step: returns a scalar loss; traced, and run on ``args`` to see what plans allocate.
        args: tensors, as the step will get them.
        layers: modules that the step calls, none inside of another, such as the blocks of a network.
        budget: bytes that a step allocates at its peak, gradients included, such as ``"8GiB"``; ``None`` for the fastest plan.

    Returns:
        A plan for ``wrap``. ``predicted_peak_bytes`` is what one run of its step allocated.

    Raises:
        BudgetBelowFloor: no plan that was run stays within the budget.
        InvalidOption: the step does not call a layer, or calls one inside of another; or nobody counts bytes here.

    Example:
        >>> plan = ptf.plan(loss, x, y, layers=blocks, budget="8GiB")  # doctest: +SKIP
    """
    started = time.monotonic()
    costs, run = read_layers(step, args, layers, rates_of(None))
    name = getattr(step, "__name__", type(step).__name__)

    def measure(names: frozenset[str]) -> int:
        return allocated_bytes(_rerunning(step, names, layers), *args) if names else bytes_of_runs(run)

    meter = rerun_meter(FRAMEWORK, "TensorFlow", measure)
    found = LayerPlans(costs, meter, name=name).plan(None if budget is None else parse_bytes(budget))
    return msgspec.structs.replace(found, solve_seconds=time.monotonic() - started)


def wrap(step: Callable[..., Any], plan: Plan, *, layers: Sequence[Any]) -> Callable[..., Any]:
    """The same step, in which the layers that the plan names are under ``tf.recompute_grad``.

    Args:
        step: the one that was planned; ``tf.function`` goes around the result.
        plan: from ``plan``, or loaded from a file.
        layers: as they were planned.

    Raises:
        PlanMismatch: the plan was made for other layers, or for another framework.

    Example:
        >>> managed = tf.function(ptf.wrap(loss, plan, layers=blocks))  # doctest: +SKIP
    """
    check_fingerprint(plan, FRAMEWORK, kinds_of(layers))
    return _rerunning(step, rerun_layers(plan), layers)


def allocated_bytes(step: Callable[..., Any], *args: Any) -> int:
    """What one run of a step and its gradient allocates at its peak, beside what was there before.

    Args:
        step: returns a scalar; run inside of ``tf.function``, four times at least.
        args: tensors.

    Raises:
        InvalidOption: TensorFlow does not count bytes on this device.

    Example:
        >>> ptf.allocated_bytes(managed, x, y) <= 8 * 2**30  # doctest: +SKIP
        True
    """
    run = tf.function(functools.partial(_gradient, step))
    return bytes_of_runs(functools.partial(run, *(tf.convert_to_tensor(each) for each in args)))


def bytes_of_runs(run: Callable[[], object]) -> int:
    """What a run allocates at its peak, beside what was there before: the most of several.

    With more threads than one between operations they run in whatever order they become ready in, and the peaks of runs
    differ. Runs that are all alike end after three, others when four have brought nothing new.

    Raises:
        InvalidOption: TensorFlow does not count bytes on this device.
    """
    # The first run also makes what stays, such as constants and the kernels' own caches.
    run()
    device = f"{_device()}:0"
    peaks: list[int] = []
    try:
        before = tf.config.experimental.get_memory_info(device)["current"]
        while len(peaks) < _MOST_RUNS and (len(peaks) < 3 or (len(set(peaks)) > 1 and max(peaks) in peaks[-4:])):
            tf.config.experimental.reset_memory_stats(device)
            run()
            peaks.append(int(tf.config.experimental.get_memory_info(device)["peak"] - before))
    except ValueError as error:
        raise InvalidOption(
            f"TensorFlow does not say what {device} allocates.",
            why=f"{error}; on a CPU the allocator of oneDNN alone counts",
            next="leave TF_ENABLE_ONEDNN_OPTS at its default, or plan on a GPU",
        ) from error
    if not max(peaks):
        raise InvalidOption(
            "TensorFlow counts no byte of this step.",
            why="on a CPU its allocator counts tensors of 256 KiB and more alone",
            next="plan with a batch of the size that is trained with",
        )
    return max(peaks)


def compare(step: Callable[..., Any], *args: Any, ways: Mapping[str, Callable[..., Any]], steps: int = 5) -> Comparison:
    """Measure ways to run one step side by side: bytes that a run allocates, seconds of a gradient, and the gradients.

    Args:
        step: the unmanaged one; returns a scalar.
        args: tensors.
        ways: the same step under plans (``ptf.wrap``) or written otherwise, by what you call them.
        steps: timed rounds; in each, every way runs once.

    Raises:
        InvalidOption: TensorFlow does not count bytes on this device.

    Example:
        >>> print(ptf.compare(loss, x, y, ways={"plan": managed}))  # doctest: +SKIP
    """
    given = tuple(tf.convert_to_tensor(each) for each in args)

    def way(each: Callable[..., Any]) -> Way:
        run = tf.function(functools.partial(_gradient, each))
        gradient = [tf.convert_to_tensor(part).numpy() for part in run(*given)[1] if part is not None]
        return Way(run=lambda: run(*given)[0].numpy(), gradient=gradient, peak_bytes=allocated_bytes(each, *given))

    place = TimedOn(
        clock=time.process_time if _device() == "CPU" else time.perf_counter,
        device=_device(),
        versions={"tensorflow": tf.__version__},
        signature=" ".join(f"{each.dtype.name}{each.shape.as_list()}" for each in given),
        note="peaks are what TensorFlow says that a run allocates, gradients included",
    )
    name = getattr(step, "__name__", type(step).__name__)
    return compare_ways(way(step), {each: way(run) for each, run in ways.items()}, place, model=name, steps=steps)


def _gradient(step: Callable[..., Any], *args: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = step(*args)
    return loss, tape.gradient(loss, tape.watched_variables())


def _device() -> str:
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


# Layers that run otherwise ------------------------------------------------------------------------------------------


def _rerunning(step: Callable[..., Any], names: Collection[str], layers: Sequence[Any]) -> Callable[..., Any]:
    def again(name: str, call: Callable[..., Any], inputs: Any, options: Any) -> Any:
        if name not in names:
            return call(*inputs, **options)
        return tf.recompute_grad(functools.partial(call, **options))(*inputs)

    @functools.wraps(step)
    def managed(*args: Any, **kwargs: Any) -> Any:
        with calling(layers, again):
            return step(*args, **kwargs)

    return managed
