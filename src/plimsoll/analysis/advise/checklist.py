"""Evidence in, the checklist out: eight items, each passed only by something that was measured or counted on this step."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll.analysis.advise.attention import FUSED, find_attention
from plimsoll.analysis.advise.evidence import Evidence, name_receipt
from plimsoll.artifacts.advice import CheckItem, CheckOutcome
from plimsoll.artifacts.costs import CostSource
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.receipt import Verdict as ReceiptVerdict
from plimsoll.artifacts.verdict import Ruling
from plimsoll.units import format_bytes, format_seconds, format_share

_ENOUGH_LOSSES = 100
"""Steps with the optimizer that make a loss curve; fewer show the first differences at most."""
_NO_RECEIPT = "no receipt was given"
_SAYS_NOTHING = (Ruling.UNDECIDED, Ruling.BASELINE_DIVERGED)
"""Rulings that neither clear the plan nor blame it."""


def check_all(evidence: Evidence) -> tuple[CheckItem, ...]:
    """The items in the order in which people go through them."""
    return tuple(check(evidence) for check in _CHECKS)


def _layers(evidence: Evidence) -> CheckItem:
    layers = evidence.layers
    largest = max(layers, key=lambda layer: layer.saved_bytes)
    total = sum(layer.saved_bytes for layer in layers)
    name = largest.name or "the whole model as one layer"
    found = f"{len(layers)} layers save {format_bytes(total)}, the most in {name}: {format_bytes(largest.saved_bytes)}"
    if evidence.trace.is_fake:
        return CheckItem(
            name="activations-by-layer",
            title="activations measured by layer",
            outcome=CheckOutcome.NOT_CHECKED,
            evidence=f"counted with fake tensors, not measured: {found}",
            next=f"run plimsoll advise {evidence.target} on the device itself",
        )
    return CheckItem(
        name="activations-by-layer",
        title="activations measured by layer",
        outcome=CheckOutcome.PASS,
        evidence=f"{found} (traced on {evidence.trace.device})",
    )


def _parameters(evidence: Evidence) -> CheckItem:
    sizes = {part.name: part.bytes for part in evidence.bottleneck.parts}
    optimizer = sizes.get("optimizer state", 0)
    state = f"{format_bytes(optimizer)} optimizer state" if optimizer else "no optimizer state (none was counted)"
    return CheckItem(
        name="parameters-apart",
        title="parameters counted apart from activations",
        outcome=CheckOutcome.PASS,
        evidence=f"at the peak {format_bytes(sizes['parameters'])} parameters, {format_bytes(sizes['gradients'])} gradients, "
        f"{state}",
    )


def _recompute(evidence: Evidence) -> CheckItem:
    receipt = evidence.receipt
    name, title = "recompute-profiled", "recompute profiled"
    if receipt is not None and receipt.measured_seconds and receipt.measured_baseline_seconds:
        overhead = receipt.measured_seconds / receipt.measured_baseline_seconds - 1
        predicted = ""
        if receipt.predicted_seconds is not None and receipt.predicted_baseline_seconds:
            share = receipt.predicted_seconds / receipt.predicted_baseline_seconds - 1
            predicted = f", predicted {format_share(share)}"
        return CheckItem(
            name=name,
            title=title,
            outcome=CheckOutcome.PASS,
            evidence=f"{name_receipt(receipt)}: measured {format_share(overhead)}{predicted}",
        )
    is_measured = evidence.costs.source is CostSource.MEASURED
    ops = "op seconds are measured" if is_measured else "op seconds are a roofline's"
    return CheckItem(
        name=name,
        title=title,
        outcome=CheckOutcome.NOT_CHECKED,
        evidence=f"{ops}, but {_NO_RECEIPT} that shows a managed step's time",
        next=evidence.verify_command,
    )


def _granularity(evidence: Evidence) -> CheckItem:
    count = len(evidence.made)
    chosen = next((candidate.name for candidate in evidence.candidates if candidate.is_chosen), None)
    name, title = "granularity-chosen", "granularity chosen"
    compared = f"{count} plans were compared: of layers, of modules, of single values"
    if chosen is None:
        return CheckItem(
            name=name,
            title=title,
            outcome=CheckOutcome.FAIL,
            evidence=f"{compared}; none of them fits",
            next="a larger budget, or a smaller micro-batch",
        )
    return CheckItem(name=name, title=title, outcome=CheckOutcome.PASS, evidence=f"{compared}; chosen: {chosen}")


def _determinism(evidence: Evidence) -> CheckItem:
    receipt = evidence.receipt
    name, title = "determinism-tested", "determinism tested"
    if receipt is None:
        return CheckItem(
            name=name, title=title, outcome=CheckOutcome.NOT_CHECKED, evidence=_NO_RECEIPT, next=evidence.verify_command
        )
    if receipt.is_deterministic:
        return CheckItem(
            name=name,
            title=title,
            outcome=CheckOutcome.PASS,
            evidence=f"two unmanaged runs gave the same bits ({receipt.compared_gradients} gradients)",
        )
    return CheckItem(
        name=name,
        title=title,
        outcome=CheckOutcome.FAIL,
        evidence="two unmanaged runs of the same step differ",
        next="torch.use_deterministic_algorithms(True), then verify again",
    )


def _attention(evidence: Evidence) -> CheckItem:
    found = find_attention(evidence.trace)
    name, title = "attention-backward", "attention backward checked"
    if found.matrices:
        return CheckItem(
            name=name,
            title=title,
            outcome=CheckOutcome.FAIL,
            evidence=f"{found.matrices} attention matrices are held for backward, {format_bytes(found.matrix_bytes)} "
            f"({found.example}); {found.fused_calls} calls are fused",
            next="attn_implementation='sdpa' in transformers, or scaled_dot_product_attention; its CPU kernel takes no "
            "dropout, CUDA's do (see --device-profile)",
        )
    if not found.fused_calls:
        return CheckItem(
            name=name,
            title=title,
            outcome=CheckOutcome.PASS,
            evidence="the layers run no fused attention and hold no attention matrix",
        )
    again = _fused_twice(evidence)
    repeated = f"; the plan runs {again} of them once more before that" if again else ""
    return CheckItem(
        name=name,
        title=title,
        outcome=CheckOutcome.PASS,
        evidence=f"{found.fused_calls} fused calls make their matrix again in backward themselves; none is held{repeated}",
        next=f'to leave them be: --override "*{FUSED}*=keep"' if again else "",
    )


def _fused_twice(evidence: Evidence) -> int:
    """Fused attention outputs that the recommended plan recomputes."""
    plan = evidence.chosen
    if plan is None:
        return 0
    return sum(
        decision.decision is Decision.RECOMPUTE and FUSED in decision.value and decision.value.endswith(".0")
        for region in plan.regions
        for decision in region.decisions
    )


def _throughput(evidence: Evidence) -> CheckItem:
    name, title = "throughput", f"{evidence.items_name}/s measured, not only batch size"
    verdict, receipt = evidence.verdict, evidence.receipt
    if verdict is not None and verdict.baseline.items_per_second and verdict.plan.items_per_second:
        before, after = verdict.baseline.items_per_second, verdict.plan.items_per_second
        return CheckItem(
            name=name,
            title=title,
            outcome=CheckOutcome.PASS,
            evidence=f"probe: {after:,.0f} {verdict.items}/s with strategy {verdict.strategy}, {before:,.0f} without",
        )
    if receipt is not None and receipt.measured_seconds and receipt.measured_baseline_seconds:
        before, after = (
            evidence.items / seconds for seconds in (receipt.measured_baseline_seconds, receipt.measured_seconds)
        )
        return CheckItem(
            name=name,
            title=title,
            outcome=CheckOutcome.PASS,
            evidence=f"receipt: {after:,.0f} {evidence.items_name}/s with {name_receipt(receipt)}, {before:,.0f} without",
        )
    step = evidence.made[0].plan.baseline_seconds
    return CheckItem(
        name=name,
        title=title,
        outcome=CheckOutcome.NOT_CHECKED,
        evidence=f"only predicted: {evidence.items} {evidence.items_name} in {format_seconds(step)} without a plan",
        next=evidence.verify_command,
    )


def _curves(evidence: Evidence) -> CheckItem:
    name, title = "loss-curves", "loss curves compared"
    verdict, receipt = evidence.verdict, evidence.receipt
    if verdict is not None:
        passes = verdict.ruling.is_pass
        failed = CheckOutcome.NOT_CHECKED if verdict.ruling in _SAYS_NOTHING else CheckOutcome.FAIL
        return CheckItem(
            name=name,
            title=title,
            outcome=CheckOutcome.PASS if passes else failed,
            evidence=f"probe of strategy {verdict.strategy} over {verdict.steps} steps: {verdict.ruling} ({verdict.reason})",
            next="" if passes else verdict.ruling.advice,
        )
    curve = () if receipt is None else receipt.plan_curve
    if receipt is not None and len(curve) >= _ENOUGH_LOSSES:
        passes = receipt.verdict.is_pass
        same = "equal at every step" if curve == receipt.baseline_curve else f"verdict {receipt.verdict}"
        return CheckItem(
            name=name,
            title=title,
            outcome=CheckOutcome.PASS if passes else CheckOutcome.FAIL,
            evidence=f"receipt: {len(curve)} steps with the optimizer, {same}",
            next="" if passes else receipt.verdict.advice,
        )
    if receipt is None:
        found = "no receipt and no verdict was given"
    elif receipt.verdict is ReceiptVerdict.LOSSES_DIFFER:
        return CheckItem(
            name=name,
            title=title,
            outcome=CheckOutcome.FAIL,
            evidence="receipt: the losses already differ at the first steps",
            next=receipt.verdict.advice,
        )
    else:
        steps = len(curve) or len(receipt.plan_losses)
        kind = "steps with the optimizer" if curve else "losses from the same weights"
        found = f"the receipt has {steps} {kind}: too few to call a curve"
    return CheckItem(
        name=name, title=title, outcome=CheckOutcome.NOT_CHECKED, evidence=found, next=evidence.curve_command
    )


_CHECKS: tuple[Callable[[Evidence], CheckItem], ...] = (
    _layers,
    _parameters,
    _recompute,
    _granularity,
    _determinism,
    _attention,
    _throughput,
    _curves,
)
