"""Plan which layers of a TensorFlow function run again for its gradient, under a budget of the bytes that a step allocates.

    plan = ptf.plan(loss, x, y, layers=blocks, budget="8GiB")
    managed = tf.function(ptf.wrap(loss, plan, layers=blocks))

``tf.recompute_grad`` takes whole functions, so a plan has one decision per layer. The bytes that a layer holds for its gradient
are read from the graph of a traced ``tf.function``: tensors that the layer's operations make and the gradient's operations
read. Before a plan is returned, its step is run, and the allocated bytes are compared with the budget.

Known weakness: on a CPU TensorFlow does not count tensors of less than 256 KiB. Time is modelled as arithmetic and traffic at
two rates that are measured here. A layer that writes variables or draws random numbers never runs again, because a second run
would write or draw again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.plan import Plan
from plimsoll.integrations.comparing import TimedOn, Way, compare_ways
from plimsoll.integrations.layers import LayerPlans, calling, check_fingerprint, kinds_of, rerun_layers, rerun_meter
from plimsoll.integrations.layers_in_graph import bytes_in_any_state, device_kind, most_bytes, rates_of, read_layers

FRAMEWORK = "tensorflow"


def plan(step: Callable[..., Any], *args: Any, layers: Sequence[Any], budget: str | int | None) -> Plan:
    """Decide which layers of a step run again in backward, to stay within a budget. The other layers are kept.

    Args:
        step: returns a scalar loss; traced, and run on ``args`` to measure what plans allocate.
        args: tensors, as the step will get them.
        layers: modules that the step calls, none inside of another, such as the blocks of a network.
        budget: bytes that a step allocates at its peak, gradients included, such as ``"8GiB"``; ``None`` for the fastest plan.

    Returns:
        A plan for ``wrap``. ``predicted_peak_bytes`` is the result of ``bytes_in_any_state`` for its step.

    Raises:
        BudgetBelowFloor: every plan that was run exceeds the budget.
        InvalidOption: the step does not call a layer, or calls one inside of another; or TensorFlow does not count bytes here.

    Example:
        >>> plan = ptf.plan(loss, x, y, layers=blocks, budget="8GiB")  # doctest: +SKIP
    """
    costs, run = read_layers(step, args, layers, rates_of(None))
    name = getattr(step, "__name__", type(step).__name__)

    def measure(names: frozenset[str]) -> int:
        managed = _rerunning(step, names, layers)
        return bytes_in_any_state(gradient_run(managed, *args) if names else run, gradient_run(managed, *args))

    meter = rerun_meter(FRAMEWORK, "TensorFlow", measure)
    return LayerPlans(costs, meter, name=name).plan(budget)


def wrap(step: Callable[..., Any], plan: Plan, *, layers: Sequence[Any]) -> Callable[..., Any]:
    """Return the same step, with the layers that the plan names under ``tf.recompute_grad``.

    Args:
        step: the planned step; wrap the result in ``tf.function``.
        plan: from ``plan``, or loaded from a file.
        layers: the planned layers.

    Raises:
        PlanMismatch: the plan was made for other layers, or for another framework.

    Example:
        >>> managed = tf.function(ptf.wrap(loss, plan, layers=blocks))  # doctest: +SKIP
    """
    check_fingerprint(plan, FRAMEWORK, kinds_of(layers))
    return _rerunning(step, rerun_layers(plan), layers)


def allocated_bytes(step: Callable[..., Any], *args: Any) -> int:
    """Return the peak of the bytes that a run of a step and its gradient allocates. It is the maximum over several runs.

    With several inter-op threads, an operation runs once its inputs are ready, so peaks differ between runs. The runs stop
    after three equal peaks, or when four runs in a row stay below the maximum.

    Args:
        step: returns a scalar; run inside of ``tf.function``, four times at least.
        args: tensors.

    Raises:
        InvalidOption: TensorFlow does not count bytes on this device.

    Example:
        >>> ptf.allocated_bytes(managed, x, y) <= 8 * 2**30  # doctest: +SKIP
        True
    """
    return most_bytes(gradient_run(step, *args))


def gradient_run(step: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Return a function that runs a step and its gradient on ``args`` and returns both. Its first run traces the step."""
    return functools.partial(
        tf.function(functools.partial(_gradient, step)), *(tf.convert_to_tensor(each) for each in args)
    )


def compare(step: Callable[..., Any], *args: Any, ways: Mapping[str, Callable[..., Any]], steps: int = 5) -> Comparison:
    """Compare several ways to run one step: the bytes that a run allocates, the seconds of a gradient, and the gradients.

    Args:
        step: the step without a plan; returns a scalar.
        args: tensors.
        ways: by name, the same step under plans (``ptf.wrap``) or written otherwise.
        steps: timed rounds; in each, every way runs once.

    Raises:
        InvalidOption: TensorFlow does not count bytes on this device.

    Example:
        >>> print(ptf.compare(loss, x, y, ways={"plan": managed}))  # doctest: +SKIP
    """
    given = tuple(tf.convert_to_tensor(each) for each in args)

    def way(each: Callable[..., Any]) -> Way:
        run = gradient_run(each, *given)
        gradient = [tf.convert_to_tensor(part).numpy() for part in run()[1] if part is not None]
        return Way(run=lambda: run()[0].numpy(), gradient=gradient, peak_bytes=most_bytes(run))

    place = TimedOn(
        clock=time.process_time if device_kind() == "CPU" else time.perf_counter,
        device=device_kind(),
        versions={"tensorflow": tf.__version__},
        signature=" ".join(f"{each.dtype.name}{each.shape.as_list()}" for each in given),
        note="peaks are the bytes that TensorFlow reports for a run, gradients included",
    )
    name = getattr(step, "__name__", type(step).__name__)
    return compare_ways(way(step), {each: way(run) for each, run in ways.items()}, place, model=name, steps=steps)


def _gradient(step: Callable[..., Any], *args: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = step(*args)
    return loss, tape.gradient(loss, tape.watched_variables())


# Layers that run again ----------------------------------------------------------------------------------------------


def _rerunning(step: Callable[..., Any], names: Collection[str], layers: Sequence[Any]) -> Callable[..., Any]:
    def again(name: str, call: Callable[..., Any], inputs: Any, options: Any) -> Any:
        if name not in names:
            return call(*inputs, **options)
        flat = tf.nest.flatten((inputs, options))
        # recompute_grad converts every argument to a tensor, and takes gradients only of positional arguments.
        tensors = [at for at, each in enumerate(flat) if tf.is_tensor(each) and not isinstance(each, tf.Variable)]
        places = [at for at in tensors if flat[at].dtype.is_floating] or tensors

        def of_tensors(*given: Any) -> Any:
            held = dict(zip(places, given, strict=True))
            rest = [held.get(at, each) for at, each in enumerate(flat)]
            positional, named = tf.nest.pack_sequence_as((inputs, options), rest)
            return call(*positional, **named)

        return tf.recompute_grad(of_tensors)(*(flat[at] for at in places))

    @functools.wraps(step)
    def managed(*args: Any, **kwargs: Any) -> Any:
        with calling(layers, again):
            return step(*args, **kwargs)

    return managed
