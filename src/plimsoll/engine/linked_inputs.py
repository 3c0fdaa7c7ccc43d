"""Outputs of one region in, links to them out, where the next region's input is that very tensor and is not to be held.

Identity is by living storage (a weak reference proves that it lives), offset, sizes, strides, dtype and version: the tensor
object may change on the way (FSDP wraps it), the storage does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from plimsoll.engine.cells import Cell, Readable
from plimsoll.engine.frame import Frame, Link
from plimsoll.engine.program import Program
from plimsoll.tracing.local_tensors import local_of, version_of
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.recorder.storages import Geometry


@dataclass(frozen=True, slots=True)
class _Offer:
    reference: StorageWeakRef
    geometry: Geometry
    version: int
    frame: Frame
    leaves: tuple[Readable, ...]
    position: int


class LinkTable:
    """The outputs of the latest managed call, for the region that comes next.

    ``silent`` regions offer none: their parameters may be gone by the time (a sharded model frees what it gathered).
    """

    def __init__(self, silent: Collection[str] = (), *, is_used: bool) -> None:
        self._is_used = is_used
        self._silent = frozenset(silent)
        self._offers: list[_Offer] = []

    def offer(
        self,
        program: Program,
        frame: Frame,
        cells: Sequence[Cell],
        packed: Mapping[int, Readable],
        link: Link | None,
        output: Any,
    ) -> None:
        """A region has returned: its outputs may be asked for again."""
        if not self._is_used:
            return
        leaves = program.boundary_leaves(cells, packed, link)
        self._offers = []
        if leaves is None or program.name in self._silent:
            return
        for position, tensor in enumerate(output_tensors(output)):
            if not program.remakes(position):
                continue
            self._offers.append(
                _Offer(
                    StorageWeakRef(local_of(tensor).untyped_storage()),
                    Geometry.of(local_of(tensor)),
                    version_of(tensor),
                    frame,
                    leaves,
                    position,
                )
            )

    def find(self, program: Program, inputs: Sequence[torch.Tensor]) -> Link | None:
        """A link to the input that is not held, if the region before made it."""
        return self.link_to(inputs[program.link_position])

    def link_to(self, tensor: torch.Tensor) -> Link | None:
        local = local_of(tensor)
        storage = local.untyped_storage()._cdata
        for offer in self._offers:
            if (
                not offer.reference.expired()
                and offer.reference.cdata == storage
                and offer.geometry == Geometry.of(local)
                and offer.version == version_of(tensor)
            ):
                return Link(offer.frame, offer.leaves, offer.position)
        return None

    def clear(self) -> None:
        """A new step begins."""
        self._offers = []
