"""Small synthetic training steps, written op by op, turned into a ``Trace`` and its ``Costs``.

Each forward op gets one backward op that reads what the forward op saved, frees the gradient of its output and makes
gradients of its inputs and parameters. Lives follow reference counting: a storage dies after the last forward op that
reads it; what slots hold is left out, as a trace leaves it out.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from plimsoll.artifacts.costs import Costs, CostSource, OpCost
from plimsoll.artifacts.region import Origin, RegionGraph, RegionOp, Slot, Value
from plimsoll.artifacts.trace import Category, OpSpec, Phase, RegionCall, Storage, Trace, TraceOp
from plimsoll.planning.frontier import Sweeper
from plimsoll.planning.simulate import choices_of, run_choices
from plimsoll.planning.step import StepIndex
from samples import filled

OUT = -1
"""In ``saves``: the op's own output."""


def bare_trace(
    specs: dict[str, OpSpec],
    *,
    device: str = "cpu",
    ops: tuple[TraceOp, ...] = (),
    timings: dict[str, tuple[float, ...]] | None = None,
) -> Trace:
    """A step of which only the costs of its ops matter; with timings it ran on its device."""
    return filled(Trace, device=device, is_fake=timings is None, ops=ops, specs=specs, timings=timings or {})


@dataclass
class _Value:
    storage: int
    bytes: int
    name: str
    tick: int
    origin: Origin = Origin.OP
    region: int = -1


@dataclass
class _Op:
    name: str
    module: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    saves: tuple[int, ...]
    seconds: float
    obstacle: str
    region: int


@dataclass
class _Storage:
    bytes: int
    category: Category
    label: str
    born: int
    dies: int
    region: int = -1


@dataclass
class _Region:
    name: str
    start: int
    end: int = -1
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    obstacle: str = ""


@dataclass
class StepBuilder:
    """Write forward with ``parameter``, ``op`` and ``region``; ``finish`` adds backward."""

    slot_seconds: float = 0.0
    replay_seconds: float = 0.0
    values: list[_Value] = field(default_factory=list)
    ops: list[_Op] = field(default_factory=list)
    storages: list[_Storage] = field(default_factory=list)
    regions: list[_Region] = field(default_factory=list)
    workspaces: dict[str, int] = field(default_factory=dict)
    is_overwriting: bool = False
    """Whether ops of backward write over what they read, as compiled ones do."""
    _current: int = -1

    def parameter(self, name: str, size: int) -> int:
        self.storages.append(_Storage(size, Category.PARAMETER, name, -1, 10**9))
        self.values.append(_Value(len(self.storages) - 1, size, f"parameter:{name}", -1, Origin.PARAMETER))
        return len(self.values) - 1

    def batch(self, size: int) -> int:
        self.storages.append(_Storage(size, Category.INPUT, "batch", -1, 10**9))
        self.values.append(_Value(len(self.storages) - 1, size, "batch", -1, Origin.INPUT))
        return len(self.values) - 1

    def op(
        self,
        name: str,
        *reads: int,
        size: int = 0,
        saves: tuple[int, ...] = (),
        seconds: float = 1.0,
        in_place: int | None = None,
        obstacle: str = "",
        workspace: int = 0,
        module: str = "",
    ) -> int:
        """One forward op; returns its output. ``in_place`` writes a new version of that value's storage."""
        tick = len(self.ops)
        if in_place is None:
            label = f"{module}::{name}"
            self.storages.append(_Storage(size, Category.ACTIVATION, label, tick, tick + 1, self._current))
            storage = len(self.storages) - 1
        else:
            reads = (in_place, *reads)
            storage, size = self.values[in_place].storage, self.values[in_place].bytes
        label = f"{module}::{name}#{tick - (self.regions[self._current].start if self._current >= 0 else 0)}"
        self.values.append(_Value(storage, size, label, tick, region=self._current))
        out = len(self.values) - 1
        key = f"{name}|{size}|{seconds}"
        self.workspaces[key] = workspace
        saved = tuple(out if v == OUT else v for v in saves)
        self.ops.append(_Op(key, module, reads, (out,), saved, seconds, obstacle, self._current))
        for value in (*reads, out):
            storage_ = self.storages[self.values[value].storage]
            storage_.dies = max(storage_.dies, tick + 1)
        return out

    @contextmanager
    def region(self, name: str, *inputs: int, obstacle: str = "") -> Iterator[_Region]:
        """What runs inside is one region call; assign its ``outputs`` before leaving."""
        region = _Region(name, len(self.ops), inputs=inputs, obstacle=obstacle)
        self.regions.append(region)
        self._current = len(self.regions) - 1
        yield region
        region.end = len(self.ops)
        self._current = -1
        for value in region.outputs:
            storage = self.storages[self.values[value].storage]
            storage.dies = max(storage.dies, region.end + 1)

    def finish(self) -> tuple[Trace, Costs]:
        """The step with its backward; the builder itself stays as it is."""
        return copy.deepcopy(self)._finish()

    def _finish(self) -> tuple[Trace, Costs]:
        forward = len(self.ops)
        trace_ops = [TraceOp(name=op.name.split("|")[0], module=op.module, phase=Phase.FORWARD, cost_key=op.name,
                             region=op.region) for op in self.ops]  # fmt: skip
        total = 2 * forward
        gradients: dict[int, int] = {}
        for position, op in enumerate(reversed(self.ops)):
            tick = forward + position
            trace_ops.append(TraceOp(name=f"{op.name.split('|')[0]}_backward", module=op.module, phase=Phase.BACKWARD,
                                     cost_key=f"{op.name}_backward", region=op.region))  # fmt: skip
            self._backward(op, tick, total, gradients)
        costs = {op.name: OpCost(seconds=op.seconds) for op in self.ops}
        costs |= {f"{op.name}_backward": OpCost(seconds=2 * op.seconds) for op in self.ops}
        trace = Trace(
            model="synthetic", fingerprint="f", signature="s", device="cpu", is_fake=False, ops=tuple(trace_ops),
            specs={}, timings={}, workspaces={k: v for k, v in self.workspaces.items() if v},
            storages=tuple(
                Storage(id=i, bytes=s.bytes, category=s.category, label=s.label, born=s.born, dies=min(s.dies, total),
                        region=s.region)
                for i, s in enumerate(self.storages)
            ),
            regions=tuple(self._region_call(i, r, forward) for i, r in enumerate(self.regions)),
        )  # fmt: skip
        return trace, Costs(
            device="cpu", source=CostSource.ROOFLINE, ops=costs, slot_seconds=self.slot_seconds,
            replay_seconds=self.replay_seconds,
        )  # fmt: skip

    def _backward(self, op: _Op, tick: int, total: int, gradients: dict[int, int]) -> None:
        for value in (*op.reads, *op.writes):
            known = self.values[value]
            if value in gradients or known.origin is Origin.INPUT:
                continue
            is_parameter = known.origin is Origin.PARAMETER
            category = Category.GRADIENT if is_parameter else Category.TEMPORARY
            made = forward_tick = known.tick
            dies = total if is_parameter else 2 * len(self.ops) - forward_tick
            self.storages.append(_Storage(known.bytes, category, f"gradient of {known.name}", tick, dies))
            gradients[value] = made
        for value in op.saves:
            if op.region < 0:
                storage = self.storages[self.values[value].storage]
                storage.dies = max(storage.dies, tick + 1)

    def _region_call(self, index: int, region: _Region, forward: int) -> RegionCall:
        ops = self.ops[region.start : region.end]
        used = dict.fromkeys([*region.inputs, *(v for op in ops for v in (*op.reads, *op.writes))])
        order = sorted(used, key=lambda v: (self.values[v].region == index, v))
        local = {value: position for position, value in enumerate(order)}
        slots: list[Slot] = []
        for position, op in enumerate(ops):
            tick = region.start + position
            read = 2 * forward - 1 - tick
            for value in op.saves:
                is_managed = self.values[value].origin is not Origin.PARAMETER
                slots.append(Slot(index=len(slots), value=local[value] if is_managed else -1, packed=tick + 1,
                                  unpacked=read, released=read + (not self.is_overwriting),
                                  is_overwritten=self.is_overwriting))  # fmt: skip
        saved = {slot.value for slot in slots}
        values = []
        for value in order:
            known = self.values[value]
            is_own = known.region == index
            origin = Origin.OP if is_own else (Origin.PARAMETER if known.origin is Origin.PARAMETER else Origin.INPUT)
            name = f"input:{local[value]}" if origin is Origin.INPUT else known.name
            values.append(Value(id=local[value], name=name, bytes=known.bytes, storage=known.storage, origin=origin,
                                producer=known.tick - region.start if is_own else -1,
                                is_storable=local[value] in saved or origin is Origin.INPUT))  # fmt: skip
        graph_ops = tuple(
            RegionOp(id=i, name=op.name.split("|")[0], reads=tuple(local[v] for v in op.reads),
                     writes=tuple(local[v] for v in op.writes), cost_key=op.name, tick=region.start + i,
                     obstacle=op.obstacle)
            for i, op in enumerate(ops)
        )  # fmt: skip
        reading = sorted(range(len(slots)), key=lambda s: (slots[s].unpacked, s))
        graph = RegionGraph(values=tuple(values), ops=graph_ops, slots=tuple(slots),
                            outputs=tuple(local[v] for v in region.outputs), backward_order=tuple(reading))  # fmt: skip
        kind = str(hash((tuple((v.name, v.bytes, v.producer) for v in values), tuple(o.cost_key for o in graph_ops),
                         tuple(s.value for s in slots))))  # fmt: skip
        backward = (2 * forward - region.end, 2 * forward - region.start)
        return RegionCall(index=index, name=region.name, call=0, kind=kind, graph=graph,
                          forward=(region.start, region.end), backward=backward, obstacle=region.obstacle)  # fmt: skip


def in_regions(*bodies: Callable[[StepBuilder, int], int], source_bytes: int = 10, loss_bytes: int = 1) -> StepBuilder:
    """A source, one region per body, which makes its output of its input, and a loss."""
    step = StepBuilder()
    x = step.op("source", size=source_bytes)
    for number, body in enumerate(bodies):
        with step.region(f"blocks.{number}", x) as region:
            x = body(step, x)
            region.outputs = (x,)
    step.op("loss", x, size=loss_bytes)
    return step


def transformer(blocks: int, *, width: int = 64, slot_seconds: float = 0.0, detail: int = 1) -> StepBuilder:
    """Pre-norm blocks of norm, attention, norm, gated MLP and two residuals, an embedding before and a loss after.

    ``width`` is the bytes of one residual stream; ``detail`` repeats element-wise pieces to make blocks longer.
    """
    step = StepBuilder(slot_seconds=slot_seconds, replay_seconds=slot_seconds)
    batch = step.batch(8)
    table = step.parameter("embedding", 8 * width)
    x = step.op("embedding", batch, table, size=width, saves=(batch,), seconds=0.2, module="embedding")
    for block in range(blocks):
        x = _block(step, f"layers.{block}", x, width, detail)
    head = step.parameter("head", 8 * width)
    logits = step.op("mm", x, head, size=6 * width, saves=(x, head), seconds=6.0, module="head")
    step.op("loss", logits, size=8, saves=(logits, OUT), seconds=1.0, module="loss")
    return step


def _block(step: StepBuilder, name: str, x: int, width: int, detail: int) -> int:
    with step.region(name, x) as region:
        weights = {w: step.parameter(f"{name}.{w}", 4 * width) for w in ("qkv", "out", "up", "down")}
        normed = _norm(step, x, width, "attn_norm", detail)
        qkv = step.op("mm", normed, weights["qkv"], size=3 * width, saves=(normed, weights["qkv"]), seconds=3.0,
                      module="attn.qkv")  # fmt: skip
        for _ in range(detail):
            qkv = step.op("rotary", qkv, size=3 * width, seconds=0.3, saves=(), module="attn")
            qkv = step.op("mul", qkv, size=3 * width, seconds=0.3, saves=(qkv,), module="attn")
        mixed = step.op("sdpa", qkv, size=width, saves=(qkv, OUT), seconds=2.0, workspace=width // 4, module="attn")
        attended = step.op("mm", mixed, weights["out"], size=width, saves=(mixed, weights["out"]), seconds=1.0,
                           module="attn.out")  # fmt: skip
        middle = step.op("add", x, attended, size=width, seconds=0.1)
        normed = _norm(step, middle, width, "mlp_norm", detail)
        hidden = step.op("mm", normed, weights["up"], size=4 * width, saves=(normed, weights["up"]), seconds=4.0,
                         module="mlp.up")  # fmt: skip
        for _ in range(detail):
            hidden = step.op("gelu", hidden, size=4 * width, saves=(hidden,), seconds=0.4, module="mlp.act")
        down = step.op("mm", hidden, weights["down"], size=width, saves=(hidden, weights["down"]), seconds=4.0,
                       module="mlp.down")  # fmt: skip
        kept = step.op("empty", size=width, seconds=0.05, module="mlp.dropout")
        mask = step.op("bernoulli_", in_place=kept, seconds=0.1, module="mlp.dropout")
        dropped = step.op("mul", down, mask, size=width, saves=(mask,), seconds=0.1, module="mlp.dropout")
        out = step.op("add", middle, dropped, size=width, seconds=0.1)
        region.outputs = (out,)
    return out


def _norm(step: StepBuilder, x: int, width: int, module: str, detail: int) -> int:
    scale = step.op("rstd", x, size=max(width // 16, 1), saves=(x,), seconds=0.1, module=module)
    y = step.op("scale", x, scale, size=width, saves=(x, scale), seconds=0.1, module=module)
    for _ in range(detail):
        y = step.op("mul", y, size=width, saves=(y,), seconds=0.1, module=module)
    return y


def random_step(seed: int, *, regions: int = 3, ops: int = 5) -> StepBuilder:
    """A chain of random little regions: fan-out, in-place ops, obstacles, unsaved inputs, workspaces, compiled backwards."""
    draw = random.Random(seed)
    step = StepBuilder(slot_seconds=draw.choice([0.0, 0.05]), replay_seconds=draw.choice([0.0, 0.02]))
    step.is_overwriting = seed % 3 == 2
    x = step.op("embedding", step.batch(draw.randint(1, 4)), size=draw.randint(1, 8), seconds=0.5)
    side = step.op("mask", size=draw.randint(1, 4), seconds=0.1)
    for number in range(draw.randint(1, regions)):
        with step.region(f"blocks.{number}", x, obstacle="reads a value" if draw.random() < 0.05 else "") as region:
            weight = step.parameter(f"{number}.weight", draw.randint(1, 6))
            known = [x] + ([side] if draw.random() < 0.3 else [])
            for _ in range(draw.randint(1, ops)):
                known.append(_random_op(step, draw, known, weight))
            region.outputs = (known[-1],)
        x = known[-1]
    step.op("loss", x, size=draw.choice([1, 1, 30]), saves=(x, OUT) if draw.random() < 0.5 else (), seconds=1.0)
    return step


def random_stage(seed: int) -> tuple[Trace, Costs]:
    """A random step, every other one with an optimizer that needs a lot of memory after all micro-batches are done."""
    trace, costs = random_step(seed).finish()
    if seed % 2 == 0:
        return trace, costs
    end = len(trace.ops)
    step = TraceOp(name="step", module="", phase=Phase.OPTIMIZER, cost_key="step")
    lasting = [msgspec.structs.replace(s, dies=end + 1) if s.born < 0 and s.dies >= end else s for s in trace.storages]
    size = random.Random(seed).randint(1, 60)
    scratch = filled(Storage, id=len(lasting), bytes=size, category=Category.TEMPORARY, born=end, dies=end + 1)
    return msgspec.structs.replace(trace, ops=(*trace.ops, step), storages=(*lasting, scratch)), costs


def _random_op(step: StepBuilder, draw: random.Random, known: list[int], weight: int) -> int:
    own = [v for v in known if step.values[v].region == step._current]
    saved = {v for op in step.ops for v in op.saves}
    fresh = [v for v in own[-1:] if v not in saved]
    if fresh and draw.random() < 0.15:
        target = fresh[0]
        known.remove(target)
        return step.op("in_place", in_place=target, seconds=draw.randint(1, 5) / 10, saves=(OUT,))
    reads = draw.sample(known, min(len(known), draw.randint(1, 2)))
    if known[-1] not in reads:
        reads.append(known[-1])
    with_weight = [weight] if draw.random() < 0.5 else []
    choices = [v for v in itertools.chain(reads, with_weight) if draw.random() < 0.6]
    saves = tuple(choices) + ((OUT,) if draw.random() < 0.4 else ())
    return step.op(
        draw.choice(["mm", "mul", "gelu"]), *reads, *with_weight, size=draw.randint(1, 12), saves=saves,
        seconds=draw.randint(1, 30) / 10, obstacle="not replayable" if draw.random() < 0.08 else "",
        workspace=draw.choice([0, 0, 0, 5]),
    )  # fmt: skip


def simulate(trace, costs, regions, forms=None):
    """The step under the decisions of a plan."""
    index = StepIndex(trace, costs, forms)
    return run_choices(index, choices_of(index, regions))


def sweep_prices(view, prices):
    """The hull of one region."""
    return Sweeper(view).sweep([prices])[0]
