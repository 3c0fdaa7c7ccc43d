"""Ops of two runs are aligned: graphs have no holes, breaks do, and what follows from the share is said."""

from __future__ import annotations

import msgspec
import pytest

from plimsoll.analysis.advise.compiler_coverage import captured_ticks, judge_coverage
from plimsoll.artifacts.capture import BackwardOp, Capture
from plimsoll.artifacts.costs import Costs, CostSource, OpCost
from plimsoll.artifacts.trace import OpSpec, Phase, Trace, TraceOp


def traced(forward: str, backward: str) -> Trace:
    """A step whose ops are single letters."""
    ops = [TraceOp(name=key, module="net", phase=Phase.FORWARD, cost_key=key) for key in forward]
    ops += [TraceOp(name=key, module="net", phase=Phase.BACKWARD, cost_key=key) for key in backward]
    ops.append(TraceOp(name="step", module="SGD", phase=Phase.OPTIMIZER, cost_key="step"))
    return Trace(
        model="Net",
        fingerprint="Net-0",
        signature="",
        device="cpu",
        is_fake=False,
        ops=tuple(ops),
        specs={key: OpSpec(name=key, flops=1, moved_bytes=1, dtype="f32") for key in forward + backward},
        storages=(),
        regions=(),
        timings={},
        workspaces={},
    )


def captured(graphs: list[str], backward: str) -> Capture:
    """Capitals in ``backward`` were captured."""
    return Capture(
        is_asked=True,
        graphs=len(graphs),
        forward=tuple(tuple(graph) for graph in graphs),
        backward=tuple(BackwardOp(cost_key=key.lower(), is_captured=key.isupper()) for key in backward),
    )


def costs(**seconds: float) -> Costs:
    return Costs(
        device="cpu", source=CostSource.MEASURED, ops={key: OpCost(seconds=value) for key, value in seconds.items()}
    )


@pytest.mark.parametrize(
    ("graphs", "backward", "forward_ticks", "backward_ticks"),
    [
        (["abcdef"], "FEDCBA", {0, 1, 2, 3, 4, 5}, {6, 7, 8, 9, 10, 11}),
        ([], "fedcba", set(), set()),
        (["ab", "ef"], "FEdcBA", {0, 1, 4, 5}, {6, 7, 10, 11}),
        (["abdef"], "FEDBA", {0, 1, 2, 3, 4, 5}, {6, 7, 8, 9, 10, 11}),  # c was folded away
        (["abxcdef"], "FEDCXBA", {0, 1, 2, 3, 4, 5}, {6, 7, 8, 9, 10, 11}),  # x is the compiler's own
    ],
)
def test_ops_are_found_wherever_breaks_and_folded_ops_are(
    graphs: list[str], backward: str, forward_ticks: set[int], backward_ticks: set[int]
):
    assert captured_ticks(traced("abcdef", "fedcba"), captured(graphs, backward)) == forward_ticks | backward_ticks


def test_shares_count_ops_and_their_seconds_apart():
    found = judge_coverage(traced("ab", "ba"), costs(a=3.0, b=1.0), captured(["a"], "bA"))
    assert (found.ops, found.captured_ops) == (4, 2)
    assert found.op_share == 0.5
    assert found.time_share == 0.75
    assert "Less than 90%" in found.advice[0]
    assert found.uncaptured == ("net",)


def test_dropout_below_a_full_budget_is_warned_of_only_where_there_is_dropout():
    plain = judge_coverage(traced("ab", "ba"), costs(a=1.0, b=1.0), captured(["ab"], "BA"))
    assert "let it recompute" in plain.advice[0]
    assert len(plain.advice) == 1
    trace = traced("ab", "ba")
    ops = (TraceOp(name="bernoulli_", module="net", phase=Phase.FORWARD, cost_key="a"), *trace.ops[1:])
    random = judge_coverage(msgspec.structs.replace(trace, ops=ops), costs(a=1.0, b=1.0), captured(["ab"], "BA"))
    assert "dropout" in random.advice[1]


def test_a_failure_captures_nothing_and_keeps_its_reason():
    failed = Capture(is_asked=True, failure="RuntimeError: no", forward=(("a",),))
    found = judge_coverage(traced("ab", "ba"), costs(a=1.0, b=1.0), failed)
    assert (found.is_measured, found.captured_ops) == (True, 0)
    assert "RuntimeError: no" in found.note
    assert "eager" in found.advice[0]


def test_a_compiler_that_was_not_asked_has_no_share():
    found = judge_coverage(traced("a", "a"), costs(a=1.0), Capture(is_asked=False, failure="switched off"))
    assert (found.is_measured, found.note) == (False, "switched off")
