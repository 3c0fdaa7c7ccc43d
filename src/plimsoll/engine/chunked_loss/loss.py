"""``linear_cross_entropy``: the cross-entropy of a linear head. It never holds all logits at the same time."""

from __future__ import annotations

import math
from typing import Any

import torch

from plimsoll.engine.chunked_loss.function import ChunkedLosses, ChunkedLossPerRow, Head, wide
from plimsoll.errors import InvalidLoss, InvalidOption
from plimsoll.planning.what_if import chunk_rows_for
from plimsoll.tracing.torch_internals import peek_functorch

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_bytes: int | str | None = None,
    chunk_rows: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return ``cross_entropy(linear(hidden, weight, bias).float(), labels)``, with only one chunk of logits alive at a time.

    The logits of a vocabulary of 128,000, with their log-softmax and their gradient, are often the peak of a step. Here each
    chunk's gradient is computed in forward, while the chunk's logits exist. Only the gradients of the hidden states and of the
    weight are held until backward. Gradients are exact up to the rounding of another order of summation.

    Args:
        hidden: hidden states of shape (..., features), floating point.
        weight: the head's weight, of shape (classes, features).
        labels: class indices of shape (...), int64.
        bias: the head's bias, of shape (classes,), if it has a bias.
        reduction: ``mean`` over the labels that count, ``sum``, or ``none`` (a loss per label, in the shape of labels).
        ignore_index: the label of positions that do not count.
        label_smoothing: from 0 to 1, as in ``torch.nn.functional.cross_entropy``.
        scale: a factor on the logits.
        softcap: logits become ``softcap * tanh(logits / softcap)``, after ``scale``.
        chunk_bytes: the most that the logits of one chunk may take, in bytes or with a unit (``"256MiB"``).
        chunk_rows: how many rows a chunk has. Without ``chunk_bytes`` and ``chunk_rows``, a chunk's logits take as many bytes
            as the hidden states.
        accumulate_dtype: the dtype to sum the gradients of weight and bias in; by default each is summed in its own dtype.

    Returns:
        A scalar, or with ``reduction="none"`` a loss per label. Its dtype is float32, or float64 if the hidden states are
        float64.

    Raises:
        InvalidLoss: shapes or dtypes do not belong together, or the loss is differentiated twice or in forward mode.
        InvalidOption: the reduction does not exist, label smoothing is outside 0 to 1, the softcap is not above 0,
            ``accumulate_dtype`` is a dtype of integers, or a chunk cannot have this size.

    Example:
        >>> hidden, weight = torch.randn(6, 4), torch.randn(10, 4)
        >>> linear_cross_entropy(hidden, weight, torch.arange(6), chunk_rows=2).shape
        torch.Size([])

    Source: computing the gradient in forward is the method of Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989) and of torch
    2.13's ``torch.nn.functional.linear_cross_entropy``. Torch's function is used where it holds no more tensors than this one:
    with a frozen weight, and without a reduction. In other cases torch's function holds a second gradient of the weight when
    backward begins (measured, see the docs).
    """
    _check(hidden, weight, labels, bias)
    _check_options(reduction, label_smoothing, softcap, accumulate_dtype)
    # the autograd functions below compute a gradient for every tensor that requires one, even in no_grad mode
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    dtype = _compute_dtype(hidden)
    flat, flat_labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    head = Head(
        chunk_rows=chunk_rows_for(
            flat.shape[0],
            flat.shape[1],
            weight.shape[0],
            element_bytes=wide(dtype).itemsize,
            chunk_bytes=chunk_bytes,
            chunk_rows=chunk_rows,
        ),
        compute_dtype=dtype,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        scale=scale,
        softcap=softcap,
        accumulate_dtype=accumulate_dtype,
    )
    given = (flat, weight, bias, flat_labels, head)
    if _torch_serves(flat, weight, bias, head, reduction):
        return _with_torch(*given, reduction).reshape(labels.shape if reduction == "none" else ())
    with torch.autocast(hidden.device.type, enabled=False):
        if reduction == "none":
            losses: torch.Tensor = ChunkedLossPerRow.apply(*given)
            return losses.reshape(labels.shape)
        total: torch.Tensor = ChunkedLosses.apply(*given)
        return total if reduction == "sum" else _mean(total, (flat_labels != ignore_index).sum())


def _mean(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return ``total / count``, the mean loss as torch computes it. If no label counts, the mean is NaN and its gradient is
    zero.
    """
    mean = total / count.clamp(min=1)
    return torch.where(count > 0, mean, mean.detach() * torch.nan)


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype of the logits. It is autocast's dtype if autocast is on, else the dtype of the hidden states."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _torch_serves(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, head: Head, reduction: str
) -> bool:
    """Return whether torch's own chunked loss can compute this loss without using more memory than Plimsoll's."""
    is_plain = head.label_smoothing == 0.0 and head.scale == 1.0 and head.softcap is None
    has_one_dtype = {t.dtype for t in (hidden, weight, bias) if t is not None} == {head.compute_dtype}
    is_wide = wide(head.compute_dtype) is head.compute_dtype
    holds_nothing_more = reduction == "none" or not (weight.requires_grad or (bias is not None and bias.requires_grad))
    return torch_has_one() and is_plain and has_one_dtype and is_wide and holds_nothing_more and hidden.shape[0] > 0


def torch_has_one() -> bool:
    """Return whether this version of torch computes a linear head and its cross-entropy in chunks (2.13 and newer)."""
    return "LinearCrossEntropyOptions" in dir(torch.nn)


def _with_torch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    head: Head,
    reduction: str,
) -> torch.Tensor:
    options: Any = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=head.chunk_rows, chunking_method=None, acc_policy="compact"
    )
    return torch.nn.functional.linear_cross_entropy(
        hidden,
        weight,
        labels,
        linear_bias=bias,
        reduction=reduction,
        ignore_index=head.ignore_index,
        options=options,
    )


def _check_options(
    reduction: str, label_smoothing: float, softcap: float | None, accumulate_dtype: torch.dtype | None
) -> None:
    if reduction not in REDUCTIONS:
        raise InvalidOption(
            f"reduction={reduction!r} is not supported.",
            why=f"the supported reductions are {', '.join(REDUCTIONS)}",
            next='use one of them, such as reduction="mean"',
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise InvalidOption(
            f"label_smoothing={label_smoothing!r} is not between 0 and 1.",
            why="it is the share of each target that is spread evenly over all classes",
            next="use a share such as label_smoothing=0.1, or leave it out",
        )
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise InvalidOption(
            f"softcap={softcap!r} is not a positive, finite number.",
            why="logits become softcap * tanh(logits / softcap)",
            next="use a number such as softcap=30.0, or leave it out",
        )
    if accumulate_dtype is not None and not accumulate_dtype.is_floating_point:
        raise InvalidOption(
            f"accumulate_dtype={accumulate_dtype} cannot hold gradients.",
            why="gradients are sums of fractions, so they need a floating-point dtype",
            next="use accumulate_dtype=torch.float32, or leave it out",
        )


def _check(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
    if peek_functorch() is not None:
        raise InvalidLoss(
            "The chunked loss does not work under torch.func transforms.",
            why="it computes its gradients itself, chunk by chunk, and torch.func cannot transform them",
            next="call handle.remove() to use the full logits there",
        )
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise InvalidLoss(
            f"The shapes of hidden states and weight do not match: {shapes}.",
            why="hidden must have shape (..., features) and weight (classes, features)",
            next="pass the weight of the head in the layout of nn.Linear",
        )
    if hidden.shape[:-1] != labels.shape:
        raise InvalidLoss(
            f"The shapes of hidden states and labels do not match: {shapes}.",
            why="every hidden state needs one label (logits_to_keep leaves fewer hidden states than labels)",
            next="slice both to the same positions, and shift the labels before the call",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidLoss(
            f"The shapes of weight and bias do not match: weight {tuple(weight.shape)}, bias {tuple(bias.shape)}.",
            why="the bias must have one number per class",
            next="pass the bias of the head in the layout of nn.Linear",
        )
    if labels.dtype is not torch.int64 or not hidden.is_floating_point():
        raise InvalidLoss(
            f"Hidden states have dtype {hidden.dtype}, labels {labels.dtype}.",
            why="hidden states must be floating point and labels int64 class indices (class probabilities are not supported)",
            next="pass labels.long(), or compute the loss from full logits",
        )
