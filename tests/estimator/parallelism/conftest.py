"""Traces of small models, made once for all tests of layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from plimsoll.artifacts.trace import Trace
from plimsoll.tracing.trace import trace


def _trace(name: str, labels: int, **changes: Any) -> Trace:
    batch = {"input_ids": torch.zeros(2, 16, dtype=torch.long), "labels": torch.zeros(2, labels, dtype=torch.long)}
    return trace(zoo.build(name, **changes), batch, repeats=1)


@pytest.fixture(scope="session")
def llama() -> Trace:
    """Six blocks, nothing tied."""
    return _trace("llama", 16, intermediate_size=48, num_hidden_layers=6, vocab_size=67)


@pytest.fixture(scope="session")
def tied_llama() -> Trace:
    """Three blocks, the head's weight being the embedding's."""
    return _trace("llama", 16, intermediate_size=48, num_hidden_layers=3, vocab_size=67, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def t5() -> Trace:
    """Two encoder and two decoder blocks: all decoder blocks read what the encoder returned."""
    return _trace("t5", 8, d_ff=48, vocab_size=71)
