"""Two sets of named tensors in, the ones that differ in any bit out."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from plimsoll.artifacts.receipt import Mismatch, finite
from plimsoll.tracing.recorder.storages import same_contents


def copies(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Private copies, to compare with later."""
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in tensors.items()}


def mismatches(
    expected: Mapping[str, torch.Tensor | None],
    found: Mapping[str, torch.Tensor | None],
    spread: Mapping[str, float | None],
) -> tuple[Mismatch, ...]:
    """Tensors of ``found`` that are not ``expected``'s bits, with how far they are and how far the model is from itself."""
    differing: list[Mismatch] = []
    for name, reference in expected.items():
        other = found.get(name)
        if reference is None and other is None:
            continue
        if reference is None or other is None:
            absolute: float | None = None
            relative: float | None = None
        elif same_contents(reference, other):
            continue
        else:
            absolute, relative = difference(reference, other)
        differing.append(
            Mismatch(
                name=name,
                max_absolute_difference=absolute,
                max_relative_difference=relative,
                baseline_max_absolute_difference=spread.get(name, 0.0),
            )
        )
    return tuple(differing)


def difference(first: torch.Tensor, second: torch.Tensor) -> tuple[float | None, float | None]:
    """Largest absolute difference, and that as a share of the largest magnitude; ``None`` where it is no number."""
    if first.shape != second.shape:
        return None, None
    apart = (first.double() - second.double()).abs().max() if first.numel() else torch.tensor(0.0)
    size = first.double().abs().max() if first.numel() else torch.tensor(0.0)
    absolute = float(apart)
    return finite(absolute), finite(absolute / float(size)) if float(size) else None


def relative_error(expected: Mapping[str, torch.Tensor | None], found: Mapping[str, torch.Tensor | None]) -> float:
    """‖found - expected‖ / ‖expected‖ over all tensors together; infinite where one of them is not finite or missing."""
    squared_error, squared_norm = 0.0, 0.0
    for name, reference in expected.items():
        other = found.get(name)
        if reference is None and other is None:
            continue
        if reference is None or other is None:
            return math.inf
        one, two = reference.detach().float().flatten(), other.detach().to(reference.device).float().flatten()
        squared_error += float(torch.linalg.vector_norm(one - two)) ** 2
        squared_norm += float(torch.linalg.vector_norm(one)) ** 2
    if not math.isfinite(squared_error):
        return math.inf
    return math.sqrt(squared_error / squared_norm) if squared_norm else (math.inf if squared_error else 0.0)
