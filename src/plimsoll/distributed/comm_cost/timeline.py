"""Computing, and what is done to each bucket of gradients, in; when the step ends, out: two lanes that run side by side.

One lane computes forward and backward. The other takes the buckets, one after the other, as they get full: local work
(encoding, decoding) and transfers in turns. Lanes slow each other down: two that compute share the processor, and beside a
transfer computing and the transfer each run at a share of their speed.

Known weaknesses: at every bucket all ranks are as slow as the slowest; transfers of two buckets never overlap, as they
may on links with a large latency; a processor is shared in equal parts, or not at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BucketWork:
    """One bucket: ``compute_seconds`` until it is full (since the one before), then ``local_seconds[0]``, the first transfer,
    ``local_seconds[1]``, the second transfer, and so on; local work is one longer than transfers.
    """

    compute_seconds: float
    local_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Speeds of what happens at the same time, as shares of full speed.

    ``compute``: computing beside a transfer; ``transfer``: a transfer beside computing; ``processor``: either of backward
    and local work beside the other (a half on one processor, 1 where each has its own).
    """

    compute: float = 1.0
    transfer: float = 1.0
    processor: float = 0.5


@dataclass(frozen=True, slots=True)
class Timeline:
    """``exposed_seconds`` is what the step takes longer than its computing alone; the others are sums over the buckets."""

    step_seconds: float
    exposed_seconds: float
    transfer_seconds: float
    local_seconds: float


@dataclass(slots=True)
class _Piece:
    """What a lane is busy with, in seconds at full speed."""

    left_seconds: float
    is_transfer: bool = False


def run_step(buckets: Sequence[BucketWork], tail_seconds: float, sharing: Sharing = Sharing()) -> Timeline:
    """The step from its start until the last gradient is there.

    Args:
        buckets: in the order in which backward fills them; forward belongs to the first.
        tail_seconds: computing after the last bucket is full.
        sharing: how the lanes slow each other down.

    Example:
        >>> run_step([BucketWork(2.0, (0.0, 0.0), (1.0,)), BucketWork(2.0, (0.0, 0.0), (1.0,))], 0.0).step_seconds
        5.0
    """
    computing = deque(_Piece(work.compute_seconds) for work in buckets)
    computing.append(_Piece(tail_seconds))
    sending: deque[_Piece] = deque()
    waiting = deque(buckets)
    now = 0.0
    while computing or sending:
        busy = [lane for lane in (computing, sending) if lane]
        speeds = [1.0] if len(busy) == 1 else _speeds(sending[0], sharing)
        ends = [lane[0].left_seconds / speed for lane, speed in zip(busy, speeds, strict=True)]
        step = min(ends)
        now += step
        for lane, speed, end in zip(busy, speeds, ends, strict=True):
            lane[0].left_seconds -= step * speed
            if end == step:  # whichever gave the minimum is over, whatever rounding says
                lane.popleft()
                if lane is computing and waiting:
                    sending.extend(_pieces(waiting.popleft()))
    computing_seconds = sum(work.compute_seconds for work in buckets) + tail_seconds
    return Timeline(
        step_seconds=now,
        exposed_seconds=max(0.0, now - computing_seconds),
        transfer_seconds=sum(sum(work.transfer_seconds) for work in buckets),
        local_seconds=sum(sum(work.local_seconds) for work in buckets),
    )


def _speeds(sent: _Piece, sharing: Sharing) -> list[float]:
    """Of computing and of what is done to gradients, at the same time."""
    return [sharing.compute, sharing.transfer] if sent.is_transfer else [sharing.processor, sharing.processor]


def _pieces(work: BucketWork) -> Iterator[_Piece]:
    yield _Piece(work.local_seconds[0])
    for transfer, local in zip(work.transfer_seconds, work.local_seconds[1:], strict=True):
        yield _Piece(transfer, is_transfer=True)
        yield _Piece(local)
