"""Which tensors of two runs differ in any bit, and by how much."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from plimsoll.artifacts.receipt import Mismatch, finite
from plimsoll.tracing.recorder.storages import same_contents


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
