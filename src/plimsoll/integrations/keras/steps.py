"""Keras' training step on the JAX and the TensorFlow backend, and its layers with their costs, for planning."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from plimsoll.errors import InvalidModel
from plimsoll.integrations.layers import LayeredStep, LayerPlans, RerunLayer, calling, kinds_of, rerun_meter

FRAMEWORK = "keras"
_STATE = "it writes state (moving averages, seeds), and jax.checkpoint does not allow that"
_TRAINING = "its call needs the value of an argument, but jax.checkpoint turns arguments into traced arrays"
_BY_NAME = "its call needs the keyword argument training, and tf.recompute_grad does not pass keyword arguments"


def bytes_of(arrays: Iterable[Any]) -> int:
    """Return the bytes of all arrays or variables. ``None`` counts as 0."""
    import keras
    import numpy as np

    kinds = [(each.shape, keras.backend.standardize_dtype(each.dtype)) for each in arrays if each is not None]
    return sum(math.prod(shape) * (2 if kind == "bfloat16" else np.dtype(kind).itemsize) for shape, kind in kinds)


def constructed(model: Any, names: Collection[str]) -> Any:
    """Construct a copy of the model that runs the named layers under ``jax.checkpoint`` or ``tf.recompute_grad``."""
    import keras

    with keras.RematScope(mode="list_of_layers", layer_names=sorted(names)):
        copy = keras.models.clone_model(model)
        if not copy.built:
            copy.build_from_config(model.get_build_config())
    # First of all: compiling builds the optimizer for the trainable variables.
    _copy_trainable(model, copy)
    copy.compile_from_config(model.get_compile_config())
    sources, targets = model.variables, copy.variables
    if model.optimizer.built:
        copy.optimizer.build(copy.trainable_variables)
        sources, targets = [*sources, *model.optimizer.variables], [*targets, *copy.optimizer.variables]
    _check_same(model, "variables", [each.shape for each in sources], [each.shape for each in targets])
    for source, target in zip(sources, targets, strict=True):
        # Two models must not share arrays: a training step on JAX donates its own.
        target.assign(keras.ops.copy(source))
    return copy


def _copy_trainable(model: Any, copy: Any) -> None:
    """Freeze the layers and variables of ``copy`` that are frozen in ``model``. A layer that constructs its own sub-layers
    does not write into its config whether they are frozen.
    """
    layers = [list(each._flatten_layers(include_self=True, recursive=True)) for each in (model, copy)]
    _check_same(model, "layers", *([type(layer) for layer in each] for each in layers))
    # A layer comes before the layers inside of it, whose flag it sets too.
    for source, target in zip(*layers, strict=True):
        target.trainable = source.trainable
    variables = [[variable for layer in each for variable in layer.variables] for each in layers]
    _check_same(model, "variables", *([variable.shape for variable in each] for each in variables))
    for source, target in zip(*variables, strict=True):
        target.trainable = source.trainable


def _check_same(model: Any, what: str, found: Sequence[Any], cloned: Sequence[Any]) -> None:
    if list(found) != list(cloned):
        raise InvalidModel(
            f"Model {model.name} cannot be constructed again.",
            why=f"Keras clones it with other {what}: {len(cloned)} in place of {len(found)}, or of another kind or shape",
            next="let get_config return what the layers were constructed with, and compile the model after freezing layers",
        )


class VariableGuard:
    """Runs Keras' train function. If it raises, the values that Keras took out of the model's variables are put back.

    Keras empties the variables before the first step of ``fit``, and fills them again from a step's result.
    """

    def __init__(self, model: Any, function: Callable[..., Any]) -> None:
        self._model = model
        self._function = function

    def __call__(self, state: Any, iterator: Any) -> Any:
        try:
            return self._function(state, iterator)
        except BaseException:
            model = self._model
            groups = (
                model.trainable_variables,
                model.non_trainable_variables,
                model.optimizer.variables,
                model.metrics_variables,
            )
            for variables, values in zip(groups, state, strict=True):
                for variable, value in zip(variables, values, strict=True):
                    if not value.is_deleted():  # donated to a step that began
                        variable.assign(value)
            raise


def layers_of(model: Any) -> list[Any]:
    """Return the model's own layers that compute something."""
    return [layer for layer in model.layers if type(layer).__name__ != "InputLayer"]


def jax_step(model: Any, x: Any, y: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return the function that Keras trains with on JAX, and its arguments."""

    def loss(trainable: Any, rest: Any, metrics: Any, optimizer: Any, x: Any, y: Any) -> Any:
        # Loss scaling reads the optimizer's variables.
        options = {"training": True, "optimizer_variables": optimizer}
        return model.compute_loss_and_updates(trainable, rest, metrics, x, y, None, **options)

    # Plans and estimates get the model's name.
    loss.__name__ = model.name
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    found = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.metrics_variables,
        model.optimizer.variables,
    )
    return loss, [*([variable.value for variable in each] for each in found), x, y]


def tensorflow_step(model: Any) -> Callable[..., Any]:
    def loss(x: Any, y: Any) -> Any:
        return model.compute_loss(x=x, y=y, y_pred=model(x, training=True))

    loss.__name__ = model.name
    return loss


def layer_plans(model: Any, x: Any, y: Any, device: str | None = None) -> LayerPlans:
    """Make an object that plans whole layers. On JAX, XLA reports the bytes of a plan; on TensorFlow, a run counts them."""
    import keras

    make = _plans_on_jax if keras.backend.backend() == "jax" else _plans_on_tensorflow
    return make(model, x, y, device)


def _plans_on_tensorflow(model: Any, x: Any, y: Any, device: str | None) -> LayerPlans:
    from plimsoll.integrations import tensorflow as ptf
    from plimsoll.integrations.layers_in_graph import bytes_in_any_state, rates_of, read_layers

    layers = layers_of(model)
    refused = {layer.name for layer in layers if "training" in inspect.signature(layer.call).parameters}
    step, _ = read_layers(tensorflow_step(model), (x, y), layers, rates_of(device))
    costs = tuple(
        dataclasses.replace(cost, obstacle=cost.obstacle or _BY_NAME) if cost.name in refused else cost
        for cost in step.layers
    )

    def measure(names: frozenset[str]) -> int:
        managed = tensorflow_step(constructed(model, names) if names else model)
        return bytes_in_any_state(*(ptf.gradient_run(managed, x, y) for _ in range(2)))

    meter = rerun_meter(FRAMEWORK, "TensorFlow", measure)
    return LayerPlans(dataclasses.replace(step, layers=costs), meter, name=model.name)


def _plans_on_jax(model: Any, x: Any, y: Any, device: str | None) -> LayerPlans:
    from plimsoll.integrations.jax.call import JaxCall
    from plimsoll.integrations.jax.seconds import clock_for

    obstacles: dict[str, str] = {}
    layers = layers_of(model)
    loss, args = jax_step(model, x, y)
    with calling(layers, _noting(obstacles, layers), "call"):
        call = JaxCall(loss, args, {}, 0)
    step = _read_on_jax(call, layers, obstacles, clock_for(device))

    def measure(names: frozenset[str]) -> int:
        function, given = jax_step(constructed(model, names), x, y)
        found = JaxCall(function, given, {}, 0, is_read=False)
        return found.measure(found.flat)

    saved = sum(each.saved_bytes for each in step.layers)
    return LayerPlans(step, rerun_meter(FRAMEWORK, "XLA", measure, saved), name=model.name)


def _noting(obstacles: dict[str, str], layers: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs a layer unchanged. It notes in ``obstacles`` if ``RematScope`` could not run the layer again
    on JAX.
    """
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


def _read_on_jax(call: Any, layers: Sequence[Any], obstacles: dict[str, str], clock: Any) -> LayeredStep:
    """Return the costs of each layer, and of the rest of the step. A layer's operations are those in the scope of its name."""
    from plimsoll.integrations.jax.program import active_values, part_of
    from plimsoll.integrations.jax.reading import flops_of
    from plimsoll.integrations.jax.regions import Region
    from plimsoll.integrations.jax.seconds import key_of_shapes

    program = call.program
    moving = active_values(program, call.active)
    found, rest = [], set(range(len(program.nodes)))
    for name, kind in kinds_of(layers).items():
        own = [at for at, node in enumerate(program.nodes) if name in node.scope.split("/")]
        if not own:
            continue
        part, inputs, outputs = part_of(program, own[0], own[-1] + 1)
        is_one = len(own) == own[-1] + 1 - own[0]
        region = Region(name, own[0], own[-1] + 1, part, inputs, outputs, tuple(each in moving for each in inputs))
        layer = RerunLayer(
            name=name,
            kind=kind,
            saved_bytes=region.reading.residual_bytes if is_one else 0,
            forward_seconds=sum(clock.seconds(node, part) for node in part.nodes),
            backward_seconds=sum(clock.rough_seconds(node, region.reading.joint) for node in region.reading.backward),
            obstacle=obstacles.get(name, "" if is_one else "it is called more than once"),
        )
        found.append((own[0], layer))
        rest.difference_update(own)
    beside = sum(clock.rough_seconds(program.nodes[at], program) for at in rest)
    return LayeredStep(
        layers=tuple(layer for _, layer in sorted(found, key=lambda pair: pair[0])),
        rest_seconds=(beside, 2 * beside),
        flops=3 * sum(flops_of(node, program) for node in program.nodes),
        device=clock.device,
        source=clock.source,
        signature=key_of_shapes(call.arrays),
    )
