"""Plans Keras 3 models: value by value for ``fit`` on the JAX backend, layer by layer under ``RematScope``.

    plan = pk.plan(model, x, y, budget="8GiB")
    with pk.apply(model, plan):
        model.fit(x, y)

    plan = pk.plan_layers(model, x, y, budget="8GiB")
    managed = pk.rebuild(model, plan)

Keras trains with one stateless function of variables and a batch, and ``plan`` plans that, as any other function of JAX.
``keras.RematScope`` knows layers alone and has to be there when they are constructed: ``rebuild`` constructs them again. On the
torch backend a Keras model is a module like any other: ``plimsoll.plan`` and ``plimsoll.apply`` take it as it is.

Source: ``compute_loss_and_updates`` of Keras' JAX trainer, "stateless and intended for use with jax.grad". Known weakness:
``RematScope`` hands ``training`` to ``jax.checkpoint`` as an array and to ``tf.recompute_grad`` by name, so layers that ask for
its value (JAX) or take it at all (TensorFlow) are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec

from plimsoll.artifacts.plan import Plan, RegionPlan
from plimsoll.errors import InvalidOption
from plimsoll.integrations.layers import RerunLayer, calling, check_fingerprint, kinds_of, rerun_layers, trace_layers
from plimsoll.integrations.search import PlanMeter, PlanSearch
from plimsoll.units import parse_bytes

FRAMEWORK = "keras"
_STATE = "it writes state (moving averages, seeds), which must not leave jax.checkpoint"
_TRAINING = "its call asks for the value of an argument, of which jax.checkpoint makes an array"
_BY_NAME = "its call takes training, and tf.recompute_grad takes no arguments by name"


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
    _check(model, ("jax",))
    from plimsoll.integrations import jax as pj

    loss, args = _jax_step(model, x, y)
    return pj.plan(loss, *args, budget=budget, device=device)


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
    _check(model, ("jax",))
    from plimsoll.integrations import jax as pj

    model.compute_loss_and_updates = pj.wrap(model.compute_loss_and_updates, plan)
    model.train_function = None
    try:
        yield
    finally:
        del model.compute_loss_and_updates
        model.train_function = None


def plan_layers(model: Any, x: Any, y: Any = None, *, budget: str | int | None) -> Plan:
    """Decide which layers of a Keras model run again for the gradient, for ``rebuild``.

    Every plan that is looked at is rebuilt, and what its step takes is asked of XLA, or counted by TensorFlow in a run.

    Args:
        model: built and compiled with a loss; left as it is. Its own layers are decided about, and what is in them goes along.
        x: one batch of inputs, as ``fit`` passes it to the model.
        y: its targets.
        budget: bytes: XLA's temporary memory on JAX, what a step allocates on TensorFlow; ``None`` for the fastest plan.

    Returns:
        A plan whose regions are layers. ``str`` shows which run again.

    Raises:
        BudgetBelowFloor: no plan that was measured stays within the budget.
        InvalidOption: Keras runs on the torch backend, or the model is not built or compiled.

    Example:
        >>> plan = pk.plan_layers(model, x[:32], y[:32], budget="8GiB")  # doctest: +SKIP
    """
    if _check(model, ("jax", "tensorflow")) == "jax":
        return _plan_on_jax(model, x, y, budget)
    from plimsoll.integrations import tensorflow as ptf
    from plimsoll.integrations.layers_in_graph import read_layers

    def measure(plans: Sequence[RegionPlan]) -> int:
        names = {each.name for each in plans if not each.is_untouched}
        return ptf.allocated_bytes(_tensorflow_step(_constructed(model, names)), x, y)

    layers = _layers(model)
    refused = {layer.name for layer in layers if "training" in inspect.signature(layer.call).parameters}
    costs = [
        dataclasses.replace(cost, obstacle=cost.obstacle or _BY_NAME) if cost.name in refused else cost
        for cost in read_layers(_tensorflow_step(model), (x, y), layers)
    ]
    return ptf.search_layers(costs, (x, y), measure, framework=FRAMEWORK, model=model.name, budget=budget)


def rebuild(model: Any, plan: Plan) -> Any:
    """The same model, constructed under ``RematScope`` so that the layers that the plan names run again in backward.

    Variables, those of the optimizer and of random numbers among them, are copied; the given model stays as it is. Classes
    of your own need ``get_config``, and losses and metrics of your own to be registered with Keras.

    Args:
        model: the one that was planned.
        plan: from ``plan_layers``, or loaded from a file.

    Raises:
        PlanMismatch: the plan was made for other layers.
        InvalidOption: Keras runs on the torch backend, or the model is not built or compiled.

    Example:
        >>> managed = pk.rebuild(model, pk.plan_layers(model, x[:32], y[:32], budget="8GiB"))  # doctest: +SKIP
        >>> managed.fit(x, y)  # doctest: +SKIP
    """
    _check(model, ("jax", "tensorflow"))
    check_fingerprint(plan, FRAMEWORK, kinds_of(_layers(model)))
    return _constructed(model, rerun_layers(plan))


def _constructed(model: Any, names: Collection[str]) -> Any:
    """The model once more, with these layers under ``jax.checkpoint`` or ``tf.recompute_grad``."""
    import keras

    with keras.RematScope(mode="list_of_layers", layer_names=sorted(names)):
        copy = keras.models.clone_model(model)
        if not copy.built:
            copy.build_from_config(model.get_build_config())
    copy.compile_from_config(model.get_compile_config())
    sources, targets = model.variables, copy.variables
    if model.optimizer.built:
        copy.optimizer.build(copy.trainable_variables)
        sources, targets = [*sources, *model.optimizer.variables], [*targets, *copy.optimizer.variables]
    for source, target in zip(sources, targets, strict=True):
        # Two models must not share arrays: a training step on JAX gives its own away.
        target.assign(keras.ops.copy(source))
    return copy


def _layers(model: Any) -> list[Any]:
    """The model's own layers that compute."""
    return [layer for layer in model.layers if type(layer).__name__ != "InputLayer"]


def _jax_step(model: Any, x: Any, y: Any) -> tuple[Callable[..., Any], list[Any]]:
    """The function that Keras trains with on JAX, and its arguments."""

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
    return loss, [*([variable.value for variable in each] for each in found), x, y]


def _tensorflow_step(model: Any) -> Callable[..., Any]:
    def loss(x: Any, y: Any) -> Any:
        return model.compute_loss(x=x, y=y, y_pred=model(x, training=True))

    return loss


def _plan_on_jax(model: Any, x: Any, y: Any, budget: str | int | None) -> Plan:
    from plimsoll.integrations.jax.call import JaxCall
    from plimsoll.integrations.jax.seconds import key_of_shapes, timed_clock

    started = time.monotonic()
    obstacles: dict[str, str] = {}
    layers = _layers(model)
    loss, args = _jax_step(model, x, y)
    with calling(layers, _noting(obstacles, layers), "call"):
        call = JaxCall(loss, args, {}, 0)
    costs = _read_on_jax(call, layers, obstacles)

    def measure(plans: Sequence[RegionPlan]) -> int:
        names = {each.name for each in plans if not each.is_untouched}
        function, given = _jax_step(_constructed(model, names), x, y)
        found = JaxCall(function, given, {}, 0, is_read=False)
        return found.measure(found.flat)

    clock = timed_clock()
    shapes = key_of_shapes(call.arrays)
    step = trace_layers(
        costs, framework=FRAMEWORK, model=model.name, signature=shapes, device=clock.device, source=clock.source
    )
    saved = sum(each.saved_bytes for each in costs)
    search = PlanSearch(step, PlanMeter(framework=FRAMEWORK, name="XLA", measure=measure, unmanaged_bytes=saved))
    found = search.run(None if budget is None else parse_bytes(budget))
    return msgspec.structs.replace(found, solve_seconds=time.monotonic() - started)


def _noting(obstacles: dict[str, str], layers: Sequence[Any]) -> Callable[..., Any]:
    """Runs layers as they are, and notes those that ``RematScope`` cannot run again on JAX."""
    import jax

    stateful = {layer.name for layer in layers if any(not each.trainable for each in layer.variables)}

    def around(name: str, call: Callable[..., Any], inputs: Any, options: Any) -> Any:
        if name in stateful:
            obstacles[name] = _STATE
            return call(*inputs, **options)
        try:
            jax.eval_shape(jax.checkpoint(call), *inputs, **options)
        except (jax.errors.ConcretizationTypeError, TypeError):
            obstacles[name] = _TRAINING
        return call(*inputs, **options)

    return around


def _read_on_jax(call: Any, layers: Sequence[Any], obstacles: dict[str, str]) -> list[RerunLayer]:
    """What each layer costs: its operations are those in the scope of its name."""
    from plimsoll.integrations.jax.program import active_values, part_of
    from plimsoll.integrations.jax.regions import Region
    from plimsoll.integrations.jax.seconds import timed_clock

    clock, program = timed_clock(), call.program
    moving = active_values(program, call.active)
    found = []
    for name, kind in kinds_of(layers).items():
        own = [at for at, node in enumerate(program.nodes) if name in node.scope.split("/")]
        if not own:
            continue
        part, inputs, outputs = part_of(program, own[0], own[-1] + 1)
        is_one = len(own) == own[-1] + 1 - own[0]
        region = Region(name, own[0], own[-1] + 1, part, inputs, outputs, tuple(each in moving for each in inputs))
        backward = sum(clock.rough_seconds(node, region.reading.joint) for node in region.reading.backward)
        layer = RerunLayer(
            name=name,
            kind=kind,
            saved_bytes=region.reading.residual_bytes if is_one else 0,
            forward_seconds=sum(clock.seconds(node, part) for node in part.nodes),
            backward_seconds=backward,
            obstacle=obstacles.get(name, "" if is_one else "it is called more than once"),
        )
        found.append((own[0], layer))
    return [layer for _, layer in sorted(found, key=lambda pair: pair[0])]


def _check(model: Any, backends: Sequence[str]) -> str:
    """The backend, refusing what has no step to plan."""
    import keras

    backend = str(keras.backend.backend())
    if backend in backends and model.built and model.compiled:
        return backend
    if backend in backends:
        why, next_ = "the model has no variables or no loss yet", "call model.build(...), model.compile(loss=...) first"
    elif backend == "torch":
        why = "a Keras model is a module of torch there"
        next_ = "call plimsoll.plan(model, batch, ...) and plimsoll.apply"
    elif backend == "tensorflow":
        why, next_ = "values are planned on the JAX backend alone", "call plan_layers and rebuild, which plan layers"
    else:
        why, next_ = f"the backend is {backend}", "start with KERAS_BACKEND=jax, =tensorflow or =torch"
    raise InvalidOption(f"This Keras model has no step of {' or '.join(backends)} to plan.", why=why, next=next_)
