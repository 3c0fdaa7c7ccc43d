"""Plan Keras 3 models: value by value for ``fit`` on the JAX backend, or layer by layer under ``RematScope``.

    plan = pk.plan(model, x, y, budget="8GiB")
    with pk.apply(model, plan):
        model.fit(x, y)

    plan = pk.plan_layers(model, x, y, budget="8GiB")
    managed = pk.rebuild(model, plan)

Keras trains with one stateless function of variables and a batch. ``plan`` plans this function like any other function of JAX.
``keras.RematScope`` can only rerun whole layers, and must be active when they are constructed, so ``rebuild`` constructs them
again. On the torch backend a Keras model is an ordinary module: use ``plimsoll.plan`` and ``plimsoll.apply``.

Source: ``compute_loss_and_updates`` of Keras' JAX trainer, "stateless and intended for use with jax.grad". Known weakness:
``RematScope`` passes ``training`` to ``jax.checkpoint`` as an array and to ``tf.recompute_grad`` by name. So layers that read
the value of ``training`` (JAX), or that take ``training`` at all (TensorFlow), are kept.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.fit import Fit
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.integrations.estimates import FixedSizes, Plannable, estimate_step, fit_steps
from plimsoll.integrations.keras.steps import (
    FRAMEWORK,
    VariableGuard,
    bytes_of,
    constructed,
    jax_step,
    layer_plans,
    layers_of,
    tensorflow_step,
)
from plimsoll.integrations.layers import check_fingerprint, kinds_of, rerun_layers
from plimsoll.units import parse_bytes

__all__ = ["apply", "compare", "estimate", "fit", "parse_bytes", "plan", "plan_layers", "rebuild"]


def plan(model: Any, x: Any, y: Any = None, *, budget: str | int | None, device: str | None = None) -> Plan:
    """Decide which values of a Keras model are held from forward to backward in its training step; the others are recomputed.

    Args:
        model: built and compiled with a loss. Its weights are not changed; its optimizer is built.
        x: one batch of inputs, as ``fit`` passes it to the model.
        y: its targets.
        budget: bytes of XLA's temporary memory for the gradient; ``None`` for the fastest plan.
        device: a device of the catalogue, whose roofline prices operations; by default they are timed on this machine.

    Raises:
        BudgetBelowFloor: every plan that was compiled exceeds the budget.
        InvalidOption: Keras runs on another backend, or the model is not built or compiled.

    Example:
        >>> plan = pk.plan(model, x[:32], y[:32], budget="8GiB")  # doctest: +SKIP
    """
    _check(model, ("jax",))
    from plimsoll.integrations import jax as pj

    loss, args = jax_step(model, x, y)
    return pj.plan(loss, *args, budget=budget, device=device)


@contextlib.contextmanager
def apply(model: Any, plan: Plan) -> Iterator[None]:
    """Inside the block, ``fit`` and ``train_on_batch`` hold only the values that the plan keeps.

    ``evaluate``, ``predict`` and the validation of ``fit`` run without the plan. Afterwards the model is restored.

    Raises:
        InvalidModel: the model already runs under a plan.
        InvalidOption: Keras runs on another backend, or the model is not built or compiled.
        PlanMismatch: in the first step: the plan was made for another model, or the step has sample or class weights. The
            model's variables keep their values.

    Example:
        >>> with pk.apply(model, plan):  # doctest: +SKIP
        ...     model.fit(x, y)
    """
    _check(model, ("jax",))
    from plimsoll.integrations import jax as pj

    if "compute_loss_and_updates" in vars(model):
        raise InvalidModel(
            f"Model {model.name} already runs under a plan.",
            why="two plans cannot manage the same training step",
            next="leave the first pk.apply block, then apply the other plan",
        )
    plain = model.compute_loss_and_updates
    managed = pj.wrap(plain, plan)

    @functools.wraps(plain)
    def planned(*args: Any, **kwargs: Any) -> Any:
        is_training = inspect.signature(plain).bind(*args, **kwargs).arguments.get("training", False)
        return managed(*args, **kwargs) if is_training else plain(*args, **kwargs)

    make = model.make_train_function

    def make_train_function(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        if not isinstance(model.train_function, VariableGuard):
            model.train_function = VariableGuard(model, model.train_function)

    model.compute_loss_and_updates, model.make_train_function = planned, make_train_function
    model.train_function = None
    try:
        yield
    finally:
        del model.compute_loss_and_updates, model.make_train_function
        model.train_function = None


def plan_layers(model: Any, x: Any, y: Any = None, *, budget: str | int | None) -> Plan:
    """Decide which layers of a Keras model run again in backward. The plan is for ``rebuild``.

    For each candidate plan, the model is rebuilt and its step is measured: XLA reports the bytes of the step, or TensorFlow
    counts them in a run.

    Args:
        model: built and compiled with a loss; not changed. Decisions are about its own layers; layers inside of them are
            included.
        x: one batch of inputs, as ``fit`` passes it to the model.
        y: its targets.
        budget: bytes: XLA's temporary memory on JAX, the step's allocations on TensorFlow; ``None`` for the fastest plan.

    Returns:
        A plan whose regions are layers. ``str`` shows which run again.

    Raises:
        BudgetBelowFloor: every plan that was measured exceeds the budget.
        InvalidOption: Keras runs on the torch backend, or the model is not built or compiled.

    Example:
        >>> plan = pk.plan_layers(model, x[:32], y[:32], budget="8GiB")  # doctest: +SKIP
    """
    _check(model, ("jax", "tensorflow"))
    return layer_plans(model, x, y).plan(budget)


def rebuild(model: Any, plan: Plan) -> Any:
    """Return the same model, constructed under ``RematScope``, so that the layers that the plan names run again in backward.

    All variables are copied, also the variables of the optimizer and of random numbers, and frozen layers stay frozen. The
    given model is not changed. Your own classes need ``get_config``, and your own losses and metrics must be registered with
    Keras.

    Args:
        model: the planned model.
        plan: from ``plan_layers``, or loaded from a file.

    Raises:
        PlanMismatch: the plan was made for other layers.
        InvalidModel: Keras clones the model with other layers or variables.
        InvalidOption: Keras runs on the torch backend, or the model is not built or compiled.

    Example:
        >>> managed = pk.rebuild(model, pk.plan_layers(model, x[:32], y[:32], budget="8GiB"))  # doctest: +SKIP
        >>> managed.fit(x, y)  # doctest: +SKIP
    """
    _check(model, ("jax", "tensorflow"))
    check_fingerprint(plan, FRAMEWORK, kinds_of(layers_of(model)))
    return constructed(model, rerun_layers(plan))


def estimate(
    model: Any, x: Any, y: Any = None, *, device: str = "H100-SXM", budget: str | int | None = None
) -> Estimate:
    """Estimate the training of a Keras model on a device of the catalogue: memory item by item, and speed.

    On JAX, XLA compiles the step on this machine to count temporaries, and x and y may be shapes. On TensorFlow the step runs
    on this machine, and its allocated bytes include the gradients.

    Args:
        model: as for ``plan`` and, on TensorFlow, ``plan_layers``.
        x: one batch of inputs.
        y: the targets of the batch.
        device: a device from the catalogue.
        budget: if given, the step is planned to fit into these bytes, which cover everything. By default nothing is planned.

    Raises:
        BudgetBelowFloor: the bytes that do not depend on the plan exceed the budget, or no measured plan fits in the rest.
        InvalidOption: Keras runs on the torch backend, or the model is not built or compiled.

    Example:
        >>> print(pk.estimate(model, x[:32], y[:32], device="H100-SXM"))  # doctest: +SKIP
    """
    started = time.monotonic()
    step, sizes = _plannable(model, x, y, device)
    name = str(model.optimizer.name)
    return estimate_step(step, sizes, device=device, optimizer=name, budget=budget, started=started)


def fit(
    model: Any,
    batch_of: Callable[[int], tuple[Any, Any]],
    budget: str | int,
    *,
    device: str | None = None,
    most_batch: int = 1024,
) -> Fit:
    """Find the batch with the most samples per second whose training fits into the budget. The budget covers everything.

    Args:
        model: as for ``estimate``.
        batch_of: returns inputs and targets for a number of samples; on JAX they may be shapes.
        budget: bytes of parameters, gradients, optimizer state, batch and temporaries together.
        device: as for ``plan``.
        most_batch: the largest batch to try.

    Raises:
        InvalidOption: ``most_batch`` is less than 1, or as for ``estimate``.

    Example:
        >>> print(pk.fit(model, lambda rows: (x[:rows], y[:rows]), "16GiB", device="H100-SXM"))  # doctest: +SKIP
    """
    return fit_steps(lambda rows: _plannable(model, *batch_of(rows), device), budget, most_batch=most_batch)


def compare(model: Any, x: Any, y: Any = None, *, plans: Mapping[str, Plan], steps: int = 5) -> Comparison:
    """Compare a Keras model under several plans: memory, seconds of a gradient, and the gradients.

    Args:
        model: the planned model.
        x: one batch of inputs.
        y: its targets.
        plans: by name, from ``plan`` or ``plan_layers``.
        steps: timed rounds; in each, every plan runs once.

    Raises:
        PlanMismatch: a plan was made for another model, or for another framework.
        InvalidOption: Keras runs on the torch backend, or the model is not built or compiled.

    Example:
        >>> print(pk.compare(model, x[:32], y[:32], plans={"half": plan}))  # doctest: +SKIP
    """
    if _check(model, ("jax", "tensorflow")) == "tensorflow":
        from plimsoll.integrations import tensorflow as ptf

        ways = {name: tensorflow_step(rebuild(model, plan)) for name, plan in plans.items()}
        return ptf.compare(tensorflow_step(model), x, y, ways=ways, steps=steps)
    from plimsoll.integrations import jax as pj

    loss, args = jax_step(model, x, y)

    def way(plan: Plan) -> Callable[..., Any]:
        return jax_step(rebuild(model, plan), x, y)[0] if plan.framework == FRAMEWORK else pj.wrap(loss, plan)

    return pj.compare(loss, *args, ways={name: way(plan) for name, plan in plans.items()}, steps=steps)


def _plannable(model: Any, x: Any, y: Any, device: str | None) -> tuple[Plannable, FixedSizes]:
    if _check(model, ("jax", "tensorflow")) == "jax":
        from plimsoll.integrations.jax.estimates import sizes_of
        from plimsoll.integrations.jax.planning import Searched

        loss, args = jax_step(model, x, y)
        trainable, rest, metrics, optimizer, *batch = args
        sizes = sizes_of(parameters=trainable, others=(rest, metrics), state=optimizer, batch=batch)
        return Searched(loss, args, 0, device), sizes
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    sizes = FixedSizes(
        parameters=bytes_of(model.variables),
        gradients=0,
        state=bytes_of(model.optimizer.variables),
        batch=bytes_of([x, y]),
        count=model.count_params(),
        rows=len(x),
    )
    return layer_plans(model, x, y, device), sizes


def _check(model: Any, backends: Sequence[str]) -> str:
    """Return the name of the backend. Raise an error if a step of this model cannot be planned."""
    import keras

    backend = str(keras.backend.backend())
    if backend in backends and model.built and model.compiled:
        return backend
    if backend in backends:
        why, next_ = (
            "the model is not built or not compiled yet",
            "call model.build(...) and model.compile(loss=...) first",
        )
    elif backend == "torch":
        why = "on the torch backend, a Keras model is a torch.nn.Module"
        next_ = "call plimsoll.plan(model, batch, ...) and plimsoll.apply"
    elif backend == "tensorflow":
        why, next_ = (
            "single values are planned only on the JAX backend",
            "call plan_layers and rebuild, which plan layers",
        )
    else:
        why, next_ = f"the backend is {backend}", "set KERAS_BACKEND to jax, tensorflow or torch"
    raise InvalidOption(
        f"This Keras model does not have a {' or '.join(backends)} training step that can be planned.",
        why=why,
        next=next_,
    )
