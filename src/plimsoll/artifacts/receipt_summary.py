"""A receipt in, plain text out: verdict first, then claim beside evidence. No torch, no rich in here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from plimsoll.artifacts.columns import align
from plimsoll.artifacts.confirmation_summary import confirmation_rows
from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.grouping import compress_names, name_call
from plimsoll.artifacts.receipt import OWN, Intermediate, Mismatch, Receipt
from plimsoll.units import format_bytes, format_seconds, format_share

_SHOWN = 5
_WHY = {str(Engine.UNTOUCHED): "the plan keeps everything"}


def summarise_receipt(receipt: Receipt) -> str:
    """The receipt as people read it: verdict, equality, peaks, seconds, engines."""
    lines = [f"Receipt for {describe_subject(receipt)}, {receipt.model} on {receipt.device}: {receipt.verdict}"]
    lines += [f"  {receipt.verdict.advice}", ""]
    lines += align([list(row) for row in receipt_figures(receipt)])
    mismatches = receipt.unexpected_mismatches
    if mismatches:
        lines += ["", "Not equal bit for bit"]
        lines += align([mismatch_row(mismatch) for mismatch in mismatches[:_SHOWN]])
        lines += [f"  and {len(mismatches) - _SHOWN} more"] if len(mismatches) > _SHOWN else []
    if receipt.faults:
        lines += ["", "Saved tensors that came back as something else"]
        lines += [f"  {fault}" for fault in receipt.faults[:_SHOWN]]
        lines += [f"  and {len(receipt.faults) - _SHOWN} more"] if len(receipt.faults) > _SHOWN else []
    if receipt.intermediates:
        lines += ["", "Intermediates"]
        lines += align([intermediate_row(intermediate) for intermediate in receipt.intermediates])
    if receipt.regions:
        lines += ["", "How regions were served"]
        lines += align(engine_rows(receipt))
    lines += [f"\nNote: {note}" for note in receipt.notes]
    return "\n".join(lines)


def describe_subject(receipt: Receipt) -> str:
    """What was held against the unmanaged step."""
    return receipt.method if receipt.strategy == OWN else f"plan {receipt.strategy!r}"


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
        *_curve_row(receipt),
        *_tensors_row(receipt),
        *_slope_row(receipt),
        *([] if receipt.strategy == OWN else [("budget", budget)]),
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
        *([] if receipt.confirmation is None else confirmation_rows(receipt.confirmation)),
        *([] if receipt.strategy == OWN else [("droppable", describe_droppable(receipt))]),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(receipt.versions.items()))),
    ]
    return tuple(rows)


def _error_row(receipt: Receipt) -> list[tuple[str, str]]:
    """The gradient's error, where it is not bound to be nothing, or is more than that."""
    measured = "not finite" if receipt.gradient_error is None else f"{receipt.gradient_error:.2%}"
    if receipt.is_lossless and receipt.rounding_tolerance:
        return [("gradient error", f"measured {measured}; {receipt.rounding_tolerance:.2%} is rounding")]
    if receipt.is_lossless:
        return [("gradient error", f"measured {measured}")] if receipt.gradient_error else []
    allowed = "any is allowed" if receipt.max_error is None else f"{receipt.max_error:.2%} is allowed"
    return [("gradient error", f"expected {receipt.predicted_error:.2%}, measured {measured}; {allowed}")]


def describe_losses(receipt: Receipt) -> str:
    """Whether the losses of both runs agree."""
    return _agreement(receipt.baseline_losses, receipt.plan_losses)


def _agreement(baseline: Sequence[float | None], plan: Sequence[float | None]) -> str:
    if baseline == plan:
        return f"identical over {len(plan)} steps"
    pairs = enumerate(zip(plan, baseline, strict=False))
    first = next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(plan), len(baseline)))
    return f"differ from step {first + 1} on"


def _curve_row(receipt: Receipt) -> list[tuple[str, str]]:
    if not receipt.plan_curve:
        return []
    last = [f"{curve[-1]:.6g}" if curve[-1] is not None else "not finite" for curve in _curves(receipt)]
    agreement = _agreement(receipt.baseline_curve, receipt.plan_curve)
    return [("loss curve", f"{agreement}; last loss {last[1]}, unmanaged {last[0]}")]


def _curves(receipt: Receipt) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    return receipt.baseline_curve, receipt.plan_curve


def _tensors_row(receipt: Receipt) -> list[tuple[str, str]]:
    """Saved tensors that were compared bit for bit with what came back."""
    if not receipt.compared_tensors:
        return []
    return [("saved tensors", f"{receipt.compared_tensors} compared with what came back, {len(receipt.faults)} faults")]


def _slope_row(receipt: Receipt) -> list[tuple[str, str]]:
    """The gradient against the loss itself."""
    slope = receipt.slope
    if slope is None:
        return []
    if not slope.is_conclusive:
        return [("slope", "the loss is too rough here to judge the gradient by it")]
    word = "is not the loss's" if slope.disagrees else "agrees with the loss"
    ratio = slope.measured / slope.expected
    return [
        (
            "slope",
            f"the gradient {word}: measured / expected slope {ratio:.4f} ± {slope.measured_error / slope.expected:.1g}",
        )
    ]


def intermediate_row(intermediate: Intermediate) -> list[str]:
    """One named intermediate: which, and how far apart."""
    name = name_call(intermediate.module, intermediate.call)
    what = f"gradient of {name}" if intermediate.is_gradient else name
    if intermediate.is_bit_equal:
        return [what, "equal bit for bit", ""]
    absolute = _difference(intermediate.max_absolute_difference)
    return [what, f"absolute {absolute}", f"relative {_difference(intermediate.max_relative_difference)}"]


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


def _pair(predicted_bytes: int | None, measured_bytes: int | None) -> str:
    if predicted_bytes is None:
        return "not measured" if measured_bytes is None else f"measured {format_bytes(measured_bytes)}"
    text = f"predicted {format_bytes(predicted_bytes)}"
    if measured_bytes is None:
        return f"{text}, not measured"
    text += f", measured {format_bytes(measured_bytes)}"
    return f"{text} ({format_share(predicted_bytes / measured_bytes - 1)})" if measured_bytes else text


def _seconds(predicted_seconds: float | None, measured_seconds: float | None, spread_seconds: float) -> str:
    if predicted_seconds is None:
        if measured_seconds is None:
            return "not measured"
        return f"measured {format_seconds(measured_seconds)} ± {format_seconds(spread_seconds)}"
    text = f"predicted {format_seconds(predicted_seconds)}"
    if measured_seconds is None:
        return f"{text}, not measured"
    return f"{text}, measured {format_seconds(measured_seconds)} ± {format_seconds(spread_seconds)}"
