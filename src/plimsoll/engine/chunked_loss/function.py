"""The autograd functions of the chunked loss: they compute gradients chunk by chunk, so that the logits of all rows never exist
at the same time.

For a sum, the gradients of hidden states, weight and bias are computed in forward, while each chunk's logits exist; backward
only scales them. For losses per row, the scale is not known before backward, so backward computes each chunk again. Gradients
are held without the mean's divisor, so that float16 does not lose small ones.

Legend: z logits of a chunk (rows, classes), p their softmax, s the softcap. d loss / d z = p - (1 - e) y - e / classes for the
label smoothing e; a softcap turns it into (1 - tanh(z / s)^2) times that.

Known weakness: if weights are narrower than float32, their gradient is summed over chunks in their own dtype, unless
``accumulate_dtype`` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plimsoll.errors import InvalidLoss

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""The gradients of the hidden states, of the weight, and of the bias. A gradient that is not needed is ``None``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Data: the options for computing a loss from hidden states: ``softcap * tanh(scale * linear / softcap)``, then
    cross-entropy.

    Without a softcap, it is ``scale * linear``, then cross-entropy.
    """

    chunk_rows: int
    compute_dtype: torch.dtype
    ignore_index: int = -100
    label_smoothing: float = 0.0
    scale: float = 1.0
    softcap: float | None = None
    accumulate_dtype: torch.dtype | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for computing a loss: float64 for float64, float32 for all other dtypes."""
    return dtype if dtype is torch.float64 else torch.float32


class ChunkedLosses(torch.autograd.Function):
    """An autograd function that returns the sum of the losses (a scalar). The gradients are computed in forward already, so
    backward only scales them.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        work = _Work(*given)
        gradients = work.empty_gradients(ctx.needs_input_grad[:3])
        losses = work.run(gradients, None)
        ctx.gradients, ctx.chunk_rows = work.as_given(gradients), work.head.chunk_rows
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        _refuse_second_order()
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise InvalidLoss(
                "Backward ran twice through the same chunked loss.",
                why="forward computes the gradients, and the first backward has already returned and released them",
                next="compute the loss again before each backward, or use the model's own loss if you need retain_graph=True",
            )
        (scale,) = outer
        for gradient in gradients:
            if gradient is not None:
                _scale(gradient, scale, ctx.chunk_rows)
        return (*gradients, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_derivative("in forward mode")


class ChunkedLossPerRow(torch.autograd.Function):
    """An autograd function that returns one loss per row. Its backward computes each chunk's logits a second time, and then the
    gradients.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        *tensors, ctx.head = given
        ctx.save_for_backward(*tensors)
        return _Work(*given).run((None, None, None), None)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        _refuse_second_order()
        hidden, weight, bias, labels = ctx.saved_tensors
        work = _Work(hidden, weight, bias, labels, ctx.head)
        gradients = work.empty_gradients(ctx.needs_input_grad[:3])
        work.run(gradients, outer[0])
        return (*work.as_given(gradients), None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_derivative("in forward mode")


def _scale(gradient: torch.Tensor, scale: torch.Tensor, rows: int) -> None:
    """Multiply a gradient in place by a factor, without rounding the factor to the gradient's dtype.

    The factor, rounded to bfloat16, would be wrong by up to 0.2%. Loss scaling uses the factor 65536, which is infinite in
    float16.
    """
    if scale.dtype is gradient.dtype:
        gradient.mul_(scale)
        return
    for block in gradient.split(rows):  # products have a wider dtype, so compute one block at a time
        block.copy_(block * scale.reshape(1))


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise _no_derivative("twice")


def _no_derivative(how: str) -> InvalidLoss:
    return InvalidLoss(
        f"The chunked loss cannot be differentiated {how}.",
        why="it computes its gradients itself, chunk by chunk, and autograd does not record how",
        next="call handle.remove() to use the full logits if you need this derivative",
    )


class _Work:
    """The loop over chunks, without autograd. Its constructor takes the same arguments as the autograd functions above."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        head: Head,
    ) -> None:
        dtype = head.compute_dtype
        self._given = (hidden, weight, bias)
        self.head = head
        self._hidden = hidden
        self._weight = weight.to(dtype)
        self._bias = None if bias is None else bias.to(dtype)
        self._labels = labels
        self._is_ignored = labels == head.ignore_index

    def empty_gradients(self, needed: tuple[bool, ...]) -> Gradients:
        """Return new tensors to add up gradients: of the hidden states, the weight and the bias. An item is ``None`` if its
        gradient is not ``needed``.
        """
        hidden, weight, bias = self._given
        wanted = self.head.accumulate_dtype
        return (
            torch.empty_like(hidden) if needed[0] else None,
            torch.zeros_like(weight, dtype=wanted) if needed[1] else None,
            torch.zeros_like(bias, dtype=wanted) if needed[2] and bias is not None else None,
        )

    def as_given(self, gradients: Gradients) -> Gradients:
        """Return the gradients, each converted to the dtype of the tensor that it belongs to."""
        hidden, weight, bias = (
            gradient if gradient is None or given is None else gradient.to(given.dtype)
            for gradient, given in zip(gradients, self._given, strict=True)
        )
        return hidden, weight, bias

    def run(self, gradients: Gradients, row_scale: torch.Tensor | None) -> torch.Tensor:
        """Return the losses per row, and add the gradients of ``sum(row_scale * losses)`` to ``gradients``."""
        count = self._hidden.shape[0]
        wants_slope = any(gradient is not None for gradient in gradients)
        losses = torch.empty(count, dtype=wide(self.head.compute_dtype), device=self._hidden.device)
        for start in range(0, count, self.head.chunk_rows):
            rows = slice(start, min(start + self.head.chunk_rows, count))
            states = self._hidden[rows].to(self.head.compute_dtype)
            scale = None if row_scale is None else row_scale[rows]
            losses[rows], slope = self._chunk(rows, states, scale, wants_slope=wants_slope)
            if slope is not None:
                self._add(rows, states, slope, gradients)
            del slope  # free it before the next chunk is computed
        return losses

    def _chunk(
        self, rows: slice, states: torch.Tensor, row_scale: torch.Tensor | None, *, wants_slope: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the losses of a chunk, and the derivatives of the losses by the logits (``None`` unless ``wants_slope``).

        On return, no other tensor of the chunk is alive.
        """
        head = self.head
        logits = torch.nn.functional.linear(states, self._weight, self._bias).to(wide(head.compute_dtype))
        if head.scale != 1.0:
            logits.mul_(head.scale)
        bent = None
        if head.softcap is not None:
            bent = logits.div_(head.softcap).tanh_()
            logits = bent * head.softcap
        is_ignored = self._is_ignored[rows]
        labels = self._labels[rows].masked_fill(is_ignored, 0).unsqueeze(1)
        logits.sub_(logits.amax(1, keepdim=True))
        target = logits.gather(1, labels).squeeze(1)
        smoothing = head.label_smoothing
        mean = logits.mean(1) if smoothing else None
        total = logits.exp_().sum(1)
        loss = total.log() - target if mean is None else total.log() - (1 - smoothing) * target - smoothing * mean
        loss.masked_fill_(is_ignored, 0.0)
        if not wants_slope:
            return loss, None
        slope = logits.div_(total.unsqueeze(1))
        if smoothing:
            slope.sub_(smoothing / slope.shape[1])
        slope.scatter_add_(1, labels, torch.full_like(labels, -(1 - smoothing), dtype=slope.dtype))
        scale = (~is_ignored).to(slope.dtype) * head.scale
        if row_scale is not None:
            scale = scale * row_scale
        slope.mul_(scale.unsqueeze(1))
        if bent is not None:
            slope.mul_(bent.square_().neg_().add_(1.0))
        return loss, slope.to(head.compute_dtype)

    def _add(self, rows: slice, states: torch.Tensor, slope: torch.Tensor, gradients: Gradients) -> None:
        """Add a chunk's gradients to ``gradients``. They follow from the derivatives ``slope`` by the chain rule through the
        linear map.
        """
        of_hidden, of_weight, of_bias = gradients
        if of_hidden is not None:
            if of_hidden.dtype is slope.dtype:
                torch.mm(slope, self._weight, out=of_hidden[rows])
            else:
                of_hidden[rows] = slope @ self._weight
        if of_weight is not None:
            if of_weight.dtype is slope.dtype:
                of_weight.addmm_(slope.t(), states)
            # one block of classes at a time, as large as the chunk, so that a second gradient of the weight never exists
            else:
                step = max(1, slope.numel() // states.shape[1])
                for first in range(0, slope.shape[1], step):
                    of_weight[first : first + step].add_(slope[:, first : first + step].t() @ states)
        if of_bias is not None:
            of_bias.add_(slope.sum(0, dtype=of_bias.dtype))
