"""A region in; the values that fused attention turns into scores, out: those that must not be noisy.

Backward of fused attention makes the probabilities again as exp(q·k - log-sum-exp), with the log-sum-exp that forward saved.
Where queries or keys come back with an error, the two no longer belong together, and the error of a score stands in the
exponent: harmless while scores are small, as at the start of training, and a hundred times the gradient once they have grown.
Measured in the lab notes.
"""

from __future__ import annotations

from plimsoll.artifacts.region import RegionGraph

_FUSED = "scaled_dot_product"
_SCORE_INPUTS = 2
"""Query and key come first."""


def score_inputs(graph: RegionGraph) -> frozenset[str]:
    """Names of the values that fused attention reads as queries and keys."""
    return frozenset(graph.values[value].name for value in _queries_and_keys(graph))


def made_into_scores(graph: RegionGraph) -> frozenset[str]:
    """Names of queries, keys, and everything in the region that they are made of."""
    found: set[int] = set()
    pending = _queries_and_keys(graph)
    while pending:
        value = pending.pop()
        if value in found:
            continue
        found.add(value)
        producer = graph.values[value].producer
        if producer >= 0:
            pending.extend(graph.ops[producer].reads)
    return frozenset(graph.values[value].name for value in found)


def _queries_and_keys(graph: RegionGraph) -> list[int]:
    return [value for op in graph.ops if _FUSED in op.name for value in op.reads[:_SCORE_INPUTS]]
