"""The few calls to a GPU that a pinned link makes, and nothing else: the seam where tests put a device of their own.

Not yet run on a GPU.

Sources: torch's notes on CUDA semantics (streams, ``record_stream``, pinned memory) and its caching host allocator, which
rounds every pinned block up to a power of two and returns none to the system before its cache is emptied.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class DeviceEvent(Protocol):
    """A moment on a stream."""

    def query(self) -> bool:
        """Whether everything before it has been done."""

    def synchronize(self) -> None:
        """Wait in this thread until it has."""


class DeviceStream(Protocol):
    """Work in order."""

    def record_event(self) -> DeviceEvent: ...

    def wait_event(self, event: Any) -> None:
        """Whatever is queued here from now on starts after ``event`` (of the same device's kind)."""

    def synchronize(self) -> None: ...


class DeviceCalls(Protocol):
    """A device with two streams beside those of the program."""

    out_stream: DeviceStream
    in_stream: DeviceStream

    def current_stream(self) -> DeviceStream: ...

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Bytes in pinned host memory."""

    def release_pinned(self) -> None:
        """Return to the system whatever pinned memory nobody holds."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device, of the current stream."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: DeviceStream) -> None:
        """Queue a copy on ``stream``; returns at once."""

    def used_on(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        """Let the allocator know that ``stream`` uses a tensor of another stream."""


class CudaCalls:
    """The calls, on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out_stream: DeviceStream = torch.cuda.Stream(device)
        self.in_stream: DeviceStream = torch.cuda.Stream(device)

    def current_stream(self) -> DeviceStream:
        return torch.cuda.current_stream(self.device)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        with torch.cuda.device(self.device):
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def release_pinned(self) -> None:
        torch._C._host_emptyCache()

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(length, dtype=dtype, device=self.device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: DeviceStream) -> None:
        with torch.cuda.stream(stream):  # type: ignore[arg-type]  # our protocol, of which torch's class is one
            destination.copy_(source, non_blocking=True)

    def used_on(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        tensor.record_stream(stream)  # type: ignore[arg-type]  # as above
