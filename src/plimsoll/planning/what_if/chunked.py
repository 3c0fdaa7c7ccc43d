"""A step with a head and a loss over many classes in, the same step with both computed chunk by chunk out.

The events are those of ``plimsoll.chunked``: no storage of all logits; one chunk of them while the loss is computed; the
gradients of the hidden states and of the weight are there from the head's forward on, because they are made there.
"""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.trace import Category, Storage, Trace
from plimsoll.planning.what_if.head import HeadAndLoss
from plimsoll.planning.what_if.rows import chunk_rows_for

_WIDE_BYTES = 4
"""Of one logit while the loss is computed, unless it is made wider."""


def with_chunked_loss(trace: Trace, head: HeadAndLoss, chunk_rows: int | None = None) -> Trace:
    """The step under ``plimsoll.chunked``.

    Args:
        trace: of the step.
        head: what ``find_head`` found in it.
        chunk_rows: rows of one chunk; ``None``: as many as ``chunk_loss`` takes by default.
    """
    rows = chunk_rows or default_rows(head)
    gone = {*head.logit_storages, *head.passing_gradients}
    early = {*head.hidden_gradients, *head.weight_gradients}
    storages: list[Storage] = []
    for storage in trace.storages:
        if storage.id in gone:
            storages.append(msgspec.structs.replace(storage, bytes=0))
        elif storage.id in early:
            storages.append(msgspec.structs.replace(storage, born=head.first_tick))
        elif storage.id in head.weight_casts:
            storages.append(msgspec.structs.replace(storage, dies=head.loss_tick))
        else:
            storages.append(storage)
    storages.append(
        Storage(
            id=len(storages),
            bytes=min(rows, head.rows) * head.classes * chunk_logit_bytes(head),
            category=Category.TEMPORARY,
            label="one chunk of logits",
            born=head.first_tick,
            dies=head.loss_tick,
        )
    )
    return msgspec.structs.replace(trace, storages=tuple(storages), workspaces=_workspaces(trace, head))


def default_rows(head: HeadAndLoss) -> int:
    """The rows of a chunk by default."""
    return chunk_rows_for(head.rows, head.features, head.classes, element_bytes=max(head.logit_bytes, _WIDE_BYTES))


def chunk_logit_bytes(head: HeadAndLoss) -> int:
    """Bytes that one logit takes in its chunk.

    Its own, a wide one where it is narrow, the tanh of a cap, and under autocast a block of the weight's gradient.
    """
    is_narrow = head.logit_bytes < _WIDE_BYTES
    cap_bytes = max(head.logit_bytes, _WIDE_BYTES) if head.is_capped else 0
    block_bytes = head.logit_bytes if head.is_mixed else 0
    return head.logit_bytes + (_WIDE_BYTES if is_narrow else 0) + cap_bytes + block_bytes


def _workspaces(trace: Trace, head: HeadAndLoss) -> dict[str, int]:
    """Without those of ops that only the head and the loss run, which meet no more than a chunk."""
    last = max((trace.storages[s].born for s in head.hidden_gradients), default=head.loss_tick)
    inside = range(head.first_tick, last + 1)
    outside = {op.cost_key for tick, op in enumerate(trace.ops) if tick not in inside or op.region >= 0}
    gone = {trace.ops[tick].cost_key for tick in inside} - outside
    return {key: size for key, size in trace.workspaces.items() if key not in gone}
