"""Sizes in, offsets into one growing file out: which of its bytes are taken, which are free again.

The lowest hole that is large enough is used first, so that the file stays short and its front stays in the page cache.
Freed neighbours become one hole; a hole at the end is no hole, the file's used part just ends sooner. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

ALIGNMENT_BYTES = 4096
"""A page, and a multiple of every disk's block."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes ``[offset, offset + size_bytes)``, both multiples of the alignment."""

    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


class Extents:
    """A first-fit free list."""

    def __init__(self) -> None:
        self.end_bytes = 0
        """Where the last taken extent ends."""
        self.taken_bytes = 0
        self._offsets: list[int] = []
        self._sizes: list[int] = []

    @property
    def holes(self) -> tuple[Extent, ...]:
        """Free extents below the end, in order; no two of them touch."""
        return tuple(Extent(offset, size) for offset, size in zip(self._offsets, self._sizes, strict=True))

    def fit(self, nbytes: int) -> Extent:
        """Where ``nbytes`` would go; nothing is taken yet, and it may reach past the end."""
        size_bytes = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for offset, hole_bytes in zip(self._offsets, self._sizes, strict=True):
            if hole_bytes >= size_bytes:
                return Extent(offset, size_bytes)
        return Extent(self.end_bytes, size_bytes)

    def take(self, extent: Extent) -> None:
        """Take what `fit` found."""
        self.taken_bytes += extent.size_bytes
        if extent.offset == self.end_bytes:
            self.end_bytes = extent.end
        elif extent.size_bytes:
            index = bisect_left(self._offsets, extent.offset)
            self._offsets[index] += extent.size_bytes
            self._sizes[index] -= extent.size_bytes
            if not self._sizes[index]:
                del self._offsets[index], self._sizes[index]

    def give_back(self, extent: Extent) -> None:
        """Free an extent, whole; it joins the holes that it touches."""
        if not extent.size_bytes:
            return
        self.taken_bytes -= extent.size_bytes
        offset, size_bytes = extent.offset, extent.size_bytes
        index = bisect_left(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] == extent.end:
            size_bytes += self._sizes[index]
            del self._offsets[index], self._sizes[index]
        if index and self._offsets[index - 1] + self._sizes[index - 1] == offset:
            index -= 1
            offset = self._offsets[index]
            size_bytes += self._sizes[index]
            del self._offsets[index], self._sizes[index]
        if offset + size_bytes == self.end_bytes:
            self.end_bytes = offset
        else:
            self._offsets.insert(index, offset)
            self._sizes.insert(index, size_bytes)
