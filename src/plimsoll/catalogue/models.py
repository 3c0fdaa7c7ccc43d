"""A name in, the configuration of a Hugging Face architecture out. Weights are always random; nothing is downloaded."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass

ConfigValue = int | float | bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One architecture with its sizes, and the batch that it is planned for unless another is given.

    ``source`` says where the sizes come from.
    """

    name: str
    architecture: str
    config: Mapping[str, ConfigValue]
    batch: int
    sequence: int
    source: str


def _model(
    name: str, architecture: str, *, batch: int, sequence: int, source: str, **config: ConfigValue
) -> CatalogueModel:
    return CatalogueModel(
        name=name,
        architecture=architecture,
        config=types.MappingProxyType(config),
        batch=batch,
        sequence=sequence,
        source=source,
    )


_TINY = "made for a CPU: the real architecture, small sizes"
_LLAMA_3 = "Grattafiori et al. 2024, The Llama 3 Herd of Models, table 3"

_MODELS = (
    _model(
        "llama-tiny",
        "LlamaForCausalLM",
        batch=4,
        sequence=256,
        source=_TINY,
        model_type="llama",
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    ),
    _model(
        "gpt2-tiny",
        "GPT2LMHeadModel",
        batch=4,
        sequence=256,
        source=f"{_TINY}; dropout on",
        model_type="gpt2",
        vocab_size=512,
        n_embd=256,
        n_layer=4,
        n_head=4,
        n_positions=1024,
        bos_token_id=0,
        eos_token_id=0,
    ),
    _model(
        "vit-tiny",
        "ViTForImageClassification",
        batch=8,
        sequence=1,
        source=_TINY,
        model_type="vit",
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=3,
        image_size=96,
        patch_size=8,
        hidden_dropout_prob=0.1,
    ),
    _model(
        "llama-3-8b",
        "LlamaForCausalLM",
        batch=1,
        sequence=8192,
        source=_LLAMA_3,
        model_type="llama",
        torch_dtype="bfloat16",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
    ),
    _model(
        "llama-3-70b",
        "LlamaForCausalLM",
        batch=1,
        sequence=8192,
        source=_LLAMA_3,
        model_type="llama",
        torch_dtype="bfloat16",
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
    ),
)

CATALOGUE: Mapping[str, CatalogueModel] = types.MappingProxyType({model.name: model for model in _MODELS})
"""Every model by its name."""
