"""A training step in; what is seen of it unmanaged, and its losses step by step, out: what others are held against."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from plimsoll.analysis.verify.curve import loss_curve
from plimsoll.analysis.verify.intermediates import Found, Intermediates
from plimsoll.analysis.verify.mismatches import mismatches
from plimsoll.artifacts.receipt import Mismatch, finite
from plimsoll.session.training_step import TrainingStep, copies, relative_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """What is compared besides gradients, buffers, peak and seconds.

    ``intermediates`` are patterns of module names; ``curve_steps`` training steps with the optimizer are compared.
    """

    intermediates: Sequence[str] = ()
    curve_steps: int = 0
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of the unmanaged model: its gradients and buffers after one step, and how far it is from itself."""

    loss: float
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor | None]
    spread: dict[str, float | None]
    intermediates: Found = field(default_factory=dict)
    curve: tuple[float | None, ...] = ()

    @property
    def is_deterministic(self) -> bool:
        return not self.spread


@dataclass(frozen=True, slots=True)
class Apart:
    """How far the step that was just run is from the evidence."""

    gradients: tuple[Mismatch, ...]
    buffers: tuple[Mismatch, ...]
    error: float

    def worst(self, other: Apart) -> Apart:
        """Of two runs, the one in which each tensor was further off."""
        return Apart(
            _merged(self.gradients, other.gradients),
            _merged(self.buffers, other.buffers),
            max(self.error, other.error),
        )


def collect_evidence(step: TrainingStep, depth: Depth) -> Evidence:
    """Run the unmanaged step twice from the same state; a third time where intermediates are asked for."""
    loss = step.run()
    gradients, buffers = copies(step.gradients()), copies(step.buffers())
    step.run()
    apart = [*mismatches(gradients, step.gradients(), {}), *mismatches(buffers, step.buffers(), {})]
    spread = {mismatch.name: mismatch.max_absolute_difference for mismatch in apart}
    return Evidence(loss, gradients, buffers, spread, run_intermediates(step, depth), run_curve(step, depth))


def compare_with(evidence: Evidence, step: TrainingStep) -> Apart:
    """Hold the gradients and buffers of the step's last run against the evidence."""
    return Apart(
        mismatches(evidence.gradients, step.gradients(), evidence.spread),
        mismatches(evidence.buffers, step.buffers(), evidence.spread),
        relative_error(evidence.gradients, step.gradients()),
    )


def run_intermediates(step: TrainingStep, depth: Depth) -> Found:
    """What the named modules make in one run of the step; nothing where none are named."""
    if not depth.intermediates:
        return {}
    with Intermediates(step.model, depth.intermediates).collect() as found:
        step.run()
    return found


def run_curve(step: TrainingStep, depth: Depth) -> tuple[float | None, ...]:
    """Losses of training steps; nothing where no curve is asked for."""
    return loss_curve(step, depth.optimizer, depth.curve_steps) if depth.curve_steps > 0 else ()


def consecutive_losses(step: TrainingStep, count: int) -> tuple[float | None, ...]:
    """The losses of consecutive runs: the random state goes on, so dropout draws anew each time."""
    step.rewind()
    return tuple(finite(step.go_on()) for _ in range(count))


def versions() -> dict[str, str]:
    """What the figures were measured with."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "machine": platform.machine()}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def _merged(first: tuple[Mismatch, ...], second: tuple[Mismatch, ...]) -> tuple[Mismatch, ...]:
    """Each tensor once, with the run in which it was further off."""
    worst: dict[str, Mismatch] = {}
    for mismatch in (*first, *second):
        known = worst.get(mismatch.name)
        if known is None or (mismatch.max_absolute_difference or 0.0) > (known.max_absolute_difference or 0.0):
            worst[mismatch.name] = mismatch
    return tuple(worst.values())
