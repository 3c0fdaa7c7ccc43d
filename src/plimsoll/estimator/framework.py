"""A device and a layout in, what a training process takes there beside its tensors out: context, workspaces, communicators.

Nothing of this can be counted from the model; every figure was measured by others or read in a library's source, and says
where. Devices whose figures nobody has published are ``UNSUPPORTED``, not guessed.

Known weaknesses: figures move with the versions of driver, CUDA and NCCL; ``CUDA_MODULE_LOADING=EAGER`` takes more than
1 GiB more; ``NCCL_BUFFSIZE``, ``NCCL_MAX_NCHANNELS`` and communicators that share resources take less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from plimsoll.artifacts.basis import Basis
from plimsoll.artifacts.estimate import BudgetItem
from plimsoll.artifacts.layout import Layout
from plimsoll.units import KIB, MIB

_SMALL_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * KIB
_LARGE_WORKSPACE_BYTES = 8 * 4096 * KIB
_HANDLES = 2
"""The thread of forward and autograd's thread have a cuBLAS handle each, and every handle its workspace."""
_PAIR_BYTES = 544 * MIB
_RING_BYTES = 688 * MIB
_MEASURED_CHANNELS = 24
_PEER_BYTES = 447 * MIB
"""3.28 GB for the seven peers of an all-to-all among eight."""
_NETWORK_PEER_BYTES = 2 * 2 * 10 * MIB
"""Two channels each way, of 10 MiB each."""


class TargetDevice(Protocol):
    """What has to be known of a device."""

    @property
    def name(self) -> str:
        """Its name in the catalogue."""

    @property
    def ranks_per_node(self) -> int:
        """How many of them share a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """What is known of one family of devices: the context's bytes, and NCCL's channels between devices of one node."""

    context_bytes: int
    context_error: float
    context_source: str
    workspace_bytes: int
    channels: int
    channels_error: float
    channels_source: str


_KERNELS_BYTES = 164 * MIB
_KERNELS = "kernels that are loaded when first used: 0.16 GiB in a run on an H100 (vllm-project/vllm#12126)"
_NVLINK = (
    "NVIDIA/nccl#964: 544 MiB for a group of two A100, 688 MiB for more, over NVLink with 24 channels; #1685: 3.28 GB for an "
    "all-to-all among eight H100; #1424: two channels per peer over the network"
)
_PCIE = f"{_NVLINK}; over PCIe 4 channels are assumed, and bytes grow with channels (#864)"
_AMPERE = _Figures(
    context_bytes=400_000_000,
    context_error=0.35,
    context_source="about 400 MB with lazy loading (pytorch/pytorch#109888); 256 MiB on an RTX 3090 (invoke-ai/InvokeAI#9413)",
    workspace_bytes=_SMALL_WORKSPACE_BYTES,
    channels=24,
    channels_error=0.3,
    channels_source=_NVLINK,
)
_ADA = _Figures(
    context_bytes=426 * MIB,
    context_error=0.3,
    context_source="426 MiB on an RTX 6000 Ada with torch 2.10 (unslothai/unsloth-zoo#1053)",
    workspace_bytes=_SMALL_WORKSPACE_BYTES,
    channels=4,
    channels_error=1.0,
    channels_source=_PCIE,
)
_HOPPER = _Figures(
    context_bytes=616 * MIB,
    context_error=0.35,
    context_source="616 MiB on a server of eight (LMCache/LMCache#4019, which does not name the device)",
    workspace_bytes=_LARGE_WORKSPACE_BYTES,
    channels=24,
    channels_error=0.6,
    channels_source=_NVLINK,
)
_HOPPER_PCIE = _Figures(
    context_bytes=_HOPPER.context_bytes,
    context_error=_HOPPER.context_error,
    context_source=_HOPPER.context_source,
    workspace_bytes=_LARGE_WORKSPACE_BYTES,
    channels=4,
    channels_error=1.0,
    channels_source=_PCIE,
)
_FIGURES = {
    "A100-40GB": _AMPERE,
    "A100-80GB": _AMPERE,
    "H100-SXM": _HOPPER,
    "H100-PCIe": _HOPPER_PCIE,
    "H200": _HOPPER,
    "B200": _HOPPER,
    "L40S": _ADA,
    "RTX-4090": _ADA,
}
_WITHOUT_CONTEXT = {"laptop-CPU"}
"""On a CPU libraries take memory from the host as every program does; nothing is set aside."""


def framework_items(device: TargetDevice, layout: Layout) -> tuple[BudgetItem, ...]:
    """What one training process takes on its device beside the tensors that a trace knows.

    The workspaces of cuBLAS come from the caching allocator, so torch counts them as allocated; all else is outside of it.

    Args:
        device: of the catalogue.
        layout: tells which groups of ranks communicate, and which of them within a node.

    Returns:
        One item for the context, one for workspaces, one per group that communicates. None for a CPU.

    Example:
        >>> from types import SimpleNamespace
        >>> items = framework_items(SimpleNamespace(name="A100-80GB", ranks_per_node=8), Layout(tp=2))
        >>> [(item.name, item.bytes // MIB) for item in items]
        [('CUDA context', 381), ('kernels', 164), ('cuBLAS workspaces', 16), ('NCCL buffers (tp)', 544)]

    Source: named in the note of every item.
    """
    if device.name in _WITHOUT_CONTEXT:
        return ()
    figures = _FIGURES.get(device.name)
    if figures is None:
        return _unsupported(device.name, layout)
    return (
        _assumed("CUDA context", figures.context_bytes, figures.context_error, figures.context_source),
        _assumed("kernels", _KERNELS_BYTES, 0.6, _KERNELS),
        BudgetItem(
            name="cuBLAS workspaces",
            bytes=_HANDLES * figures.workspace_bytes,
            relative_error=0.0,
            basis=Basis.EXACT,
            note="ATen/cuda/CublasHandlePool.cpp of torch 2.13: one per handle and stream, forward's and backward's",
        ),
        *(_communicator(each, figures, device.ranks_per_node) for each in _groups(layout)),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks that communicate: how many, how far apart in the numbering of ranks, and whether each talks to each."""

    name: str
    ranks: int
    stride: int
    traffic: str


def _groups(layout: Layout) -> list[_Group]:
    """The groups of one rank, with ranks numbered as ``Layout`` does: tp fastest, then cp, dp, pp.

    Gradients are reduced over data-parallel and context-parallel ranks together.
    """
    groups = (
        _Group("tp", layout.tp, 1, "ring"),
        _Group("cp", layout.cp, layout.tp, "ring"),
        _Group("dp and cp" if layout.cp > 1 else "dp", layout.shards, layout.tp, "ring"),
        _Group("ep", layout.ep, layout.tp, "all-to-all"),
        _Group("pp", layout.pp, layout.tp * layout.shards, "neighbours"),
    )
    return [group for group in groups if group.ranks > 1]


def _communicator(group: _Group, figures: _Figures, ranks_per_node: int) -> BudgetItem:
    share = figures.channels / _MEASURED_CHANNELS
    near = min(group.ranks, max(ranks_per_node // group.stride, 1))
    if group.traffic == "ring":
        bytes_ = share * (_PAIR_BYTES if group.ranks == 2 else _RING_BYTES)
    else:
        peers = group.ranks - 1 if group.traffic == "all-to-all" else min(group.ranks - 1, 2)
        in_node = min(near - 1, peers)
        bytes_ = share * in_node * _PEER_BYTES + (peers - in_node) * _NETWORK_PEER_BYTES
    error = figures.channels_error if near == group.ranks else max(figures.channels_error, 0.8)
    return _assumed(f"NCCL buffers ({group.name})", int(bytes_), error, figures.channels_source)


def _assumed(name: str, bytes_: int, relative_error: float, source: str) -> BudgetItem:
    return BudgetItem(name=name, bytes=bytes_, relative_error=relative_error, basis=Basis.ASSUMED, note=source)


def _unsupported(device: str, layout: Layout) -> tuple[BudgetItem, ...]:
    names = ["device context", "library workspaces", *(f"buffers ({group.name})" for group in _groups(layout))]
    return tuple(
        BudgetItem(
            name=name,
            bytes=None,
            relative_error=0.0,
            basis=Basis.UNSUPPORTED,
            note=f"no measured figure for {device} is known: measure it there, as the driver's count less torch's reserved",
        )
        for name in names
    )
