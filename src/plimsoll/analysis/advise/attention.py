"""A trace in, how its attention keeps its matrix out: in a fused kernel that makes it again in backward, or in memory.

A fused kernel (flash, memory-efficient, cuDNN) saves per-row sums and rebuilds the matrix in its own backward: recomputing its
output in a plan runs the product a second time on top. Attention written out saves the softmax of every score: its bytes
grow with the square of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.artifacts.region import RegionGraph
from plimsoll.artifacts.trace import Trace

FUSED = "scaled_dot_product"
_SOFTMAX = ("_softmax", "_safe_softmax", "softmax")
_PRODUCTS = ("bmm", "mm", "matmul", "baddbmm", "addmm")
_FURTHEST = 5
"""Ops (dropout, casts, copies) that may stand between the softmax and the product with the values."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused calls in forward, and the matrices that autograd holds: how many, and their bytes."""

    fused_calls: int
    matrices: int
    matrix_bytes: int
    example: str


def find_attention(trace: Trace) -> Attention:
    """Count fused attention and materialised attention matrices over all layers."""
    fused = matrices = matrix_bytes = 0
    example = ""
    for call in trace.regions:
        graph = call.graph
        fused += sum(FUSED in op.name for op in graph.ops)
        saved = {slot.value for slot in graph.slots if slot.is_managed}
        for value in _matrices(graph):
            if value in saved:
                matrices += 1
                matrix_bytes += graph.values[value].bytes
                example = example or f"{call.name}.{graph.values[value].name}"
    return Attention(fused, matrices, matrix_bytes, example)


def _matrices(graph: RegionGraph) -> set[int]:
    """Softmax results that go into a product, and what becomes of them on the way (dropout's output)."""
    found: set[int] = set()
    for op in graph.ops:
        if op.name not in _SOFTMAX:
            continue
        reached, frontier = set(op.writes), set(op.writes)
        for _ in range(_FURTHEST):
            readers = [other for other in graph.ops if frontier & set(other.reads)]
            if any(other.name in _PRODUCTS for other in readers):
                size = graph.values[op.writes[0]].bytes
                found |= {value for value in reached if graph.values[value].bytes >= size // 4}
                break
            frontier = {value for other in readers for value in other.writes}
            reached |= frontier
    return found
