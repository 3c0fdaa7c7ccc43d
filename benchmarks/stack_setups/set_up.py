"""A set-up of a training framework as a row of the table: how it trains without a budget, with its own switch, and with one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import zoo
from metering import LiveStorages
from plimsoll.tracing.zero import inside_engine


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
    takes_turns: Callable[[float], object] = float
    """Called after every step with its seconds; it returns where the next step may begin."""
    _began: float = 0.0

    @property
    def peaks(self) -> list[int]:
        """Bytes of all live storages, highest in each training call of the model."""
        return [] if self.meter is None else self.meter.peaks

    def attached(self, model: nn.Module | None) -> None:
        """Training is about to begin, and whatever manages the model is on it; ``None``: no module's calls are the steps."""
        if self.meter is not None and model is not None:
            self.meter.watch(inside_engine(model))
        self._began = time.process_time()

    def batches(
        self, rows: int = 8, lengths: tuple[int, ...] = (64,), count: int = 64, name: str = "llama"
    ) -> list[dict[str, Any]]:
        """Batches of random words of the given lengths in turn, or of pictures; each counts in the step that takes it."""
        torch.manual_seed(1)
        if name == "vit":
            made = [zoo.batch(name, rows) for _ in range(count)]
        else:
            made = [zoo.words(rows, lengths[number % len(lengths)]) for number in range(count)]
        if self.meter is not None:
            self.meter.wait(made)
        return made

    def stepped(self) -> None:
        """The optimizer has stepped."""
        now = time.process_time()
        self.step_seconds.append(now - self._began)
        self.takes_turns(now - self._began)
        self._began = time.process_time()

    def begins(self) -> None:
        """A step begins, where no module's call says so."""
        if self.meter is not None:
            self.meter.begin()

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
    requires: str = ""
    """A package that has to be there, besides those that tests need."""
    ranks: int = 1
    taught: int = 5
    """Steps in which plans are made and regions are recorded, before any is timed; more where batches change their shapes."""
    train: Callable[[Watch, Arm, int], Any]

    @property
    def name(self) -> str:
        """``Trainer, Llama, bf16, 2 micro-batches, 4 x 64``."""
        parts = (self.stack, self.model, self.precision, f"accumulation {self.accumulation}", self.shapes)
        parts += (f"{self.ranks} ranks",) if self.ranks > 1 else ()
        return ", ".join(parts)
