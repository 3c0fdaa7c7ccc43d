"""Trains small models with Hugging Face's trainers, with and without a budget, under a meter that asks neither."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset

import metering
import zoo
from plimsoll.integrations.transformers import PlimsollCallback

_QUIET = {"report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True}


class Rows(Dataset[dict[str, Any]]):
    """Texts of random words that are their own labels, of the given lengths in turn."""

    def __init__(self, *lengths: int, count: int = 64) -> None:
        torch.manual_seed(1)
        self.rows = [torch.randint(2, zoo.VOCABULARY, (lengths[i % len(lengths)],)) for i in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of several lengths as one batch."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def deep_llama(**changes: Any) -> nn.Module:
    """A Llama whose activations are several times its weights."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 128}
    return zoo.build("llama", **{**sizes, **changes})


class Watch(transformers.TrainerCallback):
    """Puts the meter on the model when everybody else has put on theirs."""

    def __init__(self, meter: metering.LiveStorages) -> None:
        self._meter = meter

    def on_train_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self._meter.watch(model)


@dataclasses.dataclass
class Training:
    """What a training left behind."""

    trainer: Any
    callback: PlimsollCallback | None
    peaks: list[int]

    @property
    def losses(self) -> list[Any]:
        kinds = ("loss", "eval_loss", "train_loss")
        return [row[kind] for row in self.trainer.state.log_history for kind in kinds if kind in row]

    @property
    def weights(self) -> list[torch.Tensor]:
        return [each.detach() for each in self.trainer.model.parameters()]


def train(
    make: Callable[..., Any],
    budget: int | str | None = None,
    resume: str | None = None,
    **options: Any,
) -> Training:
    """Train what ``make(callbacks=…)`` returns, a trainer, under a budget or without."""
    with metering.LiveStorages() as meter:
        callback = None if budget is None else PlimsollCallback(budget, **options)
        trainer = make(callbacks=[*filter(None, [callback]), Watch(meter)])
        trainer.train(resume_from_checkpoint=resume)
    return Training(trainer, callback, meter.peaks)


def plain_trainer(
    folder: Any, callbacks: list[Any], model: Callable[[], nn.Module] = deep_llama, **changes: Any
) -> transformers.Trainer:
    """A ``Trainer`` of a model on texts of one length, or of several (``lengths``)."""
    lengths = changes.pop("lengths", (64,))
    arguments = {"max_steps": 3, "per_device_train_batch_size": 8, **_QUIET, **changes}
    return transformers.Trainer(
        model=model(),
        args=transformers.TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=Rows(*lengths),
        eval_dataset=Rows(*lengths, count=4),
        data_collator=pad if len(lengths) > 1 else None,
        callbacks=callbacks,
    )
