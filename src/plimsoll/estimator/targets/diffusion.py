"""A diffusers configuration in, a denoiser with random weights and the step that trains it out. Nothing is downloaded."""

from __future__ import annotations

import difflib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plimsoll.errors import InvalidTarget

if TYPE_CHECKING:
    from plimsoll.estimator.targets.recipe import Recipe

_SUPPORTED = ("UNet2DConditionModel",)


class NoisePrediction(nn.Module):
    """A denoiser with its loss: the mean squared error of the noise it predicts (Ho et al. 2020, equation 14).

    The latents of a batch are taken as noised already.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        noise: torch.Tensor,
    ) -> torch.Tensor:
        """The loss: a scalar in float32.

        Args:
            sample: noised latents ``[batch, channels, height, width]``.
            timestep: one of the schedule per sample ``[batch]``.
            encoder_hidden_states: what the picture shows ``[batch, tokens, width]``.
            noise: the noise in ``sample``.
        """
        predicted = self.denoiser(sample, timestep, encoder_hidden_states).sample
        return nn.functional.mse_loss(predicted.float(), noise.float())


def build_denoiser(recipe: Recipe, dtype: torch.dtype | None) -> NoisePrediction:
    """Build a denoiser on the current default device.

    Raises:
        InvalidTarget: diffusers is missing, refuses the configuration, or the class is not one that we have batches for.
    """
    diffusers = _import_diffusers()
    if recipe.architecture not in _SUPPORTED:
        close = difflib.get_close_matches(recipe.architecture, _SUPPORTED, n=1, cutoff=0.4)
        raise InvalidTarget(
            f"{recipe.architecture} of diffusers is unsupported.",
            why=f"batches are known for {', '.join(_SUPPORTED)}",
            next=f"did you mean {close[0]}?" if close else "write a function and give package.module:function",
        )
    try:
        made: Any = getattr(diffusers, recipe.architecture).from_config(dict(recipe.fields))
    except Exception as error:  # diffusers raises whatever its configurations run into
        raise InvalidTarget(
            f"diffusers {diffusers.__version__} cannot build {recipe.architecture!r}.",
            why=f"{type(error).__name__}: {' '.join(str(error).split())}",
            next="check the configuration, or write a function and give package.module:function",
        ) from error
    model = NoisePrediction(made).train()
    return model if dtype is None else model.to(dtype)


def _import_diffusers() -> ModuleType:
    try:
        import diffusers
    except ImportError as error:
        raise InvalidTarget(
            "this target needs diffusers, which is not installed.",
            why=str(error),
            next="pip install 'plimsoll[diffusers]', or give package.module:function",
        ) from error
    module: ModuleType = diffusers
    return module
