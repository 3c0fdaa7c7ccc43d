"""Under torch.compile, block by block: torch's activation memory budget, and a compiled plan at that peer's measured peak."""

from __future__ import annotations

from functools import partial

from benchmarks import peers
from benchmarks.gpu_session.session import Bench, Session
from benchmarks.peers import Peer
from benchmarks.peers.compiled import BLOCK, apply

_BLOCKS = partial(apply, how=BLOCK)
_NEEDS = ("triton",)


def run(session: Session, part: str) -> None:
    del part
    needs = () if session.is_dry else _NEEDS
    baseline = Peer("compiled blocks", _BLOCKS, needs)
    budgeted = Peer("compiled blocks, memory budget 0.5", partial(apply, how=BLOCK, memory_budget=0.5), needs)
    # A dry run compiles the blocks of an MLP: the C++ of a Llama's takes half a minute of processor time.
    case = session.case("mlp" if session.is_dry else "llama")
    with Bench(session, case, rounds=4, baseline=baseline) as bench:
        budget_bytes = bench.add(budgeted)
        if budget_bytes is not None:
            bench.add_plan(f"plimsoll compiled, at {budgeted.name}", budget_bytes, around=_BLOCKS)
        bench.add(Peer("eager", peers.NONE.apply))
        bench.time_together(rounds=6)
