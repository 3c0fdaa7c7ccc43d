"""A small hand-made advice for tests that need one but no model."""

from __future__ import annotations

import msgspec

from plimsoll.artifacts.advice import (
    Advice,
    Bottleneck,
    Candidate,
    CaptureHazard,
    CheckItem,
    CheckOutcome,
    CompilerCoverage,
    GraphBreak,
    Kind,
    LayerUse,
    MemoryPart,
    Recommendation,
)
from plimsoll.artifacts.decision import Status
from plimsoll.units import MIB
from samples import filled


def make_candidate(name: str, *, peak_bytes: int, overhead: float, is_chosen: bool = False) -> Candidate:
    """A recomputing candidate within a budget of 64 MiB."""
    return filled(
        Candidate,
        name=name,
        strategy=name,
        allow=("recompute",),
        status=Status.OPTIMAL,
        budget_bytes=64 * MIB,
        predicted_peak_bytes=peak_bytes,
        predicted_seconds=0.1 * (1 + overhead),
        predicted_overhead=overhead,
        is_chosen=is_chosen,
        reason="the least time within the budget" if is_chosen else "slower: +24.0%",
    )


def make_advice(**changes: object) -> Advice:
    """Activations are the bottleneck, and recomputation is the answer."""
    advice = filled(
        Advice,
        cost_source="measured",
        budget_bytes=64 * MIB,
        max_error=0.0,
        baseline_seconds=0.1,
        recommendation=Recommendation(
            kind=Kind.MANAGE,
            headline="recompute some activations: 60.0 MiB instead of 100.0 MiB for +3.0% time",
            reasons=("activations hold 70% of the peak",),
            command="plimsoll plan TARGET --budget 64MiB",
        ),
        bottleneck=Bottleneck(
            part="activations",
            peak_bytes=100 * MIB,
            floor_bytes=40 * MIB,
            moment="in forward of the loss",
            parts=(
                MemoryPart(name="parameters", bytes=30 * MIB, share=0.3),
                MemoryPart(name="activations of the layers", bytes=70 * MIB, share=0.7, largest="model.layers.0"),
            ),
            summary="activations hold 70% of the peak",
            remedies=(),
        ),
        layers=tuple(filled(LayerUse, name=f"model.layers.{i}", saved_bytes=12 * MIB) for i in range(4)),
        candidates=(
            make_candidate("full", peak_bytes=50 * MIB, overhead=0.24),
            make_candidate("auto", peak_bytes=60 * MIB, overhead=0.03, is_chosen=True),
        ),
        compiler=CompilerCoverage(
            is_measured=True,
            ops=100,
            captured_ops=80,
            seconds=0.1,
            captured_seconds=0.09,
            graphs=2,
            breaks=(GraphBreak(reason="call to print", file="model.py", line=12, code="print(x)"),),
            uncaptured=("model.head",),
            advice=("manage model.head",),
        ),
        hazards=(CaptureHazard(what="_local_scalar_dense reads a value", where="model.head"),),
        checklist=(
            CheckItem(name="layers", title="activations by layer", outcome=CheckOutcome.PASS, evidence="4 layers"),
            CheckItem(
                name="determinism",
                title="determinism tested",
                outcome=CheckOutcome.NOT_CHECKED,
                evidence="no receipt was given",
                next="plimsoll verify TARGET -o receipt.json",
            ),
            CheckItem(name="attention", title="attention", outcome=CheckOutcome.FAIL, evidence="<b>8 MiB</b> saved"),
        ),
        failure_modes=(
            CheckItem(
                name="bubbles",
                title="pipeline bubbles grow",
                outcome=CheckOutcome.NOT_CHECKED,
                evidence="one process only",
            ),
        ),
        notes=("a note",),
    )
    return msgspec.structs.replace(advice, **changes)
