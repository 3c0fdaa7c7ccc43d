"""What users put on the modules of a model: hooks of every kind, weight norm, parametrizations. For any architecture.

fit(model, "forward hook")          # on the first layers of every block, on the blocks and on the model
fit_in_first_call(model, "forward hook")  # the same, by the model's first call, behind a flag
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.utils._pytree import tree_map

from plimsoll.tracing.regions import find_regions

Fit = Callable[[nn.Module], object]


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def _scaled(value: Any, factor: float) -> Any:
    """Floating-point tensors times ``factor``, in whatever a module is given or returns."""
    return tree_map(
        lambda leaf: leaf * factor if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, value
    )


def _after(parameter: torch.Tensor) -> None:
    parameter.grad = parameter.grad * 1.25


def _weights_of(layer: nn.Module) -> list[nn.Parameter]:
    return list(layer.parameters(recurse=False))


HOOKS: dict[str, Fit] = {
    "forward hook": lambda module: module.register_forward_hook(lambda _, given, output: _scaled(output, 1.25)),
    "forward hook with arguments": lambda module: module.register_forward_hook(
        lambda _, args, kwargs, output: _scaled(output, 1.25), with_kwargs=True, always_call=True, prepend=True
    ),
    "forward pre-hook": lambda module: module.register_forward_pre_hook(
        lambda _, args, kwargs: _scaled((args, kwargs), 1.25), with_kwargs=True
    ),
    "full backward hook": lambda module: module.register_full_backward_hook(
        lambda _, given, returned: _scaled(given, 1.25)
    ),
    "full backward pre-hook": lambda module: module.register_full_backward_pre_hook(
        lambda _, returned: _scaled(returned, 1.25)
    ),
    "gradient hook": lambda module: [
        each.register_hook(lambda gradient: gradient * 1.25) for each in _weights_of(module)
    ],
    "post-accumulate hook": lambda module: [
        each.register_post_accumulate_grad_hook(_after) for each in _weights_of(module)
    ],
}
"""Hooks that change what they are given, so that one too many or too few shows in gradients."""
WEIGHTS: dict[str, Fit] = {
    "weight norm": parametrizations.weight_norm,
    "old weight norm": weight_norm,
    "parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", Halved()),
}
FITTINGS = (*HOOKS, *WEIGHTS)
ALL = "everything"


def _layers(block: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The layers of a block with a matrix or a kernel, and those with a vector (norms), in order.

    Without one-dimensional convolutions: Mamba reads their weight and does not call them, and the old weight norm makes the
    weight when its layer is called.
    """
    layers = (each for each in block.modules() if not isinstance(each, nn.Conv1d))
    found = [each for each in layers if isinstance(each._parameters.get("weight"), nn.Parameter)]
    return [each for each in found if each.weight.dim() > 1], [each for each in found if each.weight.dim() == 1]


def fit(model: nn.Module, kind: str) -> None:
    """Put ``kind`` on the first matrix and the first norm of every block, and hooks on blocks and model as well."""
    blocks = [model.get_submodule(name) for name in find_regions(model)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old weight norm
        for block in blocks:
            matrices, norms = _layers(block)
            for name in HOOKS if kind == ALL else (kind,) if kind in HOOKS else ():
                for module in (*matrices[:1], *norms[:1], block):
                    HOOKS[name](module)
            for place, name in enumerate(WEIGHTS if kind == ALL else (kind,) if kind in WEIGHTS else ()):
                for layer in matrices[place : place + 1]:
                    WEIGHTS[name](layer)
    for name in HOOKS if kind == ALL else (kind,) if kind in HOOKS else ():
        if "pre-hook" not in name:  # which would scale a picture's labels
            HOOKS[name](model)


def fit_in_first_call(model: nn.Module, kind: str) -> None:
    """The same, put on by the model's first call and noted in a flag, as libraries do that collect states."""

    def fit_once(module: nn.Module, args: Any) -> None:
        if not module.is_fitted:
            fit(module, kind)
            module.is_fitted = True

    model.is_fitted = False
    model.register_forward_pre_hook(fit_once)
