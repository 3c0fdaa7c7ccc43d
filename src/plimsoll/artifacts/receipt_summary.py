"""A receipt in, plain text out: verdict first, then claim beside evidence. No torch, no rich in here."""

from __future__ import annotations

from collections import Counter

from plimsoll.artifacts.columns import align
from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.grouping import compress_names, name_call
from plimsoll.artifacts.receipt import Mismatch, Receipt
from plimsoll.units import format_bytes, format_seconds, format_share

_SHOWN = 5
_WHY = {str(Engine.UNTOUCHED): "the plan keeps everything"}


def summarise_receipt(receipt: Receipt) -> str:
    """The receipt as people read it: verdict, equality, peaks, seconds, engines."""
    lines = [f"Receipt for plan {receipt.strategy!r}, {receipt.model} on {receipt.device}: {receipt.verdict}"]
    lines += [f"  {receipt.verdict.advice}", ""]
    lines += align([list(row) for row in receipt_figures(receipt)])
    mismatches = receipt.unexpected_mismatches
    if mismatches:
        lines += ["", "Not equal bit for bit"]
        lines += align([mismatch_row(mismatch) for mismatch in mismatches[:_SHOWN]])
        lines += [f"  and {len(mismatches) - _SHOWN} more"] if len(mismatches) > _SHOWN else []
    if receipt.regions:
        lines += ["", "How regions were served"]
        lines += align(engine_rows(receipt))
    lines += [f"\nNote: {note}" for note in receipt.notes]
    return "\n".join(lines)


def receipt_figures(receipt: Receipt) -> tuple[tuple[str, str], ...]:
    """The receipt's figures as pairs of name and text."""
    budget = "none" if receipt.budget_bytes is None else format_bytes(receipt.budget_bytes)
    equal_gradients = receipt.compared_gradients - len(receipt.gradient_mismatches)
    equal_buffers = receipt.compared_buffers - len(receipt.buffer_mismatches)
    deterministic = "yes" if receipt.is_deterministic else "no: two unmanaged runs differ"
    rows = [
        *_error_row(receipt),
        ("gradients", f"{equal_gradients} of {receipt.compared_gradients} equal bit for bit"),
        ("buffers", f"{equal_buffers} of {receipt.compared_buffers} equal bit for bit"),
        ("deterministic", deterministic),
        ("losses", describe_losses(receipt)),
        ("budget", budget),
        ("peak", _pair(receipt.predicted_peak_bytes, receipt.measured_peak_bytes)),
        ("unmanaged peak", _pair(receipt.predicted_baseline_peak_bytes, receipt.measured_baseline_peak_bytes)),
    ]
    if receipt.measured_recording_peak_bytes is not None:
        rows.append(("recording step", f"measured {format_bytes(receipt.measured_recording_peak_bytes)}"))
    rows += [
        ("step", _seconds(receipt.predicted_seconds, receipt.measured_seconds, receipt.measured_spread_seconds)),
        (
            "unmanaged step",
            _seconds(
                receipt.predicted_baseline_seconds,
                receipt.measured_baseline_seconds,
                receipt.measured_baseline_spread_seconds,
            ),
        ),
        ("droppable", describe_droppable(receipt)),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(receipt.versions.items()))),
    ]
    return tuple(rows)


def _error_row(receipt: Receipt) -> list[tuple[str, str]]:
    """The gradient's error, for plans with lossy forms."""
    if receipt.is_lossless:
        return []
    measured = "not finite" if receipt.gradient_error is None else f"{receipt.gradient_error:.2%}"
    allowed = "any is allowed" if receipt.max_error is None else f"{receipt.max_error:.2%} is allowed"
    return [("gradient error", f"expected {receipt.predicted_error:.2%}, measured {measured}; {allowed}")]


def describe_losses(receipt: Receipt) -> str:
    """Whether the losses of both runs agree."""
    if receipt.baseline_losses == receipt.plan_losses:
        return f"identical over {len(receipt.plan_losses)} steps"
    first = next(
        (
            index
            for index, (ours, theirs) in enumerate(zip(receipt.plan_losses, receipt.baseline_losses, strict=False))
            if ours != theirs
        ),
        min(len(receipt.plan_losses), len(receipt.baseline_losses)),
    )
    return f"differ from step {first + 1} on"


def describe_droppable(receipt: Receipt) -> str:
    """How much of what managed regions save could be dropped; regions that nobody touched were not looked at."""
    if not any(region.activation_bytes for region in receipt.regions):
        return "not measured: no region is managed by recipes"
    return f"{receipt.droppable_share:.0%} of the managed regions' activations replay bit for bit"


def mismatch_row(mismatch: Mismatch) -> list[str]:
    """One unequal tensor: name, difference, what the unmanaged model itself shows."""
    absolute = _difference(mismatch.max_absolute_difference)
    relative = _difference(mismatch.max_relative_difference)
    spread = _difference(mismatch.baseline_max_absolute_difference)
    return [mismatch.name, f"absolute {absolute}", f"relative {relative}", f"unmanaged spread {spread}"]


def engine_rows(receipt: Receipt) -> list[list[str]]:
    """Region calls grouped by engine and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    dropped: Counter[tuple[str, str]] = Counter()
    for region in receipt.regions:
        key = (str(region.engine), region.reason)
        groups.setdefault(key, []).append(name_call(region.name, region.call))
        dropped[key] += region.dropped_bytes
    return [
        [engine, compress_names(names), _dropped(dropped[engine, reason]), reason or _WHY.get(engine, "")]
        for (engine, reason), names in groups.items()
    ]


def _dropped(bytes_: int) -> str:
    return f"dropped {format_bytes(bytes_)}" if bytes_ else "dropped nothing"


def _difference(difference: float | None) -> str:
    return "not finite" if difference is None else f"{difference:.3g}"


def _pair(predicted_bytes: int, measured_bytes: int | None) -> str:
    text = f"predicted {format_bytes(predicted_bytes)}"
    if measured_bytes is None:
        return f"{text}, not measured"
    text += f", measured {format_bytes(measured_bytes)}"
    return f"{text} ({format_share(predicted_bytes / measured_bytes - 1)})" if measured_bytes else text


def _seconds(predicted_seconds: float, measured_seconds: float | None, spread_seconds: float) -> str:
    text = f"predicted {format_seconds(predicted_seconds)}"
    if measured_seconds is None:
        return f"{text}, not measured"
    return f"{text}, measured {format_seconds(measured_seconds)} ± {format_seconds(spread_seconds)}"
