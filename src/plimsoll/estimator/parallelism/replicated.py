"""A stage's trace under way and its units in; gradients that last over micro-batches, and DDP's buckets, put in. No torch.

With several micro-batches gradients are there from the start; every backward makes new ones, adds them and frees them. DDP
(torch's, ``gradient_as_bucket_view=True``, as Megatron's buffers are) keeps all gradients in buckets, which exist from the
start as well: a new gradient is copied to its place and freed. A bucket is reduced as soon as its last gradient is there:
25 MiB each, the first 1 MiB, in the order in which backward makes them (what DDP rebuilds them to after the first step).

Source: torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.artifacts.trace import Category, Storage
from plimsoll.estimator.parallelism.editing import Edit
from plimsoll.estimator.parallelism.gradients import Gradients
from plimsoll.units import MIB

_FIRST_BUCKET_BYTES = MIB
_BUCKET_BYTES = 25 * MIB
_TICKS_TO_ACCUMULATE = 2
"""A new gradient is alive while it is made and while it is added to what is there."""


def accumulate(edit: Edit, gradients: Sequence[Gradients]) -> None:
    """Let gradients be there from the start, and new ones only until they are added."""
    for each in gradients:
        for storage in each.storages:
            edit.add(storage.bytes, Category.GRADIENT, f"accumulated {storage.label}", -1, None)
            _make_passing(edit, storage)


def reduce_in_buckets(edit: Edit, gradients: Sequence[Gradients]) -> None:
    """Keep gradients in buckets, and all-reduce each when it is full."""
    for is_expert in (False, True):
        mine = [each for each in gradients if each.unit.is_expert is is_expert]
        storages = [storage for each in mine for storage in each.storages]
        storages.sort(key=lambda storage: storage.born)
        kind = "expert gradients" if is_expert else "gradients"
        for number, bucket in enumerate(_buckets(storages)):
            size = sum(storage.bytes for storage in bucket)
            edit.add(size, Category.GRADIENT, f"bucket {number} of {kind}", -1, None)
            for storage in bucket:
                _make_passing(edit, storage)
            full = min(bucket[-1].born + 1, edit.last_tick)
            edit.collective(full, "all_reduce", f"bucket {number} of {kind}", size, mine[0].unit.dtype)


def _make_passing(edit: Edit, storage: Storage) -> None:
    edit.change(storage.id, storage.born, min(storage.born + _TICKS_TO_ACCUMULATE, edit.last_tick))


def _buckets(storages: Sequence[Storage]) -> list[list[Storage]]:
    """Consecutive gradients, each bucket closed by the one that fills it."""
    found: list[list[Storage]] = []
    room = 0
    for storage in storages:
        if room <= 0:
            found.append([])
            room = _BUCKET_BYTES if len(found) > 1 else _FIRST_BUCKET_BYTES
        found[-1].append(storage)
        room -= storage.bytes
    return found
