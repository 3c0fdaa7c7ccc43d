"""Traces of small models, made once for all tests of layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from plimsoll.artifacts.trace import Trace
from plimsoll.tracing.trace import trace


def _trace(model_class: Any, config: Any, batch: dict[str, torch.Tensor]) -> Trace:
    return trace(model_class(config), batch, repeats=1)


@pytest.fixture(scope="session")
def llama() -> Trace:
    """Six blocks, nothing tied."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=67, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return _trace(LlamaForCausalLM, config, {"input_ids": ids, "labels": ids})


@pytest.fixture(scope="session")
def tied_llama() -> Trace:
    """Three blocks, the head's weight being the embedding's."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=67, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return _trace(LlamaForCausalLM, config, {"input_ids": ids, "labels": ids})


@pytest.fixture(scope="session")
def t5() -> Trace:
    """Two encoder and two decoder blocks: all decoder blocks read what the encoder returned."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    config = T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=71, use_cache=False,
        dropout_rate=0.1, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return _trace(T5ForConditionalGeneration, config, {"input_ids": ids, "labels": torch.zeros(2, 8, dtype=torch.long)})
