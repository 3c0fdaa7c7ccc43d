"""A costed step in, the seconds of its parts out."""

from __future__ import annotations

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.trace import Phase, Trace


def optimizer_seconds(trace: Trace, costs: Costs) -> float:
    """Seconds of the optimizer's step; 0 where none was traced."""
    ops = (op for op in trace.ops if op.phase is Phase.OPTIMIZER and op.cost_key in costs.ops)
    return sum(costs.ops[op.cost_key].seconds for op in ops)
