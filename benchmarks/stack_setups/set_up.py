"""A set-up of a training framework as a row of the table: how it trains without a budget, with its own switch, and with one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from metering import LiveStorages


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How a training keeps its memory down: not at all, by the framework's ``own_switch``, or by a budget in bytes."""

    own_switch: bool = False
    budget: int | None = None


@dataclass
class Watch:
    """What a training tells of itself while it runs, and leaves behind; the meter is on where peaks are asked for."""

    meter: LiveStorages | None = None
    losses: list[float] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    _began: float = 0.0

    @property
    def peaks(self) -> list[int]:
        """Bytes of all live storages, highest in each training call of the model."""
        return [] if self.meter is None else self.meter.peaks

    def attached(self, model: nn.Module) -> None:
        """Training is about to begin, and whatever manages the model is on it."""
        if self.meter is not None:
            self.meter.watch(model)
        self._began = time.process_time()

    def stepped(self) -> None:
        """The optimizer has stepped."""
        now = time.process_time()
        self.step_seconds.append(now - self._began)
        self._began = now

    def ended(self, model: nn.Module, losses: list[float]) -> None:
        """Training is over."""
        self.losses = losses
        self.weights = [each.detach().clone() for each in model.parameters()]


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """One row: ``train`` makes the model, trains it for so many optimizer steps and tells the watch."""

    stack: str
    model: str
    precision: str = "fp32"
    accumulation: int = 1
    shapes: str
    train: Callable[[Watch, Arm, int], Any]

    @property
    def name(self) -> str:
        """``Trainer, Llama, bf16, 2 micro-batches, 4 x 64``."""
        parts = (self.stack, self.model, self.precision, f"accumulation {self.accumulation}", self.shapes)
        return ", ".join(parts)
