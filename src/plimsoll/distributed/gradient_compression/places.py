"""A seed in, the places that randomk sends out: the same on every rank, without a word between them."""

from __future__ import annotations

import hashlib
import struct

import torch

from plimsoll.distributed.gradient_compression.slots import Slot

_STATE_BYTES = 8


def generator_for(seed: int, slot: Slot, row: int = 0) -> torch.Generator:
    """Random numbers that depend on the seed, the parameter, how often it was reduced, and nothing else."""
    text = struct.pack("<qqqq", seed, slot.number, slot.reductions, row)
    digest = hashlib.blake2b(text, digest_size=_STATE_BYTES).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_places(generator: torch.Generator, elements: int, sent: int) -> torch.Tensor:
    """``sent`` different places below ``elements``, ascending: one out of each of ``sent`` equal stretches.

    Every place is as likely as any other (up to the last element of a stretch that is not whole). Unlike in a free draw, two
    neighbours rarely come together, and nothing has to be shuffled.

    Example:
        >>> draw_places(torch.Generator().manual_seed(0), 4, 4)
        tensor([0, 1, 2, 3])
    """
    starts = torch.arange(sent + 1) * elements // sent
    widths = starts[1:] - starts[:-1]
    steps = (torch.rand(sent, generator=generator, dtype=torch.float64) * widths).long()
    return starts[:-1] + torch.minimum(steps, widths - 1)
