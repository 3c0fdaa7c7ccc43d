"""Finds the configuration that a name from the catalogue or a ``config.json`` stands for, and what it says about the model.

Libraries name the same size differently (``n_embd``, ``d_model``, ``hidden_size``): the tables below say which names are one.
No torch here.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.artifacts.job import ModelFacts
from plimsoll.errors import InvalidTarget
from plimsoll.estimator.catalogue.models import CatalogueModel, known_models

_BATCH = 1
_SEQUENCE = 512
_POSITIONS = ("max_position_embeddings", "n_positions")
_FORMS = "package.module:function, a Hugging Face config.json, or a name from the catalogue"
_DIFFUSERS_CLASS = "_class_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model that is not built yet: the class that makes it, the fields of its configuration, the batch it is asked about.

    ``sequence`` is ``None`` where samples have no text. ``is_diffusers`` says which library knows the class.
    """

    name: str
    architecture: str
    fields: Mapping[str, Any]
    batch: int
    sequence: int | None
    is_diffusers: bool = False
    notes: tuple[str, ...] = ()


def find_recipe(text: str) -> Recipe | None:
    """The configuration that ``text`` names; ``None`` if it names a function (``package.module:function``).

    Raises:
        InvalidTarget: it names nothing; or the file cannot be read, or is no configuration of a model.

    Example:
        >>> find_recipe("llama-3-8b").fields["num_hidden_layers"]
        32
    """
    catalogue = known_models()
    if text in catalogue:
        return _from_catalogue(catalogue[text])
    path = Path(text)
    if path.suffix == ".json" or path.is_dir():
        return _from_file(path / "config.json" if path.is_dir() else path)
    if ":" in text:
        return None
    close = difflib.get_close_matches(text.lower(), catalogue, n=3, cutoff=0.5)
    raise InvalidTarget(
        f"{text!r} is no target.",
        why=f"a target is {_FORMS}",
        next=f"did you mean {' or '.join(close)}?" if close else f"the catalogue has {', '.join(catalogue)}",
    )


def _from_catalogue(known: CatalogueModel) -> Recipe:
    return Recipe(
        name=known.name,
        architecture=known.architecture,
        fields=_plain(known.config),
        batch=known.batch,
        sequence=known.sequence,
        is_diffusers="model_type" not in known.config,
        notes=(f"{known.name}: {known.note}",) if known.note else (),
    )


def _plain(value: Any) -> Any:
    """The value with dicts and lists of its own, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _from_file(path: Path) -> Recipe:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidTarget(
            f"{path} cannot be read as JSON.",
            why=str(error),
            next="give the config.json of a Hugging Face model",
        ) from error
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    if isinstance(fields, dict) and isinstance(fields.get(_DIFFUSERS_CLASS), str):
        own = {key: value for key, value in fields.items() if not key.startswith("_")}
        return Recipe(
            name=name,
            architecture=fields[_DIFFUSERS_CLASS],
            fields=own,
            batch=_BATCH,
            sequence=None,
            is_diffusers=True,
        )
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise InvalidTarget(
            f"{path} is no configuration of a model.",
            why='it has no "model_type"',
            next="give the config.json of a Hugging Face model; `plimsoll show` displays plans",
        )
    notes = []
    if fields.pop("quantization_config", None) is not None:
        notes.append(f"{name}: its quantization_config is left out; training in quantized weights is unsupported")
    architectures = fields.get("architectures") or [""]
    return Recipe(
        name=name,
        architecture=str(architectures[0]),
        fields=fields,
        batch=_BATCH,
        sequence=min([_SEQUENCE, *(fields[key] for key in _POSITIONS if isinstance(fields.get(key), int))]),
        notes=tuple(notes),
    )


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

    ``batch`` and ``sequence`` replace the recipe's own.

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
