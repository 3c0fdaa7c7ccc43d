"""Reads the models that the command line knows by name from the TOML files of this package. No torch here.

A file has one table per model: what the class is called, the batch that it is planned for, where its sizes come from, and under
``config`` the fields of its configuration. ``base`` names an earlier model, from which everything is taken that the table does
not say itself. ``nulls`` lists the fields that are null in the configuration, for which TOML has no word.
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

_FAMILIES = ("llama", "mixtures", "gpt", "encoders", "vision")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One architecture with its sizes, and the batch that it is planned for unless another is given.

    ``batch`` is in samples. ``sequence`` is in tokens of text per sample, ``None`` where samples have none. ``source`` says
    where the sizes come from. ``note`` says what a trace of it does not show.
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
    """Every model by its name. Weights are always random; nothing is downloaded.

    Raises:
        ValueError: an entry names no base that comes before it, lacks a field, or has one that is not known.

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
                raise ValueError(f"{name} in {family}.toml is no model of the catalogue: {error}") from error
    return types.MappingProxyType(known)


def _model(name: str, table: dict[str, Any], known: Mapping[str, CatalogueModel]) -> CatalogueModel:
    own = {key: value for key, value in table.items() if key not in ("base", "config", "nulls")}
    config = {**_frozen(table["config"]), **dict.fromkeys(table.get("nulls", ()))}
    if "base" not in table:
        return CatalogueModel(name=name, config=types.MappingProxyType(config), **own)
    base = known[table["base"]]
    return dataclasses.replace(base, name=name, config=types.MappingProxyType({**base.config, **config}), **own)


def _frozen(value: Any) -> Any:
    """The value with tuples for lists, and read-only mappings for tables."""
    if isinstance(value, dict):
        return types.MappingProxyType({key: _frozen(item) for key, item in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
