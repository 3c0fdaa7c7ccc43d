"""The figures of a training under a plan: as one line for people, as numbers for a log, and in the text of its handle.

A plan predicts the peak of the traced step. These figures add the bytes that only the real training step has, and the measured
peak.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.plan import Plan
from plimsoll.units import format_bytes, format_share


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFigures:
    """Data: the figures of a training under a plan: budget, peaks in bytes, and extra time.

    Example:
        >>> figures = TrainingFigures(
        ...     budget_bytes=100 * 2**20,
        ...     unmanaged_peak_bytes=160_000_000,
        ...     planned_peak_bytes=104_000_000,
        ...     measured_peak_bytes=103_000_000,
        ...     overhead=0.085,
        ...     extra_seconds=0.01,
        ...     managed_blocks=8,
        ...     blocks=8,
        ... )
        >>> figures.line
        'budget 100.0 MiB · peak 152.6 → 99.2 MiB planned, 98.2 MiB measured · +8.5% time predicted · 8 of 8 blocks'
    """

    budget_bytes: int | None
    unmanaged_peak_bytes: int
    """The predicted peak of the step without a plan."""
    planned_peak_bytes: int
    measured_peak_bytes: int
    """The highest peak of a step that was measured under the plan; 0 before the first measurement."""
    overhead: float
    """The time that the plan is predicted to add to a step, as a share of the step's time without a plan."""
    extra_seconds: float
    """The time that the plan is predicted to add to a step, in seconds."""
    managed_blocks: int
    """How many regions (modules that the plan decides about, mostly the repeated blocks) do not keep everything."""
    blocks: int
    unseen_bytes: int = 0
    """The part of the planned peak that the traced step does not have, in bytes: the real training step was measured to need
    more.
    """

    @classmethod
    def of(cls, plan: Plan, *, unseen_bytes: int = 0, measured_peak_bytes: int = 0) -> TrainingFigures:
        """Make the figures of a plan. ``unseen_bytes`` is what the real training step was measured to need in addition to the
        plan's peaks.
        """
        return cls(
            budget_bytes=plan.budget_bytes,
            unmanaged_peak_bytes=plan.baseline_peak_bytes + unseen_bytes,
            planned_peak_bytes=plan.predicted_peak_bytes + unseen_bytes,
            measured_peak_bytes=measured_peak_bytes,
            overhead=plan.predicted_overhead,
            extra_seconds=plan.predicted_seconds - plan.baseline_seconds,
            managed_blocks=sum(not region.is_untouched for region in plan.regions),
            blocks=len(plan.regions),
            unseen_bytes=unseen_bytes,
        )

    @property
    def line(self) -> str:
        """One line with budget, peak without and with the plan, extra time, and the number of managed blocks."""
        before, after = format_bytes(self.unmanaged_peak_bytes), format_bytes(self.planned_peak_bytes)
        (amount, unit), unit_after = before.split(), after.split()[1]
        parts = [f"peak {amount if unit == unit_after else before} → {after} planned"]
        if self.measured_peak_bytes:
            parts[0] += f", {format_bytes(self.measured_peak_bytes)} measured"
        if self.budget_bytes is not None:
            parts.insert(0, f"budget {format_bytes(self.budget_bytes)}")
        parts.append(f"{format_share(self.overhead)} time predicted")
        if self.blocks:
            parts.append(f"{self.managed_blocks} of {self.blocks} blocks")
        return " · ".join(parts)

    @property
    def parts_of_peak(self) -> str:
        """Return a clause that splits the planned peak into the traced step's part and the rest, or an empty text if there is
        no rest.
        """
        if not self.unseen_bytes:
            return ""
        return (
            f"planned {format_bytes(self.planned_peak_bytes)} = {format_bytes(self.planned_peak_bytes - self.unseen_bytes)} "
            f"in the traced step (the peak in .plan) + {format_bytes(self.unseen_bytes)} that only the training loop's step "
            "needs"
        )

    @property
    def note(self) -> str:
        """Return a sentence, shown with the plan, that says how the peaks of the real training steps differ from the traced
        step's.
        """
        parts = ["the peaks above belong to the traced step"]
        if self.unseen_bytes:
            parts.append(
                f"the training loop's own step was measured to need {format_bytes(self.unseen_bytes)} more (its loss, "
                "optimizer state, tensors that it keeps), so it is planned to peak at "
                f"{format_bytes(self.planned_peak_bytes)}"
            )
        if self.measured_peak_bytes:
            parts.append(f"the highest measured peak of the loop's steps is {format_bytes(self.measured_peak_bytes)}")
        return "; ".join(parts)

    @property
    def metrics(self) -> dict[str, float]:
        """The figures as a flat dict of numbers, for wandb, TensorBoard or a csv file. Each name ends with its unit."""
        return {
            "plimsoll/budget_bytes": self.budget_bytes or 0,
            "plimsoll/unmanaged_peak_bytes": self.unmanaged_peak_bytes,
            "plimsoll/planned_peak_bytes": self.planned_peak_bytes,
            "plimsoll/measured_peak_bytes": self.measured_peak_bytes,
            "plimsoll/planned_overhead_percent": 100 * self.overhead,
            "plimsoll/planned_extra_seconds": self.extra_seconds,
            "plimsoll/managed_blocks_count": self.managed_blocks,
        }


class ShowsFigures(abc.ABC):
    """Base class of handles: shows the training's figures as text, as HTML in a notebook, and as numbers."""

    @property
    @abc.abstractmethod
    def figures(self) -> TrainingFigures | None:
        """The figures of the training under its current plan, or ``None`` before the first plan for the budget."""

    @abc.abstractmethod
    def headline(self) -> str:
        """Return one line that names the model and says what Plimsoll does to it now."""

    def _shown_plan(self) -> Plan | None:
        """Return the plan to show below the headline, or ``None`` to show only the headline."""
        return None

    def metrics(self) -> dict[str, float]:
        """Return the figures as a flat dict of numbers, to log them in each step. It is empty before there is a plan.

        Returns:
            Names that begin with ``plimsoll/`` and end with their unit. ``plimsoll/measured_peak_bytes`` is the highest
            measured peak so far, and 0 before the first measurement.

        Example:
            >>> wandb.log({"loss": loss.item(), **handle.metrics()})  # doctest: +SKIP
        """
        figures = self.figures
        return {} if figures is None else figures.metrics

    def __repr__(self) -> str:
        figures = self.figures
        lines = [] if figures is None else [figures.line, figures.parts_of_peak]
        return "\n  ".join(filter(None, [self.headline(), *lines, "see .plan, .metrics(), .remove()"]))

    def _repr_html_(self) -> str:
        """Return the handle as HTML, for notebooks."""
        return ArtifactBase.to_html(self._shown_plan(), text=repr(self))
