"""Real text and real images that every installation has: the standard library's source, scikit-learn's digits."""

from __future__ import annotations

import argparse
import inspect

import torch
from torch.nn.functional import interpolate


def text_ids(batch: int, length: int) -> torch.Tensor:
    """``batch`` pieces of ``argparse``'s source, ``length`` bytes each, as ids below 256."""
    text = inspect.getsource(argparse).encode()
    wanted = batch * length
    repeated = (text * (wanted // len(text) + 1))[:wanted]
    return torch.frombuffer(bytearray(repeated), dtype=torch.uint8).long().view(batch, length)


def images_and_labels(batch: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``batch`` handwritten digits as ``[batch, 3, side, side]`` in 0 to 1, and which digits they are."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    picks = [i % len(digits.target) for i in range(batch)]
    small = torch.tensor(digits.images[picks] / 16, dtype=torch.float32)[:, None]
    large = interpolate(small, size=(side, side), mode="bilinear", align_corners=False)
    return large.expand(-1, 3, -1, -1).contiguous(), torch.tensor(digits.target[picks])
