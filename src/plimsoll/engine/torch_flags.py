"""Torch's global flags that decide what an op computes, such as those of mkldnn. Recomputation runs under the flags of its
forward.

A user may set them around forward only (``torch.backends.mkldnn.flags(enabled=False)``), while backward runs without them. The
flags are also compared before a recording is used for a call. The choice of the attention kernel need not be stored, because
the recorded op names the kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from plimsoll.tracing.torch_internals import internal

Flags = tuple[Any, ...]

# Read in every call of a region, hence not through the slower properties of `torch.backends`. Private names seen in torch 2.9
# to 2.15.
_ANYWHERE: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (internal("torch._C._get_mkldnn_enabled"), internal("torch._C._set_mkldnn_enabled")),
)
_ON_CUDA = (
    *(
        (internal(f"torch._C._get_{name}"), internal(f"torch._C._set_{name}"))
        for name in ("cudnn_enabled", "cudnn_deterministic", "cudnn_benchmark")
    ),
    (
        partial(internal("torch._C._get_fp32_precision_getter"), "cuda", "matmul"),
        partial(internal("torch._C._set_fp32_precision_setter"), "cuda", "matmul"),
    ),
)


def flags_for(device_type: str) -> Flags:
    """Return the current values of torch's flags that decide what an op computes, as a tuple. On CUDA there are more flags than
    on other devices.
    """
    if device_type == "cuda":
        return tuple([read() for read, _ in (*_ANYWHERE, *_ON_CUDA)])
    return tuple([read() for read, _ in _ANYWHERE])


@contextlib.contextmanager
def in_force(flags: Flags, device_type: str) -> Iterator[None]:
    """Return a context manager that sets these torch flags inside its block, and restores the old flags afterwards."""
    before = flags_for(device_type)
    kinds = (*_ANYWHERE, *_ON_CUDA)[: len(flags)]
    changed = [(write, old, new) for (_, write), old, new in zip(kinds, before, flags, strict=True) if old != new]
    try:
        for write, _, new in changed:
            write(new)
        yield
    finally:
        for write, old, _ in changed:
            write(old)
