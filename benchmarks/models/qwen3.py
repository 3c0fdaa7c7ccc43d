"""The model of the table in huggingface/accelerate#4175: Qwen3-0.6B's sizes with 24 layers, one sequence of 32,768 tokens.

The pull request states layers, hidden size, length, and the bytes of the blocks' inputs (1.61 GB, as here in 16 bits). The
other sizes and the loss are inferred from its peaks, 79.4 GB without and 24.7 GB with checkpointing. They leave no room for a
cross entropy over Qwen3's vocabulary, which takes 50 GB more. With the mean of the logits as the loss, Plimsoll predicts 78.1
and 23.3 GB for an H100.
"""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.models.data import text_ids

_SIZES = {
    "dry": ({"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 256}, 64),
    "h100": ({"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "vocab_size": 151936}, 32768),
}


def build(size: str) -> tuple[Any, dict[str, Any], Any]:
    shape, length = _SIZES[size]
    heads = shape["hidden_size"] // 64
    config = Qwen3Config(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=128,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return Qwen3ForCausalLM(config), {"input_ids": text_ids(1, length)}, lambda output: output.logits.mean()
