"""A step that fits under no plan in; what one change at a time would lead to, each evaluated, out.

Every change is made to the smallest point of the search alone, which is evaluated again with it: more memory, half the
sequence, no accumulation, compression. What cannot be evaluated here is listed as unsupported, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from plimsoll.artifacts.fit import FitChange, FitPoint
from plimsoll.artifacts.plan import Plan
from plimsoll.fitting.point import Shape
from plimsoll.fitting.search import Space
from plimsoll.pipeline.allowance import read_allowance
from plimsoll.pipeline.making import make_maker
from plimsoll.pipeline.request import split_detached
from plimsoll.pipeline.single_device import Accumulation, SingleDevice, described
from plimsoll.pipeline.step_family import Training
from plimsoll.planning.explain import format_bytes_up
from plimsoll.verification.step import TrainingStep

_TOLERATED = "1%"
"""The error of the gradient that compression is tried with."""


def find_changes(training: Training, device: SingleDevice, space: Space) -> tuple[FitChange, ...]:
    """Changes to the smallest point, those that make it fit first, then by throughput.

    Args:
        training: what is trained.
        device: what evaluated it.
        space: what was searched.
    """
    finder = _Finder(training, device, Shape(space.ladder()[0], min(space.sequences)))
    found = list(finder.changes())
    rank = {True: 0, False: 1, None: 2}
    return tuple(sorted(found, key=lambda c: (rank[c.does_fit], -(c.items_per_second or 0.0), c.floor_bytes or 0)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Finder:
    training: Training
    device: SingleDevice
    shape: Shape

    def changes(self) -> Iterator[FitChange]:
        """Every change that means something here."""
        yield self._more_memory()
        if self.training.batches.items_name == "tokens" and self.shape.sequence > 1:
            yield self._half_the_sequence()
        if self.device.accumulation.of(self.shape.batch) > 1:
            yield self._no_accumulation()
        yield self._compression()

    def _more_memory(self) -> FitChange:
        floor_bytes = self.device.evaluate(self.shape).predicted_peak_bytes
        more = format_bytes_up(floor_bytes - self.device.budget_bytes)
        looser = self._with(budget_bytes=floor_bytes)
        return self._change(f"{more} more memory", looser.evaluate(self.shape))

    def _half_the_sequence(self) -> FitChange:
        half = Shape(self.shape.batch, self.shape.sequence // 2)
        return self._change(f"half the sequence, {half.sequence} tokens", self._with().evaluate(half))

    def _no_accumulation(self) -> FitChange:
        alone = self._with(accumulation=Accumulation())
        return self._change("no accumulation: gradients of one micro-batch", alone.evaluate(self.shape))

    def _compression(self) -> FitChange:
        name = f"compress saved tensors, gradient error up to {_TOLERATED}"
        if self.training.is_elsewhere:
            return FitChange(
                name=name, does_fit=None, note="what codecs take and lose is measured on the device itself"
            )
        trace, costs = self.device.traced(self.shape)
        args, kwargs = split_detached(self.training.batches.of(self.shape))
        training = self.training

        def step() -> TrainingStep:
            return TrainingStep(training.model, args, kwargs, loss=training.loss, optimizer=training.optimizer)

        allowance = read_allowance(allow=("recompute", "compress"), max_error=_TOLERATED)
        budget_bytes = self.device.budget_bytes
        maker = make_maker(trace, costs, allowance, budget_bytes, step, lambda stage, share: None)
        plan: Plan = maker.solve(budget_bytes, raise_below_floor=False)
        note = f"expected error {plan.predicted_error:.2%}, not measured" if not plan.is_lossless else ""
        return self._change(name, described(self.device.evaluate(self.shape), plan), note)

    def _with(self, *, budget_bytes: int | None = None, accumulation: Accumulation | None = None) -> SingleDevice:
        """The same device with one thing changed; what was traced is shared."""
        return dataclasses.replace(
            self.device,
            budget_bytes=self.device.budget_bytes if budget_bytes is None else budget_bytes,
            accumulation=accumulation or self.device.accumulation,
            plans={},
        )

    def _change(self, name: str, point: FitPoint, note: str = "") -> FitChange:
        return FitChange(
            name=name,
            does_fit=point.does_fit,
            floor_bytes=point.predicted_peak_bytes,
            items_per_second=point.items_per_second if point.does_fit else None,
            note=note,
        )
