"""A kind of transfer and a payload in; the seconds that ranks take for it, repetition by repetition, out."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def start_transfer(kind: str, payload: torch.Tensor) -> dist.Work:
    """Begin a transfer on the default group.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``broadcast``.
        payload: what this rank gives: of one dimension, its length a multiple of the number of ranks.
    """
    ranks = dist.get_world_size()
    work: dist.Work | None
    if kind == "all_reduce":
        work = dist.all_reduce(payload, async_op=True)
    elif kind == "all_gather":
        work = dist.all_gather(list(payload.new_empty(ranks, len(payload))), payload, async_op=True)
    elif kind == "reduce_scatter":
        work = dist.reduce_scatter(payload.new_empty(len(payload) // ranks), list(payload.chunk(ranks)), async_op=True)
    elif kind == "all_to_all":
        work = dist.all_to_all_single(torch.empty_like(payload), payload, async_op=True)
    else:
        assert kind == "broadcast", kind
        work = dist.broadcast(payload, src=0, async_op=True)
    assert work is not None
    return work


def payload_of(payload_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeros in float32, of so many bytes or a little more: every rank gets as many."""
    ranks = dist.get_world_size()
    return torch.zeros(max(1, -(-payload_bytes // 4 // ranks)) * ranks, device=device)


def time_transfers(kind: str, payload_bytes: int, device: torch.device, *, repetitions: int) -> list[float]:
    """Seconds of each repetition on this rank; all ranks call it alike. One more, not timed, comes first."""
    payload = payload_of(payload_bytes, device)
    found = []
    for _ in range(repetitions + 1):
        wait_for_all(device)
        begin_seconds = time.perf_counter()
        start_transfer(kind, payload).wait()
        wait_for_device(device)
        found.append(time.perf_counter() - begin_seconds)
    return found[1:]


def wait_for_all(device: torch.device) -> None:
    """Until every rank is here and this one's device is idle."""
    wait_for_device(device)
    dist.barrier()
    wait_for_device(device)


def wait_for_device(device: torch.device) -> None:
    """Until nothing is under way on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
