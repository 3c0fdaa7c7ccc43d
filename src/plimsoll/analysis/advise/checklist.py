"""Judges the checklist of an advice, whose items pass only on measurements or counts of this step, and its failure modes.

A failure mode is a known way for activation management to do harm, such as a collapse of throughput.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plimsoll.analysis.advise.choosing import Made
from plimsoll.artifacts.advice import Bottleneck, CheckItem, CheckOutcome, LayerUse
from plimsoll.artifacts.costs import CostSource
from plimsoll.artifacts.decision import Decision, Engine
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import OWN, PEAK_TOLERANCE, Receipt, ReceiptVerdict
from plimsoll.artifacts.verdict import Ruling, Verdict
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import between_products
from plimsoll.units import format_bytes, format_seconds, format_share

_PASS, _FAIL, _NOT_CHECKED = CheckOutcome.PASS, CheckOutcome.FAIL, CheckOutcome.NOT_CHECKED
_FOUND, _NOT_FOUND = CheckOutcome.FOUND, CheckOutcome.NOT_FOUND
_ENOUGH_LOSSES = 100
"""The least number of training steps that a loss curve needs. Fewer steps can only show early differences."""
_COLLAPSE = 0.35
"""The overhead, as a share of the step, above which throughput counts as collapsed.

Recomputation alone cannot cause more: full recomputation costs 20% to 33% in theory, and up to 38% as measured.
"""
_NO_RECEIPT = "no receipt was given"
_SAYS_NOTHING = (Ruling.UNDECIDED, Ruling.BASELINE_DIVERGED)
"""Rulings of a probe (trainings without and with the plan) that say neither that the plan is good nor that it does harm."""
_RIGHT_GRADIENTS = (ReceiptVerdict.OVER_BUDGET, ReceiptVerdict.OVER_PREDICTION)
"""Verdicts of a receipt (the result of ``plimsoll.verify``) that mean failure, although the gradients were right."""
_FUSED = "scaled_dot_product"
_MASK_SHARE = 4
"""A factor. A saved tensor counts as an attention matrix if its bytes times this factor reach the bytes of the largest tensor
between attention's two matrix products.

A dropout mask has one byte for each four bytes of the attention matrix; smaller tensors between the products are neither.
"""
_Judged = tuple[CheckOutcome, str, str]
"""The result of judging one item: the outcome of the check, the evidence in words, and what the user should do next."""
_Checks = Sequence[tuple[str, str, Callable[["StepEvidence"], _Judged]]]
"""A list of items to judge. Each entry has an item's name, its title, and the function that judges it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvidence:
    """The evidence for the checklist and the failure modes, as data: the traced step, its plans, and the user's receipt and
    verdict.

    ``made`` begins with the plan that keeps everything. ``items`` is the number of tokens or examples in one batch, and
    ``items_name`` says which. ``target`` is the step's name in commands. ``receipt`` and ``verdict`` belong to this model and
    step.
    """

    index: StepIndex
    bottleneck: Bottleneck
    layers: Sequence[LayerUse]
    made: Sequence[Made]
    chosen: Made | None
    receipt: Receipt | None
    verdict: Verdict | None
    items: int
    items_name: str
    target: str
    again: str
    """The command that asks for the same advice again."""

    @property
    def managing(self) -> Plan | None:
        """Return the recommended plan if it saves memory; ``None`` if it keeps everything or no plan is recommended."""
        is_idle = self.chosen is None or all(region.is_untouched for region in self.chosen.plan.regions)
        return None if is_idle or self.chosen is None else self.chosen.plan

    @property
    def receipt_name(self) -> str:
        """Return a text that names the plan which the user's receipt (the result of ``plimsoll.verify``) verified, such as
        ``strategy auto at 300.0 MiB``.
        """
        assert self.receipt is not None
        if self.receipt.strategy == OWN:
            return "the model's own method"
        budget_bytes = self.receipt.budget_bytes
        budget = "" if budget_bytes is None else f" at {format_bytes(budget_bytes)}"
        return f"strategy {self.receipt.strategy}{budget}"

    @property
    def receipt_seconds(self) -> tuple[float, float] | None:
        """Return two numbers from the receipt (the result of ``plimsoll.verify``): the measured seconds of the step without the
        plan and with it.

        ``None`` unless the receipt has both.
        """
        receipt = self.receipt
        if receipt is None or not receipt.measured_baseline_seconds or not receipt.measured_seconds:
            return None
        return receipt.measured_baseline_seconds, receipt.measured_seconds

    @property
    def verify_command(self) -> str:
        """Return the command that makes a receipt (the result of ``plimsoll.verify``) for the recommended plan.

        It expects the plan in ``plan.json``. The command is shown if the user has not passed a receipt.
        """
        return (
            f"plimsoll verify {self.target}{self._with_plan} -o receipt.json, then {self.again} --receipt receipt.json"
        )

    @property
    def curve_command(self) -> str:
        """Return the command that measures loss curves with and without the plan. It is shown if these curves are missing."""
        return (
            f"plimsoll verify {self.target}{self._with_plan} --curve 100 -o receipt.json, or for lossy plans "
            f"plimsoll probe {self.target} --steps 1000{self._with_plan} -o verdict.json, "
            f"then {self.again} --receipt receipt.json or --verdict verdict.json"
        )

    @property
    def _with_plan(self) -> str:
        # where no plan is recommended, one that recomputes everything shows most
        return " --strategy full" if self.managing is None else " --plan plan.json"


def check_all(evidence: StepEvidence) -> tuple[CheckItem, ...]:
    """Judge each item of an advice's checklist (what to check before memory is optimized) from a step's trace and measurements.
    Return the items with their outcomes, in the checklist's order.
    """
    return _judge(_CHECKS, evidence)


def find_failures(evidence: StepEvidence) -> tuple[CheckItem, ...]:
    """Check for five known failures of plans, and return one item for each failure, the most costly first."""
    return _judge(_MODES, evidence)


def _judge(checks: _Checks, evidence: StepEvidence) -> tuple[CheckItem, ...]:
    return tuple(
        CheckItem(name=name, title=title.format(items=evidence.items_name), outcome=outcome, evidence=found, next=next_)
        for name, title, check in checks
        for outcome, found, next_ in [check(evidence)]
    )


def _layers(evidence: StepEvidence) -> _Judged:
    layers, trace = evidence.layers, evidence.index.trace
    largest = max(layers, key=lambda layer: layer.saved_bytes)
    total = sum(layer.saved_bytes for layer in layers)
    name = largest.name or "the whole model as one layer"
    found = f"{len(layers)} layers save {format_bytes(total)}, the most in {name}: {format_bytes(largest.saved_bytes)}"
    if trace.is_fake:
        counted = f"counted with fake tensors, not measured: {found}"
        return _NOT_CHECKED, counted, f"run plimsoll advise {evidence.target} on the device itself"
    return _PASS, f"{found} (traced on {trace.device})", ""


def _parameters(evidence: StepEvidence) -> _Judged:
    sizes = {part.name: part.bytes for part in evidence.bottleneck.parts}
    optimizer = sizes["optimizer state"]
    state = f"{format_bytes(optimizer)} optimizer state" if optimizer else "no optimizer state (none was counted)"
    kinds = f"{format_bytes(sizes['parameters'])} parameters, {format_bytes(sizes['gradients'])} gradients, {state}"
    return _PASS, f"at the peak {kinds}", ""


def _recompute(evidence: StepEvidence) -> _Judged:
    receipt, seconds = evidence.receipt, evidence.receipt_seconds
    if receipt is not None and seconds is not None:
        predicted = ""
        if receipt.predicted_seconds is not None and receipt.predicted_baseline_seconds:
            share = receipt.predicted_seconds / receipt.predicted_baseline_seconds - 1
            predicted = f", predicted {format_share(share)}"
        measured = format_share(seconds[1] / seconds[0] - 1)
        return _PASS, f"{evidence.receipt_name}: measured {measured}{predicted}", ""
    is_measured = evidence.index.costs.source is CostSource.MEASURED
    ops = "op seconds are measured" if is_measured else "op seconds are a roofline's"
    found = f"{ops}, but {_NO_RECEIPT} that shows a managed step's time"
    return _NOT_CHECKED, found, evidence.verify_command


def _granularity(evidence: StepEvidence) -> _Judged:
    compared = f"{len(evidence.made)} plans were compared: of layers, of modules, of single values"
    if evidence.chosen is None:
        return _FAIL, f"{compared}; none of them fits", "a larger budget, or a smaller micro-batch"
    return _PASS, f"{compared}; chosen: {evidence.chosen.name}", ""


def _determinism(evidence: StepEvidence) -> _Judged:
    receipt = evidence.receipt
    if receipt is None:
        return _NOT_CHECKED, _NO_RECEIPT, evidence.verify_command
    if receipt.is_deterministic:
        return _PASS, f"two unmanaged runs gave the same bits ({receipt.compared_gradients} gradients)", ""
    next_ = "torch.use_deterministic_algorithms(True), then verify again"
    return _FAIL, "two unmanaged runs of the same step differ", next_


def _attention(evidence: StepEvidence) -> _Judged:
    """Judge an item of the checklist: no attention matrix is held for backward.

    Fused kernels save only sums of rows, and make the matrix again in backward. Separate ops save the matrix itself, whose size
    grows with the square of the sequence length.
    """
    fused, held = 0, []
    for view in evidence.index.views:
        graph, between = view.graph, between_products(view)
        fused += sum(_FUSED in op.name for op in graph.ops)
        largest_bytes = max((graph.values[value].bytes for value in between), default=0)
        saved = [graph.values[value] for value in view.saved if value in between]
        held += [(view.call.name, value) for value in saved if value.bytes * _MASK_SHARE >= largest_bytes]
    if held:
        (layer, value), held_bytes = held[0], sum(value.bytes for _, value in held)
        return (
            _FAIL,
            f"{len(held)} attention matrices are held for backward, {format_bytes(held_bytes)} "
            f"({layer}.{value.name}); {fused} calls are fused",
            "attn_implementation='sdpa' in transformers, or scaled_dot_product_attention; its CPU kernel takes no "
            "dropout, CUDA's do (see --device-profile)",
        )
    if not fused:
        return _PASS, "the layers run no fused attention and hold no attention matrix", ""
    regions = () if evidence.managing is None else evidence.managing.regions
    again = sum(
        each.decision is Decision.RECOMPUTE and _FUSED in each.value and each.value.endswith(".0")
        for region in regions
        for each in region.decisions
    )
    repeated = f"; the plan runs {again} of them once more before that" if again else ""
    return (
        _PASS,
        f"{fused} fused calls make their matrix again in backward themselves; none is held{repeated}",
        f'to leave them be: --override "*{_FUSED}*=keep"' if again else "",
    )


def _throughput(evidence: StepEvidence) -> _Judged:
    verdict, seconds = evidence.verdict, evidence.receipt_seconds
    if verdict is not None and verdict.baseline.items_per_second and verdict.plan.items_per_second:
        before, after = verdict.baseline.items_per_second, verdict.plan.items_per_second
        return (
            _PASS,
            f"probe: {after:,.0f} {verdict.items}/s with strategy {verdict.strategy}, {before:,.0f} without",
            "",
        )
    if seconds is not None:
        before, after = (evidence.items / each for each in seconds)
        found = f"receipt: {after:,.0f} {evidence.items_name}/s with {evidence.receipt_name}, {before:,.0f} without"
        return _PASS, found, ""
    step = format_seconds(evidence.made[0].plan.baseline_seconds)
    found = f"only predicted: {evidence.items} {evidence.items_name} in {step} without a plan"
    return _NOT_CHECKED, found, evidence.verify_command


def _curves(evidence: StepEvidence) -> _Judged:
    verdict, receipt = evidence.verdict, evidence.receipt
    if verdict is not None:
        found = f"probe of strategy {verdict.strategy} over {verdict.steps} steps: {verdict.ruling} ({verdict.reason})"
        if verdict.ruling.is_pass:
            return _PASS, found, ""
        return _NOT_CHECKED if verdict.ruling in _SAYS_NOTHING else _FAIL, found, verdict.ruling.advice
    if receipt is None:
        return _NOT_CHECKED, "no receipt and no verdict was given", evidence.curve_command
    curve = receipt.plan_curve
    if len(curve) >= _ENOUGH_LOSSES:
        same = "equal at every step" if curve == receipt.baseline_curve else f"verdict {receipt.verdict}"
        found = f"receipt: {len(curve)} steps with the optimizer, {same}"
        return (_PASS, found, "") if receipt.verdict.is_pass else (_FAIL, found, receipt.verdict.advice)
    if receipt.verdict is ReceiptVerdict.LOSSES_DIFFER:
        return _FAIL, "receipt: the losses already differ at the first steps", receipt.verdict.advice
    steps = len(curve) or len(receipt.plan_losses)
    kind = "steps with the optimizer" if curve else "losses from the same weights"
    return _NOT_CHECKED, f"the receipt has {steps} {kind}: too few to call a curve", evidence.curve_command


_CHECKS: _Checks = (
    ("activations-by-layer", "activations measured by layer", _layers),
    ("parameters-apart", "parameters counted apart from activations", _parameters),
    ("recompute-profiled", "recompute profiled", _recompute),
    ("granularity-chosen", "granularity chosen", _granularity),
    ("determinism-tested", "determinism tested", _determinism),
    ("attention-backward", "attention backward checked", _attention),
    ("throughput", "{items}/s measured, not only batch size", _throughput),
    ("loss-curves", "loss curves compared", _curves),
)


def _collapse(evidence: StepEvidence) -> _Judged:
    verdict, seconds = evidence.verdict, evidence.receipt_seconds
    if seconds is not None:
        source = f"receipt, {evidence.receipt_name}"
    elif verdict is not None and verdict.plan.measured_step_seconds and verdict.baseline.measured_step_seconds:
        seconds = verdict.baseline.measured_step_seconds, verdict.plan.measured_step_seconds
        source = f"probe, strategy {verdict.strategy}"
    else:
        chosen = evidence.chosen
        predicted = "no plan fits" if chosen is None else f"{format_share(chosen.plan.predicted_overhead)} is predicted"
        return _NOT_CHECKED, f"{predicted}, nothing is measured", evidence.verify_command
    overhead = seconds[1] / seconds[0] - 1
    found = f"measured {format_share(overhead)} a step ({source}); more than {format_share(_COLLAPSE)} is a collapse"
    if overhead > _COLLAPSE:
        return _FOUND, found, f"plimsoll diagnose {evidence.target} --plan plan.json"
    return _NOT_FOUND, found, ""


def _gradients(evidence: StepEvidence) -> _Judged:
    receipt = evidence.receipt
    if receipt is None:
        return _NOT_CHECKED, _NO_RECEIPT, evidence.verify_command
    found = f"{evidence.receipt_name}: {receipt.verdict}"
    if not receipt.verdict.is_pass and receipt.verdict not in _RIGHT_GRADIENTS:
        cause = f"; {receipt.faults[0]}" if receipt.faults else ""
        return _FOUND, f"{found}{cause}", receipt.verdict.advice
    itself = "" if receipt.is_deterministic else "; the model differs from itself from run to run"
    return _NOT_FOUND, f"{found}{itself}", ""


def _bubbles(_: StepEvidence) -> _Judged:
    return _NOT_CHECKED, "one process on one device was traced; a pipeline's schedule cannot be seen from it", ""


def _savings(evidence: StepEvidence) -> _Judged:
    """Judge a failure mode: the plan saves less memory than expected.

    With a receipt (the result of ``plimsoll.verify``), compare the measured peak with the predicted peak. Without one, compare
    the reduction of the peak with the bytes that the plan frees between forward and backward.
    """
    receipt, plan = evidence.receipt, evidence.managing
    if receipt is not None:
        measured, predicted = receipt.measured_peak_bytes, receipt.predicted_peak_bytes
        if measured is not None and predicted is not None and measured > predicted * (1 + PEAK_TOLERANCE):
            found = f"measured peak {format_bytes(measured)}, predicted {format_bytes(predicted)}"
            again = (
                f"plimsoll verify {evidence.target} --plan plan.json again on an idle device; see who holds the peak"
            )
            return _FOUND, f"{evidence.receipt_name}: {found}", again
        kept = [region.name for region in receipt.regions if region.engine is Engine.KEEP]
        if kept:
            found = f"{len(kept)} layers kept everything although the plan drops something there ({kept[0]})"
            return _FOUND, found, "the receipt gives each layer's reason: plimsoll show receipt.json"
    if plan is None:
        return _NOT_CHECKED, "the recommendation does not save memory", ""
    unmanaged_bytes, managed_bytes = (
        sum(region.retained_bytes for region in each.regions) for each in (evidence.made[0].plan, plan)
    )
    freed_bytes, saved_bytes = unmanaged_bytes - managed_bytes, plan.baseline_peak_bytes - plan.predicted_peak_bytes
    is_found = saved_bytes < freed_bytes / 2
    why = f": the peak has moved to {plan.peak.moment}" if is_found else ""
    found = (
        f"the plan holds {format_bytes(freed_bytes)} less between forward and backward, its peak is predicted "
        f"{format_bytes(saved_bytes)} lower{why}; "
        "communication buffers and fragmentation are not seen from one process's allocations"
    )
    return (_FOUND, found, "; ".join(evidence.bottleneck.remedies)) if is_found else (_NOT_FOUND, found, "")


def _debugging(evidence: StepEvidence) -> _Judged:
    plan = evidence.managing
    if plan is None:
        return _NOT_FOUND, "every value stays where it was", ""
    dropped = sum(len(region.dropped) for region in plan.regions)
    packed = sum(len(region.packed) for region in plan.regions)
    found = f"{dropped} values do not exist between forward and backward, {packed} exist in another form"
    next_ = f"plimsoll verify {evidence.target} --plan plan.json --intermediate NAME keeps one and compares it"
    return _FOUND, found, next_


_MODES: _Checks = (
    ("throughput", "throughput collapses", _collapse),
    ("non-determinism", "non-determinism breaks gradients", _gradients),
    ("pipeline-bubbles", "the pipeline's bubbles grow", _bubbles),
    ("less-saved", "less is saved than expected", _savings),
    ("debugging", "debugging gets harder", _debugging),
)
