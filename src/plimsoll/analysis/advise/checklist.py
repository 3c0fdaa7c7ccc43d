"""The checklist, whose items pass only on measurements or counts of this step, and the failure modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plimsoll.analysis.advise.choosing import Made
from plimsoll.analysis.advise.memory import FUSED, find_attention
from plimsoll.artifacts.advice import Bottleneck, Candidate, CheckItem, CheckOutcome, FailureMode, FailureSign, LayerUse
from plimsoll.artifacts.costs import Costs, CostSource
from plimsoll.artifacts.decision import Decision, Engine
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import OWN, Receipt, ReceiptVerdict
from plimsoll.artifacts.trace import Trace
from plimsoll.artifacts.verdict import Ruling, Verdict
from plimsoll.units import format_bytes, format_seconds, format_share

_ENOUGH_LOSSES = 100
"""Steps with the optimizer that a loss curve needs; fewer steps can only show early differences."""
_NO_RECEIPT = "no receipt was given"
_SAYS_NOTHING = (Ruling.UNDECIDED, Ruling.BASELINE_DIVERGED)
"""Rulings that neither clear nor blame the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvidence:
    """The evidence for the checklist and the failure modes: the trace that was just made, and the user's receipt and verdict.

    ``items`` is the number of tokens or examples in one batch, and ``items_name`` says which. ``target`` is the step's name in
    commands. ``receipt`` and ``verdict`` belong to this model and step, or are ``None``.
    """

    trace: Trace
    costs: Costs
    bottleneck: Bottleneck
    layers: Sequence[LayerUse]
    made: Sequence[Made]
    candidates: Sequence[Candidate]
    receipt: Receipt | None
    verdict: Verdict | None
    items: int
    items_name: str
    target: str

    @property
    def chosen(self) -> Plan | None:
        """The recommended plan, or ``None``."""
        pairs = zip(self.made, self.candidates, strict=True)
        return next((entry.plan for entry, candidate in pairs if candidate.is_chosen), None)

    @property
    def manages_nothing(self) -> bool:
        """Whether the recommended plan keeps everything, or no plan is recommended."""
        plan = self.chosen
        return plan is None or all(region.is_untouched for region in plan.regions)

    @property
    def receipt_name(self) -> str:
        """The receipt's plan in words: ``strategy auto at 300.0 MiB``."""
        assert self.receipt is not None
        if self.receipt.strategy == OWN:
            return "the model's own method"
        budget_bytes = self.receipt.budget_bytes
        budget = "" if budget_bytes is None else f" at {format_bytes(budget_bytes)}"
        return f"strategy {self.receipt.strategy}{budget}"

    @property
    def receipt_seconds(self) -> tuple[float, float] | None:
        """Seconds of the step without and with the plan; ``None`` unless the receipt measured both."""
        receipt = self.receipt
        if receipt is None or not receipt.measured_baseline_seconds or not receipt.measured_seconds:
            return None
        return receipt.measured_baseline_seconds, receipt.measured_seconds

    @property
    def verify_command(self) -> str:
        """The command that writes the missing receipt, for the recommended plan once that is saved as ``plan.json``."""
        again = f"plimsoll advise {self.target} --receipt receipt.json"
        return f"plimsoll verify {self.target}{self._with_plan} -o receipt.json, then {again}"

    @property
    def curve_command(self) -> str:
        """The command that writes the missing loss curves."""
        return (
            f"plimsoll verify {self.target}{self._with_plan} --curve 100 -o receipt.json, or for lossy plans "
            f"plimsoll probe {self.target} --steps 1000{self._with_plan} -o verdict.json, "
            f"then plimsoll advise {self.target} with what they wrote"
        )

    @property
    def _with_plan(self) -> str:
        return "" if self.manages_nothing else " --plan plan.json"


_Judged = tuple[CheckOutcome, str, str]
"""An item's outcome, its evidence, and what to do next."""


def check_all(evidence: StepEvidence) -> tuple[CheckItem, ...]:
    """Judge all items, in the order of the checklist."""
    return tuple(
        CheckItem(name=name, title=title.format(items=evidence.items_name), outcome=outcome, evidence=found, next=next_)
        for name, title, check in _CHECKS
        for outcome, found, next_ in [check(evidence)]
    )


def _layers(evidence: StepEvidence) -> _Judged:
    layers = evidence.layers
    largest = max(layers, key=lambda layer: layer.saved_bytes)
    total = sum(layer.saved_bytes for layer in layers)
    name = largest.name or "the whole model as one layer"
    found = f"{len(layers)} layers save {format_bytes(total)}, the most in {name}: {format_bytes(largest.saved_bytes)}"
    if evidence.trace.is_fake:
        counted = f"counted with fake tensors, not measured: {found}"
        return CheckOutcome.NOT_CHECKED, counted, f"run plimsoll advise {evidence.target} on the device itself"
    return CheckOutcome.PASS, f"{found} (traced on {evidence.trace.device})", ""


def _parameters(evidence: StepEvidence) -> _Judged:
    sizes = {part.name: part.bytes for part in evidence.bottleneck.parts}
    optimizer = sizes.get("optimizer state", 0)
    state = f"{format_bytes(optimizer)} optimizer state" if optimizer else "no optimizer state (none was counted)"
    kinds = f"{format_bytes(sizes['parameters'])} parameters, {format_bytes(sizes['gradients'])} gradients, {state}"
    return CheckOutcome.PASS, f"at the peak {kinds}", ""


def _recompute(evidence: StepEvidence) -> _Judged:
    receipt, seconds = evidence.receipt, evidence.receipt_seconds
    if receipt is not None and seconds is not None:
        predicted = ""
        if receipt.predicted_seconds is not None and receipt.predicted_baseline_seconds:
            share = receipt.predicted_seconds / receipt.predicted_baseline_seconds - 1
            predicted = f", predicted {format_share(share)}"
        measured = format_share(seconds[1] / seconds[0] - 1)
        return CheckOutcome.PASS, f"{evidence.receipt_name}: measured {measured}{predicted}", ""
    is_measured = evidence.costs.source is CostSource.MEASURED
    ops = "op seconds are measured" if is_measured else "op seconds are a roofline's"
    found = f"{ops}, but {_NO_RECEIPT} that shows a managed step's time"
    return CheckOutcome.NOT_CHECKED, found, evidence.verify_command


def _granularity(evidence: StepEvidence) -> _Judged:
    chosen = next((candidate.name for candidate in evidence.candidates if candidate.is_chosen), None)
    compared = f"{len(evidence.made)} plans were compared: of layers, of modules, of single values"
    if chosen is None:
        return CheckOutcome.FAIL, f"{compared}; none of them fits", "a larger budget, or a smaller micro-batch"
    return CheckOutcome.PASS, f"{compared}; chosen: {chosen}", ""


def _determinism(evidence: StepEvidence) -> _Judged:
    receipt = evidence.receipt
    if receipt is None:
        return CheckOutcome.NOT_CHECKED, _NO_RECEIPT, evidence.verify_command
    if receipt.is_deterministic:
        found = f"two unmanaged runs gave the same bits ({receipt.compared_gradients} gradients)"
        return CheckOutcome.PASS, found, ""
    next_ = "torch.use_deterministic_algorithms(True), then verify again"
    return CheckOutcome.FAIL, "two unmanaged runs of the same step differ", next_


def _attention(evidence: StepEvidence) -> _Judged:
    found = find_attention(evidence.trace)
    if found.matrices:
        return (
            CheckOutcome.FAIL,
            f"{found.matrices} attention matrices are held for backward, {format_bytes(found.matrix_bytes)} "
            f"({found.example}); {found.fused_calls} calls are fused",
            "attn_implementation='sdpa' in transformers, or scaled_dot_product_attention; its CPU kernel takes no "
            "dropout, CUDA's do (see --device-profile)",
        )
    if not found.fused_calls:
        return CheckOutcome.PASS, "the layers run no fused attention and hold no attention matrix", ""
    again = _fused_twice(evidence.chosen)
    repeated = f"; the plan runs {again} of them once more before that" if again else ""
    return (
        CheckOutcome.PASS,
        f"{found.fused_calls} fused calls make their matrix again in backward themselves; none is held{repeated}",
        f'to leave them be: --override "*{FUSED}*=keep"' if again else "",
    )


def _fused_twice(plan: Plan | None) -> int:
    """Count the fused attention outputs that a plan recomputes."""
    decisions = () if plan is None else (decision for region in plan.regions for decision in region.decisions)
    return sum(
        each.decision is Decision.RECOMPUTE and FUSED in each.value and each.value.endswith(".0") for each in decisions
    )


def _throughput(evidence: StepEvidence) -> _Judged:
    verdict, seconds = evidence.verdict, evidence.receipt_seconds
    if verdict is not None and verdict.baseline.items_per_second and verdict.plan.items_per_second:
        before, after = verdict.baseline.items_per_second, verdict.plan.items_per_second
        found = f"probe: {after:,.0f} {verdict.items}/s with strategy {verdict.strategy}, {before:,.0f} without"
        return CheckOutcome.PASS, found, ""
    if seconds is not None:
        before, after = (evidence.items / each for each in seconds)
        found = f"receipt: {after:,.0f} {evidence.items_name}/s with {evidence.receipt_name}, {before:,.0f} without"
        return CheckOutcome.PASS, found, ""
    step = format_seconds(evidence.made[0].plan.baseline_seconds)
    found = f"only predicted: {evidence.items} {evidence.items_name} in {step} without a plan"
    return CheckOutcome.NOT_CHECKED, found, evidence.verify_command


def _curves(evidence: StepEvidence) -> _Judged:
    verdict, receipt = evidence.verdict, evidence.receipt
    if verdict is not None:
        found = f"probe of strategy {verdict.strategy} over {verdict.steps} steps: {verdict.ruling} ({verdict.reason})"
        if verdict.ruling.is_pass:
            return CheckOutcome.PASS, found, ""
        outcome = CheckOutcome.NOT_CHECKED if verdict.ruling in _SAYS_NOTHING else CheckOutcome.FAIL
        return outcome, found, verdict.ruling.advice
    if receipt is None:
        return CheckOutcome.NOT_CHECKED, "no receipt and no verdict was given", evidence.curve_command
    curve = receipt.plan_curve
    if len(curve) >= _ENOUGH_LOSSES:
        same = "equal at every step" if curve == receipt.baseline_curve else f"verdict {receipt.verdict}"
        found = f"receipt: {len(curve)} steps with the optimizer, {same}"
        if receipt.verdict.is_pass:
            return CheckOutcome.PASS, found, ""
        return CheckOutcome.FAIL, found, receipt.verdict.advice
    if receipt.verdict is ReceiptVerdict.LOSSES_DIFFER:
        return CheckOutcome.FAIL, "receipt: the losses already differ at the first steps", receipt.verdict.advice
    steps = len(curve) or len(receipt.plan_losses)
    kind = "steps with the optimizer" if curve else "losses from the same weights"
    found = f"the receipt has {steps} {kind}: too few to call a curve"
    return CheckOutcome.NOT_CHECKED, found, evidence.curve_command


_CHECKS: tuple[tuple[str, str, Callable[[StepEvidence], _Judged]], ...] = (
    ("activations-by-layer", "activations measured by layer", _layers),
    ("parameters-apart", "parameters counted apart from activations", _parameters),
    ("recompute-profiled", "recompute profiled", _recompute),
    ("granularity-chosen", "granularity chosen", _granularity),
    ("determinism-tested", "determinism tested", _determinism),
    ("attention-backward", "attention backward checked", _attention),
    ("throughput", "{items}/s measured, not only batch size", _throughput),
    ("loss-curves", "loss curves compared", _curves),
)


COLLAPSE = 0.35
"""More overhead than this has another cause: full recomputation costs 20% to 33% in theory, and up to 38% as measured."""
_OFF_BY = 0.05
"""A measured peak that exceeds the predicted peak by more than this share is reported as a failure."""
_WRONG = (
    ReceiptVerdict.GRADIENTS_DIFFER,
    ReceiptVerdict.BUFFERS_DIFFER,
    ReceiptVerdict.LOSSES_DIFFER,
    ReceiptVerdict.TENSORS_DIFFER,
    ReceiptVerdict.INTERMEDIATES_DIFFER,
)
_Shown = tuple[FailureSign, str, str]
"""Whether the failure was found, the evidence, and what to do next."""


def find_failures(evidence: StepEvidence) -> tuple[FailureMode, ...]:
    """Check the five failure modes of activation management, the most costly first."""
    return tuple(
        FailureMode(name=name, title=title, sign=sign, evidence=found, next=next_)
        for name, title, find in _MODES
        for sign, found, next_ in [find(evidence)]
    )


def _collapse(evidence: StepEvidence) -> _Shown:
    verdict, seconds = evidence.verdict, evidence.receipt_seconds
    if seconds is not None:
        source = f"receipt, {evidence.receipt_name}"
    elif verdict is not None and verdict.plan.measured_step_seconds and verdict.baseline.measured_step_seconds:
        seconds = verdict.baseline.measured_step_seconds, verdict.plan.measured_step_seconds
        source = f"probe, strategy {verdict.strategy}"
    else:
        plan = evidence.chosen
        predicted = "no plan fits" if plan is None else f"{format_share(plan.predicted_overhead)} is predicted"
        return FailureSign.NOT_CHECKED, f"{predicted}, nothing is measured", evidence.verify_command
    overhead = seconds[1] / seconds[0] - 1
    found = f"measured {format_share(overhead)} a step ({source}); more than {format_share(COLLAPSE)} is a collapse"
    if overhead > COLLAPSE:
        return FailureSign.FOUND, found, f"plimsoll diagnose {evidence.target} --plan plan.json"
    return FailureSign.NOT_FOUND, found, ""


def _gradients(evidence: StepEvidence) -> _Shown:
    receipt = evidence.receipt
    if receipt is None:
        return FailureSign.NOT_CHECKED, _NO_RECEIPT, evidence.verify_command
    found = f"{evidence.receipt_name}: {receipt.verdict}"
    if receipt.verdict in _WRONG:
        cause = f"; {receipt.faults[0]}" if receipt.faults else ""
        return FailureSign.FOUND, f"{found}{cause}", receipt.verdict.advice
    itself = "" if receipt.is_deterministic else "; the model differs from itself from run to run"
    return FailureSign.NOT_FOUND, f"{found}{itself}", ""


def _bubbles(evidence: StepEvidence) -> _Shown:
    found = "one process on one device was traced; a pipeline's schedule cannot be seen from it"
    return FailureSign.NOT_CHECKED, found, ""


def _savings(evidence: StepEvidence) -> _Shown:
    """Compare the measured with the predicted peak, or else the bytes freed after forward with the bytes off the peak."""
    receipt, plan = evidence.receipt, evidence.chosen
    if receipt is not None:
        measured, predicted = receipt.measured_peak_bytes, receipt.predicted_peak_bytes
        if measured is not None and predicted is not None and measured > predicted * (1 + _OFF_BY):
            found = f"measured peak {format_bytes(measured)}, predicted {format_bytes(predicted)}"
            again = (
                f"plimsoll verify {evidence.target} --plan plan.json again on an idle device; see who holds the peak"
            )
            return FailureSign.FOUND, f"{evidence.receipt_name}: {found}", again
        kept = [region.name for region in receipt.regions if region.engine is Engine.KEEP]
        if kept:
            found = f"{len(kept)} layers kept everything although the plan drops something there ({kept[0]})"
            return FailureSign.FOUND, found, "the receipt gives each layer's reason: plimsoll show receipt.json"
    if plan is None or evidence.manages_nothing:
        return FailureSign.NOT_CHECKED, "there is no plan that saves anything", ""
    freed = _held_bytes(evidence.made[0].plan) - _held_bytes(plan)
    saved = plan.baseline_peak_bytes - plan.predicted_peak_bytes
    is_found = saved < freed / 2
    why = f": the peak has moved to {plan.peak.moment}" if is_found else ""
    return (
        FailureSign.FOUND if is_found else FailureSign.NOT_FOUND,
        f"the plan holds {format_bytes(freed)} less between forward and backward, its peak is predicted "
        f"{format_bytes(saved)} lower{why}; "
        "communication buffers and fragmentation are not seen from one process's allocations",
        "; ".join(evidence.bottleneck.remedies) if is_found else "",
    )


def _held_bytes(plan: Plan) -> int:
    return sum(region.retained_bytes for region in plan.regions)


def _debugging(evidence: StepEvidence) -> _Shown:
    plan = evidence.chosen
    if plan is None or evidence.manages_nothing:
        return FailureSign.NOT_FOUND, "every value stays where it was", ""
    dropped = sum(len(region.dropped) for region in plan.regions)
    packed = sum(len(region.packed) for region in plan.regions)
    found = f"{dropped} values do not exist between forward and backward, {packed} exist in another form"
    next_ = f"plimsoll verify {evidence.target} --plan plan.json --intermediate NAME keeps one and compares it"
    return FailureSign.FOUND, found, next_


_MODES: tuple[tuple[str, str, Callable[[StepEvidence], _Shown]], ...] = (
    ("throughput", "throughput collapses", _collapse),
    ("non-determinism", "non-determinism breaks gradients", _gradients),
    ("pipeline-bubbles", "the pipeline's bubbles grow", _bubbles),
    ("less-saved", "less is saved than expected", _savings),
    ("debugging", "debugging gets harder", _debugging),
)
