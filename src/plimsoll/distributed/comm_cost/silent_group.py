"""A process group whose collectives return at once. Code that runs on it takes the time of its own work, without a network."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class SilentGroup(dist.ProcessGroup):
    """A process group of one process that claims to have ``ranks`` ranks, as if all of them had the same tensors.

    ``transfers`` is the number of collectives so far.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg]  # a group without a store: the stub lacks this form
        self._ranks = ranks
        self.transfers = 0

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "silent"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]  # the form that torch calls
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._ranks)
        return self._done(tensors)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> dist.Work:
        output.view(self._ranks, -1).copy_(given.reshape(1, -1).expand(self._ranks, -1))
        return self._done([output])

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> dist.Work:
        output.view(-1).copy_(given.view(self._ranks, -1)[0])
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            output.mul_(self._ranks)
        return self._done([output])

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        assert not input_sizes, "parts are equal"
        output.view(self._ranks, -1).copy_(given.view(self._ranks, -1)[:1].expand(self._ranks, -1))
        return self._done([output])

    # The names since torch 2.13.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def _done(self, result: list[torch.Tensor]) -> dist.Work:
        self.transfers += 1
        return _Done(result)


class _Done(dist.Work):
    """Stands for a collective that is already complete: the work object that torch's collectives return."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        device = self._result[0].device
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[] if device.type == "cpu" else [device])
        future.set_result(self._result)
        return future
