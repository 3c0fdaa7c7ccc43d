"""Gradient traffic in, plain text out: the ruling, the step, every method, the link. No torch, no rich in here."""

from __future__ import annotations

import math

from plimsoll.artifacts.columns import align
from plimsoll.artifacts.traffic import UNCOMPRESSED, LinkFit, MethodTraffic, Traffic
from plimsoll.artifacts.verdict import Estimate
from plimsoll.units import format_bytes, format_seconds

_METHOD_HEADER = ("method", "sent", "local", "predicted", "measured", "saved", "error", "ruling")
LINK_HEADER = ("link", "latency", "bandwidth", "fit off by", "sizes")
_UNKNOWN = "–"
VALIDATION_HEADER = ("held-out loss", "without", "with", "difference", "allowed", "spread", "outcome")


def summarise_traffic(traffic: Traffic) -> str:
    """The figures and the ruling as people read them."""
    lines = [title(traffic), f"  {traffic.ruling.advice}", f"  {traffic.reason}"]
    lines += [f"  missing: {missing}" for missing in traffic.missing]
    lines += [f"  {line}" for line in describe_step(traffic)]
    rows = method_rows(traffic)
    lines += ["", *align(rows, right=range(1, len(rows[0]) - 1))]
    if traffic.links:
        lines += ["", *align([list(LINK_HEADER), *map(link_cells, traffic.links)], right=[1, 2, 3])]
    validated = validation_rows(traffic)
    if validated:
        lines += ["", *align([list(VALIDATION_HEADER), *validated], right=[1, 2, 3, 4, 5])]
    lines += ["", *reasons(traffic)]
    lines += [f"\nNote: {note}" for note in traffic.notes]
    return "\n".join(lines)


def title(traffic: Traffic) -> str:
    """One line: what was looked at and what came of it."""
    return (
        f"Gradient traffic of {traffic.model}, {traffic.ranks} ranks on {traffic.device} ({traffic.backend}): "
        f"{traffic.ruling}"
    )


def describe_step(traffic: Traffic) -> list[str]:
    """The step without traffic, what its gradients are sent in, and how much there is to save."""
    step, sharded = traffic.step, traffic.sharded
    gradients = f"{format_bytes(traffic.gradient_bytes)} of gradients in"
    optimizer = traffic.optimizer.partition("(")[0]
    if step is not None:
        hidden = "" if traffic.hidden_share is None else f"{traffic.hidden_share:.0%} of the transfers' time is hidden"
        return [
            f"{format_seconds(step.measured_compute_seconds)} forward and backward, "
            f"{format_seconds(step.measured_optimizer_seconds)} {optimizer}; "
            f"{gradients} {len(step.buckets)} buckets; data: {traffic.data}",
            f"uncompressed, {hidden}; beside a transfer computing runs at {step.compute_share:.0%} of its speed",
        ]
    assert sharded is not None, "a step of either layout"
    most = sharded.measured_most_saved_share
    return [
        f"{format_seconds(sharded.measured_silent_seconds.value)} a step that gathers parameters and sends no gradients, "
        f"{format_seconds(sharded.measured_optimizer_seconds)} of it {optimizer}; "
        f"{gradients} {sharded.units} units of FSDP2; data: {traffic.data}",
        f"sending no gradients at all would save {most.value:.1%} ({most.low:.1%} to {most.high:.1%}) of the step: "
        "no method can save more",
    ]


def method_rows(traffic: Traffic) -> list[list[str]]:
    """The header and a row per method, without columns of which nothing is known; the last column is the ruling."""
    rows = [_method_cells(method) for method in traffic.methods]
    known = [place for place in range(len(_METHOD_HEADER)) if any(row[place] != _UNKNOWN for row in rows)]
    return [[row[place] for place in known] for row in (_METHOD_HEADER, *rows)]


def _method_cells(method: MethodTraffic) -> list[str]:
    is_baseline = method.method == UNCOMPRESSED
    saved = method.predicted_saved_share if method.measured_saved_share is None else method.measured_saved_share
    return [
        method.method,
        format_bytes(method.wire_bytes),
        _UNKNOWN if method.measured_local_seconds is None else format_seconds(method.measured_local_seconds),
        _UNKNOWN if method.predicted_step_seconds is None else _seconds(method.predicted_step_seconds),
        _UNKNOWN if method.measured_step_seconds is None else format_seconds(method.measured_step_seconds.value),
        _UNKNOWN if is_baseline or saved is None else f"{saved.value:.1%}",
        _UNKNOWN if method.gradient_error is None else f"{method.gradient_error:.1%}",
        _UNKNOWN if is_baseline else str(method.ruling),
    ]


def describe_break_even(method: MethodTraffic) -> str:
    """Below which bandwidth and which overlap the method saves time."""
    parts = []
    if method.break_even_bytes_per_second is not None:
        parts.append(f"below {format_rate(method.break_even_bytes_per_second)}")
    if method.break_even_hidden_share is not None:
        parts.append(f"if under {max(0.0, method.break_even_hidden_share):.0%} is hidden")
    return " and ".join(parts) or "at no bandwidth that was looked at"


def link_cells(link: LinkFit) -> list[str]:
    """One kind of transfer as the cells of ``LINK_HEADER``."""
    return [
        str(link.transfer),
        format_seconds(link.latency_seconds),
        format_rate(link.bytes_per_second),
        f"{link.relative_error:.1%}",
        ", ".join(
            f"{format_bytes(point.payload_bytes)}: {format_seconds(point.measured_seconds)}" for point in link.points
        ),
    ]


def validation_rows(traffic: Traffic) -> list[list[str]]:
    """What training with each method came to, as the cells of ``VALIDATION_HEADER``."""
    rows = []
    for method in traffic.methods:
        found = method.validation
        if found is not None:
            rows.append(
                [
                    method.method,
                    _loss(found.baseline_loss),
                    _loss(found.method_loss),
                    _UNKNOWN if found.difference is None else _difference(found.difference),
                    f"{found.allowed:.4f}",
                    f"{found.seed_spread:.4f}",
                    str(found.outcome),
                ]
            )
    return rows


def reasons(traffic: Traffic) -> list[str]:
    """Why every method got its ruling."""
    return [
        f"  {method.method}: {method.reason}"
        + ("" if method.predicted_saved_share is None else f"; pays {describe_break_even(method)}")
        for method in traffic.methods
        if method.method != UNCOMPRESSED
    ]


def format_rate(bytes_per_second: float) -> str:
    """A link's speed as people read it.

    Example:
        >>> format_rate(12.5e6)
        '100 Mbit/s'
    """
    bits = bytes_per_second * 8
    if math.isinf(bits):
        return "unlimited"
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= scale:
            return f"{bits / scale:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def _seconds(estimate: Estimate) -> str:
    reach = max(estimate.high - estimate.value, estimate.value - estimate.low)
    return f"{format_seconds(estimate.value)} ± {reach / estimate.value if estimate.value else 0.0:.0%}"


def _loss(loss: float | None) -> str:
    return _UNKNOWN if loss is None else f"{loss:.4f}"


def _difference(estimate: Estimate) -> str:
    return f"{estimate.value:+.4f} ({estimate.low:+.4f} to {estimate.high:+.4f})"
