"""A Mixtral of transformers' own code with random weights: a router and experts in every block."""

from __future__ import annotations

from typing import Any

from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.models.data import text_ids

_SIZES = {
    "tiny": ({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 256}, 2, 64),
    "small": ({"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 1024}, 4, 128),
}


def build(size: str) -> tuple[Any, dict[str, Any], Any]:
    shape, batch, length = _SIZES[size]
    config = MixtralConfig(
        **shape,
        num_attention_heads=shape["hidden_size"] // 32,
        num_key_value_heads=shape["hidden_size"] // 64,
        num_local_experts=4,
        max_position_embeddings=length,
        attn_implementation="sdpa",
        use_cache=False,
    )
    ids = text_ids(batch, length)
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}, lambda output: output.loss
