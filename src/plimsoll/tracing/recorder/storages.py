"""Tensors in, ids of living storages out.

An address names a storage only while that storage lives. The table therefore holds a weak reference to every storage that
it has seen: as long as the weak reference exists the allocator cannot hand out the same ``StorageImpl`` again, so a
look-up by address is exact for the table's lifetime. (Keying a table by ``data_ptr`` is wrong twice: it is re-used, and
all zero-size tensors share 0.) The storage of a DTensor is that of its local shard.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from plimsoll.tracing.recorder.shards import local_of


class StorageTable:
    """Gives every storage that it meets a small id, and never gives one id to two storages."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._references: list[StorageWeakRef | None] = []

    def __len__(self) -> int:
        return len(self._references)

    def find(self, tensor: torch.Tensor) -> int:
        """The id of the tensor's storage, ``-1`` if the table has not met it."""
        return self._ids.get(local_of(tensor).untyped_storage()._cdata, -1)

    def add(self, tensor: torch.Tensor) -> int:
        """The id of the tensor's storage; a new one if the table has not met it."""
        storage = local_of(tensor).untyped_storage()
        found = self._ids.get(storage._cdata)
        if found is not None:
            return found
        fresh = len(self._references)
        self._references.append(StorageWeakRef(storage))
        self._ids[storage._cdata] = fresh
        return fresh

    def is_alive(self, id_: int) -> bool:
        """Whether anybody still holds the storage.

        A dead one is let go here: its address may be used again from now on, and the table does not know it any more. (What
        a weak reference holds is small, but it sits in the C library's heap between tensors and keeps their memory apart.)
        """
        reference = self._references[id_]
        if reference is None:
            return False
        if not reference.expired():
            return True
        del self._ids[reference.cdata]
        self._references[id_] = None
        return False
