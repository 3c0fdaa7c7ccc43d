"""A model in, its training step at any micro-batch out: traced where that has to be, predicted from traces where it can be.

On a device that is not here a trace costs seconds and needs no memory, and three sizes per structure determine all others. On
the device itself seconds are measured, so the sizes that the search climbs are traced and timed, and what lies between two
of them is predicted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.trace import Trace
from plimsoll.estimator.fit.family import Family
from plimsoll.estimator.fit.micro_batches import MicroBatches
from plimsoll.estimator.fit.point import Shape
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.session.plan import trace_and_cost
from plimsoll.tracing.recorder.calling import Loss

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and where it will run."""

    model: nn.Module
    batches: MicroBatches
    loss: Loss | None
    optimizer: torch.optim.Optimizer | None
    regions: Sequence[str] | None
    device_profile: str | None

    @property
    def is_elsewhere(self) -> bool:
        """Whether the step cannot run here: another device, or parameters without memory."""
        return self.device_profile is not None or any(parameter.is_meta for parameter in self.model.parameters())


@dataclass(slots=True)
class StepFamily:
    """The step of one model at any shape; with ``accumulates`` gradients are there already."""

    training: Training
    accumulates: bool
    report: Report
    traces: dict[Shape, Trace] = field(default_factory=dict)
    _costs: dict[Shape, Costs] = field(default_factory=dict)
    _family: Family | None = None

    def foreseen(self, shape: Shape) -> tuple[Trace, Costs] | None:
        """The step at an untraced shape as far as traces so far tell for certain; ``None`` where they do not."""
        if shape in self.traces or not self.traces:
            return None
        return self._predicted(shape) if self.family.covers(shape) and self.family.is_checked else None

    def at(self, shape: Shape, *, must_trace: bool = False) -> tuple[Trace, Costs]:
        """The step at a shape with its costs.

        Args:
            shape: micro-batch and sequence.
            must_trace: whether a prediction will not do.
        """
        if shape not in self.traces and (must_trace or not self._is_predictable(shape)):
            self._trace(shape)
        if shape in self.traces:
            return self.traces[shape], self._costs[shape]
        return self._predicted(shape)

    @property
    def family(self) -> Family:
        """What the traces so far have in common."""
        if self._family is None:
            self._family = Family(self.traces)
        return self._family

    def _predicted(self, shape: Shape) -> tuple[Trace, Costs]:
        predicted = self.family.at(shape)
        if self.training.is_elsewhere:
            return predicted, roofline_costs(predicted, find_device(self.training.device_profile or "CPU"))
        return predicted, self.family.seconds_at(shape, self._costs)

    def _is_predictable(self, shape: Shape) -> bool:
        if not self.traces or not self.family.covers(shape):
            return False
        if self.training.is_elsewhere:
            return self.family.is_checked
        members = [each.batch for each in self.family.shapes if each.sequence == shape.sequence]
        return any(batch < shape.batch for batch in members) and any(batch > shape.batch for batch in members)

    def _trace(self, shape: Shape) -> None:
        training = self.training
        self.report(f"tracing {shape}")
        with gradients_in_place(training.model) if self.accumulates else contextlib.nullcontext():
            self.traces[shape], self._costs[shape] = trace_and_cost(
                training.model,
                training.batches.of(shape),
                loss=training.loss,
                optimizer=training.optimizer,
                regions=training.regions,
                device_profile=training.device_profile,
            )
        self._family = None


@contextlib.contextmanager
def gradients_in_place(model: nn.Module) -> Iterator[None]:
    """Every trainable parameter has a gradient, as after the first micro-batch of a step; then it is as it was."""
    given = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.grad is None]
    try:
        for parameter in given:
            parameter.grad = torch.zeros_like(parameter)
        yield
    finally:
        for parameter in given:
            parameter.grad = None
