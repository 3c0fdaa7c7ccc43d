"""The table of huggingface/accelerate#4175 on this card, with plans at three budgets between its rows."""

from __future__ import annotations

import plimsoll
from benchmarks import peers
from benchmarks.gpu_session.session import Bench, Session

PUBLISHED = {
    peers.NONE.name: (79.43e9, 1.08),
    peers.CHECKPOINT.name: (24.73e9, 1.38),
    peers.CHECKPOINT_AND_OFFLOAD.name: (24.73e9, 1.86),
}
"""Peak bytes and seconds of a step, as published."""
_BUDGETS = (60 * 10**9, 40 * 10**9, 30 * 10**9)


def run(session: Session, part: str) -> None:
    del part
    case = session.case("qwen3")
    budgets: tuple[int, ...] = _BUDGETS
    if session.is_dry:
        full = plimsoll.plan(case.model, case.batch, strategy="full", loss=case.loss)
        budgets = ((full.floor_bytes + full.baseline_peak_bytes) // 2,)
    with Bench(session, case, rounds=4) as bench:
        bench.add(peers.CHECKPOINT)
        for budget_bytes in budgets:
            name = "plimsoll at half" if session.is_dry else f"plimsoll at {budget_bytes // 10**9} GB"
            bench.add_plan(name, budget_bytes)
        bench.add(peers.CHECKPOINT_AND_OFFLOAD)
