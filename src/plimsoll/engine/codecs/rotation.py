"""Groups of 32 neighbours in, the same groups in a basis where no entry stands out, out. Its own inverse.

Multiplies by an orthogonal Hadamard matrix: an outlier becomes 32 entries of a sixth of its size, so that the scale of
its block is small again, and the error made in the new basis has the same L2 norm in the old one. Normally distributed
blocks stay what they are. An exact zero comes back as a small number. Outside of the kernels it is a float32 matrix
product of torch's: where the user lets those be less precise, so is this.

Source: the idea is that of QuaRot (Ashkboos et al., NeurIPS 2024), section 4, which rotates the weights' channels; here it
is a group of neighbours in memory, whatever they are. Why 32, and what it brings: docs/lab-notes.md.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch

GROUP = 32
GAIN = math.sqrt(GROUP)
"""No entry of a rotated group is more than this times the largest entry before."""


@functools.cache
def hadamard() -> npt.NDArray[np.float32]:
    """Sylvester's matrix of order 32, orthogonal and symmetric: five times a Kronecker product with that of order 2."""
    matrix = np.ones((1, 1))
    while len(matrix) < GROUP:
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]]))
    return (matrix / GAIN).astype(np.float32)


def rotate(rows: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Rotate float32 rows into the beginning of ``out``, which is other memory; what is left over of the last group stays.

    Returns:
        The rotated rows, in the shape of ``rows``.
    """
    values, out = rows.view(-1), out[: rows.numel()]
    whole = values.numel() - values.numel() % GROUP
    torch.mm(values[:whole].view(-1, GROUP), matrix, out=out[:whole].view(-1, GROUP))
    out[whole:].copy_(values[whole:])
    return out.view(rows.shape)
