"""Both arms' logs in; series, gradient comparisons and held-out losses as plain arrays out, as the rules need them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from plimsoll.analysis.probe.records import ArmLog, GradientRecord
from plimsoll.analysis.probe.statistics import Series
from plimsoll.artifacts.verdict import WHOLE_MODEL


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm's finite steps."""

    losses: Series
    norms: dict[str, Series]
    """By block, the whole model first."""


@dataclass(frozen=True, slots=True)
class GradientSamples:
    """One block's gradients compared, one entry per sample."""

    errors: Series
    cosines: Series
    gains: Series


class Evidence:
    """What two arms wrote down.

    Args:
        baseline: the unmanaged arm's log.
        plan: the managed arm's log, as long unless one of them went to NaN.
        blocks: names of the blocks, in the order of the records' norms.
    """

    def __init__(self, baseline: ArmLog, plan: ArmLog, blocks: tuple[str, ...]) -> None:
        self.baseline_log = baseline
        self.plan_log = plan
        self.blocks = (WHOLE_MODEL, *blocks)
        self.steps = min(len(baseline.steps), len(plan.steps))
        self.baseline = self._arm(baseline)
        self.plan = self._arm(plan)

    @property
    def is_baseline_finite(self) -> bool:
        return self.baseline_log.is_finite

    @property
    def is_plan_finite(self) -> bool:
        return self.plan_log.is_finite

    @property
    def identical_steps(self) -> int:
        """How many steps, from the first one on, have the same bits in both arms."""
        pairs = zip(self.baseline_log.steps, self.plan_log.steps, strict=False)
        return next((i for i, (one, other) in enumerate(pairs) if not one.is_same(other)), self.steps)

    @property
    def is_identical(self) -> bool:
        """Whether every step has the same bits in both arms."""
        return 0 < self.steps == self.identical_steps and len(self.baseline_log.steps) == len(self.plan_log.steps)

    def gradients(self, block: str) -> GradientSamples | None:
        """The comparisons of one block's gradients; ``None`` where there is none."""
        index = self.blocks.index(block) - 1
        sums = [_sums(record, index) for record in self.plan_log.gradients]
        usable = [(product, one, other) for product, one, other in sums if one > 0 and math.isfinite(other)]
        if not usable:
            return None
        products, ones, others = (np.asarray(column, dtype=np.float64) for column in zip(*usable, strict=True))
        errors = np.sqrt(np.maximum(ones + others - 2 * products, 0.0) / ones)
        lengths = np.sqrt(ones * others)
        cosines = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
        return GradientSamples(errors, np.minimum(cosines, 1.0), products / ones)

    def held_out(self) -> tuple[Series, Series] | None:
        """Losses of the held-out batches in both arms, at the latest look that both had."""
        ours = {record.steps: record.losses for record in self.plan_log.held_out}
        for record in reversed(self.baseline_log.held_out):
            if record.steps in ours:
                return _floats(record.losses), _floats(ours[record.steps])
        return None

    def _arm(self, log: ArmLog) -> Arm:
        steps = log.steps[: self.steps]
        if steps and not steps[-1].is_finite:
            steps = steps[:-1]
        losses = _floats(tuple(record.loss for record in steps))
        norms = {self.blocks[0]: _floats(tuple(record.gradient_norm for record in steps))}
        for index, block in enumerate(self.blocks[1:]):
            norms[block] = _floats(tuple(record.block_norms[index] for record in steps))
        return Arm(losses, norms)


def _floats(numbers: tuple[float | None, ...]) -> Series:
    return np.asarray([math.nan if number is None else number for number in numbers], dtype=np.float64)


def _sums(record: GradientRecord, index: int) -> tuple[float, float, float]:
    """Product and squared lengths of one block, or of all of them (-1)."""
    columns = (record.products, record.baseline_squares, record.plan_squares)
    if index < 0:
        product, one, other = (math.fsum(column) for column in columns)
    else:
        product, one, other = (column[index] for column in columns)
    return product, one, other
