"""A name and a size in, a model with its batch and loss out. One file per family; a new one is one file and one line here.

Sizes: ``dry`` (Llama, Qwen3 and MLP) is the smallest that plans decide about; ``tiny`` takes milliseconds per step, for trying
things and for many steps; ``cpu`` takes seconds per step on a laptop core; ``h200`` fills an H200 with activations; ``h100``
is what `benchmarks.gpu_session` trains, a Llama of a billion parameters that takes 36 GiB and a Qwen3 that takes 78 GB. What
`benchmarks.compiled` trains has ``small`` too, a fraction of a second per step: it compiles each model forty times.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

FAMILIES = ("llama", "gpt2", "vit", "clip", "resnet", "mlp", "launch_bound")
COMPILED_FAMILIES = ("llama", "gpt2", "vit", "clip", "mixtral")
SIZES = ("tiny", "cpu", "h200")
COMPILED_SIZES = ("tiny", "small")


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark: ``loss`` makes a scalar of what ``model(**batch)`` returns."""

    name: str
    size: str
    model: nn.Module
    batch: dict[str, Any]
    loss: Callable[[Any], torch.Tensor]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def build(name: str, size: str = "cpu") -> Case:
    """Build the family ``name`` at ``size``, in training mode, with the same weights and batch every time."""
    family = importlib.import_module(f"benchmarks.models.{name}")
    is_large = size in ("h100", "h200")
    device = torch.device("cuda" if is_large else "cpu")
    dtype = torch.bfloat16 if is_large else torch.float32
    torch.manual_seed(0)
    # Weights are drawn where they stay: a billion of them in 32 bits on the host take longer than many measurements.
    with device, _default_dtype(dtype):
        model, batch, loss = family.build(size)
    moved = {
        key: each.to(device, dtype if each.is_floating_point() else None) if isinstance(each, torch.Tensor) else each
        for key, each in batch.items()
    }
    return Case(name, size, model.train(), moved, loss)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
