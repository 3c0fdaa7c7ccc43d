"""One line keeps DeepSpeed's engine under a budget: a small Llama learns Python's own argparse module, byte by byte.

Runs on a CPU: python examples/10_deepspeed_engine.py, or torchrun --nproc-per-node 2 examples/10_deepspeed_engine.py.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")

import deepspeed
import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

import plimsoll

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
}


def main() -> None:
    torch.manual_seed(0)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference, and compiled for minutes
    if "RANK" not in os.environ:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    text = Path(argparse.__file__ or "").read_bytes()[: 96 * 64]
    rows = torch.tensor(list(text)).reshape(12, 8, 64)
    engine, *_ = deepspeed.initialize(model=made, model_parameters=made.parameters(), config=CONFIG)
    with plimsoll.attach(engine, budget="14MiB") as handle:
        for ids in rows[distributed.get_rank() :: distributed.get_world_size()]:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            print(f"loss {loss:.3f}, highest step {handle.peak_bytes / 2**20:.1f} MiB")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
