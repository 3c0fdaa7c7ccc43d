"""Makes the document (the content to show) of gradient traffic, the bytes that ranks send each other in a step: the step, the
link, and a table of compression methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plimsoll.artifacts.traffic import UNCOMPRESSED, MethodTraffic, Traffic
from plimsoll.artifacts.verdict import IntervalEstimate
from plimsoll.ui.document import Document, Paragraph, Section, Tone, tabulate
from plimsoll.units import format_bytes, format_rate, format_seconds

_METHODS: Mapping[str, Callable[[MethodTraffic], str]] = {
    "method": lambda method: method.method,
    "sent": lambda method: format_bytes(method.sent_bytes),
    "encode, decode": lambda method: format_seconds(method.measured_local_seconds),
    "predicted": lambda method: format_seconds(method.predicted_step_seconds),
    "saves": lambda method: f"{method.predicted_saved_share:.1%}",
    "measured": lambda method: format_seconds(method.measured_step_seconds.value),
    "saves (95%)": lambda method: _interval(method.measured_saved_share),
    "error": lambda method: f"{method.gradient_error:.1%}",
}


def _interval(share: IntervalEstimate) -> str:
    return f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%})"


def view_traffic(traffic: Traffic) -> Document:
    """Make the document (the content to show) of gradient traffic, the bytes that ranks send each other in a step."""
    is_worth_it = traffic.fastest != UNCOMPRESSED
    rate = traffic.assumed_bytes_per_second
    step = (
        f"{format_seconds(traffic.measured_silent_seconds)} forward and backward without sending gradients, "
        f"{format_seconds(traffic.measured_forward_seconds)} of it forward; "
        f"gradients of {traffic.layout} in {traffic.exchanges} parts; data: {traffic.data}"
    )
    link = (
        f"{format_rate(traffic.measured_bytes_per_second)}, {format_seconds(traffic.measured_latency_seconds)} latency; "
        f"predicted for {'this link' if rate is None else format_rate(rate)}"
    )
    return Document(
        source="Gradient traffic",
        subject=f"of {traffic.model}, {traffic.ranks} ranks on {traffic.device} ({traffic.backend})",
        word=traffic.fastest if is_worth_it else "do not compress",
        tone=Tone.GOOD if is_worth_it else Tone.NEUTRAL,
        lines=[
            f"{traffic.fastest} saves most time; whether it harms training shows on held-out data only: train with and without"
            if is_worth_it
            else "no method saves 2% of the step for certain"
        ],
        sections=[
            Section("The step and the link", [Paragraph(step), Paragraph(link)]),
            Section("Methods", [tabulate(traffic.methods, _METHODS, numbers=range(1, len(_METHODS)))]),
        ],
    )
