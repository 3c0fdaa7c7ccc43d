"""A Hugging Face configuration in, a model with random weights and a random batch out. Nothing is downloaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from plimsoll.errors import InvalidTarget
from plimsoll.targets.target import Target, TargetOptions

if TYPE_CHECKING:
    import torch

_SEED = 0
_BATCH = 1
_SEQUENCE = 512


def build_from_file(path: Path, options: TargetOptions) -> Target:
    """Build what a ``config.json`` describes.

    Raises:
        InvalidTarget: no such file, not a model's configuration, or an architecture that transformers does not know.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidTarget(
            f"{path} cannot be read as JSON.",
            why=str(error),
            next="give the config.json of a Hugging Face model",
        ) from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise InvalidTarget(
            f"{path} is no configuration of a model.",
            why='it has no "model_type"',
            next="give the config.json of a Hugging Face model; `plimsoll show` displays plans",
        )
    architectures = fields.get("architectures") or [""]
    return build(fields, architectures[0], options, _BATCH, _SEQUENCE)


def build(fields: dict[str, Any], architecture: str, options: TargetOptions, batch: int, sequence: int) -> Target:
    """Build a model from the fields of its configuration.

    Args:
        fields: as in ``config.json``.
        architecture: the class in transformers, or nothing for the causal language model of this ``model_type``.
        options: what the command line says about size and place; overrides ``batch`` and ``sequence``.
        batch: examples in the batch.
        sequence: tokens per example, for models of text.

    Raises:
        InvalidTarget: transformers is missing, or refuses the configuration.
    """
    import torch

    transformers = _import_transformers()
    quiet_transformers()
    if not options.is_meta:
        _refuse_absent(options.device)
    model_type = fields["model_type"]
    try:
        config = transformers.AutoConfig.for_model(**fields)
        config.use_cache = False  # a cache for generation would keep keys and values alive through the step
        with torch.random.fork_rng(devices=[]), torch.device("meta" if options.is_meta else options.device):
            torch.manual_seed(_SEED)
            model = _make_model(transformers, config, architecture)
    except Exception as error:  # transformers raises whatever its configurations run into
        raise InvalidTarget(
            f"transformers {transformers.__version__} cannot build {architecture or model_type!r}.",
            why=f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}",
            next="check the configuration, or write a function and give package.module:function",
        ) from error
    model.train()
    return Target(model=model, batch=_make_batch(model, options, options.batch or batch, options.sequence or sequence))


def _refuse_absent(device: str) -> None:
    """Refuse a device that torch cannot allocate on here."""
    import torch

    try:
        torch.empty(1, device=device)
    except Exception as error:  # torch raises AssertionError, RuntimeError or NotImplementedError, by kind of device
        raise InvalidTarget(
            f"There is no device {device!r} here.",
            why=f"torch {torch.__version__} says: {str(error).strip().split(chr(10))[0]}",
            next="leave --device out for the CPU, or plan for a device that is not here with --device-profile",
        ) from error


def _make_model(transformers: ModuleType, config: Any, architecture: str) -> torch.nn.Module:
    made: torch.nn.Module
    if architecture:
        made = getattr(transformers, architecture)._from_config(config)
    else:
        made = transformers.AutoModelForCausalLM.from_config(config)
    return made


def _make_batch(model: torch.nn.Module, options: TargetOptions, batch: int, sequence: int) -> dict[str, Any]:
    """A random batch with labels for models of text and for image classifiers."""
    import torch

    config: Any = model.config
    known = config.to_dict()
    if options.sequence is None:  # what is too long for a small configuration is not what anybody asked for
        sequence = min(sequence, getattr(config, "max_position_embeddings", sequence))
    random = torch.Generator().manual_seed(_SEED)
    if "vocab_size" in known:
        tokens = torch.randint(known["vocab_size"], (batch, sequence), generator=random).to(options.device)
        labels = tokens
        if "SequenceClassification" in type(model).__name__:
            labels = torch.zeros(batch, dtype=torch.long, device=options.device)
        return {"input_ids": tokens, "labels": labels}
    if "image_size" in known and "ImageClassification" in type(model).__name__:
        if options.sequence is not None:
            raise InvalidTarget(
                f"--seq would have no effect on {type(model).__name__}.",
                why="its batch is images, whose size the configuration decides",
                next="leave it out, or change image_size in the configuration",
            )
        shape = (batch, known.get("num_channels", 3), known["image_size"], known["image_size"])
        pixels = torch.rand(shape, generator=random).to(options.device)
        labels = torch.randint(config.num_labels, (batch,), generator=random).to(options.device)
        return {"pixel_values": pixels, "labels": labels}
    raise InvalidTarget(
        f"no batch is known for {type(model).__name__}.",
        why="Plimsoll makes random batches for models of text and for image classifiers only",
        next="write a function that returns (model, batch) and give package.module:function",
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
