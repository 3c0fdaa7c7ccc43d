"""A Llama of 1.1 billion parameters, 2 × 8,192 tokens: peers, and Plimsoll with each peer's peak as its budget."""

from __future__ import annotations

from benchmarks import peers
from benchmarks.gpu_session.session import Bench, Session

_PEERS = (peers.CHECKPOINT, peers.SAC, peers.REMAT_ATTENTION)


def run(session: Session, part: str) -> None:
    del part
    with Bench(session, session.case("llama"), rounds=4) as bench:
        for peer in _PEERS[::2] if session.is_dry else _PEERS:
            if (budget_bytes := bench.add(peer)) is not None:
                bench.add_plan(f"plimsoll at {peer.name}", budget_bytes)
        bench.time_together(rounds=6)
