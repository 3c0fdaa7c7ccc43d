"""Writes the memory timelines of plans as a trace file for ui.perfetto.dev and chrome://tracing, with the peak marked.

Source: the Trace Event Format (JSON): counter events ``C``, complete events ``X``, instant events ``i``, metadata ``M``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from plimsoll.artifacts.naming import plain_name
from plimsoll.artifacts.plan import Plan, TimelinePoint
from plimsoll.errors import InvalidReport
from plimsoll.ui.document import name_budget, seconds_of
from plimsoll.units import format_bytes

_PHASES = 1
_HOLDERS_NAMED = 8


def render_perfetto(plans: Sequence[Plan]) -> str:
    """Return the memory timelines of one or several plans as JSON text in the Trace Event Format.

    Timestamps are microseconds on the clock of the step without a plan: each operation starts when it would start without a
    plan, so the time that a plan spends on recomputation and transfers is not shown. If a plan lacks seconds, each operation
    takes one microsecond.

    Raises:
        InvalidReport: none of the given plans has a timeline.

    Example:
        >>> render_perfetto([plan])  # doctest: +SKIP
        '{"displayTimeUnit": "ms", "traceEvents": [...'
    """
    shown = [plan for plan in plans if plan.timeline]
    if not shown:
        raise InvalidReport(
            "There is no timeline to write.",
            why="none of the given files is a plan" if not plans else "the plan was saved without a timeline",
            next="give a plan with a timeline: `plimsoll plan TARGET --budget 70GiB --output plan.json` writes one",
        )
    events = [event for process, plan in enumerate(shown, 1) for event in _events(plan, process)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events, "otherData": _about(shown)}, indent=1) + "\n"


def _about(plans: Sequence[Plan]) -> dict[str, str]:
    is_timed = all(seconds_of(plan.timeline) is not None for plan in plans)
    clock = "time of the operation's start in the unmanaged step" if is_timed else "one microsecond per operation"
    return {"producer": "plimsoll", "model": plans[0].model, "fingerprint": plans[0].fingerprint, "clock": clock}


def _events(plan: Plan, process: int) -> Iterator[dict[str, Any]]:
    """Yield the trace events of one plan, which the trace viewer shows as one process.

    They are its name, the phases, one counter per memory category, the budget and the peak.
    """
    limit = name_budget(plan.budget_bytes)
    yield _event("M", "process_name", process, args={"name": f"{plan.model}, plan {plan.strategy}, {limit}"})
    yield _event("M", "thread_name", process, tid=_PHASES, args={"name": "phases of the step"})
    starts = _starts(plan)
    yield from _phases(plan.timeline, starts, process)
    categories = sorted({name for point in plan.timeline for name in point.by_category})
    for point, start in zip(plan.timeline, starts, strict=True):
        sizes = {name: point.by_category.get(name, 0) for name in categories}
        yield _event("C", "memory by category, bytes", process, ts=start, args=sizes)
        yield _event("C", "memory, bytes", process, ts=start, args={"total": point.bytes})
    if plan.budget_bytes is not None:
        for start in (starts[0], starts[-1]):
            yield _event("C", "budget, bytes", process, ts=start, args={"budget": plan.budget_bytes})
    yield _peak(plan, starts, process)


def _starts(plan: Plan) -> list[float]:
    """Return, for each point of the plan's timeline, the microsecond at which the point begins."""
    seconds = seconds_of(plan.timeline)
    if seconds is None:
        return [float(point.tick) for point in plan.timeline]
    return [round(each * 1e6, 3) for each in seconds]


def _phases(points: Sequence[TimelinePoint], starts: Sequence[float], process: int) -> Iterator[dict[str, Any]]:
    """Yield one trace event with a duration for each phase of the step: forward, backward and optimizer."""
    pairs = zip(points, starts, strict=True)
    begun = [(phase, next(members)[1]) for phase, members in itertools.groupby(pairs, lambda pair: pair[0].phase)]
    ends = [start for _, start in begun[1:]] + [starts[-1]]
    for (phase, start), end in zip(begun, ends, strict=True):
        yield _event("X", phase, process, tid=_PHASES, ts=start, dur=round(end - start, 3), cat="phase")


def _peak(plan: Plan, starts: Sequence[float], process: int) -> dict[str, Any]:
    """Return the trace event at the highest point of the timeline.

    Its arguments name the tensors that hold most of the peak.
    """
    at = max(range(len(starts)), key=lambda index: plan.timeline[index].bytes)
    point = plan.timeline[at]
    held = {plain_name(holder.label): format_bytes(holder.bytes) for holder in plan.peak.holders[:_HOLDERS_NAMED]}
    name = f"peak {format_bytes(point.bytes)}, {point.moment}"
    return _event("i", name, process, tid=_PHASES, ts=starts[at], s="g", cat="peak", args=held)


def _event(kind: str, name: str, process: int, **fields: Any) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": process, "tid": 0, **fields}
