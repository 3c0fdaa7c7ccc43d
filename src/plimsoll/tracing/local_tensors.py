"""A tensor that stands for one spread over ranks (DTensor) or made of several in, the dense tensors of this process out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no memory of its own and stands for others."""
    return is_traceable_wrapper_subclass(tensor)


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
    if not is_wrapper(tensor):
        return (tensor,)
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    inside = (getattr(tensor, name) for name in names)
    return tuple(part for it in inside if isinstance(it, torch.Tensor) for part in dense_parts(it))


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that this process holds of ``tensor``."""
    return sum(part.numel() * part.element_size() for part in dense_parts(tensor))
