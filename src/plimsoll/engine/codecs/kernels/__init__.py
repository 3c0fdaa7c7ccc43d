"""The codecs' hot loops as Triton kernels: one read and one write, where the torch form makes a pass per op.

A codec uses them for CUDA tensors where Triton is installed; nothing else imports it. Not yet run on a GPU: so far they have
been tested under Triton's interpreter, against the torch form.
"""

from __future__ import annotations

import importlib.util

import torch


def are_usable(device: torch.device) -> bool:
    """Whether kernels run on tensors of this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
