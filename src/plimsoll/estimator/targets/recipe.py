"""A name from the catalogue or a ``config.json`` in, the configuration that a model is built from out. No torch here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
