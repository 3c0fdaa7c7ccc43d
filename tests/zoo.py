"""One zoo of small real architectures for all tests: transformers' own code, random weights, batches that train them.

    model, batch = zoo.sample("llama")
    model = zoo.build("mixtral", num_local_experts=8)

Sizes are the smallest that keep what makes an architecture itself: grouped queries, dropout, two towers, a router.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 64
TOKENS = 16
IMAGE = 16

_WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
_DECODER = {**_WIDTHS, **_WORDS, "num_key_value_heads": 2, "use_cache": False}
_PATCHES = {"image_size": IMAGE, "patch_size": 4}
_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_CONVOLUTIONS = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": 3}
_SPECIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_DECODER, "num_local_experts": 4}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64, "use_cache": False}
        | {"bos_token_id": 0, "eos_token_id": 0},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {**_WIDTHS, **_WORDS}),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
        | {"use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0},
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", {**_WIDTHS, **_PATCHES, **_DROPOUT, "num_labels": 3}),
    "swin": (
        "SwinConfig",
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
        | {"num_labels": 3},
    ),
    "convnext": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "num_labels": 3},
    ),
    "resnet": ("ResNetConfig", "ResNetForImageClassification", {**_CONVOLUTIONS, "layer_type": "basic"}),
    "clip": (
        "CLIPConfig",
        "CLIPModel",
        {
            "text_config": {**_WIDTHS, **_WORDS, "eos_token_id": 1},
            "vision_config": {**_WIDTHS, **_PATCHES},
            "projection_dim": 16,
        },
    ),
}
SPECIES = tuple(_SPECIES)


def build(name: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """The model ``name`` in training mode, the same weights every time; ``changes`` replace fields of its configuration."""
    config_name, model_name, fields = _SPECIES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**fields, **changes})
    model: nn.Module = getattr(transformers, model_name)(config)
    return model.train()


def words(rows: int = 2, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """Token ids that are their own labels; 0 and 1, which end or pad texts, do not occur."""
    ids = torch.randint(2, vocabulary, (rows, tokens))
    return {"input_ids": ids, "labels": ids}


def pictures(rows: int = 2, size: int = IMAGE, classes: int = 3) -> dict[str, torch.Tensor]:
    """Pictures of noise with classes."""
    return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.randint(0, classes, (rows,))}


def batch(name: str, rows: int = 2) -> dict[str, Any]:
    """A batch that trains the model ``name`` as it is built without changes."""
    if name == "clip":
        return {
            "input_ids": words(rows)["input_ids"],
            "pixel_values": pictures(rows)["pixel_values"],
            "return_loss": True,
        }
    if name in ("vit", "swin", "convnext", "resnet"):
        return pictures(rows, IMAGE if name == "vit" else 32)
    return words(rows)


def sample(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model and a batch that trains it."""
    return build(name), batch(name)


class TinyLanguageModel(nn.Module):
    """What a trainer takes for a language model, with as few operations as that needs: the compiler is done with it soon."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.up, self.head = nn.Linear(width, 4 * width), nn.Linear(4 * width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(torch.tanh(self.up(self.words(input_ids))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)
