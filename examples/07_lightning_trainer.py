"""One line keeps Lightning's Trainer under a budget: a small Llama learns Python's own argparse module, byte by byte.

Runs on a CPU in a few seconds. What was planned stands in the log, what was measured beside the loss.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from plimsoll.integrations.lightning import PlimsollCallback


class ByteModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    text = Path(argparse.__file__ or "").read_bytes()[: 64 * 64]
    rows = DataLoader(torch.tensor(list(text)).reshape(64, 64), batch_size=8)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        max_steps=6,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[PlimsollCallback(budget="13MiB")],
    )
    trainer.fit(ByteModel(), rows)
    for name, value in trainer.callback_metrics.items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()
