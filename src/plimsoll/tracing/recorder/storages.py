"""Functions about a tensor's memory: which storage it is, how the tensor is laid out in it, and which bits it holds.

An address identifies a storage only while that storage lives. So ``StorageTable`` holds a weak reference to every storage that
it has seen. While the weak reference exists, the allocator cannot reuse the ``StorageImpl``, so a look-up by address is exact
for the table's lifetime. (``data_ptr`` is not a valid key for two reasons: addresses are reused, and all tensors without
elements share 0.) For a DTensor, the storage of its local shard is used.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.reductions import StorageWeakRef

from plimsoll.tracing.local_tensors import is_wrapper, local_of, parts_of_sparse

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A mapping from the size of an element in bytes to the integer dtype of that size. It is used to view bits."""
_ROW = 512
_ROWS_AT_ONCE = 2048
_SMALL_BYTES = 2**14
_known_weights: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Data: the layout of a tensor in its storage.

    Sizes, strides and the offset from the start of the storage are in elements.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Geometry:
        return Geometry(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def changed(self, change: Callable[[Any], Any]) -> Geometry:
        """Return a copy of the geometry with ``change`` applied to each number, in a fixed order."""
        size = tuple([change(number) for number in self.size])
        return Geometry(size, tuple([change(number) for number in self.stride]), change(self.offset), self.dtype)

    def view_on(self, base: torch.Tensor) -> torch.Tensor:
        """Return a tensor with this geometry on the storage of ``base``."""
        if base.dtype is self.dtype:
            return torch.as_strided(base, self.size, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), self.offset, self.size, self.stride)


def has_lazy_bits(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's bits are not its values (lazy conjugate or negation). A geometry cannot express that."""
    return tensor.is_conj() or tensor.is_neg()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is plain: dense and strided, with its own storage.

    Not plain are subclasses that wrap several tensors, and the zeros of forward-mode derivatives, which are not in memory.
    """
    return tensor.layout is torch.strided and not is_wrapper(tensor) and not tensor._is_zerotensor()


class StorageTable:
    """A table that gives each storage that it is shown a small integer id. Two storages never get the same id, even if one is
    freed and its address is reused.
    """

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._references: list[StorageWeakRef | None] = []

    def __len__(self) -> int:
        return len(self._references)

    def find(self, tensor: torch.Tensor) -> int:
        """Return the id of the tensor's storage. Return ``-1`` if the storage is unknown, or if the tensor is sparse and has
        none.
        """
        local = local_of(tensor)
        return self._ids.get(local.untyped_storage()._cdata, -1) if local.layout is torch.strided else -1

    def add(self, tensor: torch.Tensor) -> int:
        """Return the id of the tensor's storage. If the storage is unknown, it gets a new id."""
        storage = local_of(tensor).untyped_storage()
        found = self._ids.get(storage._cdata)
        if found is not None:
            return found
        fresh = len(self._references)
        self._references.append(StorageWeakRef(storage))
        self._ids[storage._cdata] = fresh
        return fresh

    def address(self, id_: int) -> int:
        """Return the address of a storage that is still in the table. The address is an argument for ``is_storage_gone``."""
        reference = self._references[id_]
        assert reference is not None
        return int(reference.cdata)

    def let_go(self, id_: int) -> None:
        """Forget a storage that was freed. Its address may be reused from now on.

        A weak reference keeps only a small object, but in the C library's heap that object is between tensors and fragments
        their memory.
        """
        del self._ids[self.address(id_)]
        self._references[id_] = None


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the same bits as integers, to compare bits instead of values."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGER_OF_SIZE[tensor.element_size()])


def storage_fingerprint(tensor: torch.Tensor) -> int:
    """Return a checksum of the tensor's whole storage. It depends on all bytes and their positions. At most 8 MiB of the bytes
    are copied at a time.
    """
    storage = tensor.untyped_storage()
    count = storage.nbytes()
    if count == 0 or storage.device.type == "meta":  # forward-mode derivatives check shapes there
        return 0
    if storage.device.type == "cpu":
        return storage_crc(tensor) if count <= _SMALL_BYTES else _host_fingerprint(storage)
    flat = _of_storage(torch.int64, storage, 0, count // 8)
    rest = flat.numel() % _ROW
    # A sum of bytes would make a copy eight times as large, so only the remainder is read as bytes.
    few = torch.cat([_of_storage(torch.uint8, storage, count - count % 8, count % 8).long(), flat[:rest]])
    of_columns, of_rows = (
        torch.from_numpy(_weights(size)).to(flat.device) for size in (_ROW, max(flat.numel() // _ROW, few.numel()))
    )
    found = (few * of_rows[: few.numel()]).sum()
    for place, part in enumerate(flat[rest:].view(-1, _ROW).split(_ROWS_AT_ONCE)):
        first = place * _ROWS_AT_ONCE
        found += ((part * of_columns).sum(1) * of_rows[first : first + len(part)]).sum()
    return int(found)


def _host_fingerprint(storage: torch.UntypedStorage) -> int:
    """Return a checksum of a storage on the CPU: the sum of its numbers, each with a weight of its row and a weight of its
    column.

    Numpy takes a fifth to a half of the time of torch's sums and of a CRC, because it reads the bytes in place.
    """
    data = memoryview(_bytes_of(storage)).cast("B")
    count = storage.nbytes() // (8 * _ROW) * _ROW
    rows = np.frombuffer(data, np.int64, count).reshape(-1, _ROW)
    # Plain sums of rows and columns would take permutation matrices for equal.
    sums = np.einsum("ij,j->i", rows, _weights(_ROW))
    return hash((int(np.dot(sums, _weights(len(rows)))), zlib.crc32(data[8 * count :])))


def _weights(count: int) -> NDArray[np.int64]:
    """Return random odd numbers, the same in each call. A number times an odd one is never 0 modulo 2^64, so a change of one
    number always shows.
    """
    global _known_weights
    if len(_known_weights) < count:
        drawn = np.random.default_rng(0).integers(-(2**62), 2**62, 2 * count)
        _known_weights = drawn | 1
    return _known_weights[:count]


def storage_crc(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of all bytes of a CPU tensor's storage. The bytes are read in place."""
    return zlib.crc32(_bytes_of(tensor.untyped_storage()))


def _bytes_of(storage: torch.UntypedStorage) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def _of_storage(dtype: torch.dtype, storage: torch.UntypedStorage, offset: int, count: int) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, (count,))  # type: ignore[call-overload,no-any-return]


def content_fingerprint(tensor: torch.Tensor) -> int:
    """Return a checksum of the tensor's elements in their order. It does not depend on the tensor's strides and offset."""
    count = tensor.numel() * tensor.element_size()
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == count
    return storage_fingerprint(tensor if is_whole else tensor.detach().clone(memory_format=torch.contiguous_format))


def same_bits(first: torch.Tensor, second: Any) -> bool:
    """Return True if two tensors have the same geometry and the same bits. Any NaN equals any NaN."""
    if not isinstance(second, torch.Tensor) or not is_plain(first) or not is_plain(second):
        return False
    return Geometry.of(first) == Geometry.of(second) and same_contents(first, second)


def same_contents(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of equal shape and dtype hold the same bits, element by element. Any NaN equals any NaN."""
    if first.shape != second.shape or first.dtype != second.dtype or first.layout != second.layout:
        return False
    if first.layout is not torch.strided:
        parts, others = parts_of_sparse(first), parts_of_sparse(second)
        return all(same_contents(one, other) for one, other in zip(parts, others, strict=True))
    if first.numel() == 0 or (first.is_meta and second.is_meta):
        return True
    if first.is_complex():
        first, second = torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj())
    if first.stride() != second.stride():
        first, second = first.contiguous(), second.contiguous()
    if torch.equal(as_integers(first), as_integers(second)):
        return True
    if not first.dtype.is_floating_point:
        return False
    both_nan = first.isnan() & second.isnan()
    return bool((both_nan | (as_integers(first) == as_integers(second))).all())
