"""One recording step in; what its saved values look like in other forms, and what noise in them does to gradients, out.

While a region's saved values are all there, codecs are tried on them: bytes, and noise = ‖decoded - value‖ / ‖value‖. In
backward every autograd node of a *sampled* region runs again right before its turn, once per saved value with that value
read through a lossy codec. What changes in its outputs is known exactly where they are gradients of parameters; where they
flow on, the relative change is noted, and whoever adds things up decides what it does further up.

The step itself sees the values as they are: its gradients are those of the unmanaged model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plimsoll.artifacts.region import RegionGraph
from plimsoll.codecs.protocol import Codec
from plimsoll.codecs.registry import find_codec
from plimsoll.recording.calling import output_tensors
from plimsoll.runtime.cells import Cell
from plimsoll.runtime.frame import Frame
from plimsoll.runtime.packed import whole_storage

REFERENCE_CODEC = "int8"
"""What values are read through to see how gradients react."""
LEAST_LOSSY_ELEMENTS = 4096
"""Smaller tensors are not worth a lossy form."""
_CHUNK = 1 << 20
_ACCUMULATE = "torch::autograd::AccumulateGrad"

RegionKey = tuple[str, int]
"""Name of a region, and which of its calls in a step."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One codec on one value: payload bytes and noise; ``None`` bytes if it could not represent the data."""

    payload_bytes: int | None
    noise: float = 0.0


@dataclass(slots=True)
class Seen:
    """What was seen of one value.

    ``parameter_error`` is the squared error of parameter gradients, ‖Δg‖², and ``flow_error`` the squared relative error of
    gradients that flow on, both per squared unit of noise and summed over the value's slots. ``readers`` are the names of
    the autograd nodes that read it.
    """

    dtype: torch.dtype
    count: int
    trials: dict[str, Trial] = field(default_factory=dict)
    parameter_error: float = 0.0
    flow_error: float = 0.0
    readers: set[str] = field(default_factory=set)


class Sensor:
    """Watches the first call of every region of a managed model.

    Args:
        codecs: names of the codecs to try.
        sampled: region calls on which they are tried, and whose nodes run again; of the others only readers are noted.
        wants_sensitivity: whether nodes run again at all.
    """

    def __init__(self, codecs: Sequence[str], sampled: Collection[RegionKey], *, wants_sensitivity: bool) -> None:
        self.seen: dict[RegionKey, dict[str, Seen]] = {}
        self._codecs = [find_codec(name) for name in codecs]
        self._reference = find_codec(REFERENCE_CODEC)
        self._sampled = frozenset(sampled)
        self._wants_sensitivity = wants_sensitivity
        self._values: dict[RegionKey, dict[int, str]] = {}
        self._trial: _NodeTrial | None = None
        self._early: dict[tuple[RegionKey, int], torch.Tensor] = {}

    def saw(
        self,
        name: str,
        call: int,
        graph: RegionGraph,
        tensors: Sequence[torch.Tensor],
        output: Any,
        first_node: int,
    ) -> None:
        """A region's forward is through.

        Args:
            name: the region's.
            call: which of its calls in this step.
            graph: its recording.
            tensors: what autograd saved, by slot.
            output: what the region returned.
            first_node: the sequence number of its first autograd node.
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
        if key in self._sampled and self._wants_sensitivity:
            for node in _nodes_of(output, first_node):
                node.register_prehook(_Again(self, key, node))

    def unpack(self, name: str, call: int) -> Callable[[Cell], torch.Tensor]:
        """The unpack hook for one region call."""
        key = (name, call)

        def unpack(cell: Cell) -> torch.Tensor:
            value = self._early.get((key, cell.index)) if self._trial is not None else None
            if value is None:
                value = self._early.pop((key, cell.index), None)
            if value is None:
                value = Frame.unpack(cell)
            seen = self._seen(key, cell.index)
            if seen is None:
                return value
            trial = self._trial
            if trial is None:
                node = torch._C._current_autograd_node()
                seen.readers.add("" if node is None else node.name())
                return value
            self._early[key, cell.index] = value
            return trial.read(self._values[key][cell.index], value)

        return unpack

    def run_again(self, key: RegionKey, node: Any, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Run a node that is about to run: as it is, then once per saved value with noise in that value."""
        trial = self._trial = _NodeTrial(self._reference)
        try:
            with torch.no_grad():
                plain = _run(node, gradients)
                for value in [v for v in trial.noise_of if trial.noise_of[v] is None]:
                    trial.noisy = value
                    self._compare(self.seen[key][value], plain, _run(node, gradients), node, trial.noise_of[value])
        finally:
            self._trial = None

    def _compare(
        self, seen: Seen, plain: tuple[Any, ...], noisy: tuple[Any, ...], node: Any, noise: float | None
    ) -> None:
        if not noise:
            return
        for (following, _), before, after in zip(node.next_functions, plain, noisy, strict=False):
            if following is None or not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
                continue
            squared = _squared_distance(before, after) / noise**2
            if _ends_in_parameter(following):
                seen.parameter_error += squared
            else:
                size = float(torch.linalg.vector_norm(before.float())) ** 2
                seen.flow_error += squared / size if size else 0.0

    def _seen(self, key: RegionKey, slot: int) -> Seen | None:
        name = self._values.get(key, {}).get(slot)
        return None if name is None else self.seen[key][name]

    def _try(self, tensor: torch.Tensor, key: RegionKey) -> Seen:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            whole = whole_storage(tensor)
            seen = Seen(whole.dtype, whole.numel())
            if key not in self._sampled:
                return seen
            for codec in self._codecs:
                is_small = not codec.is_lossless and whole.numel() < LEAST_LOSSY_ELEMENTS
                if codec.accepts(whole.dtype) and not is_small:
                    seen.trials[codec.name] = _try_codec(codec, whole)
        return seen


class _NodeTrial:
    """One node, run several times. ``noise_of`` has an entry per value that it reads, set when that value was noisy."""

    def __init__(self, reference: Codec) -> None:
        self.noisy: str | None = None
        self.noise_of: dict[str, float | None] = {}
        self._reference = reference

    def read(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """What the node gets to see of a saved tensor."""
        can_be_noisy = self._reference.accepts(value.dtype) and value.numel() >= LEAST_LOSSY_ELEMENTS
        if can_be_noisy:
            self.noise_of.setdefault(name, None)
        if name != self.noisy or not can_be_noisy:
            return value
        payload = self._reference.encode(value)
        if payload is None:
            self.noise_of[name] = 0.0
            return value
        decoded = self._reference.decode(payload)
        size = float(torch.linalg.vector_norm(value.float()))
        self.noise_of[name] = _squared_distance(value, decoded) ** 0.5 / size if size else 0.0
        return decoded


class _Again:
    """The prehook of one node."""

    def __init__(self, sensor: Sensor, key: RegionKey, node: Any) -> None:
        self._sensor = sensor
        self._key = key
        self._node = node

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self._sensor.run_again(self._key, self._node, gradients)


def _run(node: Any, gradients: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
    out = node(*gradients)
    return out if isinstance(out, tuple) else (out,)


def _nodes_of(output: Any, first_node: int) -> Iterator[Any]:
    """Autograd nodes of a region that hold saved tensors."""
    pending: list[Any] = [tensor.grad_fn for tensor in output_tensors(output)]
    known: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in known or node.name() == _ACCUMULATE or node._sequence_nr() < first_node:
            continue
        known.add(node)
        pending.extend(following for following, _ in node.next_functions)
        if any(name.startswith("_saved_") or name == "saved_tensors" for name in dir(node)):
            yield node


def _ends_in_parameter(node: Any) -> bool:
    """Whether a gradient goes to a parameter with nothing but views and casts in between."""
    while node is not None and node.name() in _PASSES_ON:
        node = node.next_functions[0][0]
    return node is not None and node.name() == _ACCUMULATE


_PASSES_ON = frozenset({"TBackward0", "ViewBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0"})


def _try_codec(codec: Codec, whole: torch.Tensor) -> Trial:
    payload = codec.encode(whole, most_bytes=whole.numel() * whole.element_size() - 1)
    if payload is None:
        return Trial(None)
    if codec.is_lossless:
        return Trial(payload.bytes)
    size = float(torch.linalg.vector_norm(whole.float() if whole.dtype.itemsize < 4 else whole))
    distance = _squared_distance(whole, codec.decode(payload)) ** 0.5
    return Trial(payload.bytes, distance / size if size else 0.0)


def _squared_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """‖first - second‖², in pieces, so that no temporary is large."""
    flat, other = first.reshape(-1), second.reshape(-1)
    pieces = zip(flat.split(_CHUNK), other.split(_CHUNK), strict=True)
    return sum(float(torch.linalg.vector_norm(a.float() - b.float())) ** 2 for a, b in pieces)
