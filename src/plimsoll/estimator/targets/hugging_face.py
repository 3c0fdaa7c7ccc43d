"""A transformers configuration in, a model with random weights out. Nothing is downloaded."""

from __future__ import annotations

import difflib
import logging
from types import ModuleType
from typing import TYPE_CHECKING, Any

from plimsoll.errors import InvalidTarget

if TYPE_CHECKING:
    import torch

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


def build_model(recipe: Recipe, dtype: torch.dtype | None) -> torch.nn.Module:
    """Build the model on the current default device.

    Args:
        recipe: with the fields of a ``config.json``.
        dtype: of the parameters; ``None`` for the configuration's own.

    Raises:
        InvalidTarget: transformers is missing, does not know the architecture, or refuses the configuration.
    """
    transformers = _import_transformers()
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
        raise InvalidTarget(
            f"transformers {transformers.__version__} cannot build {recipe.architecture or model_type!r}.",
            why=f"{type(error).__name__}: {' '.join(str(error).split())}",
            next="check the configuration, or write a function and give package.module:function",
        ) from error
    return made.train()


def _class_of(transformers: ModuleType, config: Any, architecture: str) -> Any:
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


def _unknown(transformers: ModuleType, what: str, name: str, known: list[str]) -> InvalidTarget:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return InvalidTarget(
        f"transformers {transformers.__version__} knows no {what} {name!r}.",
        why=f"the closest names are {', '.join(close)}" if close else f"nothing among its {len(known)} is close to it",
        next="correct the configuration, upgrade transformers, or write a function and give package.module:function",
    )


def quiet_transformers() -> None:
    """Keep transformers' advice out of our output; its errors still raise."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _import_transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise InvalidTarget(
            "this target needs transformers, which is not installed.",
            why=str(error),
            next="pip install 'plimsoll[hf]', or give package.module:function",
        ) from error
    module: ModuleType = transformers
    return module
