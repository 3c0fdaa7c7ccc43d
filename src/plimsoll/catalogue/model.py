"""What an entry of the catalogue is, and how the files of the catalogue make theirs. No torch here."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass

ConfigValue = int | float | bool | str | None | tuple[int, ...] | tuple[str, ...] | Mapping[str, "ConfigValue"]

TINY = "made for a CPU: the real architecture, small sizes"
"""The source of every tiny sibling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One architecture with its sizes, and the batch that it is planned for unless another is given.

    ``batch`` is in samples. ``sequence`` is in tokens of text per sample, ``None`` where samples have none. ``source`` says
    where the sizes come from. ``note`` says what a trace of it does not show.
    """

    name: str
    architecture: str
    config: Mapping[str, ConfigValue]
    batch: int
    sequence: int | None
    source: str
    note: str = ""


def catalogue_model(
    name: str,
    architecture: str,
    *,
    batch: int,
    source: str,
    sequence: int | None = None,
    note: str = "",
    **config: ConfigValue,
) -> CatalogueModel:
    """An entry whose further keywords are the fields of its configuration."""
    return CatalogueModel(
        name=name,
        architecture=architecture,
        config=types.MappingProxyType(config),
        batch=batch,
        sequence=sequence,
        source=source,
        note=note,
    )
