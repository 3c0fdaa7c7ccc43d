"""Keeps backward in the order of its graph, in the code that inductor generates.

torch places a recomputed op right before its reader. Inductor's scheduler then fuses kernels that read the same input: a mask,
or the angles of rotary embeddings. Recomputed kernels of two blocks become one, and the second block's are made a whole block
early and wait in memory. So every kernel is told to wait for the last op before it that is not fused (a matrix product,
attention). Fusing across that op would be a circle, which the scheduler refuses. A kernel may still run later, with its reader.

Private to torch and seen in torch 2.13: ``_pre_fusion_custom_pass`` and ``CustomSchedulerPass``, ``add_fake_dep``, ``WeakDep``,
``compute_ancestors``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch._inductor import config, custom_graph_pass

_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)
"""Before torch 2.13 there is one kind of pass; what torch keeps of either is its uuid."""


def in_order() -> dict[str, Any]:
    """Inductor's options for it; none where the user has a pass of the whole process in that place."""
    return {} if config._pre_fusion_custom_pass is not None else {"_pre_fusion_custom_pass": GraphOrder()}


class GraphOrder(_Pass):
    """Adds the waits to the nodes of inductor's scheduler before it fuses them.

    inductor copies its configuration deeply; it holds nothing, so a copy is itself.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphOrder:
        return self

    def uuid(self) -> str:
        """Names this code, for torch's caches of compiled graphs."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.dependencies import WeakDep
        from torch._inductor.virtualized import V

        if not V.graph.is_backward:
            return nodes
        last = None
        for node in nodes:
            if last is not None:
                node.add_fake_dep(WeakDep(last, mutating_buf=last, is_fake=True))
            if node.is_extern() and node.get_buffer_names():
                last = next(iter(node.get_buffer_names()))
        V.graph.scheduler.compute_ancestors()
        return nodes
