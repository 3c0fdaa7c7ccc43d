"""The compression that people write first: saved-tensor hooks that hold every activation as int8, with one scale per row.

Every floating-point tensor that a block saves is rounded, parameters excepted; a tensor that several ops save is held once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.blocks import repeated_blocks

_LEAST_ELEMENTS = 4096
Held = tuple[torch.Tensor, torch.Tensor, torch.dtype]


@contextlib.contextmanager
def apply(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """Hold what the repeated blocks save as int8."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    blocks = repeated_blocks(model)
    originals = [block.forward for block in blocks]
    for block, original in zip(blocks, originals, strict=True):
        block.forward = functools.partial(_forward, original, parameters)  # type: ignore[method-assign]
    try:
        yield model
    finally:
        for block in blocks:
            del block.forward


def _forward(original: Callable[..., Any], parameters: set[int], *args: Any, **kwargs: Any) -> Any:
    held: dict[tuple[Any, ...], tuple[torch.Tensor, Held]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor | Held:
        is_parameter = tensor.untyped_storage().data_ptr() in parameters
        if is_parameter or not tensor.is_floating_point() or tensor.numel() < _LEAST_ELEMENTS:
            return tensor
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if key not in held:  # the tensor is kept beside its code until the block returns, so no address comes up twice
            held[key] = (tensor, _quantize(tensor))
        return held[key][1]

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        output = original(*args, **kwargs)
    held.clear()
    return output


def _quantize(tensor: torch.Tensor) -> Held:
    scale = tensor.detach().abs().amax(dim=-1, keepdim=True).div_(127).clamp_min_(1e-12)
    return (tensor.detach() / scale).round_().to(torch.int8), scale, tensor.dtype


def _unpack(held: torch.Tensor | Held) -> torch.Tensor:
    if isinstance(held, torch.Tensor):
        return held
    codes, scale, dtype = held
    return codes.to(dtype) * scale
