"""Says which devices run GPU kernels: all that a trace depends on of a device. No torch here."""

from __future__ import annotations


def runs_gpu_kernels(device_name: str) -> bool:
    """Whether a device of this name runs GPU kernels: all do that do not call themselves a CPU.

    Example:
        >>> runs_gpu_kernels("H100-SXM"), runs_gpu_kernels("laptop-CPU")
        (True, False)
    """
    return "cpu" not in device_name.lower()
