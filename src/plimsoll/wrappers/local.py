"""A tensor that stands for one spread over ranks (DTensor) or made of several in, the dense tensors of this process out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The plain tensors that hold the memory of ``tensor``: itself, or a DTensor's local shard.

    The storage of a wrapper has the size of the whole tensor and no memory, so bytes are counted, and bits compared, here.
    No collective runs and autograd sees nothing.

    Args:
        tensor: any tensor.

    Example:
        >>> [part.shape for part in dense_parts(torch.zeros(2, 3))]
        [torch.Size([2, 3])]
    """
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return (tensor,)
    names, _ = wrapper.__tensor_flatten__()
    return tuple(part for name in names for part in dense_parts(getattr(tensor, name)))


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that this process holds of ``tensor``."""
    return sum(part.numel() * part.element_size() for part in dense_parts(tensor))
