"""The link from a CUDA device to pinned host memory, over PCIe or NVLink.

Not yet run on a GPU: its logic is tested against a device that records the order of calls and detects every use of memory
before the event that frees it.

The link has its own stream for each direction. Only an exhausted budget and `close` block the host. In all other cases, a
stream waits for an event.

* The copy-out waits for the stream that made the source. `settle` makes that stream wait for the copy-out before the source's
  memory returns to the allocator, so that the next tensor there cannot overwrite bytes that are being copied.
* The copy-in waits for the copy-out, and for the stream that allocated the destination (an earlier use of the same memory may
  still be queued there). `read` makes the current stream wait for the copy-in.
* If a ticket is deleted during a copy, its memory is held until the copy's event has passed.

The source must belong to the stream that is current in `store`; tensors that autograd saves do.
"""

from __future__ import annotations

import torch

from plimsoll.engine.offload.pinned_memory import Buffer, CudaCalls, DeviceCalls, DeviceEvent, DeviceStream, PinnedPool
from plimsoll.engine.offload.protocol import Link, flat_bytes_of
from plimsoll.errors import OffloadFailed


class PinnedLink(Link):
    """A link that keeps tensors of a CUDA device in pinned host memory.

    Args:
        device: the device of the tensors.
        most_bytes: the most bytes of host memory. Pinned blocks count with their size, which is a power of two.
        calls: the calls to the device. Tests pass their own.
    """

    def __init__(
        self, device: torch.device, most_bytes: int | None = None, *, calls: DeviceCalls | None = None
    ) -> None:
        self.name = "host"
        self.calls = CudaCalls(device) if calls is None else calls
        self.pool = PinnedPool(self.calls, most_bytes)
        self._is_closed = False

    @property
    def taken_bytes(self) -> int:
        """The bytes of pinned host memory that are in use or kept for later."""
        return self.pool.taken_bytes

    def store(self, tensor: torch.Tensor) -> PinnedTicket:
        self.check_open()
        source = flat_bytes_of(tensor)
        return PinnedTicket(self, source, self.pool.take(source.nbytes))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.calls.out_stream.synchronize()
            self.calls.in_stream.synchronize()
            self.pool.close()

    def check_open(self) -> None:
        """Check that the link (to host memory or disk) is open.

        Raises:
            OffloadFailed: the link is closed.
        """
        if self._is_closed:
            raise OffloadFailed(
                "This host link is closed.",
                why="close() was called, which frees its buffers",
                next="open another link, and close it only after the last backward",
            )


class PinnedTicket:
    """A ticket for one tensor of a CUDA device that was stored on a link. The tensor is in a pinned buffer, or is being copied
    there or back.
    """

    def __init__(self, link: PinnedLink, source: torch.Tensor, buffer: Buffer) -> None:
        self._buffer = buffer
        self._pool = link.pool
        self._source: torch.Tensor | None = source
        self._arriving: tuple[torch.Tensor, DeviceEvent, DeviceStream] | None = None
        self._link = link
        self._calls = calls = link.calls
        self._dtype = source.dtype
        self._length = source.numel()
        self._home = calls.current_stream()
        calls.out_stream.wait_event(self._home.record_event())
        calls.copy(self._bytes(), source, calls.out_stream)
        self._has_left = calls.out_stream.record_event()
        buffer.busy_until = self._has_left

    def settle(self) -> None:
        if self._source is not None:
            if not self._has_left.query():
                self._home.wait_event(self._has_left)
            self._source = None
        self._pool.collect()

    def prefetch(self) -> None:
        if self._arriving is None and self._buffer.memory is not None:
            self._expect()

    def read(self) -> torch.Tensor:
        if self._arriving is None:
            self._link.check_open()
        tensor, has_arrived, home = self._arriving or self._expect()
        self._arriving = None
        here = self._calls.current_stream()
        here.wait_event(has_arrived)
        if here != home:
            self._calls.used_on(tensor, here)
        return tensor

    def _expect(self) -> tuple[torch.Tensor, DeviceEvent, DeviceStream]:
        """Allocate device memory for the tensor, and begin to copy the tensor there.

        Return the tensor, the event at the end of the copy, and the stream that the memory was allocated on.
        """
        self.settle()
        home = self._calls.current_stream()
        tensor = self._calls.empty(self._length, self._dtype)
        in_stream = self._calls.in_stream
        in_stream.wait_event(home.record_event())
        in_stream.wait_event(self._has_left)
        self._calls.copy(tensor, self._bytes(), in_stream)
        has_arrived = in_stream.record_event()
        self._buffer.busy_until = has_arrived
        self._arriving = (tensor, has_arrived, home)
        return self._arriving

    def _bytes(self) -> torch.Tensor:
        """Return the used part of the pinned buffer, as a tensor with the dtype of the stored tensor."""
        assert self._buffer.memory is not None, "the link is open"
        return self._buffer.memory[: self._length * self._dtype.itemsize].view(self._dtype)

    def __del__(self) -> None:
        held = (self._source, self._arriving[0] if self._arriving is not None else None)
        self._buffer.companions = tuple(tensor for tensor in held if tensor is not None)
        self._pool.returned.append(self._buffer)
