"""Keeps what backward computes again close to where it is read, in the code that inductor generates.

torch places a recomputed op right before its reader. Inductor's scheduler then fuses kernels that read the same input: a mask,
or the angles of rotary embeddings. Recomputed kernels of two blocks become one, and the second block's are made a whole block
early and wait in memory. So every recomputed kernel is told to wait for the last op before it that is not fused and that
belongs to backward itself; fusing across that op would be a circle, which the scheduler refuses.

Private to torch and seen in torch 2.13: ``_pre_fusion_custom_pass`` and ``CustomSchedulerPass``, ``add_fake_dep``, ``WeakDep``,
``compute_ancestors``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomSchedulerPass


class RecomputeLate(CustomSchedulerPass):
    """Adds the waits to the nodes of inductor's scheduler before it fuses them.

    inductor copies its configuration deeply; it holds nothing, so a copy is itself.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> RecomputeLate:
        return self

    def uuid(self) -> str:
        """Names this code, for torch's caches of compiled graphs."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.dependencies import WeakDep
        from torch._inductor.virtualized import V

        if not V.graph.is_backward:
            return nodes
        anchor = None
        for node in nodes:
            again = _is_recomputed(node)
            if again and anchor is not None:
                node.add_fake_dep(WeakDep(anchor, mutating_buf=anchor, is_fake=True))
            elif not again and node.is_extern() and node.get_buffer_names():
                anchor = next(iter(node.get_buffer_names()))
        V.graph.scheduler.compute_ancestors()
        return nodes


def _is_recomputed(node: Any) -> bool:
    """Whether a kernel runs forward's ops alone, which the partitioner has marked."""
    made = [origin for part in node.get_nodes() for origin in part.node.get_origins() if origin.op == "call_function"]
    return bool(made) and all("recompute" in origin.meta for origin in made)
