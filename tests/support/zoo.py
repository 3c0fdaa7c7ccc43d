"""One zoo of small real architectures for all tests: transformers' own code, random weights, batches that train them.

    model, batch = zoo.sample("llama")
    model = zoo.build("mixtral", num_local_experts=8)

Sizes are the smallest that keep what makes an architecture itself: grouped queries, dropout, two towers, a router.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_EXPERTS = {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
_PICTURES_AND_WORDS = {
    "vision_config": {"model_type": "clip_vision_model", **_WIDTHS, "image_size": IMAGE, "patch_size": 8},
    "text_config": {"model_type": "llama", **_DECODER},
    "image_token_index": 1,
}
_OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_EXPERTS, **_ENDS, "head_dim": 8}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**_EXPERTS, **_ENDS}),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {**_DECODER, **_ENDS, "num_hidden_layers": 4, "num_experts": 4, "expert_layer_period": 2}
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_d_conv": 2},
    ),
    "wav2vec2": (
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        {**_WIDTHS, "vocab_size": VOCABULARY, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2}
        | {"mask_time_prob": 0.0, "ctc_zero_infinity": True, "pad_token_id": 0},
    ),
    "segformer": (
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2]}
        | {"decoder_hidden_size": 16},
    ),
    "dpt": (
        "DPTConfig",
        "DPTForSemanticSegmentation",
        {**_WIDTHS, "image_size": IMAGE, "patch_size": 4, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}
        | {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16, "reassemble_factors": [4, 2, 1, 0.5]}
        | {"is_hybrid": False, "readout_type": "project"},
    ),
    "clipseg": (
        "CLIPSegConfig",
        "CLIPSegForImageSegmentation",
        {
            "text_config": {**_WIDTHS, **_WORDS, "eos_token_id": 1},
            "vision_config": {**_WIDTHS, **_PATCHES},
            "projection_dim": 16,
            "reduce_dim": 16,
            "extract_layers": [0, 1],
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
    ),
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration", _PICTURES_AND_WORDS),
    "vipllava": (
        "VipLlavaConfig",
        "VipLlavaForConditionalGeneration",
        {**_PICTURES_AND_WORDS, "vision_feature_layers": [-2, -1]},
    ),
}
OTHERS = tuple(_OTHERS)
"""Architectures that few tests need: see ``SPECIES`` for the zoo proper."""

EXTRAS = {
    "states": ("output_hidden_states",),
    "attentions": ("output_attentions",),
    "router logits": ("output_router_logits",),
    "cache": ("use_cache",),
}
"""Extra outputs, with the arguments that ask for them."""


def build(name: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """The model ``name`` in training mode, the same weights every time; ``changes`` replace fields of its configuration."""
    config_name, model_name, fields = {**_SPECIES, **_OTHERS}[name]
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
    if name == "clipseg":
        given = {**words(rows), **pictures(rows)}
        return {**given, "labels": torch.rand(rows, IMAGE, IMAGE)}
    if name in ("llava", "vipllava"):
        given = words(rows)
        given["input_ids"][:, 1:5] = 1  # where the patches of the picture go
        return {**given, "pixel_values": pictures(rows)["pixel_values"]}
    if name in ("segformer", "dpt"):
        size = IMAGE if name == "dpt" else 32
        return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.randint(0, 2, (rows, size, size))}
    if name == "wav2vec2":
        return {"input_values": torch.randn(rows, 400), "labels": words(rows, 4)["labels"]}
    if name in ("vit", "swin", "convnext", "resnet"):
        return pictures(rows, IMAGE if name == "vit" else 32)
    return words(rows)


def extras(name: str) -> tuple[str, ...]:
    """The extra outputs (of ``EXTRAS``) that the model ``name`` has."""
    without = {"attentions": ("convnext", "resnet")}
    only = {"router logits": ("mixtral", "qwen3-moe", "olmoe", "jamba")}
    only["cache"] = ("llama", "gpt2", "t5", "llava", "vipllava", *only["router logits"])
    return tuple(each for each in EXTRAS if name not in without.get(each, ()) and name in only.get(each, (name,)))


def sample(name: str, asked: Sequence[str] = ()) -> tuple[nn.Module, dict[str, Any]]:
    """A model and a batch that trains it, in a call that asks for these of ``EXTRAS``."""
    call = {key: True for extra in asked for key in EXTRAS[extra]}
    changes = {"attn_implementation": "eager"} if "attentions" in asked else {}
    return build(name, **changes), {**batch(name), **call}


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
