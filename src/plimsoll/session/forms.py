"""Measures the forms (compressed, offloaded) that the values of a step can be held in: bytes, seconds and noise.

One step runs at the lowest memory while a sensor (hooks that try codecs on saved values) watches it. Its gradients equal the
unmanaged (without a plan) model's gradients, and are kept as the reference for lossy plans. Codecs are tried on the first, the
middle and the last call of every kind of region (managed module). All calls of a kind share the result: the largest payload,
and the root mean square of noise and sensitivity.

Queries and keys stay exact. Backward of fused attention recomputes the probabilities as exp(q·k - log-sum-exp), with the
log-sum-exp that forward saved. If queries or keys are restored with an error, they no longer match the log-sum-exp, and the
error of a score is in the exponent. This is harmless while scores are small, as at the start of training. Once scores have
grown, it is not: one step of 40 had a gradient 14 times too long (lab notes). An error measured on the first batch cannot show
that in advance.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Form, Forms, LinkCost, RegionForms, ValueForms
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.region import Origin, RegionGraph
from plimsoll.artifacts.trace import RegionCall, Trace
from plimsoll.engine.codecs.protocol import Codec
from plimsoll.engine.codecs.registry import find_codec, lossless_codecs
from plimsoll.engine.offload.measure import LinkSpeed, link_speed
from plimsoll.engine.offload.open import default_link_name
from plimsoll.engine.sensing import LEAST_LOSSY_ELEMENTS, RegionKey, Seen, Sensor, squared_norm
from plimsoll.engine.stored_forms import READS_SIGN_ONLY
from plimsoll.errors import TracingFailed
from plimsoll.planning.step import StepIndex
from plimsoll.session.manage import manage
from plimsoll.session.options import PlanOptions
from plimsoll.session.training_step import TrainingStep, copies, relative_error
from plimsoll.tracing.meters.timing import clock_for, one_thread
from plimsoll.tracing.recorder.untouched import untouched

LOSSY = ("bf16", "int8:unrotated", "int8", "int4:unrotated", "int4")
"""Names of the lossy codecs that the strategy ``auto`` chooses from."""
_LEAST_BYTES = 4096
"""Values with fewer bytes than this are not compressed or offloaded, because that would not save enough."""
_LEAST_LINK_BYTES = 1 << 16
"""Values with fewer bytes than this are not offloaded, because such transfers are mostly overhead."""
_STATISTIC_SHARE = 8
"""An op's output that is at least 8 times smaller than the op's largest input is a statistic (a norm's mean, a softmax's
logarithm). Backward needs it exactly.
"""
_SLACK = 1.1
"""If the compressed size depends on the data, it may grow by this factor. If it grows by more, the value is kept
uncompressed.
"""
_FUSED_ATTENTION = "scaled_dot_product"
_SCORE_INPUTS = 2
"""The number of inputs of fused attention that scores are computed from: the query and the key are its first two inputs."""
_MAXIMUM = re.compile(r"(?<!:):(amax|logsumexp)(#\d+)?$")
"""Names of the values that a softmax saves in a compiled block."""


@dataclass(frozen=True, slots=True)
class Sensed:
    """Data: what trying codecs and links (host memory or disk) in one step gave: the forms (ways to hold a value other than
    unchanged), and that step's gradients on the CPU.
    """

    forms: Forms
    gradients: dict[str, torch.Tensor | None]


def sense_forms(step: TrainingStep, trace: Trace, costs: Costs, lowest: Plan, options: PlanOptions) -> Sensed:
    """Run one step under the plan with the lowest peak, and measure the forms (codecs and links) that its values could be held
    in.

    The model must not be managed. It is restored afterwards.

    Raises:
        TracingFailed: the trace was made for a device that this machine lacks.
    """
    if trace.is_fake:
        raise TracingFailed(
            "Compression and offloading cannot be planned from a fake trace.",
            why="a codec's size and error depend on the values, and a link's speed depends on the machine",
            next="plan with allow='recompute' for a device that this machine lacks, or plan on the device itself",
        )
    sensor = Sensor(_codecs(options), _sampled(trace), wants_sensitivity=options.wants_lossy)
    with untouched(step.model, lowest.written):
        with manage(step.model, lowest, sensor=sensor):
            try:
                step.run()
            finally:
                sensor.close()
        gradients = {name: None if g is None else g.to("cpu") for name, g in copies(step.gradients()).items()}
    link, speed = _measure_link(options, step.device, trace)
    maker = _FormMaker(trace, costs, sensor, gradients, link, speed, str(step.device), _wished(options))
    return Sensed(maker.make(), gradients)


def sense_compiled(step: TrainingStep, trace: Trace, costs: Costs, plan: Plan, options: PlanOptions) -> Sensed:
    """Measure the forms (codecs and links) that the saved values of compiled blocks could be held in.

    Codecs are tried in one step with everything saved. A link (to host memory or disk) returns exactly what it was given, so if
    only offloading is allowed, no step is run. ``plan`` says what is compiled.
    """
    sensor = Sensor(_codecs(options), _sampled(trace), wants_sensitivity=False)
    for call in trace.regions:
        if call.unpacks_at_once:
            # Only values that forward saves: the other slots are packed in backward.
            saved = (slot for slot in call.graph.slots if slot.packed <= call.forward[1])
            values = {call.graph.values[slot.value].name: call.graph.values[slot.value] for slot in saved}
            held = {name: value for name, value in values.items() if value.bytes >= _LEAST_BYTES}
            sensor.compiled[call.name, call.call] = tuple(sorted(held))
            unseen = {name: Seen(torch.uint8, value.bytes) for name, value in held.items()}
            sensor.seen[call.name, call.call] = {} if options.may_compress else unseen
    gradients: dict[str, torch.Tensor | None] = {}
    if options.may_compress:
        with untouched(step.model, plan.written), manage(step.model, plan, sensor=sensor):
            step.run()
            gradients = {name: None if g is None else g.to("cpu") for name, g in copies(step.gradients()).items()}
            if options.wants_lossy:
                _follow_noise(step, trace, sensor, gradients)
    link, speed = _measure_link(options, step.device, trace)
    maker = _FormMaker(trace, costs, sensor, gradients, link, speed, str(step.device), _wished(options))
    return Sensed(maker.make(), gradients)


def _follow_noise(
    step: TrainingStep, trace: Trace, sensor: Sensor, gradients: Mapping[str, torch.Tensor | None]
) -> None:
    """Measure how an error in each saved value of compiled blocks changes the gradients. For each value of each kind of block
    that a lossy codec may take, one step runs with noise added to that value.

    Noise cannot be followed through a compiled block, because the block is one node of autograd.
    """
    kinds: dict[str, list[RegionCall]] = {}
    for call in trace.regions:
        if call.unpacks_at_once:
            kinds.setdefault(call.kind, []).append(call)
    energy = sum(_energies(gradients).values())
    for calls in kinds.values():
        keys = frozenset((call.name, call.call) for call in calls)
        exact = score_inputs(calls[0].graph)
        for name in sensor.compiled[calls[0].name, calls[0].call]:
            seen = [sensor.seen[key][name] for key in keys]
            is_lossy = seen[0].dtype.is_floating_point and seen[0].count >= LEAST_LOSSY_ELEMENTS
            if not is_lossy or name in exact:
                moved = math.inf
            else:
                sensor.noisy, sensor.squared_noise = (keys, name), 0.0
                step.run()
                squared = relative_error(gradients, step.gradients()) ** 2
                moved = squared * energy / sensor.squared_noise if sensor.squared_noise else math.inf
            for one in seen:
                one.parameter_error = moved
    sensor.noisy = None


def _energies(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
    """Return a mapping from each parameter's name to the squared norm of its gradient."""
    return {name: squared_norm(gradient) for name, gradient in gradients.items() if gradient is not None}


def _wished(options: PlanOptions) -> tuple[str, ...]:
    """Return the names of the codecs that the user named in strategies and overrides."""
    by_override = {find_codec(o.form).name for o in options.overrides if o.decision is Decision.COMPRESS and o.form}
    return (*options.codecs, *sorted(by_override))


def _codecs(options: PlanOptions) -> tuple[str, ...]:
    if not options.may_compress:
        return ()
    lossy = LOSSY if options.max_error > 0 else ()
    lossless = tuple(codec.name for codec in lossless_codecs())
    return tuple(dict.fromkeys((*lossless, *lossy, *_wished(options))))


def _sampled(trace: Trace) -> frozenset[RegionKey]:
    """Return the region calls (calls of planned modules) that codecs are tried on: the first, the middle and the last call of
    each kind of region.
    """
    kinds: dict[str, list[RegionKey]] = {}
    for call in trace.regions:
        kinds.setdefault(call.kind, []).append((call.name, call.call))
    return frozenset(calls[i] for calls in kinds.values() for i in (0, len(calls) // 2, -1))


def _measure_link(options: PlanOptions, device: torch.device, trace: Trace) -> tuple[LinkCost | None, LinkSpeed | None]:
    """Return the cost of the link and its whole measurement, or ``None`` for both if plans may not offload."""
    if not options.may_offload:
        return None, None
    name = options.link or default_link_name(device)
    largest_bytes = max((value.bytes for call in trace.regions for value in call.graph.values), default=0)
    speed = link_speed(name, device, host_budget=options.host_budget_bytes, largest_bytes=largest_bytes)
    return speed.cost(name), speed


@dataclass(frozen=True)
class _FormMaker:
    """Makes the forms of a step's values, which are ways to hold a value (a codec, or offloading), from measurements of one
    step.
    """

    trace: Trace
    costs: Costs
    sensor: Sensor
    gradients: Mapping[str, torch.Tensor | None]
    link: LinkCost | None
    speed: LinkSpeed | None
    device: str
    wished: Collection[str]
    """Names of the codecs that the user asked for."""

    @functools.cached_property
    def _energy(self) -> dict[str, float]:
        return _energies(self.gradients)

    def make(self) -> Forms:
        index = StepIndex(self.trace, self.costs)
        by_kind: dict[str, list[RegionCall]] = {}
        for call in self.trace.regions:
            by_kind.setdefault(call.kind, []).append(call)
        regions = []
        for calls in by_kind.values():
            shared = {name: self._value(name, calls) for name in self._names(calls)}
            for call in calls:
                can_offload = index.neighbour(call.index) is not None
                values = tuple(self._with_link(entry, call) if can_offload else entry for entry in shared.values())
                regions.append(RegionForms(name=call.name, call=call.call, values=values))
        return Forms(regions=tuple(regions), link=self.link)

    def _names(self, calls: Sequence[RegionCall]) -> list[str]:
        return [name for name in self._seen(calls[0]) if any(v.name == name for v in calls[0].graph.values)]

    def _seen(self, call: RegionCall) -> Mapping[str, Seen]:
        return self.sensor.seen.get((call.name, call.call), {})

    def _value(self, name: str, calls: Sequence[RegionCall]) -> ValueForms:
        seen = [(call, self._seen(call)[name]) for call in calls if name in self._seen(call)]
        sampled = [(call, entry) for call, entry in seen if entry.trials]
        sensitivity = self._sensitivity(name, sampled)
        readers = frozenset().union(*(entry.readers for _, entry in seen))
        forms: list[Form] = []
        refused: list[tuple[str, str]] = []
        for codec_name in dict.fromkeys(codec for _, entry in sampled for codec in entry.trials):
            found = self._form(codec_name, calls[0].graph, name, [e for _, e in sampled], readers)
            if isinstance(found, str):
                refused.append((codec_name, found))
            else:
                forms.append(found)
        forms = _worthwhile(forms, self.wished)
        return ValueForms(value=name, sensitivity=sensitivity, forms=tuple(forms), refused=tuple(refused))

    def _form(
        self, codec_name: str, graph: RegionGraph, name: str, seen: Sequence[Seen], readers: frozenset[str]
    ) -> Form | str:
        """Return the form of one value under one codec: its bytes, seconds and error. If the codec cannot be used, return the
        reason as text.
        """
        codec = find_codec(codec_name)
        trials = [entry.trials[codec_name] for entry in seen if codec_name in entry.trials]
        value = next(v for v in graph.values if v.name == name)
        if value.bytes < _LEAST_BYTES:
            return "the value is too small for another form to pay off"
        if any(trial.payload_bytes is None for trial in trials):
            return f"{codec_name}: the data are not finite, or would not get smaller"
        if codec.keeps_sign_only and not (readers and readers <= READS_SIGN_ONLY):
            return f"{codec_name}: not only ReLU reads it"
        if not codec.is_lossless and _is_statistic(graph, name):
            return f"{codec_name}: the value is a statistic, which backward needs exactly"
        if not codec.is_lossless and name in made_into_scores(graph):
            return f"{codec_name}: in fused attention's backward, its error would be in an exponent"
        count, dtype = seen[0].count, seen[0].dtype
        exact = codec.payload_bytes(count, dtype)
        held = exact if exact is not None else int(_SLACK * max(t.payload_bytes or 0 for t in trials))
        if held >= value.bytes:
            return f"{codec_name}: the data would not get smaller"
        seconds = measure_codec(codec_name, dtype, count, self.device)
        return Form(
            name=codec_name,
            decision=Decision.COMPRESS,
            held_bytes=held,
            encode_seconds=seconds.encode,
            decode_seconds=seconds.decode,
            noise=math.sqrt(statistics.fmean(trial.noise**2 for trial in trials)) if trials else 0.0,
            workspace_bytes=codec.workspace_bytes(count, dtype),
            is_private=codec.keeps_sign_only,
        )

    def _sensitivity(self, name: str, sampled: Sequence[tuple[RegionCall, Seen]]) -> float:
        """Return the relative error of the whole gradient per unit of relative error in the named value. It is infinite for
        values that must be exact.

        Such values are all that are not floating-point numbers, and queries and keys, whatever they are rebuilt from.
        """
        total = sum(self._energy.values())
        if not sampled or not total:
            return 0.0
        if not sampled[0][1].dtype.is_floating_point:
            return math.inf
        if any(name in score_inputs(call.graph) for call, _ in sampled):
            return math.inf
        squares = [(entry.parameter_error + entry.flow_error * self._upstream(call)) / total for call, entry in sampled]
        return math.sqrt(statistics.fmean(squares))

    def _upstream(self, call: RegionCall) -> float:
        """Return the squared norm of the gradients that an error in this call's saved values can change: gradients in earlier
        regions, and of parameters outside of all regions.
        """
        others = {f"{other.name}." for other in self.trace.regions if other.index >= call.index}
        return sum(energy for name, energy in self._energy.items() if not name.startswith(tuple(others)))

    def _with_link(self, entry: ValueForms, call: RegionCall) -> ValueForms:
        value = next(v for v in call.graph.values if v.name == entry.value)
        link, speed = self.link, self.speed
        if link is None or speed is None or value.bytes < _LEAST_LINK_BYTES or value.origin is Origin.PARAMETER:
            return entry
        form = Form(
            name=link.name,
            decision=Decision.OFFLOAD,
            held_bytes=0,
            encode_seconds=self._copy_seconds(value.bytes, speed.out_cpu_seconds_per_byte),
            decode_seconds=self._copy_seconds(value.bytes, speed.in_cpu_seconds_per_byte),
            link_bytes=value.bytes,
        )
        return ValueForms(
            value=entry.value, sensitivity=entry.sensitivity, forms=(*entry.forms, form), refused=entry.refused
        )

    def _copy_seconds(self, bytes_: int, cpu_seconds_per_byte: float) -> float:
        """Return the processor's seconds for the transfer of ``bytes_`` bytes. They are 0 on a GPU, because its copy engines do
        the work.
        """
        if self.device != "cpu" or self.speed is None:
            return 0.0
        return self.speed.latency_seconds + bytes_ * cpu_seconds_per_byte


def score_inputs(graph: RegionGraph) -> frozenset[str]:
    """Return the names of the values that fused attention reads as queries and keys."""
    return frozenset(graph.values[value].name for value in _queries_and_keys(graph))


def made_into_scores(graph: RegionGraph) -> frozenset[str]:
    """Return the names of queries, keys, and all values in the region that they are computed from."""
    found: set[int] = set()
    pending = _queries_and_keys(graph)
    while pending:
        value = pending.pop()
        if value in found:
            continue
        found.add(value)
        producer = graph.values[value].producer
        if producer >= 0:
            pending.extend(graph.ops[producer].reads)
    return frozenset(graph.values[value].name for value in found)


def _queries_and_keys(graph: RegionGraph) -> list[int]:
    """Return the ids of the values in the region that fused attention computes scores from (queries and keys).

    In compiled code, also the scores themselves, if a softmax keeps their maximum and their sum.
    """
    found = [value for op in graph.ops if _FUSED_ATTENTION in op.name for value in op.reads[:_SCORE_INPUTS]]
    softmax = (op for op in graph.ops if any(_MAXIMUM.search(graph.values[write].name) for write in op.writes))
    return [*found, *(read for op in softmax for read in op.reads)]


def _is_statistic(graph: RegionGraph, name: str) -> bool:
    value = next(v for v in graph.values if v.name == name)
    if value.producer < 0:
        return False
    reads = [graph.values[read].bytes for read in graph.ops[value.producer].reads]
    return value.bytes * _STATISTIC_SHARE <= max(reads, default=0)


def _worthwhile(forms: Sequence[Form], wished: Collection[str]) -> list[Form]:
    """Return the forms that are worth offering to the planner. A form is a way to hold one tensor: a codec, or the link.

    A form is left out if another one is at least as good in bytes, seconds and error, and better in one of them. Forms that the
    user has named (``wished``) always stay.
    """

    def beats(one: Form, other: Form) -> bool:
        pairs = ((one.held_bytes, other.held_bytes), (one.seconds, other.seconds), (one.noise, other.noise))
        is_private = one.is_private and not other.is_private
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs) and not is_private

    return [form for form in forms if form.name in wished or not any(beats(other, form) for other in forms)]


_MOST_ELEMENTS = 1 << 22
"""Codecs are timed on tensors of at most this many elements."""
_RUNS = 3


@dataclass(frozen=True, slots=True)
class CodecSeconds:
    """The seconds that a codec takes to encode one tensor and to decode it, as data."""

    encode: float
    decode: float


@functools.lru_cache(maxsize=512)
def measure_codec(name: str, dtype: torch.dtype, count: int, device: str) -> CodecSeconds:
    """Return the seconds of one codec on a tensor of ``count`` elements. The random state does not change.

    The data depend on the dtype: normal numbers, coin flips for booleans, small counts for integers. Times of tensors above 4
    Mi elements are extrapolated, because a codec processes any tensor in the same chunks. The result is the median of three
    runs on one thread, with the clock that times ops.

    Args:
        name: the codec's name.
        dtype: a dtype that it accepts.
        count: the number of elements.
        device: the tensor's device.
    """
    codec, clock = find_codec(name), clock_for(torch.device(device))
    measured = min(count, _MOST_ELEMENTS)
    tensor = _data(codec, dtype, measured, device)
    encode, decode = [], []
    threads = one_thread() if torch.device(device).type == "cpu" else contextlib.nullcontext()
    with torch.no_grad(), threads:
        for run in range(_RUNS + 1):
            payload, encode_seconds = clock.time(functools.partial(codec.encode, tensor))
            decode_seconds = 0.0 if payload is None else clock.time(functools.partial(codec.decode, payload))[1]
            if run:  # the first run allocates memory that later runs reuse
                encode.append(encode_seconds)
                decode.append(decode_seconds)
    scale = count / max(measured, 1)
    return CodecSeconds(statistics.median(encode) * scale, statistics.median(decode) * scale)


def _data(codec: Codec, dtype: torch.dtype, count: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype is torch.bool:
        data = torch.rand(count, generator=generator) < 0.9
    elif dtype.is_floating_point:
        data = torch.randn(count, generator=generator)
        # the lossless codecs for floats accept mostly-zero or two-valued data
        if codec.is_lossless and not codec.keeps_sign_only:
            data = data.clamp_min(1.0) - 1.0 if codec.name.startswith("zeros") else (data > 0).float()
    else:
        data = torch.randint(0, 100, (count,), generator=generator)
    return data.to(dtype).to(device)
