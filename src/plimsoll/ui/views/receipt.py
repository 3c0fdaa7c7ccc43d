"""Makes the document (the content to show) of a receipt, the evidence for a plan: the verdict, each claim with its evidence,
the differences, and how each region (a module that the plan decides about) ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.naming import compress_names, name_call
from plimsoll.artifacts.receipt import (
    MOST_ROUNDING,
    OWN,
    Claim,
    Confirmation,
    Intermediate,
    Mismatch,
    Receipt,
    TileRounding,
)
from plimsoll.ui.document import (
    CurvesChart,
    Document,
    Element,
    Fold,
    NamedFigures,
    Section,
    Table,
    Tone,
    format_budget,
    subject_of,
)
from plimsoll.units import format_bytes, format_seconds, format_share

_SHOWN = 10


def view_receipt(receipt: Receipt) -> Document:
    """Make the document (the content to show) of a receipt, the evidence for a plan: the verdict, the equality of gradients,
    peaks, seconds, and how each region ran.
    """
    subject = receipt.method if receipt.strategy == OWN else f"plan {receipt.strategy!r}"
    return Document(
        source="Receipt",
        subject=f"for {subject}, {receipt.model} on {receipt.device}",
        word=receipt.verdict,
        tone=Tone.GOOD if receipt.verdict.is_pass else Tone.BAD,
        about=subject_of(receipt, label=f"{receipt.strategy}, {format_budget(receipt.budget_bytes, 'no budget')}"),
        lines=[receipt.verdict.advice],
        statement=_statement(receipt),
        sections=[Section("Measured against the unmanaged step", _evidence(receipt))],
        notes=receipt.notes,
    )


def _statement(receipt: Receipt) -> str:
    text = f"{receipt.verdict.advice} {receipt.compared_gradients} gradients and {receipt.compared_buffers} buffers compared."
    if not receipt.is_lossless:
        text += f" The gradient's measured error is {_error(receipt)}."
    if receipt.measured_peak_bytes is not None:
        text += f" The measured peak is {format_bytes(receipt.measured_peak_bytes)}"
        predicted_bytes = receipt.predicted_peak_bytes
        text += "." if predicted_bytes is None else f"; the prediction was {format_bytes(predicted_bytes)}."
    return text


def _evidence(receipt: Receipt) -> list[Element]:
    elements: list[Element] = [NamedFigures(_figures(receipt))]
    unexpected = receipt.unexpected_mismatches
    expected = [m for m in (*receipt.gradient_mismatches, *receipt.buffer_mismatches) if m not in unexpected]
    if unexpected:
        elements.append(_mismatches(unexpected, "Not equal bit for bit"))
    if expected:
        elements.append(Fold("Not equal bit for bit, as allowed", [_mismatches(expected, "")], is_detail=True))
    if receipt.faults:
        title = "Saved tensors that backward got with other contents"
        elements.append(Table(title=title, rows=[(str(fault),) for fault in receipt.faults], most_rows=_SHOWN))
    if receipt.intermediates:
        elements.append(Table(title="Intermediates", rows=[_intermediate(each) for each in receipt.intermediates]))
    if receipt.plan_curve:
        elements.append(CurvesChart("loss", receipt.baseline_curve, receipt.plan_curve))
    elif len(receipt.baseline_losses) > 1:
        elements.append(CurvesChart("loss", receipt.baseline_losses, receipt.plan_losses))
    if receipt.regions:
        header = ("engine", "regions", "memory", "why")
        elements.append(Table(title="How regions were handled", header=header, rows=_engines(receipt)))
    return elements


def _figures(receipt: Receipt) -> list[tuple[str, str]]:
    """Return what the plan claims and what was measured, as pairs of name and text."""
    equal_gradients = receipt.compared_gradients - len(receipt.gradient_mismatches)
    equal_buffers = receipt.compared_buffers - len(receipt.buffer_mismatches)
    is_own = receipt.strategy == OWN
    rows = [
        *_equality(receipt),
        *([] if receipt.tile_rounding is None else [("tiles", _tile_rounding(receipt.tile_rounding))]),
        (
            "gradients",
            f"{equal_gradients} of {receipt.compared_gradients} equal bit for bit"
            + (" to the step in tiles without recomputation" if receipt.tile_rounding else ""),
        ),
        ("buffers", f"{equal_buffers} of {receipt.compared_buffers} equal bit for bit"),
        ("deterministic", "yes" if receipt.is_deterministic else "no: two unmanaged runs differ"),
        ("losses", _agreement(receipt.baseline_losses, receipt.plan_losses)),
        *_further_evidence(receipt),
    ]
    if not is_own:
        rows.append(("budget", format_budget(receipt.budget_bytes)))
    rows += [
        ("peak", _peak(receipt.predicted_peak_bytes, receipt.measured_peak_bytes)),
        ("unmanaged peak", _peak(receipt.predicted_baseline_peak_bytes, receipt.measured_baseline_peak_bytes)),
    ]
    if receipt.measured_recording_peak_bytes is not None:
        rows.append(("first step", f"measured {format_bytes(receipt.measured_recording_peak_bytes)}"))
    unmanaged = (receipt.measured_baseline_seconds, receipt.measured_baseline_spread_seconds)
    rows += [
        ("step", _seconds(receipt.predicted_seconds, receipt.measured_seconds, receipt.measured_spread_seconds)),
        ("unmanaged step", _seconds(receipt.predicted_baseline_seconds, *unmanaged)),
        *([] if receipt.confirmation is None else _confirmation(receipt.confirmation)),
        *([] if is_own else [("recomputable", _recomputable(receipt))]),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(receipt.versions.items()))),
    ]
    return rows


def _error(receipt: Receipt) -> str:
    return "not finite" if receipt.gradient_error is None else f"{receipt.gradient_error:.2%}"


def _equality(receipt: Receipt) -> list[tuple[str, str]]:
    """Return a list with one row, a pair of name and text, about the error of the gradient.

    The list is empty if the plan is lossless, was not compiled, and shows no error.
    """
    if receipt.is_lossless and receipt.rounding_tolerance:
        text = f"measured {_error(receipt)}; rounding explains up to {receipt.rounding_tolerance:.2%}"
    elif receipt.is_lossless:
        text = f"measured {_error(receipt)}" if receipt.gradient_error else ""
    else:
        allowed = "any error is allowed" if receipt.max_error is None else f"{receipt.max_error:.2%} is allowed"
        text = f"expected {receipt.predicted_error:.2%}, measured {_error(receipt)}; {allowed}"
    return [("gradient error", text)] if text else []


def _tile_rounding(rounding: TileRounding) -> str:
    """Return a text that says how far running modules in tiles moves the gradient, and how large the rounding error of the
    plain step is.
    """
    dropout = ", without dropout" if rounding.is_without_dropout else ""
    if rounding.obstacle:
        return (
            f"gradient moved by {rounding.difference:.1e}{dropout}; not compared with float64, because the model does not run "
            f"in it: {rounding.obstacle}"
        )
    return (
        f"gradient error against float64 {rounding.tiled_error:.2e}, without tiles {rounding.plain_error:.2e}{dropout}; "
        f"largest ratio of one tensor {rounding.worst_ratio:.2f} ({rounding.worst_tensor}), {MOST_ROUNDING} is allowed"
    )


def _agreement(baseline: Sequence[float | None], plan: Sequence[float | None]) -> str:
    """Return a text that says whether the losses with and without the plan agree."""
    if baseline == plan:
        return f"identical over {len(plan)} steps"
    pairs = enumerate(zip(plan, baseline, strict=False))
    first = next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(plan), len(baseline)))
    return f"differ from step {first + 1} on"


def _further_evidence(receipt: Receipt) -> list[tuple[str, str]]:
    """Return rows for the longer loss curve, the comparison of saved tensors, and the check of the gradient against the
    loss.
    """
    rows = []
    if receipt.plan_curve:
        theirs, ours = (
            f"{curve[-1]:.6g}" if curve[-1] is not None else "not finite"
            for curve in (receipt.baseline_curve, receipt.plan_curve)
        )
        agreement = _agreement(receipt.baseline_curve, receipt.plan_curve)
        rows.append(("loss curve", f"{agreement}; last loss {ours}, unmanaged {theirs}"))
    if receipt.compared_tensors:
        text = f"{receipt.compared_tensors} compared with what backward got, {len(receipt.faults)} faults"
        rows.append(("saved tensors", text))
    slope = receipt.slope
    if slope is not None and slope.is_conclusive:
        word = "does not agree with the loss" if slope.disagrees else "agrees with the loss"
        ratio, error = slope.measured / slope.expected, slope.measured_error / slope.expected
        rows.append(("slope", f"the gradient {word}: measured / expected slope {ratio:.4f} ± {error:.1g}"))
    elif slope is not None:
        rows.append(("slope", "the loss is not smooth enough here to check the gradient against it"))
    return rows


def _confirmation(confirmation: Confirmation) -> list[tuple[str, str]]:
    """Return rows about a plan that was made without the device: whether its predictions held on the device, and the revised
    plan.
    """
    rows = [
        ("planned for", f"{confirmation.cost_device}, with costs from a roofline model"),
        ("on the device", _deviation(confirmation)),
    ]
    if confirmation.revised is not None:
        rows += [
            ("given plan", _claim(confirmation.given)),
            ("revised plan", f"{_claim(confirmation.revised)}: {confirmation.revised_verdict}"),
        ]
    elif confirmation.obstacle:
        rows.append(("revised plan", f"none: {confirmation.obstacle}"))
    return rows


def _claim(claim: Claim) -> str:
    """Return one line with the predicted and measured peak and seconds."""
    return (
        f"peak predicted {format_bytes(claim.predicted_peak_bytes)}, measured {format_bytes(claim.measured_peak_bytes)}; "
        f"forward and backward predicted {format_seconds(claim.predicted_seconds)}, measured "
        f"{format_seconds(claim.measured_seconds)} ± {format_seconds(claim.measured_spread_seconds)}"
    )


def _deviation(confirmation: Confirmation) -> str:
    """Return a text that says whether the predicted peak and time are wrong, and by how much."""
    given, found = confirmation.given, []
    if confirmation.budget_bytes is not None and confirmation.is_over_budget:
        over_bytes = given.measured_peak_bytes - confirmation.budget_bytes
        found.append(f"the peak is {format_bytes(over_bytes)} above the budget")
    elif confirmation.is_peak_off:
        found.append(f"the predicted peak is off by {format_share(given.peak_error)}")
    if confirmation.is_time_off:
        found.append(f"the predicted time is off by {format_share(given.seconds_error)}")
    limits = f"{confirmation.peak_tolerance:.0%} of the peak and {confirmation.seconds_tolerance:.0%} of the time are allowed"
    if not found:
        errors = f"the peak is off by {format_share(given.peak_error)}, the time by {format_share(given.seconds_error)}"
        return f"confirmed: {errors} ({limits})"
    return f"{' and '.join(found)} ({limits})"


def _intermediate(intermediate: Intermediate) -> tuple[str, str, str]:
    """Return the cells for one compared intermediate (a module's output or its gradient): its name and its difference."""
    name = name_call(intermediate.module, intermediate.call)
    if intermediate.output:
        name = f"output {intermediate.output} of {name}"
    what = f"gradient of {name}" if intermediate.is_gradient else name
    if intermediate.is_bit_equal:
        return what, "equal bit for bit", ""
    absolute = _difference(intermediate.max_absolute_difference)
    return what, f"absolute {absolute}", f"relative {_difference(intermediate.max_relative_difference)}"


def _recomputable(receipt: Receipt) -> str:
    """Return a text about how much a plan could save: the share of activations in regions that backward could recompute.

    Regions that keep everything under the plan were not measured.
    """
    if not any(region.activation_bytes for region in receipt.regions):
        return "not measured: the plan does not manage a region by recipes"
    return f"{receipt.droppable_share:.0%} of the managed regions' activations can be recomputed bit for bit"


def _mismatches(mismatches: Sequence[Mismatch], title: str) -> Table:
    """Make a table of the tensors that differ between the steps with and without the plan: name, difference, and difference
    between two runs without a plan.
    """
    rows = [
        (
            mismatch.name,
            f"absolute {_difference(mismatch.max_absolute_difference)}",
            f"relative {_difference(mismatch.max_relative_difference)}",
            f"unmanaged spread {_difference(mismatch.baseline_max_absolute_difference)}",
        )
        for mismatch in mismatches
    ]
    return Table(title=title, rows=rows, most_rows=_SHOWN)


def _engines(receipt: Receipt) -> list[tuple[str, ...]]:
    """Return the table rows that say how regions ran: one row for each way and reason, with the regions' names and the bytes
    that they dropped.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    dropped: Counter[tuple[str, str]] = Counter()
    for region in receipt.regions:
        why = "the plan keeps everything" if region.engine is Engine.UNTOUCHED else ""
        key = (region.how, region.reason or why)
        groups.setdefault(key, []).append(name_call(region.name, region.call))
        dropped[key] += region.dropped_bytes
    return [
        (key[0], compress_names(names), f"dropped {format_bytes(dropped[key]) if dropped[key] else 'nothing'}", key[1])
        for key, names in groups.items()
    ]


def _difference(difference: float | None) -> str:
    return "not finite" if difference is None else f"{difference:.3g}"


def _peak(predicted_bytes: int | None, measured_bytes: int | None) -> str:
    predicted = None if predicted_bytes is None else format_bytes(predicted_bytes)
    text = _claimed(predicted, None if measured_bytes is None else format_bytes(measured_bytes))
    if predicted_bytes is not None and measured_bytes:
        text += f" ({format_share(predicted_bytes / measured_bytes - 1)})"
    return text


def _seconds(predicted_seconds: float | None, measured_seconds: float | None, spread_seconds: float) -> str:
    predicted = None if predicted_seconds is None else format_seconds(predicted_seconds)
    measured = (
        f"{format_seconds(measured_seconds)} ± {format_seconds(spread_seconds)}"
        if measured_seconds is not None
        else None
    )
    return _claimed(predicted, measured)


def _claimed(predicted: str | None, measured: str | None) -> str:
    """Return a text such as ``predicted 60.0 MiB, measured 61.0 MiB``."""
    found = "not measured" if measured is None else f"measured {measured}"
    return found if predicted is None else f"predicted {predicted}, {found}"
