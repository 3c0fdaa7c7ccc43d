"""The link from a CUDA device to pinned host memory, over PCIe or NVLink.

Not yet run on a GPU: its logic is tested against a device that records the order of calls and notices every
use of memory before the event that frees it.

It has two streams beside the program's, one for each direction. Nothing there blocks the host but a spent budget
and `close`: where something must come first, a stream waits for an event.

* The copy-out waits for the stream that made the source. `settle` makes that stream wait for the copy-out before the
  source's memory goes back to the allocator, so that what is allocated there next cannot overwrite bytes on their way.
* The copy-in waits for the copy-out, and for the stream whose allocator gave the destination (its memory may have had
  another use that is queued still). `read` makes the current stream wait for the copy-in.
* Memory of a ticket that is dropped under way is held until its event has passed.

The source is expected to be of the stream that is current in `store`, as is what autograd saves.
"""

from __future__ import annotations

import torch

from plimsoll.engine.offload.pinned_memory import Buffer, CudaCalls, DeviceCalls, DeviceEvent, DeviceStream, PinnedPool
from plimsoll.engine.offload.protocol import Link, flat_bytes_of
from plimsoll.errors import OffloadFailed


class PinnedLink(Link):
    """Keeps a CUDA device's tensors in pinned host memory.

    Args:
        device: whose tensors.
        most_bytes: of host memory, counted as it is taken: pinned blocks are powers of two.
        calls: the device's calls; tests pass their own.
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
        """Host memory that is pinned now, in use or kept for later."""
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
        """
        Raises:
            OffloadFailed: closed.
        """
        if self._is_closed:
            raise OffloadFailed(
                "This host link is closed.",
                why="close() was called and its buffers are gone",
                next="open another link, and close it after the last backward",
            )


class PinnedTicket:
    """A tensor in a pinned buffer, or on its way there or back."""

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
        """Make room for the tensor and begin to copy it in."""
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
        """The part of the buffer that is used, as what it holds."""
        assert self._buffer.memory is not None, "the link is open"
        return self._buffer.memory[: self._length * self._dtype.itemsize].view(self._dtype)

    def __del__(self) -> None:
        held = (self._source, self._arriving[0] if self._arriving is not None else None)
        self._buffer.companions = tuple(tensor for tensor in held if tensor is not None)
        self._pool.returned.append(self._buffer)
