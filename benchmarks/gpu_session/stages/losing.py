"""Where Plimsoll is expected to lose: steps whose Python takes longer than the device."""

from __future__ import annotations

from benchmarks import peers
from benchmarks.gpu_session.session import Bench, Session
from benchmarks.gpu_session.stages.longest import case_of


def run(session: Session, part: str) -> None:
    del part
    short = case_of(session.case("llama"), 64 if session.is_dry else 2048)
    with Bench(session, short, rounds=10, table="1 × 2048 tokens") as bench:
        for peer in (peers.CHECKPOINT, peers.SAC):
            budget_bytes = bench.add(peer)
        if (budget_bytes := bench.peaks.get(peers.CHECKPOINT.name)) is not None:
            bench.add_plan(f"plimsoll at {peers.CHECKPOINT.name}", budget_bytes)
    with Bench(session, session.case("launch_bound"), rounds=20, table="48 blocks of width 16") as bench:
        bench.add(peers.CHECKPOINT)
        bench.add_plan("plimsoll, every block recomputed", None, strategy="full")
