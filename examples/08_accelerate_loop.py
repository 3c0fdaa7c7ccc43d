"""One line keeps a loop with Accelerate under a budget: a small Llama learns Python's own argparse module, byte by byte.

Runs on a CPU in a few seconds: python examples/08_accelerate_loop.py, or accelerate launch with any number of processes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import plimsoll


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    text = Path(argparse.__file__ or "").read_bytes()[: 96 * 64]
    rows = DataLoader(torch.tensor(list(text)).reshape(96, 64), batch_size=8)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    model, optimizer, rows = accelerator.prepare(made, optimizer, rows)
    with plimsoll.attach(model, budget="14MiB") as handle:  # after prepare: what it returns is called
        for ids in rows:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.print(f"loss {loss:.3f}, highest step {handle.peak_bytes / 2**20:.1f} MiB")
    accelerator.end_training()


if __name__ == "__main__":
    main()
