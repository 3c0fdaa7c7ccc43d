"""A Llama of transformers' own code with random weights: the model of the table in which the peers were first compared."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.models.data import text_ids

_SIZES = {
    "dry": ({"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 256}, 1, 64),
    "tiny": ({"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "vocab_size": 256}, 2, 128),
    "small": ({"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 1024}, 4, 256),
    "cpu": ({"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "vocab_size": 4096}, 2, 512),
    "h100": (
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000}
        | {"num_key_value_heads": 8},
        2,
        8192,
    ),
    "h200": ({"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "vocab_size": 32000}, 4, 8192),
}


def build(size: str) -> tuple[Any, dict[str, Any], Any]:
    shape, batch, length = _SIZES[size]
    config = LlamaConfig(
        **{"num_key_value_heads": shape["hidden_size"] // 64, **shape},
        num_attention_heads=shape["hidden_size"] // 64,
        max_position_embeddings=length,
        attn_implementation="sdpa",
        use_cache=False,
    )
    ids = text_ids(batch, length)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}, lambda output: output.loss
