"""Finds the configuration for a name or a ``config.json``, and reads the model's sizes from it, without torch.

Libraries name the same size differently (``n_embd``, ``d_model``, ``hidden_size``): the tables below list equivalent names.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plimsoll.artifacts.files import FileRefused, ReadLimits, decode_json, is_read_once, read_file
from plimsoll.artifacts.job import ModelFacts
from plimsoll.errors import InvalidTarget
from plimsoll.estimator.catalogue.models import CatalogueModel, known_models
from plimsoll.units import MIB

_BATCH = 1
_SEQUENCE = 512
_POSITIONS = ("max_position_embeddings", "n_positions")
_FORMS = "package.module:function, a Hugging Face config.json, timm/NAME, diffusers/CLASS, or a name from the catalogue"
_LIMITS = ReadLimits(most_bytes=16 * MIB, most_items=1_000_000)
_IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""Implementations of attention and experts that torch and transformers contain.

Other implementations are downloaded as kernels.
"""
_COUNT = re.compile(r"^(n|num|number)_.*(layers?|blocks?|stages?)$|^(depths?|n_layer)$|(?<!window)_layers$")
_MOST_LAYERS = 4096
_VARIANT = re.compile(r"(-(instruct|chat|base|it|hf|v0\.3))+$")
"""Words at the end of a model's name that name other weights of the same sizes, such as ``Instruct``."""
_SMALL = "-tiny"
"""The end of the names of the catalogue's own small models."""
_DIFFUSERS_CLASS = "_class_name"
_OWN_NAMES = ("timm", "diffusers")
"""The libraries whose own model names can be targets (texts that name a model with its batch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model that is not built yet, as data: its class, the fields of its configuration, and its default batch.

    ``sequence`` is ``None`` if samples are not text. ``library`` is the library that has the class.
    """

    name: str
    architecture: str
    fields: Mapping[str, Any]
    batch: int
    sequence: int | None
    library: str = "transformers"
    notes: tuple[str, ...] = ()


def find_recipe(text: str) -> Recipe | None:
    """Return the recipe (class and configuration) that ``text`` names.

    Return ``None`` if it names a function (``package.module:function``).

    Raises:
        InvalidTarget: the name is unknown, the file cannot be read, or it does not hold a model's configuration.

    Example:
        >>> find_recipe("llama-3-8b").fields["num_hidden_layers"]
        32
    """
    catalogue = known_models()
    path = Path(text)
    is_folder = os.path.isdir(text)  # false of a name that is too long
    known = text if text in catalogue else "" if is_folder else _catalogue_name(text)
    if known in catalogue:
        return _from_catalogue(catalogue[known])
    if path.suffix == ".json" or is_folder:
        return _from_file(path / "config.json" if os.path.isdir(text) else path)
    library, slash, own_name = text.partition("/")
    if slash and library in _OWN_NAMES:
        return _from_library(library, own_name)
    if ":" in text:
        return None
    likely = [name for name in catalogue if not slash or not name.endswith(_SMALL)]
    close = difflib.get_close_matches(text.lower(), likely, n=3, cutoff=0.5)
    raise InvalidTarget(
        f"{text!r} is not a target.",
        why=f"a target is {_FORMS}",
        next=f"did you mean {' or '.join(close)}?"
        if close
        else "save the model's config.json and pass that file (Plimsoll does not download anything)"
        if slash
        else f"the catalogue has {', '.join(catalogue)}",
    )


def _catalogue_name(text: str) -> str:
    """Return the catalogue's name for a model of the Hugging Face Hub: without its owner, and without the words for variants
    that have the same sizes.

    Example:
        >>> _catalogue_name("Qwen/Qwen2.5-7B-Instruct"), _catalogue_name("meta-llama/Meta-Llama-3-8B")
        ('qwen2.5-7b', 'llama-3-8b')
    """
    owner, slash, name = text.rpartition("/")
    if owner in _OWN_NAMES or "/" in owner or (slash and not owner):
        return text
    known = _VARIANT.sub("", name.lower()).removeprefix("meta-")
    # The catalogue's own small models have such names too, but not the sizes of openai/whisper-tiny.
    return text if slash and known.endswith(_SMALL) else known


def _from_library(library: str, own_name: str) -> Recipe:
    """Make a recipe (a description of a model that is not built yet) for ``timm/NAME`` or ``diffusers/CLASS``: a model in its
    library's default sizes.

    The name itself is not checked here; only the library knows all of its names.

    Raises:
        InvalidTarget: the library is not installed.
    """
    if library not in sys.modules and find_spec(library) is None:
        raise InvalidTarget(
            f"{library}/{own_name} needs {library}, which is not installed.",
            why=f"{library} itself builds the model, with random weights",
            next=f"pip install {library}, or use package.module:function",
        )
    return Recipe(
        name=f"{library}/{own_name}", architecture=own_name, fields={}, batch=_BATCH, sequence=None, library=library
    )


def split_target(text: str) -> tuple[str, str]:
    """Split ``package.module:function`` into module and function.

    Raises:
        InvalidTarget: the text does not have this form.
    """
    module_name, _, function_name = text.partition(":")
    if not all(name.isidentifier() for name in (*module_name.split("."), function_name)):
        raise InvalidTarget(
            f"{text!r} is not a target.",
            why="a target that is your own function has the form package.module:function",
            next="write for example my_project.training:make_step",
        )
    return module_name, function_name


def check_target(text: str) -> None:
    """Raise an error for text that cannot be a target (a name of a model with its batch), before torch is imported. Code of the
    named package is not run.

    Raises:
        InvalidTarget: the name, file or configuration is invalid, or the package does not exist.
    """
    if text.endswith(".py") and os.path.isfile(text):
        raise InvalidTarget(
            f"{text} is a script, and not a target.",
            why="a target is a function that returns a model and its batch",
            next=f"plimsoll run {shlex.quote(text)} --budget 8GiB trains it under a budget; for other commands name a "
            "function, such as my_project.training:make_step",
        )
    if is_read_once(text) or find_recipe(text) is not None:
        return
    module_name, _ = split_target(text)
    top = module_name.partition(".")[0]
    if top not in sys.modules and not PathFinder.find_spec(top, [os.getcwd(), *sys.path]) and not find_spec(top):
        raise explain_import(module_name, ModuleNotFoundError(f"No module named {top!r}"))


def explain_import(module_name: str, error: BaseException) -> InvalidTarget:
    """Return the error to raise if a target's module (the module in ``package.module:function``) cannot be imported. It
    explains ``error``, the exception of the import.
    """
    return InvalidTarget(
        f"The module {module_name} cannot be imported.",
        why=f"{type(error).__name__}: {error}",
        next=f"run `python -c 'import {module_name}'` in the current directory, {Path.cwd()}, to see where it fails",
    )


def _from_catalogue(known: CatalogueModel) -> Recipe:
    return Recipe(
        name=known.name,
        architecture=known.architecture,
        fields=_plain(known.config),
        batch=known.batch,
        sequence=known.sequence,
        library="transformers" if "model_type" in known.config else "diffusers",
        notes=(f"{known.name}: {known.note}",) if known.note else (),
    )


def _plain(value: Any) -> Any:
    """Copy a configuration's value for JSON: mappings become dicts, and sequences become lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _from_file(path: Path) -> Recipe:
    try:
        fields = decode_json(read_file(path, _LIMITS), _LIMITS)
    except (FileRefused, ValueError) as error:
        raise InvalidTarget(
            f"{path} cannot be read as JSON.",
            why=str(error),
            next="pass the config.json of a Hugging Face model",
        ) from error
    notes: list[str] = []
    fields = _harmless(fields, str(path), notes)
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    if isinstance(fields, dict) and isinstance(fields.get(_DIFFUSERS_CLASS), str):
        own = {key: value for key, value in fields.items() if not key.startswith("_")}
        return Recipe(
            name=name,
            architecture=fields[_DIFFUSERS_CLASS],
            fields=own,
            batch=_BATCH,
            sequence=None,
            library="diffusers",
            notes=tuple(notes),
        )
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise InvalidTarget(
            f"{path} is not a model configuration.",
            why='it does not contain "model_type"',
            next="pass the config.json of a Hugging Face model; `plimsoll show` displays plans",
        )
    architectures = fields.get("architectures") or [""]
    return Recipe(
        name=name,
        architecture=str(architectures[0] if isinstance(architectures, list) else architectures),
        fields=fields,
        batch=_BATCH,
        sequence=min([_SEQUENCE, *(fields[key] for key in _POSITIONS if isinstance(fields.get(key), int))]),
        notes=tuple(notes),
    )


def _harmless(node: Any, path: str, notes: list[str], place: str = "") -> Any:
    """Copy the fields of a configuration, without fields that make a library download or run something that is not in the file.

    Raises:
        InvalidTarget: the number of layers is larger than in any known model. Each layer would have to be built.
    """
    if isinstance(node, list):
        return [_harmless(each, path, notes, f"{place}.") for each in node]
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in node.items():
        named = f"{place}{key}"
        reason = _reason_to_leave_out(key, value)
        if reason:
            notes.append(f"{path}: ignored {named}; {reason}")
            continue
        _refuse_too_many(key, value, named, path)
        kept[key] = _harmless(value, path, notes, f"{named}.")
    return kept


def _reason_to_leave_out(key: str, value: object) -> str:
    if key == "quantization_config" and value is not None:
        return "training with quantized weights is not supported"
    if key == "use_pretrained_backbone" and value:
        return "nothing is downloaded, and all weights are random"
    if key.endswith("_implementation") and value not in _IMPLEMENTATIONS:
        return f"only {', '.join(map(str, _IMPLEMENTATIONS[1:]))} run without downloaded kernels"
    return ""


def _refuse_too_many(key: str, value: object, named: str, path: str) -> None:
    counts = value if isinstance(value, list) and _COUNT.search(key) else [value]
    numbers = [each for each in counts if isinstance(each, int) and _COUNT.search(key)]
    if sum(numbers) > _MOST_LAYERS or len(counts) > _MOST_LAYERS:
        raise InvalidTarget(
            f"{path} asks for {max(sum(numbers), len(counts)):.6g} as its {named}.",
            why=f"each would be built as a module, and no known model has more than {_MOST_LAYERS:,}",
            next="correct the configuration",
        )


_LAYERS = (("num_hidden_layers",), ("n_layer",), ("encoder_layers", "decoder_layers"), ("num_layers",))
"""Groups of configuration fields whose sum is the number of blocks. The first group with all its fields present is used."""
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "encoder_attention_heads", "num_heads")
_HEAD_SIZE = ("head_dim", "d_kv")
_LATENT_HEAD = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""The sizes of multi-head latent attention: a query has the first two, a value the third."""
_KV_HEADS = ("num_key_value_heads",)
_INTERMEDIATE = ("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok",)
_TOWERS = ("text_config", "vision_config")
_NO_ATTENTION = ("mamba", "mamba2")
_GPT_WIDENING = 4
"""The default of ``n_inner`` for models like GPT-2, as a multiple of the model's width."""


def facts_of(recipe: Recipe, *, batch: int | None = None, sequence: int | None = None) -> ModelFacts:
    """Return the sizes of a model that follow from the recipe's fields (the model's configuration). A size that they do not
    give is ``None``.

    ``batch`` and ``sequence`` override the recipe's own.

    Example:
        >>> from plimsoll.estimator.targets.recipe import find_recipe
        >>> facts_of(find_recipe("mixtral-8x7b")).experts
        8
    """
    fields = recipe.fields
    towers = list(_towers(fields))
    widest = max(towers, key=lambda tower: _first(tower, _HIDDEN) or 0)
    is_text = recipe.sequence is not None and _is_text(fields)
    has_heads = recipe.library == "transformers" and fields.get("model_type") not in _NO_ATTENTION
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
        head_size=_head_size(widest, hidden, heads),
        kv_heads=(_first(widest, _KV_HEADS) or heads) if heads else None,
        intermediate=_first(widest, _INTERMEDIATE)
        or (_GPT_WIDENING * hidden if hidden and "n_embd" in widest else None),
        vocabulary=next((tower["vocab_size"] for tower in towers if isinstance(tower.get("vocab_size"), int)), None),
        experts=_first(fields, _EXPERTS),
        experts_per_token=_first(fields, _EXPERTS_PER_TOKEN),
    )


def _head_size(fields: Mapping[str, Any], hidden: int | None, heads: int | None) -> int | None:
    """Return the elements of one attention head, or ``None`` if they are unknown or the model is an encoder-decoder."""
    if not heads or any("decoder_layers" in key for key in fields):
        return None
    latent = [_first(fields, (name,)) for name in _LATENT_HEAD]
    if all(latent):
        return sum(size or 0 for size in latent) // 2
    return _first(fields, _HEAD_SIZE) or (hidden // heads if hidden else None)


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
