"""Activations in host memory: TRL's offloading of everything, and plans at its peak with and without offloading."""

from __future__ import annotations

import plimsoll
from benchmarks import peers
from benchmarks.gpu_session.session import Bench, Session


def run(session: Session, part: str) -> None:
    del part
    case = session.case("llama")
    with Bench(session, case, rounds=4) as bench:
        budget_bytes = bench.add(peers.OFFLOADING)
        if budget_bytes is None:  # without that peer: close to the floor, where offloading has to do something
            full = plimsoll.plan(case.model, case.batch, strategy="full", loss=case.loss)
            budget_bytes = round(1.1 * full.floor_bytes)
        for allow in (("recompute",), ("recompute", "offload")):
            bench.add_plan(f"plimsoll, {' + '.join(allow)}", budget_bytes, allow=allow)
