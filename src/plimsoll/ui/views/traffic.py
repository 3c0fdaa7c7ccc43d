"""Makes the document of gradient traffic: the ruling, the step, every method, the link, held-out losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plimsoll.artifacts.traffic import UNCOMPRESSED, LinkFit, MethodTraffic, Traffic, TrafficRuling
from plimsoll.artifacts.verdict import IntervalEstimate
from plimsoll.ui.document import UNKNOWN, Document, Element, Paragraph, Section, Table, Tone, table_of_known, tabulate
from plimsoll.ui.views.verdict import OUTCOMES
from plimsoll.units import format_bytes, format_rate, format_seconds

_METHODS_HEADER = ("method", "sent", "local", "predicted", "measured", "saved", "error", "ruling")
_LINKS: Mapping[str, Callable[[LinkFit], str]] = {
    "link": lambda link: link.transfer,
    "latency": lambda link: format_seconds(link.latency_seconds),
    "bandwidth": lambda link: format_rate(link.bytes_per_second),
    "fit error": lambda link: f"{link.relative_error:.1%}",
    "sizes": lambda link: ", ".join(
        f"{format_bytes(point.payload_bytes)}: {format_seconds(point.measured_seconds)}" for point in link.points
    ),
}
_VALIDATION_HEADER = ("method", "without", "with", "difference", "allowed", "spread", "outcome")
_RULINGS: dict[str, Tone] = {
    TrafficRuling.KEEP: Tone.GOOD,
    TrafficRuling.REFUSE: Tone.BAD,
    TrafficRuling.UNDECIDED: Tone.NEUTRAL,
}


def view_traffic(traffic: Traffic) -> Document:
    """Make the document of the gradient traffic."""
    return Document(
        source="Gradient traffic",
        subject=f"of {traffic.model}, {traffic.ranks} ranks on {traffic.device} ({traffic.backend})",
        word=traffic.ruling,
        tone=_RULINGS[traffic.ruling],
        lines=[traffic.ruling.advice, traffic.reason, *(f"missing: {missing}" for missing in traffic.missing)],
        sections=[
            Section("The step", [Paragraph(line) for line in _step(traffic)]),
            Section("Methods", _methods(traffic)),
        ],
        notes=traffic.notes,
    )


def _step(traffic: Traffic) -> list[str]:
    """The step's seconds without traffic, its buckets or units, and how much time compression could save."""
    step, sharded = traffic.step, traffic.sharded
    gradients = f"{format_bytes(traffic.gradient_bytes)} of gradients in"
    optimizer = traffic.optimizer.partition("(")[0]
    if step is not None:
        hidden = "" if traffic.hidden_share is None else f"{traffic.hidden_share:.0%} of the transfers' time is hidden"
        return [
            f"{format_seconds(step.measured_compute_seconds)} forward and backward, "
            f"{format_seconds(step.measured_optimizer_seconds)} {optimizer}; "
            f"{gradients} {len(step.buckets)} buckets; data: {traffic.data}",
            f"uncompressed, {hidden}; during a transfer, compute runs at {step.compute_share:.0%} of its speed",
        ]
    assert sharded is not None, "a step of either layout"
    most = sharded.measured_most_saved_share
    return [
        f"{format_seconds(sharded.measured_silent_seconds.value)} a step that gathers parameters but does not send gradients, "
        f"{format_seconds(sharded.measured_optimizer_seconds)} of it in {optimizer}; "
        f"{gradients} {sharded.units} units of FSDP2; data: {traffic.data}",
        f"no method can save more than {most.value:.1%} ({most.low:.1%} to {most.high:.1%}) of the step, which is what a "
        "step without any gradient traffic saves",
    ]


def _methods(traffic: Traffic) -> list[Element]:
    rows = [_method(method) for method in traffic.methods]
    elements: list[Element] = [table_of_known(_METHODS_HEADER, rows, range(1, 7), tones=_RULINGS)]
    elements += [Paragraph(_reason(method)) for method in traffic.methods if method.method != UNCOMPRESSED]
    if traffic.links:
        elements.append(tabulate(traffic.links, _LINKS, title="Links", numbers=(1, 2, 3)))
    validated = _validations(traffic)
    if validated:
        elements.append(
            Table(
                title="Held-out loss",
                header=_VALIDATION_HEADER,
                rows=validated,
                numbers=(1, 2, 3, 4, 5),
                tones=OUTCOMES,
            )
        )
    return elements


def _method(method: MethodTraffic) -> tuple[str, ...]:
    is_baseline = method.method == UNCOMPRESSED
    saved = method.predicted_saved_share if method.measured_saved_share is None else method.measured_saved_share
    return (
        method.method,
        format_bytes(method.wire_bytes),
        UNKNOWN if method.measured_local_seconds is None else format_seconds(method.measured_local_seconds),
        UNKNOWN if method.predicted_step_seconds is None else _seconds(method.predicted_step_seconds),
        UNKNOWN if method.measured_step_seconds is None else format_seconds(method.measured_step_seconds.value),
        UNKNOWN if is_baseline or saved is None else f"{saved.value:.1%}",
        UNKNOWN if method.gradient_error is None else f"{method.gradient_error:.1%}",
        UNKNOWN if is_baseline else method.ruling,
    )


def _reason(method: MethodTraffic) -> str:
    """The reason for a method's ruling, and the bandwidth and overlap below which the method saves time."""
    text = f"{method.method}: {method.reason}"
    if method.predicted_saved_share is None:
        return text
    parts = []
    if method.break_even_bytes_per_second is not None:
        parts.append(f"below {format_rate(method.break_even_bytes_per_second)}")
    if method.break_even_hidden_share is not None:
        parts.append(f"if less than {max(0.0, method.break_even_hidden_share):.0%} of the transfers is hidden")
    return f"{text}; saves time {' and '.join(parts) or 'at none of the bandwidths that were tried'}"


def _validations(traffic: Traffic) -> list[tuple[str, ...]]:
    """The held-out losses of training with each method."""
    found = [(method.method, method.validation) for method in traffic.methods if method.validation is not None]
    return [
        (
            name,
            UNKNOWN if validation.baseline_loss is None else f"{validation.baseline_loss:.4f}",
            UNKNOWN if validation.method_loss is None else f"{validation.method_loss:.4f}",
            UNKNOWN if validation.difference is None else _difference(validation.difference),
            f"{validation.allowed:.4f}",
            f"{validation.seed_spread:.4f}",
            validation.outcome,
        )
        for name, validation in found
    ]


def _seconds(estimate: IntervalEstimate) -> str:
    reach = max(estimate.high - estimate.value, estimate.value - estimate.low)
    return f"{format_seconds(estimate.value)} ± {reach / estimate.value if estimate.value else 0.0:.0%}"


def _difference(estimate: IntervalEstimate) -> str:
    return f"{estimate.value:+.4f} ({estimate.low:+.4f} to {estimate.high:+.4f})"
