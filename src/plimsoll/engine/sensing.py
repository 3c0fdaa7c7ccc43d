"""One recording step in; what its saved values look like in other forms, and what noise in them does to gradients, out.

While a region's saved values are all there, codecs are tried on them: bytes, and noise = ‖decoded - value‖ / ‖value‖. In
backward a tracker follows noise through the nodes of *sampled* regions; values of regions that talk to other ranks count as too
sensitive for any. The step itself sees the values as they are: its
gradients are those of the unmanaged model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plimsoll.artifacts.region import RegionGraph
from plimsoll.engine.cells import Cell
from plimsoll.engine.codecs.protocol import Codec
from plimsoll.engine.codecs.registry import find_codec
from plimsoll.engine.frame import Frame
from plimsoll.engine.noise import LEAST_LOSSY_ELEMENTS, NoiseTracker, can_run_again, relative_distance
from plimsoll.engine.stored_forms import whole_storage
from plimsoll.tracing.local_tensors import is_sharded
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.recorder.collectives import IS_COLLECTIVE

REFERENCE_CODEC = "int8"
"""What values are read through to see how gradients react."""

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

    Per squared unit of its noise, ``parameter_error`` is the squared error of the region's parameter gradients and
    ``flow_error`` the squared relative error of the gradient that leaves the region. ``readers`` are the names of the
    autograd nodes that read it.
    """

    dtype: torch.dtype
    count: int
    trials: dict[str, Trial] = field(default_factory=dict)
    parameter_error: float = 0.0
    flow_error: float = 0.0
    readers: set[str] = field(default_factory=set)


class Sensor:
    """Watches the first call of every region of a managed model, until ``close``.

    Args:
        codecs: names of the codecs to try.
        sampled: region calls on which they are tried, and through which noise is followed.
        wants_sensitivity: whether noise is followed at all.
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
        if key not in self._sampled or not self._wants_sensitivity:
            return
        if any(op.obstacle == IS_COLLECTIVE for op in graph.ops) or any(map(is_sharded, output_tensors(output))):
            for seen in found.values():  # a node that is run again on one rank alone could wait for ever
                seen.parameter_error = math.inf
            return
        self._trackers[key] = NoiseTracker(output, first_node, self._reference)

    def unpack(self, name: str, call: int) -> Callable[[Cell], torch.Tensor]:
        """The unpack hook for one region call."""
        key = (name, call)

        def unpack(cell: Cell) -> torch.Tensor:
            tracker = self._trackers.get(key)
            is_trying = tracker is not None and tracker.is_trying
            value = self._early.get((key, cell.index))
            if value is None:
                value = Frame.restore(cell)
            if is_trying:  # the node will read it once more, and a replay makes it only once
                self._early[key, cell.index] = value
            else:
                self._early.pop((key, cell.index), None)
            value_name = self._values.get(key, {}).get(cell.index)
            if value_name is None:
                return cell.show(value)
            if tracker is not None and is_trying:
                return tracker.read(value_name, value)
            node = torch._C._current_autograd_node()
            if tracker is not None and not can_run_again(node):
                tracker.give_up(value_name)
            self.seen[key][value_name].readers.add("" if node is None else node.name())
            return cell.show(value)

        return unpack

    def close(self) -> None:
        """Backward has ended: note where noise arrived, and let go of the graph."""
        for key, tracker in self._trackers.items():
            for name, arrived in tracker.close().items():
                self.seen[key][name].parameter_error = arrived.at_parameters
                self.seen[key][name].flow_error = arrived.further_up
        self._trackers.clear()
        self._early.clear()

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


def _try_codec(codec: Codec, whole: torch.Tensor) -> Trial:
    payload = codec.encode(whole, most_bytes=whole.numel() * whole.element_size() - 1)
    if payload is None:
        return Trial(None)
    if codec.is_lossless:
        return Trial(payload.bytes)
    return Trial(payload.bytes, relative_distance(whole, codec.decode(payload)))
