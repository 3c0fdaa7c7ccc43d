"""Reads the models that the command line knows by name from the TOML files of this package, without torch.

A file has one table per model: its class, the batch that it is planned for, the source of its sizes, and under ``config`` the
fields of its configuration. ``base`` names an earlier model; fields that the table omits are taken from it. ``nulls`` lists
fields that are null in the configuration, because TOML cannot express null.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

_FAMILIES = ("llama", "qwen2", "mixtures", "gpt", "encoders", "vision")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One entry of the catalogue, as data: an architecture with its sizes, and its default batch.

    ``batch`` is in samples. ``sequence`` is in text tokens per sample, ``None`` if samples are not text. ``source`` says where
    the sizes come from. ``note`` says what a trace of the model does not show.
    """

    name: str
    architecture: str
    config: Mapping[str, Any]
    batch: int
    sequence: int | None = None
    source: str
    note: str = ""


@functools.cache
def known_models() -> Mapping[str, CatalogueModel]:
    """Return a read-only mapping from name to model. Models have random weights, and are never downloaded.

    Raises:
        ValueError: an entry's ``base`` does not come before it, or a field is missing or unknown.

    Example:
        >>> known_models()["llama-3-8b"].config["num_hidden_layers"]
        32
    """
    known: dict[str, CatalogueModel] = {}
    for family in _FAMILIES:
        text = resources.files(__package__).joinpath(f"{family}.toml").read_text(encoding="utf-8")
        for name, table in tomllib.loads(text).items():
            try:
                known[name] = _model(name, table, known)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{name} in {family}.toml is not a valid model of the catalogue: {error}") from error
    return types.MappingProxyType(known)


def _model(name: str, table: dict[str, Any], known: Mapping[str, CatalogueModel]) -> CatalogueModel:
    own = {key: value for key, value in table.items() if key not in ("base", "config", "nulls")}
    config = {**_frozen(table["config"]), **dict.fromkeys(table.get("nulls", ()))}
    if "base" not in table:
        return CatalogueModel(name=name, config=types.MappingProxyType(config), **own)
    base = known[table["base"]]
    return dataclasses.replace(base, name=name, config=types.MappingProxyType({**base.config, **config}), **own)


def _frozen(value: Any) -> Any:
    """Convert lists to tuples and tables to read-only mappings."""
    if isinstance(value, dict):
        return types.MappingProxyType({key: _frozen(item) for key, item in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
