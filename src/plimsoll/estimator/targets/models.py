"""Builds models with random weights from configurations of transformers and diffusers. Nothing is downloaded."""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from plimsoll.errors import InvalidTarget
from plimsoll.estimator.targets.recipe import Recipe

_AUTO_CLASSES = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForZeroShotImageClassification",
    "AutoModelForImageClassification",
)
"""Where a configuration names no class: the first of these that knows its type, a head with a loss."""
_DENOISERS = ("UNet2DConditionModel",)
"""Classes of diffusers for which batches are known."""


def build_model(recipe: Recipe, dtype: torch.dtype | None) -> torch.nn.Module:
    """Build the model on the current default device.

    ``dtype`` is of the parameters, ``None`` for the configuration's own.

    Raises:
        InvalidTarget: transformers is missing, does not know the architecture, or refuses the configuration.
    """
    transformers = _import("transformers", "hf")
    quiet_transformers()
    fields = dict(recipe.fields)
    model_type = fields["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise _unknown(transformers, "model_type", model_type, list(transformers.CONFIG_MAPPING.keys()))
    try:
        config = transformers.AutoConfig.for_model(**fields)
        config.use_cache = False  # a cache for generation would keep keys and values alive through the step
        class_ = _class_of(transformers, config, recipe.architecture)
        made: torch.nn.Module = class_._from_config(config, **({} if dtype is None else {"dtype": dtype}))
    except InvalidTarget:
        raise
    except Exception as error:  # transformers raises whatever its configurations run into
        raise _cannot_build(transformers, recipe.architecture or model_type, error) from error
    return made.train()


def _class_of(transformers: Any, config: Any, architecture: str) -> Any:
    if not architecture:
        for name in _AUTO_CLASSES:
            known = getattr(transformers, name)._model_mapping
            if type(config) in known:
                found = known[type(config)]
                return found[0] if isinstance(found, tuple) else found
        raise InvalidTarget(
            f'the configuration of {config.model_type!r} names no class in "architectures".',
            why="and transformers has no class for it whose loss is known",
            next='add "architectures": ["…"], or write a function and give package.module:function',
        )
    class_ = getattr(transformers, architecture, None)
    if class_ is None:
        names = [name for name in dir(transformers) if "For" in name or name.endswith("Model")]
        raise _unknown(transformers, "architecture", architecture, names)
    return class_


def _unknown(transformers: Any, what: str, name: str, known: Sequence[str]) -> InvalidTarget:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return InvalidTarget(
        f"transformers {transformers.__version__} knows no {what} {name!r}.",
        why=f"the closest names are {', '.join(close)}" if close else f"nothing among its {len(known)} is close to it",
        next="correct the configuration, upgrade transformers, or write a function and give package.module:function",
    )


def quiet_transformers() -> None:
    """Keep transformers' advice out of our output; its errors still raise."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


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
    diffusers = _import("diffusers", "diffusers")
    if recipe.architecture not in _DENOISERS:
        close = difflib.get_close_matches(recipe.architecture, _DENOISERS, n=1, cutoff=0.4)
        raise InvalidTarget(
            f"{recipe.architecture} of diffusers is unsupported.",
            why=f"batches are known for {', '.join(_DENOISERS)}",
            next=f"did you mean {close[0]}?" if close else "write a function and give package.module:function",
        )
    try:
        made: Any = getattr(diffusers, recipe.architecture).from_config(dict(recipe.fields))
    except Exception as error:  # diffusers raises whatever its configurations run into
        raise _cannot_build(diffusers, recipe.architecture, error) from error
    model = NoisePrediction(made).train()
    return model if dtype is None else model.to(dtype)


def _cannot_build(library: Any, name: str, error: Exception) -> InvalidTarget:
    return InvalidTarget(
        f"{library.__name__} {library.__version__} cannot build {name!r}.",
        why=f"{type(error).__name__}: {' '.join(str(error).split())}",
        next="check the configuration, or write a function and give package.module:function",
    )


def _import(library: str, extra: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise InvalidTarget(
            f"this target needs {library}, which is not installed.",
            why=str(error),
            next=f"pip install 'plimsoll[{extra}]', or give package.module:function",
        ) from error
