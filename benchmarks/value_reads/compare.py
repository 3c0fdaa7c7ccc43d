"""Three twins of a model train in turns: without anything, under torch's checkpointing, and under a plan.

All have the same seeds and, in each step, the same data. Peaks are the highest of the last five steps, without parameters.
Times are medians of the second half of the steps before those, as processor time on one thread. The first step also records.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import plimsoll
from benchmarks.value_reads.stack import Batch, Kind
from plimsoll.tracing.meters.memory import PeakMeter

METERED_STEPS = 5
_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the trainings of one kind showed. Ratios of time are to the unmanaged twin's steps."""

    kind: str
    unmanaged_bytes: int
    checkpoint_bytes: int
    plan_bytes: int
    checkpoint_ratio: float
    plan_ratio: float
    first_step_ratio: float
    recordings: int
    """The most recordings of one region, under all signatures."""
    streams: int
    """The programs of that region under one signature."""
    last_recorded: int
    """The last step that recorded a region."""
    reruns: int
    """Calls whose forward backward ran again, in all regions together."""
    checkpoint_unequal: int
    """Steps with other gradients or buffers than the unmanaged twin."""
    plan_unequal: int
    checkpoint_error: str
    plan_error: str
    warnings: tuple[str, ...]

    @property
    def peak_share(self) -> float:
        return self.plan_bytes / self.checkpoint_bytes if self.checkpoint_bytes else 0.0

    @property
    def time_share(self) -> float:
        return self.plan_ratio / self.checkpoint_ratio if self.checkpoint_ratio else 0.0


class _Twin:
    """A model in training, with the seconds and the peaks of its steps."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.unequal_steps = 0
        self.error = ""

    def backward(self, step: int, batch: Batch, *, is_metered: bool) -> None:
        """Compute gradients, unless a step before has failed."""
        torch.manual_seed(step)
        np.random.seed(step)
        random.seed(step)
        self.optimizer.zero_grad()
        gc.collect()
        begun = time.process_time()
        try:
            with self._metered() if is_metered else contextlib.nullcontext():
                loss_of(self.model(**batch)).backward()
        except Exception as error:  # noqa: BLE001 - a failure is a result of this kind, and belongs in its row
            self.error = f"step {step}: {type(error).__name__}: {error}"
        self.seconds.append(time.process_time() - begun)

    def compare(self, plain: _Twin) -> None:
        """Count the step if gradients or buffers are not the unmanaged twin's to the bit."""
        found, wanted = ([_gradients(twin.model), list(twin.model.buffers())] for twin in (self, plain))
        self.unequal_steps += not all(
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for mine, others in zip(found, wanted, strict=True)
            for a, b in zip(mine, others, strict=True)
        )

    def ratio(self, plain: _Twin) -> float:
        late = slice(len(plain.seconds) // 2, -METERED_STEPS)
        pairs = zip(self.seconds[late], plain.seconds[late], strict=True)
        return 0.0 if self.error else statistics.median(a / b for a, b in pairs)

    @property
    def peak_bytes(self) -> int:
        return 0 if self.error else max(self.peaks)

    @contextlib.contextmanager
    def _metered(self) -> Iterator[None]:
        with PeakMeter("cpu") as meter:
            yield
        self.peaks.append(meter.peak_bytes)


def compare(kind: Kind, steps: int) -> Row:
    """Train the three twins of a kind."""
    torch.manual_seed(0)
    model = kind.make().train()
    plain, checkpointed, ours = (_Twin(each) for each in (model, copy.deepcopy(model), copy.deepcopy(model)))
    checkpointed.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    plan = plimsoll.plan(ours.model, dict(kind.batch_of(steps)), strategy="full", loss=loss_of)
    recorded, last_recorded = 0, 0
    with plimsoll.apply(ours.model, plan), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            batch = kind.batch_of(step)
            plain.backward(step, batch, is_metered=step >= steps - METERED_STEPS)
            if plain.error:
                raise RuntimeError(plain.error)
            for twin in (checkpointed, ours):
                if not twin.error:
                    twin.backward(step, batch, is_metered=step >= steps - METERED_STEPS)
                    twin.compare(plain)
            for twin in (plain, checkpointed, ours):
                twin.optimizer.step()
            services = services_of(ours.model)
            before, recorded = recorded, sum(one.recordings for one in {each.learning for each in services})
            last_recorded = step if recorded > before else last_recorded
        most = max(services, key=lambda each: (each.learning.recordings, each.streams), default=None)
    texts = [str(each.message).replace(f"{Path.cwd()}/", "") for each in caught if "plimsoll" in str(each.message)]
    return Row(
        kind=kind.name,
        unmanaged_bytes=plain.peak_bytes,
        checkpoint_bytes=checkpointed.peak_bytes,
        plan_bytes=ours.peak_bytes,
        checkpoint_ratio=checkpointed.ratio(plain),
        plan_ratio=ours.ratio(plain),
        first_step_ratio=ours.seconds[0] / statistics.median(plain.seconds),
        recordings=most.learning.recordings if most is not None else 0,
        streams=most.streams if most is not None else 0,
        last_recorded=last_recorded,
        reruns=sum(each.reruns for each in services),
        checkpoint_unequal=checkpointed.unequal_steps,
        plan_unequal=ours.unequal_steps,
        checkpoint_error=checkpointed.error,
        plan_error=ours.error,
        warnings=tuple(texts),
    )


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def _gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def services_of(model: nn.Module) -> list[Any]:
    """Return what serves the calls of the regions, one for each region and signature."""
    forwards = [vars(inner).get("forward") for inner in model.modules()]
    return [service for each in forwards if hasattr(each, "services") for service in each.services.values()]
