"""Why did my peak not move? Checkpointing a small Llama with a large vocabulary, and the one line that moves its peak.

The text is the source of Python's own argparse module, byte by byte; the vocabulary is larger than that needs, as those of
language models are large beside a short sequence. Runs on a CPU in a few seconds.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import transformers

from plimsoll import explain
from plimsoll.chunked import chunk_loss
from plimsoll.units import format_bytes


def main() -> None:
    torch.manual_seed(0)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = transformers.LlamaConfig(
        vocab_size=16384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    text = Path(argparse.__file__ or "").read_bytes()[: 2 * 256]
    tokens = torch.tensor(list(text)).reshape(2, 256)
    batch = {"input_ids": tokens, "labels": tokens}

    model.gradient_checkpointing_enable()
    before = explain(model, batch)
    print(before.verdict)
    for change in before.helpful[:3]:
        print(f"  {change.name}: the peak would be {format_bytes(change.predicted_peak_bytes)}")

    plain = model(**batch).loss.item()
    with chunk_loss(model):
        after = explain(model, batch)
        assert abs(model(**batch).loss.item() - plain) < 1e-4
    print(f"with chunk_loss(model): {format_bytes(before.peak.bytes)} became {format_bytes(after.peak.bytes)}")


if __name__ == "__main__":
    main()
