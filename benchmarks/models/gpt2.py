"""A GPT-2 of transformers' own code with random weights and dropout on."""

from __future__ import annotations

from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.models.data import text_ids

_SIZES = {
    "tiny": ({"n_embd": 128, "n_layer": 4, "n_head": 2, "vocab_size": 256}, 2, 128),
    "small": ({"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 1024}, 4, 256),
    "cpu": ({"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 4096}, 2, 512),
    "h200": ({"n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257}, 16, 1024),
}


def build(size: str) -> tuple[Any, dict[str, Any], Any]:
    shape, batch, length = _SIZES[size]
    config = GPT2Config(
        **shape, n_positions=length, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
        attn_implementation="sdpa", use_cache=False, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    ids = text_ids(batch, length)
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}, lambda output: output.loss
