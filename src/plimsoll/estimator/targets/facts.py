"""The fields of a configuration in, the ``ModelFacts`` they state out. No torch here.

Libraries name the same size differently (``n_embd``, ``d_model``, ``hidden_size``): the tables below say which names are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plimsoll.artifacts.model_facts import ModelFacts
from plimsoll.estimator.targets.recipe import Recipe

_LAYERS = (("num_hidden_layers",), ("n_layer",), ("encoder_layers", "decoder_layers"), ("num_layers",))
"""The fields whose sum is the number of blocks; the first that are all there count."""
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "encoder_attention_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads",)
_INTERMEDIATE = ("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok",)
_TOWERS = ("text_config", "vision_config")
_NO_ATTENTION = ("mamba", "mamba2")
_GPT_WIDENING = 4
"""``n_inner`` of GPT-2's kind, where it is not given, as a multiple of the width."""


def facts_of(recipe: Recipe, *, batch: int | None = None, sequence: int | None = None) -> ModelFacts:
    """What the recipe's fields say; ``None`` where they do not.

    Args:
        recipe: what the model would be built from.
        batch: samples, if others than the recipe's.
        sequence: tokens per sample, if others than the recipe's.

    Example:
        >>> from plimsoll.estimator.targets.recipe import find_recipe
        >>> facts_of(find_recipe("mixtral-8x7b")).experts
        8
    """
    fields = recipe.fields
    towers = list(_towers(fields))
    widest = max(towers, key=lambda tower: _first(tower, _HIDDEN) or 0)
    is_text = recipe.sequence is not None and not recipe.is_diffusers and _is_text(fields)
    has_heads = not recipe.is_diffusers and fields.get("model_type") not in _NO_ATTENTION
    heads = _first(widest, _HEADS) if has_heads else None
    hidden = _first(widest, _HIDDEN)
    return ModelFacts(
        name=recipe.name,
        architecture=recipe.architecture or str(fields.get("model_type", "")),
        batch=batch or recipe.batch,
        sequence=(sequence or recipe.sequence) if is_text else None,
        layers=_layers(towers),
        hidden=hidden,
        heads=heads,
        kv_heads=(_first(widest, _KV_HEADS) or heads) if heads else None,
        intermediate=_first(widest, _INTERMEDIATE)
        or (_GPT_WIDENING * hidden if hidden and "n_embd" in widest else None),
        vocabulary=next((tower["vocab_size"] for tower in towers if isinstance(tower.get("vocab_size"), int)), None),
        experts=_first(fields, _EXPERTS),
        experts_per_token=_first(fields, _EXPERTS_PER_TOKEN),
    )


def _is_text(fields: Mapping[str, Any]) -> bool:
    return not any(name in fields for name in ("vision_config", "image_size", "num_mel_bins"))


def _towers(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    nested = [fields[name] for name in _TOWERS if isinstance(fields.get(name), Mapping)]
    yield from nested or [fields]


def _layers(towers: list[Mapping[str, Any]]) -> int | None:
    counts = [_tower_layers(tower) for tower in towers]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _tower_layers(tower: Mapping[str, Any]) -> int | None:
    if tower.get("model_type") == "t5" and isinstance(tower.get("num_layers"), int):
        return int(tower["num_layers"]) + int(tower.get("num_decoder_layers") or tower["num_layers"])
    for names in reversed(_LAYERS) if "encoder_layers" in tower else _LAYERS:
        counts = [count for name in names if isinstance(count := tower.get(name), int)]
        if len(counts) == len(names):
            return int(sum(counts))
    return None


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = fields.get(name)
        if isinstance(value, int):
            return value
    return None
