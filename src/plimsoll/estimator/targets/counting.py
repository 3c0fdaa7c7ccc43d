"""A built model in, the facts that only it knows out: how many parameters, how many a token passes, what its batch is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.model_facts import ModelFacts
from plimsoll.estimator.targets.facts import facts_of
from plimsoll.estimator.targets.recipe import Recipe
from plimsoll.estimator.targets.target import Target

_TOKENS = "input_ids"


def count_parameters(model: nn.Module, facts: ModelFacts) -> tuple[int, int | None]:
    """All parameters, and those that one token passes (``None`` where the model has experts and does not say how many).

    Stacked experts are recognised by their first dimension, which is the number of experts; tied parameters count once.

    Args:
        model: the whole model.
        facts: with its experts, if it has some.
    """
    total = active = 0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        total += count
        is_stacked = parameter.dim() == 3 and ".experts." in name and parameter.shape[0] == facts.experts
        active += count * (facts.experts_per_token or 0) // parameter.shape[0] if is_stacked else count
    if facts.experts and not facts.experts_per_token:
        return total, None
    return total, active


def described(target: Target) -> ModelFacts:
    """Facts of a model that a function built: from its configuration if it carries one, from its batch otherwise."""
    model = target.model
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    fields = to_dict() if callable(to_dict) else {}
    samples, sequence = _sizes(target.batch)
    known = fields if isinstance(fields, Mapping) else {}
    recipe = Recipe(name=name, architecture=name, fields=known, batch=samples or 1, sequence=sequence)
    return msgspec.structs.replace(facts_of(recipe), batch=samples)


def _sizes(batch: Any) -> tuple[int | None, int | None]:
    """Samples, and tokens of text per sample, as far as the batch shows them."""
    if isinstance(batch, Mapping):
        tokens = batch.get(_TOKENS)
        if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
            return tokens.shape[0], tokens.shape[1]
        tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    elif isinstance(batch, torch.Tensor):
        tensors = [batch]
    else:
        tensors = [value for value in batch if isinstance(value, torch.Tensor)] if isinstance(batch, tuple) else []
    return next((tensor.shape[0] for tensor in tensors if tensor.dim() > 0), None), None
