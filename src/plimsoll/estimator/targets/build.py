"""A recipe in, a target out: the model built with random weights, in the precision asked for, and a batch that trains it."""

from __future__ import annotations

import torch

from plimsoll.errors import InvalidTarget
from plimsoll.estimator.targets.batches import BatchSize, make_batch
from plimsoll.estimator.targets.recipe import Recipe
from plimsoll.estimator.targets.target import Target, TargetOptions

_SEED = 0


def build(recipe: Recipe, options: TargetOptions) -> Target:
    """Build a model from its configuration, and a random batch.

    Args:
        recipe: class, fields of the configuration, default sizes.
        options: what the command line says about size, place and precision; overrides the recipe.

    Raises:
        InvalidTarget: a library is missing or refuses the configuration, there is no such device, or no batch is known.
    """
    if not options.is_meta:
        _refuse_absent(options.device)
    dtype = None if options.precision is None else getattr(torch, options.precision.parameter_dtype)
    with torch.random.fork_rng(devices=[]), torch.device("meta" if options.is_meta else options.device):
        torch.manual_seed(_SEED)
        model = _build_model(recipe, dtype)
    size = BatchSize(
        samples=options.batch or recipe.batch,
        sequence=options.sequence or recipe.sequence,
        is_asked=options.sequence is not None,
        device=options.device,
        is_meta=options.is_meta,
    )
    return Target(
        model=model,
        batch=make_batch(model, size),
        is_configured=True,
        precision=options.precision,
        notes=recipe.notes,
    )


def _build_model(recipe: Recipe, dtype: torch.dtype | None) -> torch.nn.Module:
    if recipe.is_diffusers:
        from plimsoll.estimator.targets.diffusion import build_denoiser

        return build_denoiser(recipe, dtype)
    from plimsoll.estimator.targets.hugging_face import build_model

    return build_model(recipe, dtype)


def _refuse_absent(device: str) -> None:
    """Refuse a device that torch cannot allocate on here."""
    try:
        torch.empty(1, device=device)
    except Exception as error:  # torch raises AssertionError, RuntimeError or NotImplementedError, by kind of device
        raise InvalidTarget(
            f"There is no device {device!r} here.",
            why=f"torch {torch.__version__} says: {str(error).strip().split(chr(10))[0]}",
            next="leave --device out for the CPU, or plan for a device that is not here with --device-profile",
        ) from error
