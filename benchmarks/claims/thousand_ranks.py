"""GPT-3 175B and Llama-3 405B on 1,024 ranks: what every stage holds and how long the step takes, as a table."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.page import format_table
from plimsoll.artifacts.estimate import Estimate, StageEstimate
from plimsoll.estimator.estimate import estimate

_GIB = 2**30
QUESTIONS = (
    (
        "gpt3-175b",
        "A100-80GB",
        2048,
        "dp=16,tp=8,sp,pp=8,zero=1,schedule=interleaved,virtual=3,micro-batches=64",
        "none",
    ),
    ("llama-3-405b", "H100-SXM", 8192, "dp=8,tp=8,sp,pp=16,zero=1,micro-batches=64", "full"),
)
"""Target, device, sequence, layout, strategy: one sample per micro-batch, bf16, AdamW with master weights."""


def lines() -> Iterator[str]:
    """The section of the page."""
    yield "## 1,024 ranks"
    yield ""
    for target, device, sequence, layout, strategy in QUESTIONS:
        found = estimate(
            target,
            1,
            device=device,
            sequence=sequence,
            precision="bf16",
            has_master_weights=True,
            layout=layout,
            strategy=strategy,
        )
        yield from table(found)


def table(found: Estimate) -> Iterator[str]:
    """One estimate, stage by stage."""
    speed = found.throughput
    tokens = 0.0 if speed.tokens_per_second is None else speed.tokens_per_second
    fits = {True: "fits", False: "does not fit", None: "may fit, the error bar leaves it open"}[found.does_fit]
    yield f"**{found.target}** on {found.layout.ranks:,} {found.device}, strategy `{found.strategy}`: `{found.layout}`."
    yield ""
    yield (
        f"Step {speed.step_seconds:.1f} s ± {speed.relative_error:.0%}, {tokens:,.0f} tokens/s, MFU {speed.mfu or 0:.1%}. "
        f"The tightest rank is that of stage {found.tightest.stage}: {fits}."
    )
    yield ""
    head = ("ranks of stage", "regions", "in flight", "parameters", "state and masters", "activations", "live peak",
            "whole", "±", "bubble")  # fmt: skip
    yield from format_table(head, [_cells(stage) for stage in found.stages])
    yield ""
    yield "Sizes in GiB on one rank; *whole* adds what the allocator, the CUDA context and NCCL take."
    yield ""


def _cells(stage: StageEstimate) -> list[str]:
    items = {item.name: item.bytes or 0 for item in stage.items}
    activations = items["activations"] + items["activations of other micro-batches"]
    sizes = (
        items["parameters"],
        items["optimizer state"] + items["master weights"],
        activations,
        stage.allocated_bytes,
        stage.total_bytes,
        stage.error_bytes,
    )
    return [
        str(stage.stage),
        stage.regions,
        str(stage.in_flight),
        *(f"{size / _GIB:.1f}" for size in sizes),
        f"{stage.bubble_share:.1%}",
    ]
