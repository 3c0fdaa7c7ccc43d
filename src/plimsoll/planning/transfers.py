"""A region and its choice in, the seconds of packing and bringing back out, with transfers hidden where compute hides them.

What a region sends goes out while the next region's forward runs, and comes back while that region's backward runs: one
window per region and direction, so regions do not compete. What does not fit the window is waited for.
"""

from __future__ import annotations

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Form
from plimsoll.artifacts.trace import RegionCall
from plimsoll.planning.choice import Choice
from plimsoll.planning.step import RegionView, StepIndex


def forms_of(view: RegionView, choice: Choice) -> list[Form]:
    """The forms of the packed values."""
    return [view.form(value, name) for value, name in choice.packed]


def link_bytes(view: RegionView, choice: Choice) -> int:
    """Bytes at the other end of the link."""
    return sum(form.link_bytes for form in forms_of(view, choice))


def packing_seconds(index: StepIndex, view: RegionView, choice: Choice) -> float:
    """Seconds of encoding and decoding, and of waiting for the link."""
    forms = forms_of(view, choice)
    return sum(form.seconds for form in forms) + waiting_seconds(index, view, forms)


def waiting_seconds(index: StepIndex, view: RegionView, forms: list[Form]) -> float:
    """Seconds of transfers, both ways, that the neighbour's compute does not hide."""
    sent = [form.link_bytes for form in forms if form.decision is Decision.OFFLOAD]
    link, after = index.forms.link, index.neighbour(view.call.index)
    if not sent or link is None or after is None:
        return 0.0
    latency_seconds = len(sent) * link.latency_seconds
    out_seconds = latency_seconds + sum(sent) / link.out_bytes_per_second
    in_seconds = latency_seconds + sum(sent) / link.in_bytes_per_second
    out_window, in_window = windows_of(index, view.call, after)
    return max(0.0, out_seconds - out_window) + max(0.0, in_seconds - in_window)


def windows_of(index: StepIndex, call: RegionCall, after: RegionCall) -> tuple[float, float]:
    """Seconds of compute that hide the way out and the way back."""
    before = index.seconds_before
    out_window = before[after.forward[1]] - before[call.forward[1]]
    in_window = before[call.backward[0]] - before[after.backward[0]]
    return float(out_window), float(in_window)
