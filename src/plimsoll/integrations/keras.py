"""Plans Keras 3 models on the JAX backend, and lets ``fit`` follow the plan.

    plan = pk.plan(model, x, y, budget="8GiB")
    with pk.apply(model, plan):
        model.fit(x, y)

Keras trains with one stateless function of variables and a batch, and that is what is planned, value by value, as any other
function of JAX; ``keras.RematScope`` knows layers alone, and has to be there when they are constructed. On the torch backend
a Keras model is a module like any other: ``plimsoll.plan`` and ``plimsoll.apply`` take it as it is.

Source: ``compute_loss_and_updates`` of Keras' JAX trainer, "stateless and intended for use with jax.grad".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from plimsoll.artifacts.plan import Plan
from plimsoll.errors import InvalidOption
from plimsoll.integrations import jax as pj


def plan(model: Any, x: Any, y: Any = None, *, budget: str | int | None, device: str | None = None) -> Plan:
    """Decide which values of a Keras model are held for the gradient of its training step.

    Args:
        model: built and compiled with a loss; its weights stay as they are, its optimizer is built.
        x: one batch of inputs, as ``fit`` passes it to the model.
        y: its targets.
        budget: bytes of XLA's temporary memory for the gradient; ``None`` for the fastest plan.
        device: a name of the catalogue, whose roofline says what operations take; by default they are timed here.

    Raises:
        BudgetBelowFloor: no plan that was compiled stays within the budget.
        InvalidOption: Keras runs on another backend, or the model is not built or compiled.

    Example:
        >>> plan = pk.plan(model, x[:32], y[:32], budget="8GiB")  # doctest: +SKIP
    """
    _check(model)

    def loss(trainable: Any, rest: Any, metrics: Any, optimizer: Any, x: Any, y: Any) -> Any:
        # Loss scaling reads the optimizer's variables.
        options = {"training": True, "optimizer_variables": optimizer}
        return model.compute_loss_and_updates(trainable, rest, metrics, x, y, None, **options)

    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    found = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.metrics_variables,
        model.optimizer.variables,
    )
    variables = [[variable.value for variable in each] for each in found]
    return pj.plan(loss, *variables, x, y, budget=budget, device=device)


@contextlib.contextmanager
def apply(model: Any, plan: Plan) -> Iterator[None]:
    """While it lasts, ``fit`` and ``train_on_batch`` hold what the plan says; afterwards the model is as it was.

    Raises:
        InvalidOption: Keras runs on another backend, or the model is not built or compiled.
        PlanMismatch: in the first step: the plan was made for another model.

    Example:
        >>> with pk.apply(model, plan):  # doctest: +SKIP
        ...     model.fit(x, y)
    """
    _check(model)
    model.compute_loss_and_updates = pj.wrap(model.compute_loss_and_updates, plan)
    model.train_function = None
    try:
        yield
    finally:
        del model.compute_loss_and_updates
        model.train_function = None


def _check(model: Any) -> None:
    """Refuse what has no step of JAX to plan."""
    import keras

    backend = keras.backend.backend()
    if backend == "torch":
        why, next_ = (
            "a Keras model is a module of torch there",
            "call plimsoll.plan(model, batch, ...) and plimsoll.apply",
        )
    elif backend != "jax":
        why, next_ = f"the backend is {backend}, which decides by itself", "start with KERAS_BACKEND=jax or =torch"
    elif not (model.built and model.compiled):
        why, next_ = (
            "the model has no variables or no loss yet",
            "call model.build(...) and model.compile(loss=...) first",
        )
    else:
        return
    raise InvalidOption("This Keras model has no step of JAX to plan.", why=why, next=next_)
