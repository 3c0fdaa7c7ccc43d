"""A step and its gradient in; how fast the loss really changes along that gradient out.

The gradient ``g`` claims that the loss at ``θ + h·g/‖g‖`` grows by ``h·‖g‖``. Losses at shifted parameters, under the same
random numbers, show whether it does: a gradient made with another dropout mask than the loss's own fails this by its very
size. It judges one direction only, and only where the loss is smooth at that scale, and precise enough: below float32
rounding alone is more than the slope's change.

Source: the central difference with one Richardson step; its error is judged by the difference of two step lengths, and by
the precision of the parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch

from plimsoll.artifacts.receipt import Slope
from plimsoll.session.training_step import TrainingStep

_LENGTHS = (0.02, 0.01)
"""Step lengths as shares of the loss that the gradient claims them to change."""


def measure_slope(step: TrainingStep, gradients: Mapping[str, torch.Tensor | None]) -> Slope | None:
    """Slope of the loss along the gradient; ``None`` where the gradient is nothing, or no number.

    Args:
        step: run forward four times; its parameters are put back bit for bit.
        gradients: by parameter name, each of its parameter's shape.
    """
    norm = math.sqrt(sum(float(g.detach().double().square().sum()) for g in gradients.values() if g is not None))
    if not math.isfinite(norm) or norm == 0.0:
        return None
    scale = max(abs(step.forward_loss()), 1e-12) / norm
    slopes = [_central_difference(step, gradients, norm, share * scale) for share in _LENGTHS]
    if not all(map(math.isfinite, slopes)):
        return None
    coarse, fine = slopes
    rounding = norm * _precision(gradients) / _LENGTHS[-1]
    return Slope(expected=norm, measured=fine + (fine - coarse) / 3, measured_error=max(abs(fine - coarse), rounding))


def _precision(gradients: Mapping[str, torch.Tensor | None]) -> float:
    """The share by which the least precise dtype rounds: two equally rounded slopes would look exact."""
    return max(torch.finfo(g.dtype).eps for g in gradients.values() if g is not None)


def _central_difference(
    step: TrainingStep, gradients: Mapping[str, torch.Tensor | None], norm: float, length: float
) -> float:
    losses = []
    for sign in (1.0, -1.0):
        with _shifted(step, gradients, sign * length / norm):
            losses.append(step.forward_loss())
    return (losses[0] - losses[1]) / (2 * length)


@contextlib.contextmanager
def _shifted(step: TrainingStep, gradients: Mapping[str, torch.Tensor | None], factor: float) -> Iterator[None]:
    """Parameters moved along the gradient, and put back bit for bit."""
    moved = [
        (parameter, parameter.detach().clone(), gradients[name])
        for name, parameter in step.model.named_parameters()
        if gradients.get(name) is not None
    ]
    try:
        with torch.no_grad():
            for parameter, _, gradient in moved:
                assert gradient is not None
                parameter.add_(gradient.to(parameter.dtype), alpha=factor)
        yield
    finally:
        with torch.no_grad():
            for parameter, before, _ in moved:
                parameter.copy_(before)
