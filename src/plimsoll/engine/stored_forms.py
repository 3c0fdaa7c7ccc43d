"""Pack saved values: hold each in fewer bytes or elsewhere, as the payload of a codec or as a ticket for bytes that were sent
over a link to host memory or disk.

Whole storages are packed as flat tensors; slots (saved tensors) are views of what comes back. If a codec cannot represent a
value (NaN, integers out of range), the value is held unchanged and counted, so that the receipt can report it.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from plimsoll.engine.capturing import refuse_capture
from plimsoll.engine.codecs.protocol import Codec, Payload
from plimsoll.engine.codecs.registry import find_codec
from plimsoll.engine.hooks import NOTHING, Cell, OpenCall, Readable, modified_in_place
from plimsoll.engine.offload.protocol import Link, Ticket
from plimsoll.engine.replay_plan import ReplayPlan
from plimsoll.errors import ReplayMismatch, SavedTensorModified
from plimsoll.tracing.local_tensors import Shell
from plimsoll.tracing.torch_internals import below_autograd, current_autograd_node

READS_SIGN_ONLY = frozenset({"ReluBackward0"})
"""Names of autograd nodes that read only the sign of a saved tensor."""


class Source:
    """A saved tensor (for a DTensor, the local shard) that is about to be packed and is still held. `damage` checks that
    nothing has written to it since.

    Without a plan, autograd would raise for such a write too, so modified contents must not be encoded or sent.
    """

    __slots__ = ("_outer", "_seen", "_version", "whole")

    def __init__(self, tensor: torch.Tensor, shell: Shell | None = None) -> None:
        self._seen = tensor.detach()  # shares its version counter, which ``whole`` does not
        self._outer = None if shell is None or shell.outer is None else shell.outer.detach()
        self._version = self._version_now()
        self.whole = whole_storage(tensor)

    def damage(self) -> SavedTensorModified | None:
        """Return the error to raise when the tensor is read, if it was written to in place. Return ``None`` if it was not."""
        found = self._version_now()
        if found == self._version:
            return None
        return modified_in_place(f"a saved tensor of shape {tuple(self._seen.shape)}", self._version, found)

    def _version_now(self) -> int:
        return self._seen._version + (0 if self._outer is None else self._outer._version)


class Encoded:
    """Holds a codec's payload in place of a value. Each read decodes the payload again."""

    __slots__ = ("_codec", "_payload")

    def __init__(self, codec: Codec, payload: Payload) -> None:
        self._codec = codec
        self._payload = payload

    def read(self) -> torch.Tensor:
        return self._codec.decode(self._payload)


class Sent:
    """A value that is being sent, or was sent, over a link to host memory or disk.

    The original tensor is held until the copy has finished. If the copy failed, the tensor stays held.
    """

    __slots__ = ("__weakref__", "_damage", "_source", "_ticket")

    def __init__(self, ticket: Ticket, source: Source) -> None:
        self._ticket = ticket
        self._source: Source | None = source
        self._damage: SavedTensorModified | None = None

    def settle(self) -> None:
        """Wait until the copy over the link (to host memory or disk) has finished, and release the original tensor.

        Raises:
            OffloadFailed: the copy failed. The original tensor is still held.
        """
        self._ticket.settle()
        self._has_left()

    def prefetch(self) -> None:
        """Begin to bring the tensor back from host memory or disk."""
        self._ticket.prefetch()

    def read(self) -> torch.Tensor:
        """Return the tensor, brought back from host memory or disk.

        Raises:
            OffloadFailed: the tensor did not come back.
            SavedTensorModified: the tensor was written to in place before the copy over the link had finished.
        """
        tensor = self._ticket.read()
        if self._source is not None:
            whole = self._source.whole
            if tensor.untyped_storage()._cdata == whole.untyped_storage()._cdata:
                self._damage = self._source.damage()
            else:
                self._has_left()
        if self._damage is not None:
            raise self._damage
        return tensor

    def _has_left(self) -> None:
        if self._source is not None:
            self._damage, self._source = self._source.damage(), None


class Refused:
    """Holds a tensor unchanged, because a codec could not represent it. Like encoded and offloaded tensors, it is read with
    ``read``.
    """

    __slots__ = ("_source",)

    def __init__(self, source: Source) -> None:
        self._source = source

    def read(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            SavedTensorModified: the tensor was written to in place since it was saved.
        """
        damage = self._source.damage()
        if damage is not None:
            raise damage
        return self._source.whole


class Packer:
    """Packs saved values of one managed model: encodes them with codecs, or sends them over the link.

    ``link_form`` is the name that the plan uses for the link, if that is not the link's own name.
    """

    def __init__(self, link: Link | None, link_form: str = "") -> None:
        self._link = link
        self.link_form = link_form or ("" if link is None else link.name)
        """The name that plans use for the link, or an empty string without a link."""

    def use_link(self, link: Link, link_form: str) -> None:
        """Send values over this link from now on. It is called once, if this object was made without a link."""
        self._link, self.link_form = link, link_form

    def codec(self, form: str) -> Codec | None:
        """Return the codec with this name, or ``None`` if ``form`` is the name of the link (``disk`` or ``host``).

        A plan gives each packed value such a name.
        """
        return None if self._link is not None and form == self.link_form else find_codec(form)

    def keeps_sign_only(self, form: str) -> bool:
        """Return whether only the signs of a value come back from this codec, so that nothing can be recomputed from it."""
        codec = self.codec(form)
        return codec is not None and codec.keeps_sign_only

    def pack(self, source: Source, form: str, *, seed: int, most_bytes: int | None) -> Readable:
        """Encode or send a saved tensor, and return the object to hold instead of it. ``form`` is the name of a codec or of the
        link.

        Raises:
            OffloadFailed: the link is full.
            CaptureRefused: a CUDA graph is being captured, and the form needs the host in every step.
        """
        codec, whole = self.codec(form), source.whole
        if codec is None or not codec.is_capturable(whole.dtype):
            refuse_capture(
                whole.device.type,
                f"A tensor stored as {form!r}",
                why="the replayed graph would copy to host memory that other tensors use by then"
                if codec is None
                else "the replayed graph would reuse what the host chose during capture: data-dependent sizes, or a seed",
                next="plan with allow=('recompute',), or with codecs whose size is fixed, such as int8",
            )
        if codec is None:
            assert self._link is not None
            return Sent(self._link.store(whole), source)
        payload = codec.encode(whole, seed=seed, most_bytes=most_bytes) if codec.accepts(whole.dtype) else None
        return Refused(source) if payload is None else Encoded(codec, payload)


@dataclass(frozen=True, slots=True)
class Packing:
    """Data: how one value is packed: its codec or link, and the saved tensors (numbers in the order of saving) that are views
    of the value.

    ``most_bytes`` is the limit for the size of the payload, or ``None`` if the size is known or no limit was planned.
    """

    value: int
    form: str
    slots: tuple[int, ...]
    most_bytes: int | None


class RegionPacker:
    """Packs values that one region (a module that the plan decides about) saved: encodes or offloads them as its plan says.

    ``shares`` maps the name of a packed value to the planned payload size, as a share of the value's bytes.
    """

    def __init__(self, plan: ReplayPlan, packer: Packer, shares: Mapping[str, float]) -> None:
        self._plan = plan
        self._packer = packer
        self._packings = _packings(plan, shares)
        self.refused: Counter[tuple[str, str]] = Counter()
        """How often a value was kept because its codec could not represent it.

        The key is a pair of value name and codec name.
        """

    def pack(self, call: OpenCall, number: int) -> dict[int, Readable]:
        """Encode or send values that call number ``number`` of the region saved, and free the original of each at once.

        Return a mapping from value id to the object that is held instead.
        """
        if not self._packings:
            return {}
        with _without_autocast(self._plan.device_type):
            return self._pack(call, number)

    def _pack(self, call: OpenCall, number: int) -> dict[int, Readable]:
        plan, tensors = self._plan, call.tensors
        packed: dict[int, Readable] = {}
        for packing in self._packings:
            source = Source(tensors[packing.slots[0]], call.cells[packing.slots[0]].shell)
            # Stochastic rounding must differ from call to call, but be the same when a run is repeated.
            seed = zlib.crc32(f"{plan.name}/{plan.call}/{packing.value}/{number}".encode())
            try:
                with below_autograd():
                    one = self._packer.pack(source, packing.form, seed=seed, most_bytes=packing.most_bytes)
            except BaseException:
                call.close()  # the remaining tensors are freed with the error
                raise
            packed[packing.value] = one
            if isinstance(one, Refused):
                self.refused[plan.graph.values[packing.value].name, packing.form] += 1
            del source, one
            for slot in packing.slots:
                tensors[slot] = NOTHING
        return packed


def _packings(plan: ReplayPlan, shares: Mapping[str, float]) -> tuple[Packing, ...]:
    """Return one `Packing` for each value that the plan packs, with the value that saves most bytes first.

    The reason for the order: an original is freed after its packing, so memory is highest before the first one.
    """
    graph, forms = plan.graph, plan.choice.packed
    slots: dict[int, list[int]] = {}
    for slot in graph.slots:
        if slot.is_managed and slot.value in forms:
            slots.setdefault(slot.value, []).append(slot.index)
    packings = []
    for value, found in slots.items():
        name, nbytes = graph.values[value].name, plan.bytes_of(value)
        dtype = plan.recording.slot_geometries[found[0]].dtype
        most_bytes = most_payload_bytes(plan.codecs[value], nbytes, dtype, shares.get(name))
        packings.append(Packing(value, forms[value], tuple(found), most_bytes))
    return tuple(sorted(packings, key=lambda packing: (packing.most_bytes or 0) - plan.bytes_of(packing.value)))


def most_payload_bytes(codec: Codec | None, nbytes: int, dtype: torch.dtype, share: float | None) -> int | None:
    """Return the limit in bytes for a payload whose size depends on the data. For other payloads, return ``None``.

    The limit is the planned share of the value's bytes, because a call may be larger than the planned call.
    """
    if codec is None or not codec.accepts(dtype) or codec.payload_bytes(nbytes // dtype.itemsize, dtype) is not None:
        return None
    return None if share is None else math.ceil(share * nbytes)


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of the storage of ``tensor`` as a flat tensor without autograd."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))


def check_reader_of_sign(names: Mapping[int, str], slot: int) -> None:
    """Raise ``ReplayMismatch`` if only the signs of a value are held and an autograd node reads more of it than the sign."""
    node = current_autograd_node()
    if slot in names and (node is None or node.name() not in READS_SIGN_ONLY):
        reader = "unknown code" if node is None else node.name()
        raise ReplayMismatch(
            f"The plan stores only the signs of {names[slot]!r}, but {reader} reads the tensor.",
            why="only the backward of ReLU can work with signs; the plan was made for another step",
            next="plan this model again; the optimizer has not stepped",
        )


@dataclass(frozen=True, slots=True)
class Taking:
    """Data: one saved value of a compiled block that is compressed or offloaded.

    ``share`` is the planned size of its payload as a share of its bytes, or ``None`` if unknown.
    """

    value: str
    form: str
    share: float | None = None

    def most_bytes(self, packer: Packer, tensor: torch.Tensor) -> int | None:
        """Return the limit in bytes for the payload if its size depends on the data, else ``None``."""
        nbytes = tensor.untyped_storage().nbytes()
        return most_payload_bytes(packer.codec(self.form), nbytes, tensor.dtype, self.share)


class SavingHook:
    """The pack hook (see ``saved_tensors_hooks``) for one call of a compiled block.

    It compresses or offloads the first saved tensors, in the order of ``taking``, and keeps the tensors that are saved after
    them.
    """

    def __init__(self, taking: Sequence[Taking], packer: Packer, seed: str) -> None:
        self._taking, self._packer, self._seed = taking, packer, seed
        self.packed: list[Readable] = []

    def pack(self, tensor: torch.Tensor) -> Readable:
        at = len(self.packed)
        if at == len(self._taking):
            return Cell.kept(tensor)
        taking, seed = self._taking[at], zlib.crc32(f"{self._seed}/{at}".encode())
        with below_autograd(), _without_autocast(tensor.device.type):
            most_bytes = taking.most_bytes(self._packer, tensor)
            readable = self._packer.pack(Source(tensor), taking.form, seed=seed, most_bytes=most_bytes)
        self.packed.append(readable)
        return PackedTensor(tensor, readable)


class PackedTensor:
    """One tensor that a compiled block saved and that is compressed or offloaded: the object that holds it, and its size,
    strides and offset.
    """

    __slots__ = ("_device_type", "_layout", "readable")

    def __init__(self, tensor: torch.Tensor, readable: Readable) -> None:
        self._layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._device_type = tensor.device.type
        self.readable = readable

    def read(self) -> torch.Tensor:
        with below_autograd(), _without_autocast(self._device_type):
            return self.readable.read().as_strided(*self._layout)


def read_saved(saved: Readable) -> torch.Tensor:
    return saved.read()


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that turns autocast off, because codecs compute in the precision that they were measured in."""
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
