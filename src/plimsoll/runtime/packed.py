"""A saved value in, what is held of it instead out: a codec's payload, or a ticket for its bytes at the other end of a link.

Whole storages are packed, flat: the slots are views of what comes back. What a codec cannot represent (NaN where it has
none, integers out of range) is held as it is, and counted, so that the receipt can say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from plimsoll.artifacts.region import RegionGraph
from plimsoll.codecs.protocol import Codec, Payload
from plimsoll.codecs.registry import find_codec
from plimsoll.errors import ReplayMismatch
from plimsoll.links.protocol import Link, Ticket
from plimsoll.runtime.cells import Readable
from plimsoll.runtime.choosing import Choice

READS_SIGN_ONLY = frozenset({"ReluBackward0", "ThresholdBackward0"})
"""Autograd nodes that look at a saved tensor only to see where it is positive."""


class Encoded:
    """A codec's payload; every read decodes it again."""

    __slots__ = ("_codec", "_payload")

    def __init__(self, codec: Codec, payload: Payload) -> None:
        self._codec = codec
        self._payload = payload

    def read(self) -> torch.Tensor:
        return self._codec.decode(self._payload)


class Sent:
    """A tensor that is, or will be, at the other end of a link."""

    __slots__ = ("__weakref__", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket

    def read(self) -> torch.Tensor:
        return self.ticket.read()


class Refused:
    """A tensor that its codec could not represent; replays get copies, because they may write to what they are given."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def read(self) -> torch.Tensor:
        return self._tensor.clone()


class Packer:
    """Packs the values of one managed model. ``link`` takes what is not compressed."""

    def __init__(self, link: Link | None) -> None:
        self._link = link

    def codec(self, form: str) -> Codec | None:
        """The codec of that name; ``None`` for the link."""
        return None if self.is_link(form) else find_codec(form)

    def is_link(self, form: str) -> bool:
        return self._link is not None and form == self._link.name

    def pack(self, tensor: torch.Tensor, form: str, *, seed: int, most_bytes: int | None) -> Readable:
        """What to hold instead of ``tensor`` (flat, detached).

        Raises:
            OffloadFailed: the link has no room.
        """
        codec = self.codec(form)
        if codec is None:
            assert self._link is not None
            return Sent(self._link.store(tensor))
        payload = codec.encode(tensor, seed=seed, most_bytes=most_bytes)
        return Refused(tensor) if payload is None else Encoded(codec, payload)


@dataclass(frozen=True, slots=True)
class Packing:
    """One packed value, and the slots that show it. ``most_bytes`` is what the plan counted for it (0: not known)."""

    value: int
    form: str
    slots: tuple[int, ...]
    most_bytes: int


def plan_packing(graph: RegionGraph, choice: Choice, payload_bytes: Mapping[str, int]) -> tuple[Packing, ...]:
    """How each packed value is packed, the largest saving first: then the highest moment is before the first."""
    slots: dict[int, list[int]] = {}
    for slot in graph.slots:
        if slot.is_managed and slot.value in choice.packed:
            slots.setdefault(slot.value, []).append(slot.index)
    packings = [
        Packing(value, choice.packed[value], tuple(found), payload_bytes.get(graph.values[value].name, 0))
        for value, found in slots.items()
    ]
    return tuple(sorted(packings, key=lambda packing: packing.most_bytes - graph.values[packing.value].bytes))


def is_exact(codec: Codec) -> bool:
    """Whether decoding gives back the very bits."""
    return codec.is_lossless and not codec.keeps_sign_only


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage of ``tensor``, flat, without autograd."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))


def check_reader_of_sign(names: Mapping[int, str], slot: int) -> None:
    """Refuse to hand a value of which only the sign is left to an autograd node that reads more.

    Raises:
        ReplayMismatch: it does.
    """
    node = torch._C._current_autograd_node()
    if slot in names and (node is None or node.name() not in READS_SIGN_ONLY):
        reader = "nothing that is known" if node is None else node.name()
        raise ReplayMismatch(
            f"{names[slot]!r} is held as signs alone, and {reader} reads it.",
            why="only backward of ReLU and of thresholds reads no more than signs; the plan was made for another step",
            next="the optimizer has not stepped; plan this model again",
        )
