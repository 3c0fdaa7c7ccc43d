"""A name in, the configuration of an architecture out. Weights are always random; nothing is downloaded."""

from __future__ import annotations

import types
from collections.abc import Mapping

from plimsoll.catalogue import encoders, gpt, llama, mixtures, vision
from plimsoll.catalogue.model import CatalogueModel

_FAMILIES = (llama, mixtures, gpt, encoders, vision)

CATALOGUE: Mapping[str, CatalogueModel] = types.MappingProxyType(
    {model.name: model for family in _FAMILIES for model in family.MODELS}
)
"""Every model by its name."""
