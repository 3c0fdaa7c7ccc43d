"""Makes the candidate plans for a traced and timed step. The planner predicts each plan's peak and time; no plan is run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from plimsoll.analysis.advise.choosing import Made, Wish
from plimsoll.analysis.advise.memory import LITTLE
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Forms
from plimsoll.artifacts.plan import FrontierPoint, Plan
from plimsoll.artifacts.progress import Progress
from plimsoll.artifacts.trace import Trace
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import find_extremes
from plimsoll.session.forms import sense_forms
from plimsoll.session.options import PlanOptions
from plimsoll.session.task import TrainingTask
from plimsoll.units import format_bytes_up

_NAMED = ("full", "selective:attention", "selective:mlp", "selective:norm")
_NAMED_COMPILED = ("full",)
_SHARES = (0.25, 0.5, 0.75)
"""Without a budget, plans are made for three peaks between the unmanaged peak and the floor (the smallest peak that
recomputation reaches). They are at these shares of the way down."""
_LOSSY = "int8"
"""The name of a well-known lossy codec. A plan that uses it throughout is shown as a candidate if an error is tolerated."""
_CHEAP = 0.01
"""A share of the step time: extra time up to this share is negligible. If a plan with so little extra time has a smaller peak
than the knee, that peak is preferred. The knee is the point of the curve of time against peak that is farthest below the line
between both ends.
"""
_DECISIONS = {"compress": Decision.COMPRESS, "offload": Decision.OFFLOAD}


class CandidateMaker:
    """Makes the candidate plans of one step, among which the advice chooses one.

    They are named strategies such as ``full``, the strategy ``auto`` with recomputation only, and ``auto`` that may also
    compress or offload.
    """

    def __init__(self, task: TrainingTask, trace: Trace, costs: Costs, options: PlanOptions, report: Progress) -> None:
        self._task = task
        self._trace = trace
        self._costs = costs
        self._options = options
        self._report = report
        report("planning recomputation", 0.0)
        self._planner = Planner(StepIndex(trace, costs, may_recompute=options.may_recompute))
        self.unmanaged = self._solve(self._planner, "none", None, ())

    def knee_text(self) -> str:
        """Return, as text for a budget, the peak at the knee of the frontier (the curve of least step time against peak).

        If plans can hardly lower the peak without a plan, return the peak without a plan.
        """
        unmanaged = self.unmanaged
        knee = find_knee(unmanaged.frontier, unmanaged.baseline_seconds)
        if knee is None or unmanaged.floor_bytes > (1 - LITTLE) * unmanaged.baseline_peak_bytes:
            return f"{unmanaged.baseline_peak_bytes}B"
        return format_bytes_up(knee.peak_bytes).replace(" ", "")

    def make(self, wish: Wish) -> list[Made]:
        """Return the candidate plans, each with its name; the plan that keeps everything is the first.

        ``wish`` has the limits that a plan must keep to. Without a budget, some plans for other peaks are among them, to show
        what these peaks would cost.
        """
        made = [Made(name="none", plan=self.unmanaged)]
        may_recompute, peak_bytes = self._options.may_recompute, self.unmanaged.baseline_peak_bytes
        for name in (_NAMED_COMPILED if self._task.units else _NAMED) if may_recompute else ():
            plan = self._solve(self._planner, name, None, ("recompute",))
            if any(not region.is_untouched for region in plan.regions):
                made.append(Made(name=name, plan=plan))
        if wish.is_budget and wish.limit_bytes >= peak_bytes:
            return made
        if may_recompute:
            has_points = not wish.is_budget and wish.limit_bytes < peak_bytes
            for share in _SHARES if has_points else ():
                point_bytes = peak_bytes - int((peak_bytes - self.unmanaged.floor_bytes) * share)
                plan = self._solve(self._planner, "auto", point_bytes, ("recompute",))
                made.append(Made(name=f"auto, {share:.0%} to the floor", plan=plan, is_point=True))
            made.append(self._auto(self._planner, wish, ("recompute",)))
        if self._options.wants_forms and wish.limit_bytes != peak_bytes:
            made += self._with_forms(wish)
        return made

    def _with_forms(self, wish: Wish) -> list[Made]:
        """Return candidate plans that may compress, offload, or do both, in addition to recomputing values.

        Only what the user allowed is tried. ``wish`` has the limits that a plan must keep to.
        """
        self._report("trying codecs and links", 0.3)
        wanted = self._options
        if wanted.max_error:
            wanted = dataclasses.replace(wanted, strategies=("auto", _LOSSY))
        lowest = find_extremes(self._trace, self._costs).lowest
        forms = sense_forms(self._task.step(), self._trace, self._costs, lowest, wanted).forms
        words = tuple(word for word in _DECISIONS if word in self._options.allow)
        made = [entry for word in words for entry in self._try_forms(forms, (word,), wish)]
        # A form that no plan uses alone would not be used together with another form.
        if len(words) > 1 and all(_uses_forms(entry.plan) for entry in made if entry.name != _LOSSY):
            made += self._try_forms(forms, words, wish)
        return made

    def _try_forms(self, forms: Forms, words: tuple[str, ...], wish: Wish) -> list[Made]:
        """Return the fastest plan within the limits that may do what ``words`` name: ``compress``, ``offload``, or both.

        ``forms`` are the codecs and links that values can take. If compression is tried and an error is tolerated, also return
        a plan that uses the lossy codec for all values.
        """
        self._report(f"planning with {' and '.join(words)}", 0.4 + 0.3 * len(words))
        may_recompute = self._options.may_recompute
        allow = (*(("recompute",) if may_recompute else ()), *words)
        offered = only(forms, words)
        index = StepIndex(self._trace, self._costs, offered, may_recompute=may_recompute)
        planner = Planner(index, limits=self._options.limits())
        made = [self._auto(planner, wish, allow, offered)]
        if words == ("compress",) and self._options.max_error:
            lossy = self._solve(planner.heedless_of_error(), _LOSSY, None, allow)
            made.append(Made(name=_LOSSY, plan=lossy))
        return made

    def _auto(self, planner: Planner, wish: Wish, allow: tuple[str, ...], offered: Forms | None = None) -> Made:
        """Return the fastest plan whose peak is within the limit that the user wishes, as a candidate with its name.

        ``allow`` says what the plan may do, such as ``recompute``. ``offered`` are the codecs and links that it may use.
        """
        plan = self._solve(planner, "auto", wish.limit_bytes, allow)
        refused = "" if offered is None else why_unused(offered, plan)
        return Made(name=f"auto ({' + '.join(allow)})", plan=plan, refused=refused)

    def _solve(self, planner: Planner, strategy: str, budget_bytes: int | None, allow: tuple[str, ...]) -> Plan:
        made = solve(planner, budget_bytes=budget_bytes, strategy=strategy, raise_below_floor=False)
        return dataclasses.replace(self._options, allow=allow).written_into(made)


def only(forms: Forms, words: Collection[str]) -> Forms:
    """Return a copy of ``forms`` (the codecs and links that each value can take) with only the kinds that ``words`` name.

    Without ``offload``, the link is removed too.
    """
    decisions = {_DECISIONS[word] for word in words}
    replace = msgspec.structs.replace
    regions = tuple(
        replace(
            region,
            values=tuple(
                replace(entry, forms=tuple(form for form in entry.forms if form.decision in decisions))
                for entry in region.values
            ),
        )
        for region in forms.regions
    )
    return replace(forms, regions=regions, link=forms.link if Decision.OFFLOAD in decisions else None)


def why_unused(forms: Forms, plan: Plan) -> str:
    """Return a text that says why a plan uses none of the offered codecs and links; empty if it uses at least one.

    The reason is that they cost more time, or that no value supports one.
    """
    if _uses_forms(plan):
        return ""
    entries = [entry for region in forms.regions for entry in region.values]
    if any(entry.forms for entry in entries):
        return "another form would take more time than recomputing"
    kind = "another form" if plan.max_error else "another form without loss"
    reasons = Counter(reason for entry in entries for _, reason in entry.refused)
    common = f" ({reasons.most_common(1)[0][0]})" if reasons else ""
    return f"no value here can take {kind}{common}"


def _uses_forms(plan: Plan) -> bool:
    return any(decision.is_packed for region in plan.regions for decision in region.decisions)


def find_knee(frontier: Sequence[FrontierPoint], baseline_seconds: float) -> FrontierPoint | None:
    """Return the knee of a frontier, the curve of least step time against peak: the point where saving more gets dear.

    It is the point farthest below the line between both ends, with both axes scaled to 0 … 1. If a point with a smaller peak
    costs at most 1% of the step, that point is returned instead. The result is ``None`` for fewer than two points. The frontier
    must be Pareto-optimal: no point may beat another in both peak and time.

    Example:
        >>> points = [FrontierPoint(peak_bytes=b, step_seconds=s) for b, s in ((10, 2.0), (20, 1.2), (40, 1.0))]
        >>> find_knee(points, 1.0).peak_bytes
        20

    Source: Satopää et al. 2011, Finding a "Kneedle" in a Haystack; without its smoothing, because the curve is exact.
    """
    if len(frontier) < 2:
        return None
    points = sorted(frontier, key=lambda point: point.peak_bytes)
    low, high = points[0], points[-1]
    bytes_range = high.peak_bytes - low.peak_bytes
    seconds = [point.step_seconds for point in points]
    seconds_range = max(seconds) - min(seconds)
    cheap = next((p for p in points if p.step_seconds <= baseline_seconds * (1 + _CHEAP)), high)
    if not bytes_range or not seconds_range:
        return cheap
    knee = min(points, key=lambda p: p.peak_bytes / bytes_range + p.step_seconds / seconds_range)
    return min(knee, cheap, key=lambda point: point.peak_bytes)
