"""Plans for frameworks that checkpoint whole layers: the planner decides for each layer whether it runs again in backward.

All values that a layer makes for its derivative count as one value; running the layer again recomputes that value. The layers'
inputs are always held. Keras' ``RematScope`` and TensorFlow's ``recompute_grad`` do not support finer decisions.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.artifacts.costs import Costs, CostSource, OpCost
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.region import Origin, RegionGraph, RegionOp, Slot, Value
from plimsoll.artifacts.trace import Category, Phase, RegionCall, Storage, Trace, TraceOp
from plimsoll.errors import PlanMismatch
from plimsoll.integrations.search import PlanMeter, PlanSearch, TracedStep, check_plan


@dataclass(frozen=True, kw_only=True)
class RerunLayer:
    """Data: the costs of one layer. ``saved_bytes`` are the bytes of the values that the layer makes inside and its derivative
    reads.

    ``kind`` is equal for equal layers. ``obstacle`` says why the layer cannot run again; it is empty if the layer can.
    """

    name: str
    kind: str
    saved_bytes: int
    forward_seconds: float
    backward_seconds: float
    obstacle: str = ""


def kinds_of(layers: Sequence[Any]) -> dict[str, str]:
    """Return a mapping from each layer's name to its kind: its class and the shapes of its variables.

    If several layers have the same name, the later layers get a number. Layers are objects with ``name`` and ``variables``,
    such as those of Keras and TensorFlow.
    """
    found: dict[str, str] = {}
    for layer in layers:
        name, number = str(layer.name), 2
        while name in found:
            name, number = f"{layer.name}:{number}", number + 1
        found[name] = f"{type(layer).__name__} {[tuple(each.shape) for each in layer.variables]}"
    return found


def fingerprint(framework: str, kinds: Mapping[str, str]) -> str:
    """Return a digest of the layers' kinds (classes and shapes of variables). A plan recognises its model by this digest, which
    is the same at any batch size.

    The layers' names do not change the digest, because a framework may number them.
    """
    text = "\n".join(sorted(kinds.values()))
    return f"{framework}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def check_fingerprint(plan: Plan, framework: str, kinds: Mapping[str, str]) -> None:
    """Raise an error unless the plan was made for this framework and these layers.

    Raises:
        InvalidOption: ``plan`` is not a `Plan`.
        PlanMismatch: the plan was made for another framework or other layers; the error says which.
    """
    check_plan(plan, framework, f"layers of {framework}")
    found = fingerprint(framework, kinds)
    if plan.fingerprint != found:
        raise PlanMismatch(
            f"This plan was made for other layers: {plan.fingerprint}, not {found}.",
            why="the layers have other classes or shapes than the planned layers",
            next="plan this model again",
        )
    if unknown := rerun_layers(plan) - kinds.keys():
        raise PlanMismatch(
            f"The model does not have layers called {', '.join(sorted(unknown))}.",
            why="the plan recomputes layers by name, and these names were not found",
            next="give the layers fixed names, or plan this model again",
        )


Around = Callable[[str, Callable[..., Any], Any, Any], Any]
"""A function that runs a layer.

Its arguments are the layer's name, its original call, and the positional and named arguments.
"""


@contextlib.contextmanager
def calling(layers: Sequence[Any], around: Around, method: str = "__call__") -> Iterator[None]:
    """Inside the block, each call of a layer's method goes through the function ``around``.

    Python looks ``__call__`` up on the class only, so an attribute of the layer does not change a call. The step holds the
    layers themselves, so replacements cannot be passed. A patched class would affect its other objects too, and would run twice
    for a subclass whose own ``__call__`` calls ``super``. So each layer temporarily gets its own subclass as its class:
    ``isinstance`` still holds, and other objects are not affected. ``object.__setattr__`` bypasses the frameworks' hooks on
    assignment.
    """
    with contextlib.ExitStack() as undo:
        for name, layer in zip(kinds_of(layers), layers, strict=True):
            kind = type(layer)

            def call(self: Any, *inputs: Any, _kind: type = kind, _name: str = name, **options: Any) -> Any:
                return around(_name, functools.partial(getattr(_kind, method), self), inputs, options)

            undo.callback(object.__setattr__, layer, "__class__", kind)
            object.__setattr__(layer, "__class__", type(kind.__name__, (kind,), {method: call}))
        yield


def rerun_layers(plan: Plan) -> frozenset[str]:
    """Return the names of the layers that run again in backward under a plan."""
    return frozenset(region.name for region in plan.regions if not region.is_untouched)


@dataclass(frozen=True, kw_only=True)
class LayeredStep:
    """Data: the layers in the order of the forward pass, and the costs of the rest of the step.

    ``rest_seconds`` are the seconds outside of layers, in forward and in backward. ``flops`` is the arithmetic of the whole
    step. ``device`` is the device of the seconds, and ``source`` says whether they were measured on this device or computed for
    it. ``signature`` has the batch's shapes.
    """

    layers: tuple[RerunLayer, ...]
    rest_seconds: tuple[float, float]
    flops: int
    device: str
    source: CostSource
    signature: str


class LayerPlans:
    """A training step that can be planned layer by layer: each layer is either kept or run again in backward. It searches for
    the fastest plan within a budget.
    """

    dtype = "f32"

    def __init__(self, step: LayeredStep, meter: PlanMeter, *, name: str) -> None:
        self.name, self.flops, self._meter = name, step.flops, meter
        self.search = PlanSearch(_traced(step, meter.framework, name), meter)
        self.counted_by = f"as counted by {meter.name} on this device"

    def plan(self, budget: int | str | None) -> Plan:
        """Return the fastest plan within a budget."""
        return self.search.run(budget)

    def unmanaged_taken(self) -> int:
        """Return the bytes that the step takes if all layers are kept."""
        return self._meter.measure(())


def rerun_meter(
    framework: str, name: str, measure: Callable[[frozenset[str]], int], saved_bytes: int | None = None
) -> PlanMeter:
    """Return an object that measures the bytes of a step under a plan, given the names of the layers that run again.

    Args:
        framework: the layers' framework.
        name: the name of whatever counts the bytes.
        measure: returns the bytes of a step that reruns these layers; called once per set of names.
        saved_bytes: bytes that the step holds without a plan. By default they are measured, and the search starts from this
            measurement.
    """
    known = functools.cache(measure)
    kept = None if saved_bytes is not None else known(frozenset())
    return PlanMeter(
        framework=framework,
        name=name,
        measure=lambda plans: known(frozenset(each.name for each in plans if not each.is_untouched)),
        unmanaged_bytes=known(frozenset()) if saved_bytes is None else saved_bytes,
        kept_bytes=kept,
    )


def _traced(step: LayeredStep, framework: str, model: str) -> TracedStep:
    """Return the step as a trace: the layers in order, the rest of the step, then the layers' derivatives in reverse order."""
    layers = step.layers
    last = 2 * len(layers) + 1
    named = [
        *((Phase.FORWARD, each.name, "call", each.forward_seconds) for each in layers),
        (Phase.FORWARD, "", "rest", step.rest_seconds[0]),
        (Phase.BACKWARD, "", "rest gradient", step.rest_seconds[1]),
        *((Phase.BACKWARD, each.name, "gradient", each.backward_seconds) for each in layers[::-1]),
    ]
    ops = tuple(
        TraceOp(name=name, module=owner, phase=phase, cost_key=f"{owner} {name}") for phase, owner, name, _ in named
    )
    seconds = {f"{owner} {name}": taken for _, owner, name, taken in named}
    storages: list[Storage] = []
    calls: list[RegionCall] = []
    for at, layer in enumerate(layers):
        storages += _storages(layer, at, len(storages))
        calls.append(_call(layer, at, last - at, len(storages) - 2))
    trace = Trace(
        model=model,
        fingerprint=fingerprint(framework, {each.name: each.kind for each in layers}),
        signature=step.signature,
        device=step.device,
        is_fake=True,
        ops=ops,
        specs={},
        storages=tuple(storages),
        regions=tuple(calls),
        timings={},
        workspaces={},
    )
    costs = Costs(
        device=step.device, source=step.source, ops={key: OpCost(seconds=each) for key, each in seconds.items()}
    )
    return TracedStep(trace, costs, 0.0)


def _storages(layer: RerunLayer, at: int, first: int) -> tuple[Storage, Storage]:
    """Return the two storages that represent a layer in the trace: one of 0 bytes for its input, and one for all values that
    the layer makes.
    """
    return (
        Storage(
            id=first, bytes=0, category=Category.INPUT, label=f"input of {layer.name}", born=-1, dies=-1, region=-1
        ),
        Storage(
            id=first + 1,
            bytes=layer.saved_bytes,
            category=Category.ACTIVATION,
            label=f"inside of {layer.name}",
            born=at,
            dies=at,
            region=at,
        ),
    )


def _call(layer: RerunLayer, tick: int, back: int, storage: int) -> RegionCall:
    values = (
        Value(id=0, name="input", bytes=0, storage=storage, origin=Origin.PARAMETER, is_storable=True),
        Value(
            id=1,
            name="inside",
            bytes=layer.saved_bytes,
            storage=storage + 1,
            origin=Origin.OP,
            producer=0,
            is_storable=True,
        ),
    )
    op = RegionOp(id=0, name="call", reads=(0,), writes=(1,), cost_key=f"{layer.name} call", tick=tick)
    slot = Slot(index=0, value=1, packed=tick, unpacked=back, released=back + 1)
    return RegionCall(
        index=tick,
        name=layer.name,
        call=0,
        kind=hashlib.sha256(layer.kind.encode()).hexdigest()[:12],
        graph=RegionGraph(values=values, ops=(op,), slots=(slot,), outputs=(), backward_order=(0,)),
        forward=(tick, tick + 1),
        backward=(back, back + 1),
        obstacle=layer.obstacle,
        is_compiled=True,
    )
