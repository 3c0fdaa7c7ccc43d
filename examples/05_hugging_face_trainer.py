"""One line keeps Hugging Face's Trainer under a budget: a small Llama learns Python's own argparse module, byte by byte.

Runs on a CPU in a few seconds. The log shows the budget, what was planned and what was measured beside every loss.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from plimsoll.integrations.transformers import PlimsollCallback


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    )
    text = Path(argparse.__file__ or "").read_bytes()[: 64 * 64]
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.tensor(list(text)).reshape(64, 64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=6,
            logging_steps=2,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[PlimsollCallback(budget="13MiB")])
        trainer.train()


if __name__ == "__main__":
    main()
