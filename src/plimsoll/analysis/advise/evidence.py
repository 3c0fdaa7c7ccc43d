"""What the checklist and the failure modes are judged by: the trace made just now, and what was handed in. No assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.analysis.advise.choosing import Made
from plimsoll.artifacts.advice import Bottleneck, Candidate, LayerUse
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import OWN, Receipt
from plimsoll.artifacts.trace import Trace
from plimsoll.artifacts.verdict import Verdict
from plimsoll.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """``items`` are the tokens or examples of one batch, ``items_name`` says which; ``target`` is how commands name the step.

    ``receipt`` and ``verdict`` belong to this model and step, or are ``None``.
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
        """The recommended plan."""
        pairs = zip(self.made, self.candidates, strict=True)
        return next((entry.plan for entry, candidate in pairs if candidate.is_chosen), None)

    @property
    def manages_nothing(self) -> bool:
        """Whether no plan is recommended, or one that leaves everything as it is."""
        plan = self.chosen
        return plan is None or all(region.is_untouched for region in plan.regions)

    @property
    def verify_command(self) -> str:
        """What makes the receipt that is missing; with the recommended plan once it is saved."""
        plan = "" if self.manages_nothing else " --plan plan.json"
        return f"plimsoll verify {self.target}{plan} -o receipt.json, then plimsoll advise {self.target} --receipt receipt.json"

    @property
    def curve_command(self) -> str:
        """What makes the loss curves that are missing."""
        plan = "" if self.manages_nothing else " --plan plan.json"
        return (
            f"plimsoll verify {self.target}{plan} --curve 100 -o receipt.json, or for lossy plans plimsoll probe "
            f"{self.target} --steps 1000{plan} -o verdict.json, then plimsoll advise {self.target} with what they wrote"
        )


def name_receipt(receipt: Receipt) -> str:
    """What a receipt is about: ``strategy auto at 300.0 MiB``."""
    if receipt.strategy == OWN:
        return "the model's own method"
    budget = "" if receipt.budget_bytes is None else f" at {format_bytes(receipt.budget_bytes)}"
    return f"strategy {receipt.strategy}{budget}"
