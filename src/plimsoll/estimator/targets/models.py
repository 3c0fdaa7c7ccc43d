"""Builds models of transformers, diffusers and timm with random weights, and random batches to train them.

Models are never downloaded. Batches are text, images, both, sound, or latents. Integer tensors always have values, even for a
model on the meta device, so that masks and positions computed from them are correct. All other tensors of such a batch are on
the meta device.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import itertools
import logging
import math
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plimsoll.errors import InvalidTarget
from plimsoll.estimator.targets.recipe import Recipe
from plimsoll.session.device_costs import device_memory_bytes
from plimsoll.units import format_bytes

_AUTO_CLASSES = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForZeroShotImageClassification",
    "AutoModelForImageClassification",
)
"""The classes to try if a configuration does not name one.

The first that knows the configuration's type is used; each has a loss.
"""
_DENOISERS = {
    "UNet2DModel": 0,
    "DiTTransformer2DModel": 0,
    "UNet2DConditionModel": 77,
    "PixArtTransformer2DModel": 120,
    "SD3Transformer2DModel": 77 + 256,
    "FluxTransformer2DModel": 512,
}
"""The classes of diffusers that batches can be made for, each with the number of prompt tokens that its pipeline uses."""


def build_model(recipe: Recipe, dtype: torch.dtype | None) -> torch.nn.Module:
    """Build a model of transformers on the current default device.

    ``dtype`` is the parameters' dtype; ``None`` means the configuration's own.

    Raises:
        InvalidTarget: transformers is missing, does not know the architecture, or refuses the configuration.
    """
    transformers = _import("transformers", "torch-plimsoll[hf]")
    quiet_transformers()
    fields = dict(recipe.fields)
    model_type = fields["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise _unknown(transformers, "model_type", model_type, list(transformers.CONFIG_MAPPING.keys()))
    try:
        with _offline():
            config = transformers.AutoConfig.for_model(**fields)
            config.use_cache = False  # a cache for generation would keep keys and values alive through the step
            if getattr(config, "use_pretrained_backbone", None):
                config.use_pretrained_backbone = False  # some have it by default
            class_ = _class_of(transformers, config, recipe.architecture)
            made: torch.nn.Module = class_._from_config(config, **({} if dtype is None else {"dtype": dtype}))
    except InvalidTarget:
        raise
    except Exception as error:  # transformers raises whatever its configurations run into
        raise _cannot_build(transformers, recipe.architecture or model_type, error) from error
    return made.train()


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Refuse network access to this thread: a configuration may name weights or code that libraries would download."""
    from huggingface_hub import constants

    own, look_up, was_offline = threading.get_ident(), socket.getaddrinfo, constants.HF_HUB_OFFLINE

    def refuse(*address: Any, **options: Any) -> Any:
        if threading.get_ident() != own:
            return look_up(*address, **options)
        raise OSError(f"models are built without network access, but this model connects to {address[0]}")

    socket.getaddrinfo, constants.HF_HUB_OFFLINE = refuse, True
    try:
        yield
    finally:
        socket.getaddrinfo, constants.HF_HUB_OFFLINE = look_up, was_offline


def _class_of(transformers: Any, config: Any, architecture: str) -> Any:
    if not architecture:
        for name in _AUTO_CLASSES:
            known = getattr(transformers, name)._model_mapping
            if type(config) in known:
                found = known[type(config)]
                return found[0] if isinstance(found, tuple) else found
        raise InvalidTarget(
            f'The configuration of {config.model_type!r} does not name a class in "architectures".',
            why="transformers does not have a default class with a known loss for it",
            next='add "architectures": ["…"], or write a function and give package.module:function',
        )
    class_ = getattr(transformers, architecture, None)
    if class_ is None:
        names = [name for name in dir(transformers) if "For" in name or name.endswith("Model")]
        raise _unknown(transformers, "architecture", architecture, names)
    return class_


def _unknown(transformers: Any, what: str, name: str, known: Sequence[str]) -> InvalidTarget:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return InvalidTarget(
        f"transformers {transformers.__version__} does not know the {what} {name!r}.",
        why=f"the closest names are {', '.join(close)}" if close else f"none of its {len(known)} names is similar",
        next="correct the configuration, upgrade transformers, or write a function and give package.module:function",
    )


def quiet_transformers() -> None:
    """Make transformers print only errors, so that its advice does not mix with our output."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


class NoisePrediction(nn.Module):
    """A module that wraps a denoiser together with its loss: the mean squared error of the predicted noise (Ho et al. 2020,
    equation 14).

    The latents of a batch are assumed to be noised already.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, noise: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return the loss: a scalar in float32.

        Args:
            noise: the noise in the latents, with their shape.
            inputs: noised latents, timesteps, and conditions, by the denoiser's own argument names.
        """
        predicted = self.denoiser(**inputs).sample
        if predicted.shape != noise.shape:  # the other half is a learned variance, which this loss does not use
            predicted = predicted.chunk(2, dim=1)[0]
        return nn.functional.mse_loss(predicted.float(), noise.float())


class Classification(nn.Module):
    """A module that wraps an image classifier together with its loss: the cross-entropy of its logits."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss: a scalar in float32.

        Args:
            pixel_values: images ``[batch, channels, height, width]``.
            labels: one class per image ``[batch]``.
        """
        return nn.functional.cross_entropy(self.classifier(pixel_values).float(), labels)


def build_classifier(recipe: Recipe, dtype: torch.dtype | None) -> Classification:
    """Build a timm model with its loss on the current default device.

    Raises:
        InvalidTarget: timm is missing, does not know the name, or the model does not have classes.
    """
    timm, name = _import("timm", "timm"), recipe.architecture
    if name not in timm.list_models() and name not in timm.list_models(pretrained=True):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.6)
        raise InvalidTarget(
            f"timm {timm.__version__} does not know the model {name!r}.",
            why=f"the closest names are {', '.join(close)}" if close else "none of its models has a similar name",
            next="correct the name, upgrade timm, or write a function and give package.module:function",
        )
    try:
        with _offline():
            made = timm.create_model(name, pretrained=False)
    except Exception as error:  # timm raises whatever its models run into
        raise _cannot_build(timm, name, error) from error
    if not getattr(made, "num_classes", 0):
        raise InvalidTarget(
            f"The timm model {name} does not have classes.",
            why="it returns features, and Plimsoll does not know a loss for features",
            next="write a function that returns (model, batch, loss) and give package.module:function",
        )
    model = Classification(made).train()
    return model if dtype is None else model.to(dtype)


def build_denoiser(recipe: Recipe, dtype: torch.dtype | None) -> NoisePrediction:
    """Build a denoiser of diffusers with its loss on the current default device.

    Raises:
        InvalidTarget: diffusers is missing or refuses the configuration, or no batch is known for the class.
    """
    diffusers = _import("diffusers", "torch-plimsoll[diffusers]")
    if recipe.architecture not in _DENOISERS:
        close = difflib.get_close_matches(recipe.architecture, _DENOISERS, n=1, cutoff=0.4)
        raise InvalidTarget(
            f"The diffusers class {recipe.architecture} is not supported.",
            why=f"Plimsoll can make batches for {', '.join(_DENOISERS)}",
            next=f"did you mean {close[0]}?" if close else "write a function and give package.module:function",
        )
    try:
        with _offline():
            made: Any = getattr(diffusers, recipe.architecture).from_config(dict(recipe.fields))
    except Exception as error:  # diffusers raises whatever its configurations run into
        raise _cannot_build(diffusers, recipe.architecture, error) from error
    model = NoisePrediction(made).train()
    return model if dtype is None else model.to(dtype)


def _cannot_build(library: Any, name: str, error: Exception) -> InvalidTarget:
    return InvalidTarget(
        f"{library.__name__} {library.__version__} cannot build {name!r}.",
        why=f"{type(error).__name__}: {' '.join(str(error).split())}",
        next="check the configuration, or write a function and give package.module:function",
    )


def _import(library: str, package: str) -> Any:
    try:
        return importlib.import_module(library)
    except Exception as error:  # broken installations raise anything
        missing = error.name if isinstance(error, ImportError) else ""
        raise InvalidTarget(
            f"This target needs {library}, which {'is not installed' if missing == library else 'cannot be imported'}.",
            why=f"{type(error).__name__}: {error}",
            next=f"pip install '{package if missing == library else missing or library}', or use package.module:function",
        ) from error


BUILDERS = {"transformers": build_model, "diffusers": build_denoiser, "timm": build_classifier}
"""A mapping from the name of a library to the function that builds a model of that library from a recipe."""

_SEED = 0
_TIMESTEPS = 1000
_TIMES = 6
"""The number of additional conditions of Stable Diffusion XL: original size, crop and target size, two numbers each."""
_LATENT_SIDE = 64
_PICTURE_SIDE, _PIXELS_PER_TOKEN = 1024, 16
_HOST = "cpu"
"""The device that integers are drawn on, even for a model on the meta device."""
_FRAMES_PER_POSITION = 2
"""The number of spectrogram frames per position: Whisper's second convolution halves their number."""
_LEARNED_POSITIONS = re.compile(r"(^|\.)(wpe|position_embeddings?|embed_positions)\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """How large a batch is and where its tensors are, as data.

    ``samples`` is the number of samples. ``sequence`` is the number of text tokens per sample; ``None`` means the model's
    default, if samples are text. With ``is_asked`` the user gave the sequence length, so a batch without a sequence must refuse
    it.
    """

    samples: int
    sequence: int | None
    is_asked: bool
    device: str
    is_meta: bool


def refuse_too_large(what: str, needed_bytes: int, device: str) -> None:
    """Refuse tensors larger than the device's whole memory, because the operating system would kill the process.

    Raises:
        InvalidTarget: the message has both sizes.
    """
    device_bytes = device_memory_bytes(device)
    if device_bytes is not None and needed_bytes > device_bytes:
        raise InvalidTarget(
            f"{what} do not fit on {device}.",
            why=f"they need {format_bytes(needed_bytes)}, but the device has {format_bytes(device_bytes)}",
            next="use smaller sizes, plan for another machine's device with --device-profile, or use `plimsoll estimate`",
        )


def make_batch(model: nn.Module, size: BatchSize) -> dict[str, Any]:
    """Return a random batch with labels: a dict of keyword arguments for a call of ``model``.

    Raises:
        InvalidTarget: no batch is known for the model, or it cannot take the sequence length.
    """
    maker = _Maker(model, size)
    if isinstance(model, NoisePrediction):
        return maker.latents(model.denoiser)
    if isinstance(model, Classification):
        return maker.images(model.classifier)
    names = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    known: dict[str, Any] = config.to_dict() if config is not None else {}
    if "return_loss" in names and {"input_ids", "pixel_values"} <= names.keys():
        return maker.pairs(known)
    if "input_features" in names and "labels" in names and "max_source_positions" in known:
        return maker.sound(known)
    if "pixel_values" in names and "ImageClassification" in type(model).__name__ and "image_size" in known:
        return maker.pictures(known, int(getattr(config, "num_labels", 1)))
    if "input_ids" in names and "labels" in names and "vocab_size" in known and "pixel_values" not in names:
        return maker.text(known)
    raise InvalidTarget(
        f"Plimsoll cannot make a batch for {type(model).__name__}.",
        why="it makes random batches for text models with a loss, image classifiers, CLIP, Whisper and denoisers",
        next="write a function that returns (model, batch) and give package.module:function",
    )


def learned_positions(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield each parameter of a text model that has a learned vector for each position: its name, and how many it has."""
    for name, parameter in model.named_parameters():
        if _LEARNED_POSITIONS.search(name) and "vision" not in name:
            yield name, parameter.shape[0]


class _Maker:
    """Makes one random batch for a model, with a fixed seed. It has one method for each kind of batch (text, images, latents
    and others).
    """

    def __init__(self, model: nn.Module, size: BatchSize) -> None:
        self._model = model
        self._size = size
        self._home = "meta" if size.is_meta else size.device
        self._random = torch.Generator().manual_seed(_SEED)
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def text(self, known: dict[str, Any]) -> dict[str, Any]:
        sequence = self._sequence(getattr(self._model.config, "max_position_embeddings", None))
        tokens = self._integers(known["vocab_size"], sequence)
        name = type(self._model).__name__
        labels = tokens
        if "SequenceClassification" in name:
            labels = torch.zeros_like(tokens[:, 0])
        elif "TokenClassification" in name:
            labels = torch.zeros_like(tokens)
        return {"input_ids": tokens, "labels": labels}

    def pictures(self, known: dict[str, Any], classes: int) -> dict[str, Any]:
        self._refuse_sequence("its batch is images, and the configuration sets their size")
        return {"pixel_values": self._pixels(known), "labels": self._integers(classes)}

    def pairs(self, known: dict[str, Any]) -> dict[str, Any]:
        text, vision = known["text_config"], known["vision_config"]
        tokens = self._integers(text["vocab_size"], self._sequence(text["max_position_embeddings"]))
        if isinstance(text.get("eos_token_id"), int):
            tokens[:, -1] = text["eos_token_id"]
        return {"input_ids": tokens, "pixel_values": self._pixels(vision), "return_loss": True}

    def sound(self, known: dict[str, Any]) -> dict[str, Any]:
        frames = _FRAMES_PER_POSITION * known["max_source_positions"]
        features = self._floats(known["num_mel_bins"], frames)
        labels = self._integers(known["vocab_size"], self._sequence(known["max_target_positions"]))
        return {"input_features": features, "labels": labels}

    def images(self, classifier: Any) -> dict[str, Any]:
        self._refuse_sequence("its batch is images, and the model sets their size")
        pixels = self._floats(*classifier.default_cfg["input_size"])
        return {"pixel_values": pixels, "labels": self._integers(classifier.num_classes)}

    def latents(self, denoiser: nn.Module) -> dict[str, Any]:
        """Return a batch of latents with the size in the denoiser's configuration, or with Stable Diffusion's size."""
        self._refuse_sequence("its batch is latents, and the configuration sets their size")
        known: Any = denoiser.config
        if "axes_dims_rope" in known:
            return self._packed_latents(known)
        side = known["sample_size"] or _LATENT_SIDE
        sides = (side, side) if isinstance(side, int) else tuple(side)
        latents, noise = self._floats(known["in_channels"], *sides), self._floats(known["in_channels"], *sides)
        batch: dict[str, Any] = {"timestep": self._integers(_TIMESTEPS), "noise": noise}
        tokens = _DENOISERS[type(denoiser).__name__]
        if tokens:
            widths = ("caption_channels", "joint_attention_dim", "cross_attention_dim")
            width = next(known[name] for name in widths if known.get(name))
            batch["encoder_hidden_states"] = self._floats(tokens, width)
        if known.get("pooled_projection_dim"):
            batch["pooled_projections"] = self._floats(known["pooled_projection_dim"])
        if known.get("num_embeds_ada_norm") and not tokens:
            batch["class_labels"] = self._integers(known["num_embeds_ada_norm"])
        if known.get("addition_embed_type") == "text_time":
            times = _TIMES * known["addition_time_embed_dim"]
            text = self._floats(known["projection_class_embeddings_input_dim"] - times)
            batch["added_cond_kwargs"] = {"text_embeds": text, "time_ids": self._floats(_TIMES)}
        if getattr(denoiser, "use_additional_conditions", None) is not None:
            sizes = (2, 1) if denoiser.use_additional_conditions else ()
            given = [self._floats(each) for each in sizes]
            batch["added_cond_kwargs"] = dict(itertools.zip_longest(("resolution", "aspect_ratio"), given))
        return batch | {"hidden_states" if "patch_size" in known else "sample": latents}

    def _packed_latents(self, known: Any) -> dict[str, Any]:
        """Return Flux's inputs for an image of 1024 pixels: 2 × 2 latents as one token, and the tokens of a prompt."""
        tokens = (_PICTURE_SIDE // _PIXELS_PER_TOKEN) ** 2
        shape, words = (tokens, known["in_channels"]), _DENOISERS["FluxTransformer2DModel"]
        batch = {
            "hidden_states": self._floats(*shape),
            "noise": self._floats(*shape),
            "timestep": self._floats(),
            "encoder_hidden_states": self._floats(words, known["joint_attention_dim"]),
            "pooled_projections": self._floats(known["pooled_projection_dim"]),
            "img_ids": torch.zeros(tokens, len(known["axes_dims_rope"]), device=self._home),
            "txt_ids": torch.zeros(words, len(known["axes_dims_rope"]), device=self._home),
        }
        return batch | ({"guidance": self._floats()} if known["guidance_embeds"] else {})

    def _pixels(self, known: dict[str, Any]) -> torch.Tensor:
        side = known["image_size"]
        height, width = (side, side) if isinstance(side, int) else side
        return self._floats(known.get("num_channels") or 3, height, width)

    def _floats(self, *shape: int) -> torch.Tensor:
        sizes = (self._size.samples, *shape)
        if self._size.is_meta:
            return torch.empty(sizes, dtype=self._dtype, device=self._home)
        refuse_too_large(
            "The floating-point tensors of the batch", math.prod(sizes) * self._dtype.itemsize, self._size.device
        )
        return torch.rand(sizes, generator=self._random).to(self._size.device, self._dtype)

    def _integers(self, below: int, *shape: int) -> torch.Tensor:
        sizes = (self._size.samples, *shape)
        refuse_too_large("The integer tensors of the batch", math.prod(sizes) * torch.long.itemsize, _HOST)
        drawn = torch.randint(below, sizes, generator=self._random)
        return drawn.to(self._size.device)

    def _sequence(self, longest: int | None) -> int:
        """Return the tokens per sample: the number that the user requested, or else the default, but at most ``longest``, the
        model's longest sequence.
        """
        sequence = self._size.sequence or longest or 1
        if not self._size.is_asked:
            return min(sequence, longest or sequence)
        for name, positions in learned_positions(self._model):
            if positions < sequence:
                raise InvalidTarget(
                    f"{type(self._model).__name__} accepts at most {positions:,} tokens per sample, not {sequence:,}.",
                    why=f"its positions are learned, and {name} has {positions:,} positions",
                    next=f"use --seq {positions} or less, or a configuration with more positions",
                )
        return sequence

    def _refuse_sequence(self, why: str) -> None:
        if self._size.is_asked:
            raise InvalidTarget(
                f"--seq would not have an effect on {type(self._model).__name__}.",
                why=why,
                next="leave --seq out, or change the size in the configuration",
            )
