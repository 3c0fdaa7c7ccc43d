"""Four budgets between the smallest peak that a plan reaches and the peak without a plan."""

from __future__ import annotations

import plimsoll
from benchmarks.gpu_session.session import Bench, Session

_SHARES = (0.05, 0.25, 0.5, 0.75)


def run(session: Session, part: str) -> None:
    del part
    case = session.case("llama")
    with Bench(session, case, rounds=4) as bench:
        full = plimsoll.plan(case.model, case.batch, strategy="full", loss=case.loss)
        session.write(way="range", floor_bytes=full.floor_bytes, unmanaged_peak_bytes=full.baseline_peak_bytes)
        for share in _SHARES[2:3] if session.is_dry else _SHARES:
            budget_bytes = full.floor_bytes + round(share * (full.baseline_peak_bytes - full.floor_bytes))
            bench.add_plan(f"plimsoll at {share:.0%}", budget_bytes)
