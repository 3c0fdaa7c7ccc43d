"""Counts the FLOPs of an op call: torch's formulas, and our own where torch has none or counts too many.

Torch's formula for a convolution's backward does not divide the gradient of the weights by the groups. For a depthwise
convolution of 256 channels, forward and backward together are then 86 times too many FLOPs (``torch.utils.flop_counter``, seen
in torch 2.13).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from plimsoll.tracing.recorder.collectives import argument_names

_CONVOLUTIONS = frozenset(
    f"aten::{name}" for name in ("convolution", "_convolution", "convolution_overrideable", "convolution_backward")
)


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """Return the FLOPs of one call of an op, or ``None`` for an op without a formula.

    A multiplication and its addition are two FLOPs. Adding a bias does not count.

    Args:
        func: an overload of an op, such as ``torch.ops.aten.mm.default``.
        args: its positional arguments. Tensors may be fake.
        kwargs: its keyword arguments.
        out: what the call returned.

    Example:
        >>> x, weight = torch.ones(1, 8, 10, 10), torch.ones(8, 1, 3, 3)
        >>> rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 8)
        >>> out = torch.convolution(x, weight, *rest)
        >>> count_flops(torch.ops.aten.convolution.default, (x, weight, *rest), {}, out)
        14400
    """
    if not isinstance(func, torch._ops.OpOverload):
        return None
    if func._schema.name in _CONVOLUTIONS:
        return _convolution_flops(dict(zip(argument_names(func), args, strict=False)) | kwargs, out)
    if func is torch.ops.aten._grouped_mm.default:
        return _grouped_flops(args[0], args[1])
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return None
    is_attention = func._schema.name.startswith("aten::_scaled_dot_product")
    return int(count(*(_with_equal_heads(args) if is_attention else args), **kwargs, out_val=out))


def _convolution_flops(named: dict[str, Any], out: Any) -> int:
    """Return the FLOPs of a convolution, or of those gradients that its backward computes.

    At each position of its output a convolution uses each weight once; a transposed one does so at each position of its
    input. The weight has the channels of one group on one side, so groups are counted already. Each of the two gradients
    does the same multiplications again.
    """
    produced = named.get("grad_output", out)
    positions = (named["input"] if named["transposed"] else produced).shape[2:]
    once = 2 * int(named["input"].shape[0]) * math.prod(map(int, (*positions, *named["weight"].shape)))
    return once * (sum(map(bool, named["output_mask"][:2])) if "output_mask" in named else 1)


def _grouped_flops(rows: torch.Tensor, weights: torch.Tensor) -> int:
    """Return the FLOPs of a grouped product, because torch lacks a formula. Each of ``rows`` is multiplied with the weights of
    one group.
    """
    groups = rows.shape[0] if rows.dim() == weights.dim() == 3 else 1
    return 2 * groups * rows.shape[-2] * rows.shape[-1] * weights.shape[-1]


def _with_equal_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an attention op with shapes in place of tensors. In these shapes, keys and values have as many
    heads as queries.

    They are for torch's FLOP formulas, which accept a shape instead of a tensor. Before 2.13, these formulas did not support
    grouped queries.
    """
    heads = max((arg.shape[1] for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 4), default=0)
    return tuple(
        torch.Size((arg.shape[0], heads, *arg.shape[2:])) if isinstance(arg, torch.Tensor) and arg.dim() == 4 else arg
        for arg in args
    )
