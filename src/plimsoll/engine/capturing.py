"""CUDA graphs: detect a capture, and raise an error for work that a graph cannot repeat.

A graph runs the captured kernels again at the same addresses, without Python. During a capture the host must not wait for the
device. A region (a module that the plan decides about) whose calls are recorded can be captured: its recipes (ops that rebuild
dropped tensors) are kernels like any others. Samples and inspections are skipped, because the host would have to read their
results. Whatever needs Python in every step (recording, random states, transfers, codecs that read the data first) is refused
before it runs.

Not yet run on a GPU.
"""

from __future__ import annotations

import torch

from plimsoll.errors import CaptureRefused

_CAPTURED = frozenset({"cuda"})
"""Types of devices that have graphs to capture."""
WARM_UP = "run three training steps with the same shapes before the capture (torch also asks for warm-up steps)"


def is_capturing(device_type: str) -> bool:
    """Return whether a CUDA graph is being captured on the current stream. If the device is a CPU, CUDA is not queried."""
    return device_type in _CAPTURED and torch.cuda.is_current_stream_capturing()


def refuse_capture(device_type: str, what: str, *, why: str, next: str) -> None:  # noqa: A002 - as in every error
    """Raise an error if a CUDA graph is being captured.

    Raises:
        CaptureRefused: a graph is being captured. ``what`` is the subject of the error's first sentence.
    """
    if is_capturing(device_type):
        raise CaptureRefused(f"{what} cannot be captured in a CUDA graph.", why=why, next=next)
