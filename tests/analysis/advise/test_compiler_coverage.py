"""The share of a step that the compiler captured, what follows from it, and ops that a CUDA graph cannot capture."""

from __future__ import annotations

import msgspec
import pytest
import torch

from plimsoll.analysis.advise.compiler_coverage import captured_ticks, find_hazards, judge_coverage
from plimsoll.artifacts.advice import BackwardOp, Capture
from plimsoll.artifacts.costs import Costs, CostSource, OpCost
from plimsoll.artifacts.trace import OpSpec, Phase, Trace, TraceOp
from plimsoll.tracing.trace import trace
from samples import filled
from steps import Stack, mean_square, stack


def test_reads_of_values_and_shapes_that_depend_on_them_are_hazards():
    class Picky(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            scale = x.detach().abs().max().item()
            return x[x > 0] / scale

    hazards = {hazard.what: hazard for hazard in find_hazards(trace(Picky(), torch.randn(8, 32), loss=mean_square))}
    assert any("_local_scalar_dense reads a value" in what for what in hazards)
    assert any("with a mask" in what for what in hazards)


def test_a_step_of_fixed_shapes_has_no_hazard_until_an_optimizer_reads_its_count():
    model, batch, loss = stack()
    assert find_hazards(trace(model, batch, loss=loss)) == ()
    optimizer = torch.optim.AdamW(model.parameters())
    found = find_hazards(trace(model, batch, loss=loss, optimizer=optimizer))
    assert [hazard.where for hazard in found] == ["optimizer of AdamW"]
    assert "capturable" in found[0].what


def traced(forward: str, backward: str) -> Trace:
    """A step whose ops are single letters."""
    ops = [TraceOp(name=key, module="net", phase=Phase.FORWARD, cost_key=key) for key in forward]
    ops += [TraceOp(name=key, module="net", phase=Phase.BACKWARD, cost_key=key) for key in backward]
    ops.append(TraceOp(name="step", module="SGD", phase=Phase.OPTIMIZER, cost_key="step"))
    specs = {key: OpSpec(name=key, flops=1, moved_bytes=1, dtype="f32") for key in forward + backward}
    return filled(Trace, ops=tuple(ops), specs=specs)


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


@pytest.mark.parametrize(
    ("capture", "is_measured", "note", "advice"),
    [
        (Capture(is_asked=True, failure="RuntimeError: no", forward=(("a",),)), True, "RuntimeError: no", "eager"),
        (Capture(is_asked=False, failure="switched off"), False, "switched off", ""),
    ],
)
def test_a_failure_captures_nothing_and_keeps_its_reason(capture: Capture, is_measured: bool, note: str, advice: str):
    found = judge_coverage(traced("ab", "ba"), costs(a=1.0, b=1.0), capture)
    assert (found.is_measured, found.captured_ops) == (is_measured, 0)
    assert note in found.note
    assert advice in " ".join(found.advice)
