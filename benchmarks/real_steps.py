"""A catalogue model and how it is trained in, what a real step of it on this CPU allocates out, category by category.

The step is the second one: the optimizer's state is there. Bytes are those of allocator events (``measuring/memory.py``), exact
as torch asked for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from plimsoll.artifacts.job import parse_precision
from plimsoll.estimator.targets.target import Target, TargetOptions, load_target
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes

_OPTIMIZERS: dict[str, Any] = {
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
}
_LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model and how it is trained; ``precision`` is the model's own where it is empty."""

    target: str
    precision: str = ""
    optimizer: str = "adamw"
    micro_batches: int = 1

    def __str__(self) -> str:
        parts = [self.target, self.precision, self.optimizer if self.optimizer != "adamw" else ""]
        parts.append(f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else "")
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Bytes of one real step.

    ``gradient_bytes`` are those after backward; ``held_bytes`` what forward leaves for backward (loss and output among it);
    ``made_bytes`` what the step itself has alive at the peak: everything but parameters, buffers, batch and optimizer state.
    """

    parameter_bytes: int
    buffer_bytes: int
    batch_bytes: int
    state_bytes: int
    gradient_bytes: int
    held_bytes: int
    made_bytes: int
    peak_bytes: int


def measure(training: Training) -> MeasuredStep:
    """Train two steps, and measure the second."""
    target = load_target(training.target, TargetOptions(precision=parse_precision(training.precision or None)))
    model = target.model
    optimizer = _OPTIMIZERS[training.optimizer](model.parameters(), lr=_LEARNING_RATE)
    _step(target, optimizer, training.micro_batches, PeakMeter())
    optimizer.zero_grad(set_to_none=True)
    own = list(_state_tensors(optimizer))
    counters = storage_bytes(tensor for tensor in own if not tensor.dim())
    batch = [leaf for leaf in tree_leaves(target.batch) if isinstance(leaf, torch.Tensor)]
    lasting = storage_bytes([*model.parameters(), *model.buffers(), *batch, *own])
    meter = PeakMeter()
    with meter:
        _step(target, optimizer, training.micro_batches, meter)
    return MeasuredStep(
        parameter_bytes=storage_bytes(model.parameters()),
        buffer_bytes=storage_bytes(model.buffers()),
        batch_bytes=storage_bytes(batch),
        state_bytes=storage_bytes(own) - counters,
        gradient_bytes=storage_bytes(p.grad for p in model.parameters() if p.grad is not None),
        held_bytes=meter.windows[0].resident_bytes,
        made_bytes=meter.peak_bytes,
        peak_bytes=lasting + meter.peak_bytes,
    )


def _step(target: Target, optimizer: torch.optim.Optimizer, micro_batches: int, meter: PeakMeter) -> None:
    """Forward, backward, and the optimizer; the output lives until backward ends, as in the usual loop."""
    for _ in range(micro_batches):
        with target.autocast():
            output = target.model(**target.batch)
        loss = getattr(output, "loss", output) if target.loss is None else target.loss(output)
        meter.mark("backward")
        loss.backward()
        del output, loss
    optimizer.step()


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
