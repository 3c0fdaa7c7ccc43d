"""Measure in one recorded step what lossy codecs would do to a model: the bytes that encoded values take, and the noise that
they add to gradients.

A lossy codec does not give back the exact value. While all saved values of a region (a module that the plan decides about) are
held, codecs are tried on them. The results are bytes and noise = ‖decoded - value‖ / ‖value‖. The step itself reads the exact
values, so its gradients equal the unmanaged model's.

The effect of noise on gradients is followed through backward to first order. Right before an autograd node runs, the node is
run again once per saved value that it reads, each time with that value read through a lossy codec. The difference is exactly
the noise that the value adds to the node's outputs. From there on, noise is one number (a squared norm) for each value and each
edge of the graph. A node passes on the *relative* noise of its incoming gradient. Noises that meet add as squares (they are
assumed independent), so the gradient of a parallel branch (a residual connection) dilutes noise. Noise that reaches a parameter
is counted; noise that leaves the region is reported relative to the gradient that leaves it.

Some nodes are not run again: nodes of ``torch.autograd.Function`` (their backward is user Python, which may count calls), nodes
that raise, and all nodes of a region with collectives. The values that they read count as too sensitive.

A compiled block is one such node. For compiled blocks the whole step is run again for each of their values, with noise in that
value in all equal blocks at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plimsoll.artifacts.region import IS_COLLECTIVE, RegionGraph
from plimsoll.engine.codecs.protocol import Codec
from plimsoll.engine.codecs.registry import find_codec
from plimsoll.engine.hooks import Cell, Readable, restore
from plimsoll.engine.stored_forms import Encoded, Packer, Refused, Source, whole_storage
from plimsoll.tracing.local_tensors import densified, is_sharded
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.torch_internals import below_autograd, current_autograd_node

REFERENCE_CODEC = "int8"
"""The name of the codec that values are read through to measure the effect on gradients."""
LEAST_LOSSY_ELEMENTS = 4096
"""A lossy codec is considered only for tensors with at least this many elements. Smaller tensors do not save enough."""
_CHUNK = 1 << 20
_ACCUMULATE = "torch::autograd::AccumulateGrad"

Gradients = tuple[torch.Tensor | None, ...]
Noise = dict[str, float]
"""A mapping from value name to the squared norm of the noise that reading this value through a lossy codec has caused."""

RegionKey = tuple[str, int]
"""Identifies one call of a region: the region's name, and the number of the call within a step."""


@dataclass(frozen=True, slots=True)
class CodecTrial:
    """Data: what one codec did to one value: the payload's size in bytes, and the relative noise ‖decoded - value‖ / ‖value‖.

    ``payload_bytes`` is ``None`` if the codec could not represent the data.
    """

    payload_bytes: int | None
    noise: float = 0.0


@dataclass(slots=True)
class Seen:
    """Data: the measurements of one saved value. ``trials`` maps the name of a codec to its result.

    ``count`` is the number of elements. Two numbers say what noise in the value does, both per squared unit of the value's
    noise. ``parameter_error`` is the squared error of the region's parameter gradients. ``flow_error`` is the squared relative
    error of the gradient that leaves the region. ``readers`` are the names of the autograd nodes that read the value.
    """

    dtype: torch.dtype
    count: int
    trials: dict[str, CodecTrial] = field(default_factory=dict)
    parameter_error: float = 0.0
    flow_error: float = 0.0
    readers: set[str] = field(default_factory=set)


class Sensor:
    """Measures, in one step, what lossy codecs would do to the values that each region saves. It works until ``close`` is
    called.

    In the calls in ``sampled``, it tries codecs on saved values and, if ``wants_sensitivity``, follows their noise through
    backward.
    """

    def __init__(self, codecs: Sequence[str], sampled: Collection[RegionKey], *, wants_sensitivity: bool) -> None:
        self.seen: dict[RegionKey, dict[str, Seen]] = {}
        self._codecs = [find_codec(name) for name in codecs]
        self._reference = find_codec(REFERENCE_CODEC)
        self._sampled = frozenset(sampled)
        self._wants_sensitivity = wants_sensitivity
        self._values: dict[RegionKey, dict[int, str]] = {}
        self._trackers: dict[RegionKey, NoiseTracker] = {}
        self._early: dict[tuple[RegionKey, int], torch.Tensor] = {}
        self.compiled: dict[RegionKey, tuple[str, ...]] = {}
        """A mapping from a compiled block to the names of its values that are to be measured."""
        self.noisy: tuple[Collection[RegionKey], str] | None = None
        """For some compiled blocks, the name of the value that is now read through a lossy codec.

        ``None`` means that all values are read exactly.
        """
        self.squared_noise = 0.0
        """The sum, over the values that were read through a lossy codec, of the squared relative noise."""

    def packer(self, key: RegionKey) -> Watching:
        """Return an object that replaces a compiled block's `Packer` (the object that encodes its saved tensors). The
        replacement passes each tensor to this sensor.
        """
        return Watching(self, key)

    def pack(self, key: RegionKey, name: str, source: Source) -> Readable:
        """Measure a value that a compiled block has saved, and return an object that holds the value.

        If the effect of noise in this value is being measured, the object holds a lossy copy instead.
        """
        if self.noisy is None:
            self.seen.setdefault(key, {})[name] = self._try(source.whole, key)
            return Refused(source)
        keys, noisy = self.noisy
        payload = self._reference.encode(source.whole) if name == noisy and key in keys else None
        if payload is None:
            return Refused(source)
        self.squared_noise += relative_distance(source.whole, self._reference.decode(payload)) ** 2
        return Encoded(self._reference, payload)

    def saw(
        self,
        name: str,
        call: int,
        graph: RegionGraph,
        tensors: Sequence[torch.Tensor],
        output: Any,
        first_node: int,
    ) -> None:
        """Measure the saved values of a region whose forward has just returned.

        ``tensors`` are its saved tensors, in the order of saving. ``first_node`` is the sequence number of the region's first
        autograd node.
        """
        key = (name, call)
        found = self.seen.setdefault(key, {})
        slots = self._values.setdefault(key, {})
        for slot in graph.slots:
            if not slot.is_managed:
                continue
            value = graph.values[slot.value]
            slots[slot.index] = value.name
            if value.name not in found:
                found[value.name] = self._try(tensors[slot.index], key)
        if key not in self._sampled or not self._wants_sensitivity:
            return
        if any(op.obstacle == IS_COLLECTIVE for op in graph.ops) or any(map(is_sharded, output_tensors(output))):
            for seen in found.values():  # running a node again on one rank alone could block in a collective forever
                seen.parameter_error = math.inf
            return
        self._trackers[key] = NoiseTracker(output, first_node, self._reference)

    def unpack(self, name: str, call: int) -> Callable[[Cell], torch.Tensor]:
        """Return the unpack hook for one call of a region: it returns the saved tensor, or in a measurement a lossy copy."""
        key = (name, call)

        def unpack(cell: Cell) -> torch.Tensor:
            tracker = self._trackers.get(key)
            is_trying = tracker is not None and tracker.is_trying
            value = self._early.get((key, cell.index))
            if value is None:
                value = restore(cell)
            if is_trying:  # the node will read it a second time, but a replay makes it only once
                self._early[key, cell.index] = value
            else:
                self._early.pop((key, cell.index), None)
            value_name = self._values.get(key, {}).get(cell.index)
            if value_name is None:
                return cell.show(value)
            if tracker is not None and is_trying:
                return tracker.read(value_name, value)
            node = current_autograd_node()
            if tracker is not None and not can_run_again(node):
                tracker.give_up(value_name)
            self.seen[key][value_name].readers.add("" if node is None else node.name())
            return cell.show(value)

        return unpack

    def close(self) -> None:
        """End the measurement after backward: store, for each value, the noise that reached the region's parameters and the
        noise that left the region. Release the autograd graph.
        """
        for key, tracker in self._trackers.items():
            for name, arrived in tracker.close().items():
                self.seen[key][name].parameter_error = arrived.at_parameters
                self.seen[key][name].flow_error = arrived.further_up
        self._trackers.clear()
        self._early.clear()

    def _try(self, tensor: torch.Tensor, key: RegionKey) -> Seen:
        with torch.no_grad(), below_autograd():
            whole = whole_storage(tensor)
            seen = Seen(whole.dtype, whole.numel())
            if key not in self._sampled:
                return seen
            for codec in self._codecs:
                is_small = not codec.is_lossless and whole.numel() < LEAST_LOSSY_ELEMENTS
                if codec.accepts(whole.dtype) and not is_small:
                    seen.trials[codec.name] = _try_codec(codec, whole)
        return seen


class Watching(Packer):
    """Replaces a `Packer` (the object that encodes a compiled block's saved tensors). It only passes each tensor to a sensor.

    Its argument ``form`` is the value's name.
    """

    def __init__(self, sensor: Sensor, key: RegionKey) -> None:
        super().__init__(None)
        self._sensor, self._key = sensor, key

    def codec(self, form: str) -> None:
        return None

    def pack(self, source: Source, form: str, *, seed: int, most_bytes: int | None) -> Readable:
        return self._sensor.pack(self._key, form, source)


def _try_codec(codec: Codec, whole: torch.Tensor) -> CodecTrial:
    payload = codec.encode(whole, most_bytes=whole.numel() * whole.element_size() - 1)
    if payload is None:
        return CodecTrial(None)
    if codec.is_lossless:
        return CodecTrial(payload.bytes)
    return CodecTrial(payload.bytes, relative_distance(whole, codec.decode(payload)))


@dataclass(slots=True)
class Arrived:
    """Data: how much noise in gradients one value has caused, per squared unit of the value's relative noise.

    ``at_parameters`` is the squared norm of the noise at the region's parameters. ``further_up`` is the squared norm of the
    noise in the gradient that leaves the region, divided by the squared norm of this gradient.
    """

    at_parameters: float = 0.0
    further_up: float = 0.0


class NoiseTracker:
    """Follows the noise of lossy values through the backward of one region, from node to node.

    The noise begins where a value is read through the ``reference`` codec.
    """

    def __init__(self, output: Any, first_node: int, reference: Codec) -> None:
        self.arrived: dict[str, Arrived] = {}
        self._reference = reference
        self._first_node = first_node
        self._at: dict[tuple[Any, int], Noise] = {}
        self._made: dict[Any, list[Noise]] = {}
        self._trial: _Trial | None = None
        self._known: set[Any] = set()
        self._handles: list[Any] = []
        for node in self._nodes(output):
            if can_run_again(node) and _has_saved(node):
                self._handles.append(node.register_prehook(functools.partial(self._try_values, node)))
            self._handles.append(node.register_hook(functools.partial(self._pass_on, node)))

    def read(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return what an autograd node of this region reads for a saved tensor: the tensor itself, or in a trial its lossy
        copy.
        """
        return value if self._trial is None else self._trial.read(name, value)

    def give_up(self, name: str) -> None:
        """Mark this value as too sensitive, because the effect of its noise cannot be measured."""
        self._arrival(name).at_parameters = math.inf

    @property
    def is_trying(self) -> bool:
        """Whether the autograd node that runs now runs only for a measurement and not for backward."""
        return self._trial is not None

    def close(self) -> dict[str, Arrived]:
        """Release autograd's graph. Return, for each value name, the noise that reached parameters and the noise that left the
        region.
        """
        for handle in self._handles:
            handle.remove()
        self._handles, self._known = [], set()
        self._at, self._made = {}, {}
        return self.arrived

    def _nodes(self, output: Any) -> Iterator[Any]:
        """Yield the autograd nodes of the region.

        Hooks that only add up noise are registered on the nodes just outside of the region.
        """
        pending: list[Any] = [tensor.grad_fn for tensor in output_tensors(output)]
        while pending:
            node = pending.pop()
            if node is None or node in self._known or node.name() == _ACCUMULATE:
                continue
            self._known.add(node)
            if not self._is_inside(node):
                self._handles.append(node.register_prehook(functools.partial(self._leave, node)))
                continue
            pending.extend(following for following, _ in node.next_functions)
            yield node

    def _is_inside(self, node: Any) -> bool:
        return bool(node._sequence_nr() >= self._first_node)

    def _try_values(self, node: Any, gradients: Gradients) -> None:
        """Before backward runs an autograd node, run it with exact values, then once for each saved value that it reads, with
        noise in that value.
        """
        self._trial = trial = _Trial(self._reference)
        try:
            with torch.no_grad():
                plain = _run(node, gradients)
                for name in list(trial.noise_of):
                    trial.noisy = name
                    noisy = _run(node, gradients)
                    noise = trial.noise_of[name]
                    if noise:
                        made = [squared_distance(a, b) / noise**2 for a, b in zip(plain, noisy, strict=True)]
                        self._note(node, name, made)
        except RuntimeError:
            for name in trial.noise_of:
                self.give_up(name)
        finally:
            self._trial = None

    def _note(self, node: Any, name: str, made: Sequence[float]) -> None:
        entries = self._made.setdefault(node, [{} for _ in made])
        for entry, squared in zip(entries, made, strict=True):
            entry[name] = entry.get(name, 0.0) + squared

    def _pass_on(self, node: Any, outputs: Gradients, inputs: Gradients) -> None:
        """Hook that runs after an autograd node: add up the noise in its results, and note it at the next nodes or at
        parameters.

        Noise that came in is passed on in proportion to the gradient, and the noise that this node made is added.
        """
        # Relative to the whole gradient: the residual stream dilutes the noise of a branch. An estimate that stopped at the
        # node was nine times too large on a Llama (docs/project/design/noise-is-followed.md).
        relative = self._relative_noise(node, inputs)
        made = self._made.pop(node, [])
        for position, (following, index) in enumerate(node.next_functions):
            if following is None or position >= len(outputs) or outputs[position] is None:
                continue
            size = squared_norm(outputs[position])
            noise = {name: share * size for name, share in relative.items()}
            for name, squared in (made[position] if made else {}).items():
                noise[name] = noise.get(name, 0.0) + squared
            if following.name() == _ACCUMULATE:
                for name, squared in noise.items():
                    self._arrival(name).at_parameters += squared
            else:
                entry = self._at.setdefault((following, index), {})
                for name, squared in noise.items():
                    entry[name] = entry.get(name, 0.0) + squared

    def _leave(self, node: Any, gradients: Gradients) -> None:
        """Hook that runs before a node outside of the region: count the noise that arrives there, relative to the gradient that
        leaves the region.
        """
        for name, share in self._relative_noise(node, gradients).items():
            self._arrival(name).further_up += share

    def _relative_noise(self, node: Any, gradients: Gradients) -> Noise:
        arriving: Noise = {}
        for index in range(len(gradients)):
            for name, squared in self._at.pop((node, index), {}).items():
                arriving[name] = arriving.get(name, 0.0) + squared
        if not arriving:
            return {}
        size = sum(squared_norm(gradient) for gradient in gradients)
        return {name: squared / size for name, squared in arriving.items()} if size else {}

    def _arrival(self, name: str) -> Arrived:
        return self.arrived.setdefault(name, Arrived())


@dataclass(slots=True)
class _Trial:
    """Several runs of one autograd node, to measure noise. In each run, another saved value is read through a lossy codec.

    ``noise_of`` maps the name of each value that the node reads to the relative noise of this value.
    """

    reference: Codec
    noisy: str = ""
    noise_of: dict[str, float] = field(default_factory=dict)

    def read(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if not self.reference.accepts(value.dtype) or value.numel() < LEAST_LOSSY_ELEMENTS:
            return value
        self.noise_of.setdefault(name, 0.0)
        if name != self.noisy:
            return value
        payload = self.reference.encode(value)
        if payload is None:
            return value
        decoded = self.reference.decode(payload)
        self.noise_of[name] = relative_distance(value, decoded)
        return decoded


def can_run_again(node: Any) -> bool:
    """Return whether this node is one of PyTorch's own nodes, which may be called at any time."""
    return callable(node)


def _run(node: Any, gradients: Gradients) -> tuple[Any, ...]:
    out = node(*gradients)
    return out if isinstance(out, tuple) else (out,)


def _has_saved(node: Any) -> bool:
    return any(name.startswith("_saved_") or name == "saved_tensors" for name in dir(node))


def squared_norm(tensor: torch.Tensor | None) -> float:
    """Return the sum of the squares of all elements, or 0 for ``None``."""
    if tensor is None:
        return 0.0
    dense = densified(tensor.detach())
    return float(torch.linalg.vector_norm(dense, dtype=_norm_dtype(dense.dtype))) ** 2


def relative_distance(value: torch.Tensor, other: torch.Tensor) -> float:
    """Return ‖other - value‖ / ‖value‖, or 0 if ‖value‖ is 0."""
    size = squared_norm(value)
    return (squared_distance(value, other) / size) ** 0.5 if size else 0.0


def squared_distance(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """Return ‖first - second‖².

    The result is computed in chunks so that temporaries stay small. It is 0 if either is ``None``.
    """
    if first is None or second is None:
        return 0.0
    flat, other = (densified(tensor.detach()).reshape(-1) for tensor in (first, second))
    dtype = _norm_dtype(flat.dtype)
    pieces = zip(flat.split(_CHUNK), other.split(_CHUNK), strict=True)
    return sum(float(torch.linalg.vector_norm(a.to(dtype) - b.to(dtype))) ** 2 for a, b in pieces)


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to use when squares of elements of the given dtype are added: float32, float64, or a complex dtype.

    The reason: torch refuses a dtype that is narrower than the input's, and narrow floats overflow.
    """
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    return torch.float64 if dtype == torch.float64 else torch.float32
