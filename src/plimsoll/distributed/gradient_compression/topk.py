"""Top-K: each rank sends the largest elements of its gradient with their places, and adds up what all ranks sent.

If every rank needs the whole mean, each rank gets the payloads (the bytes sent for a gradient) of all ranks, by one all-gather.
So the bytes that a rank sends grow with the number of ranks. If gradients are sharded, each rank gets the payloads for its own
shard, by one all-to-all. A payload consists of places as int32, then values in the gradient's own dtype. Its length depends
only on the number of elements and the dtype, so all ranks know it.

Source: Lin et al. 2018, "Deep Gradient Compression"; Stich et al. 2018, "Sparsified SGD with memory". Known weakness: among
elements of equal magnitude, the device chooses which ones to send, and a GPU may choose others in a second run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from plimsoll.distributed.gradient_compression.feedback import FeedbackOutcome, Offer
from plimsoll.distributed.gradient_compression.method import Method
from plimsoll.distributed.gradient_compression.slots import Form

_NAMES = vars(dist)
# torch 2.13 renamed it and warns of the old name.
_all_gather = _NAMES["all_gather_single" if "all_gather_single" in _NAMES else "all_gather_into_tensor"]


@dataclass(frozen=True, slots=True)
class TopKMean:
    """Computes the mean over ranks of the elements that the ranks send: each rank sends the largest elements of its gradient.

    All ranks of a group must make the same calls of ``reduce``.
    """

    method: Method
    form: Form

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[FeedbackOutcome]:
        rows = [each.values for each in offers]
        mine = [self.encode(each.values, each.slot.dtype) for each in offers]
        message = torch.cat(mine, dim=1)
        received = message.new_empty(group.size(), message.shape[1])
        if self.form == "shard":
            dist.all_to_all_single(received, message, group=group)
        else:
            _all_gather(received, message, group=group)
        outcomes = []
        payloads = received.split([each.shape[1] for each in mine], dim=1)
        for each, row, own, theirs in zip(offers, rows, mine, payloads, strict=True):
            places, values = self.decode(own, each.slot.dtype)
            sent = torch.zeros_like(row).scatter_(1, places, values)
            mean = row.new_zeros(row.shape[1])
            # Always from rank 0 on: then every rank gets the same bits.
            for from_places, from_values in zip(*self.decode(theirs, each.slot.dtype), strict=True):
                mean.index_add_(0, from_places, from_values, alpha=1 / group.size())
            outcomes.append(FeedbackOutcome(mean=mean, sent=sent))
        return outcomes

    def encode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Turn float32 rows ``(rows, elements)`` into payloads, one for each row: bytes with the places and values of the row's
        largest elements.
        """
        sent = self.method.elements_sent(rows.shape[1])
        places = rows.abs().topk(sent, dim=1, sorted=False).indices
        # Values beyond the range of the dtype are clipped, and the rest stays in the residual.
        limit = torch.finfo(dtype).max
        values = rows.gather(1, places).clamp(-limit, limit).to(dtype)
        return torch.cat([places.int().view(torch.uint8), values.view(torch.uint8)], dim=1)

    def decode(self, payloads: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places and the float32 values that are in the payloads, for each row of payloads."""
        sent = payloads.shape[1] // (torch.int32.itemsize + dtype.itemsize)
        places, values = payloads.split([sent * torch.int32.itemsize, sent * dtype.itemsize], dim=1)
        # Clones, because a view as another dtype has to start at a multiple of its size.
        as_rows = torch.contiguous_format
        return (
            places.clone(memory_format=as_rows).view(torch.int32).long(),
            values.clone(memory_format=as_rows).view(dtype).float(),
        )
