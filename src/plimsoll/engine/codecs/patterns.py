"""A tensor in, its bit patterns as integers out: codecs that must be exact compare patterns and not values.

-0.0 equals 0.0 and NaN equals nothing; their patterns behave.
"""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_patterns(dtype: torch.dtype) -> bool:
    """Whether there is an integer as wide as an element."""
    return dtype.itemsize in _INTEGERS


def patterns_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as integers."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])
