"""Finds the fastest layout of a number of ranks for a number of samples per step within a budget, with the estimator.

``ranks=64,samples=512`` leaves the rest open: tensor, pipeline and expert parallelism, how much ZeRO shards, and the
micro-batch. Each layout is estimated twice. The estimate with everything kept is an upper bound of the speed of all plans. The
bytes that are in memory under every plan are a lower bound of all peaks: above the budget, the layout cannot fit. Plans
are solved only for layouts that may fit and could be the fastest, the most promising first. Full recomputation is not a bound:
a plan that keeps a little of a block can have a lower peak.

Then micro-batches are doubled. A larger micro-batch gathers parameters and launches kernels less often, so it changes which
layout is the fastest. Each layout has a lower bound of its seconds with larger micro-batches. Layouts are doubled in the order
of these bounds, until all bounds are above the fastest step.

If the budget is the device's own memory, the result must fit the device together with its error. The fastest layout that does
not fit so is planned again for fewer bytes. The original stays in the list.

Known weakness: schedules are 1F1B, and context parallelism is off, unless they are given. The comparison depends on links and
rates that may be off by 30%: the first few layouts of the list are each worth a try.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec

from plimsoll.artifacts.estimate import LayoutChoice
from plimsoll.artifacts.job import Layout, ModelFacts
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.errors import InvalidLayout, PlimsollError
from plimsoll.estimator.estimate_job import EstimateJob
from plimsoll.estimator.layout_space import LayoutSpace
from plimsoll.estimator.setting import AUTO, EVERYTHING, NOTHING

_LARGEST_BATCH = 64
_WORTH_TRYING = 0.99
"""A larger micro-batch is tried if its lower bound is below this share of the fastest step. Each try may take another trace."""
_SHOWN = 8
_MOST_CHECKS = 16
"""How many layouts, or smaller budgets for the same layout, are compared with the device's memory in full."""
MakeJob = Callable[[Layout, int], EstimateJob]


@dataclass(slots=True)
class _Tried:
    """One layout that was tried, as data: its job, its peak and seconds, a lower bound of the peak of all plans
    (``floor_bytes``), and a lower bound of its seconds with larger micro-batches (``least_seconds``).

    Until a plan is solved, peak and seconds are those with everything kept. If no plan can fit, they are those with everything
    recomputed. ``kept_seconds`` always is the time with everything kept.
    """

    job: EstimateJob
    batch: int
    strategy: str
    peak_bytes: int
    seconds: float
    floor_bytes: int
    kept_seconds: float
    least_seconds: float
    fits_device: bool | None = None

    @property
    def budget_bytes(self) -> int:
        assert self.job.setting.budget_bytes is not None, "a search has a budget"
        return self.job.setting.budget_bytes

    @property
    def does_fit(self) -> bool:
        return self.peak_bytes <= self.budget_bytes

    @property
    def choice(self) -> LayoutChoice:
        return LayoutChoice(
            layout=self.job.layout,
            batch=self.batch,
            strategy=self.strategy,
            peak_bytes=self.peak_bytes,
            step_seconds=self.seconds,
            is_too_close=self.fits_device is False,
        )


class LayoutSearch:
    """Searches for the fastest layout. ``make`` is a function that makes the estimate's job for a layout and a micro-batch
    size.
    """

    def __init__(
        self, space: LayoutSpace, make: MakeJob, strategy: str, facts: ModelFacts, *, is_for_device: bool = False
    ) -> None:
        self._space = space
        self._is_for_device = is_for_device
        self._make = make
        self._strategy = strategy
        self._facts = facts
        self._tell: Progress = silent
        self._settled: list[_Tried] = []
        self._unfit: list[_Tried] = []

    def run(self, batch: int | None, tell: Progress = silent) -> tuple[EstimateJob, tuple[LayoutChoice, ...]]:
        """Return the job of the fastest layout that fits, and a list of the fastest layouts.

        If no layout fits, return the job and the list for the layouts with the lowest peak.

        Raises:
            InvalidLayout: the model's sizes do not allow any layout of the space.
        """
        self._tell = tell
        first = batch or 1
        tried = [each for layout in self._layouts(first) if (each := self._try(layout, first)) is not None]
        if not tried:
            raise InvalidLayout(
                f"No layout of {self._space.ranks} ranks can run {self._space.samples} samples in micro-batches of {first}.",
                why="degrees must divide the ranks and the model's sizes, and the data-parallel ranks must divide the samples",
                next="change ranks= or samples=, or fix fewer degrees",
            )
        self._settle(tried)
        if batch is None:
            self._enlarge(tried)
        if self._is_for_device:
            self._leave_room_for_errors()
        found = self._fastest() or sorted(self._unfit, key=lambda each: each.peak_bytes)
        best = next((each for each in found if each.fits_device), found[0])
        found = [best, *(each for each in found if each is not best)]
        best.job.setting = replace(best.job.setting, strategy=best.strategy)
        shown: dict[tuple[Layout, bool], LayoutChoice] = {}
        for each in found:  # list every layout once, with its best micro-batch, and once more if that is too close
            alone = msgspec.structs.replace(each.job.layout, micro_batches=1)
            shown.setdefault((alone, each.fits_device is False), each.choice)
        return best.job, tuple(shown.values())[:_SHOWN]

    def _layouts(self, batch: int) -> Iterator[Layout]:
        every = list(self._space.layouts(batch, self._facts))
        for number, layout in enumerate(every):
            self._tell(f"layout {number + 1} of {len(every)}: {layout}", number / len(every))
            yield layout

    def _try(self, layout: Layout, batch: int) -> _Tried | None:
        """Estimate a layout with everything kept, and a lower bound of the peak of its plans.

        If the user gave a strategy, estimate only that strategy. Return ``None`` if the model cannot use the layout.
        """
        named = NOTHING if self._strategy == AUTO else self._strategy
        try:
            job = self._make(layout, batch)
            figures = job.measure(named)
            peak_bytes, seconds = figures.peak_bytes, figures.step_seconds
            floor_bytes = job.least_bytes() if self._strategy == AUTO else peak_bytes
        # Some models cannot be checked from the layout alone, such as the heads of a function's model, or adapters.
        except PlimsollError:
            return None
        return _Tried(job, batch, named, peak_bytes, seconds, floor_bytes, seconds, job.least_seconds())

    def _enlarge(self, tried: list[_Tried]) -> None:
        """Double the micro-batches of all layouts that could become the fastest, in the order of their bounds.

        A layout is not doubled further if a step then takes longer, or if no plan for it can fit.
        """
        waiting = list(tried)
        while waiting:
            each = min(waiting, key=lambda each: each.least_seconds)
            waiting.remove(each)
            fastest = min((known.seconds for known in self._settled), default=math.inf)
            if each.floor_bytes > each.budget_bytes or each.least_seconds >= _WORTH_TRYING * fastest:
                continue
            self._tell(f"micro-batches of {2 * each.batch}: {each.job.layout}", 0.9)
            larger = self._doubled(each.job.layout, 2 * each.batch)
            if larger is not None:
                self._settle([larger])
                waiting += [larger] if larger.kept_seconds < each.kept_seconds else []

    def _doubled(self, layout: Layout, batch: int) -> _Tried | None:
        count, rest = divmod(self._space.samples, layout.dp * batch)
        if batch > _LARGEST_BATCH or rest or not count or "micro-batches" in self._space.given:
            return None
        return self._try(msgspec.structs.replace(layout, micro_batches=count), batch)

    def _settle(self, tried: list[_Tried]) -> None:
        """Solve a plan for each layout that does not fit without one, but may fit with one, and could be the fastest. Layouts
        are taken in order of the speed that they would reach with everything kept.
        """
        for each in sorted(tried, key=lambda each: each.seconds):
            if each.does_fit:
                self._settled.append(each)
            elif each.floor_bytes > each.budget_bytes:
                if self._strategy == AUTO:
                    self._follow(each, EVERYTHING)
                self._unfit.append(each)
            elif all(each.seconds < known.seconds for known in self._fastest()[:1]):
                self._tell(f"planning {each.job.layout}", 0.9)
                if self._follow(each, AUTO):
                    self._settled.append(each)
                else:  # a plan that does not fit has the lowest peak of all plans
                    each.floor_bytes = each.peak_bytes
                    self._unfit.append(each)

    def _follow(self, each: _Tried, strategy: str) -> bool:
        """Set the strategy of a layout that was tried, with the peak and seconds under it. Return whether the layout fits."""
        figures = each.job.measure(strategy)
        each.strategy, each.peak_bytes, each.seconds = strategy, figures.peak_bytes, figures.step_seconds
        return each.does_fit

    def _leave_room_for_errors(self) -> None:
        """Find the fastest layout whose whole memory plus its error is within the device's memory. Set ``fits_device`` of each
        layout that is checked.

        A layout with a plan that may not fit is planned again for fewer bytes.
        """
        for _ in range(_MOST_CHECKS):
            each = next((one for one in self._fastest() if one.fits_device is not False), None)
            if each is None or each.fits_device:
                return
            self._tell(f"checking {each.job.layout}", 0.95)
            total_bytes, error_bytes = each.job.measure_device(each.strategy)
            device_bytes = each.job.setting.device.memory_bytes
            each.fits_device = total_bytes + error_bytes <= device_bytes
            budget_bytes = int(each.peak_bytes * device_bytes / (total_bytes + error_bytes))
            if not each.fits_device and self._strategy == AUTO and each.floor_bytes <= budget_bytes:
                job = each.job.within(budget_bytes)
                figures = job.measure(AUTO)
                tighter = _Tried(
                    job=job,
                    batch=each.batch,
                    strategy=AUTO,
                    peak_bytes=figures.peak_bytes,
                    seconds=figures.step_seconds,
                    floor_bytes=each.floor_bytes,
                    kept_seconds=each.kept_seconds,
                    least_seconds=each.least_seconds,
                )
                self._settled += [tighter] if tighter.does_fit else []

    def _fastest(self) -> list[_Tried]:
        return sorted(self._settled, key=lambda each: each.seconds)
