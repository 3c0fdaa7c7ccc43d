"""Lists every part of a device's memory at the peak of a step: tensors, and memory outside the tensors.

The error of an item is what comparisons with real steps leave open (``docs/estimate.md``). On a CPU the peak of live tensors
was compared with torch's own count. On a GPU the same trace assumes the kernels that the device would run; that was compared
only with published figures, so errors are wider there.

What a process holds outside its tensors (context, workspaces, communicators) cannot be computed from the model. Every such
figure was measured by others or read in a library's source, and names its source. Devices without published figures are
``UNSUPPORTED``, not guessed.

Known weaknesses: figures change with the versions of driver, CUDA and NCCL. ``CUDA_MODULE_LOADING=EAGER`` needs over
1 GiB more; ``NCCL_BUFFSIZE``, ``NCCL_MAX_NCHANNELS`` and communicators that share resources need less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.estimate import BudgetItem
from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.memory_use import AllocatorUse, OptimizerUse
from plimsoll.artifacts.trace import Category, runs_gpu_kernels
from plimsoll.planning.costing.devices import Device
from plimsoll.units import GIB, KIB, MIB

COUNTED_ERROR = 0.01
"""The relative error of bytes that are counted from shapes.

Real steps under DDP, FSDP2, HSDP and with float32 gradients take 0.5% to 1% more or less than counted at most
(``tests/estimator/parallelism/test_rank.py``).
"""
_WORKSPACE_ERROR = 0.5
"""The relative error of the cuBLAS workspaces.

A process that runs forward and backward in one thread has one handle instead of the two counted here.
"""
_ACTIVATION_ERROR = {False: 0.02, True: 0.05}
_TEMPORARY_ERROR = {False: 0.03, True: 0.15}
"""The relative errors of activations and of temporaries. The key says whether the trace had to assume a GPU's kernels, because
this machine lacks the GPU.

The masks, statistics and workspaces of such kernels differ between versions.
"""
_COMMUNICATION_ERROR = 0.2
"""The relative error of communication buffers.

They are modelled on FSDP2 and DDP of torch 2.13, whose settings change how many buffers are alive at one time.
"""
_FRAGMENTATION_ERROR = 0.8
"""The relative error of the bytes that are lost to fragmentation.

Recorded on an A100: 210, 152, 157 and 924 MiB; simulated: 215, 165, 38 and 909 (``docs/allocator.md``).
"""
_UNACCOUNTED = {
    True: (
        0.14,
        int(5.75 * GIB),
        0.6,
        "in the 23 published Megatron-DeepSpeed pipeline runs used for tuning, the median was 5.5 GiB above the sum, whatever "
        "the model's size: memory that does not grow with the model, such as the communicators of two frameworks",
    ),
    False: (
        0.06,
        int(5.75 * GIB),
        1.0,
        "one FSDP job and two LoRA jobs held 7 to 12% more; a dropout that the estimate left out explains 3% of it",
    ),
}
"""What published runs hold in addition to the sum of all items that are estimated. The key says whether the job has a pipeline.

Each entry has the share of that sum, the limit in bytes, the relative error and the source.
"""
_EXACT = {
    Category.PARAMETER: "parameters",
    Category.GRADIENT: "gradients",
    Category.BUFFER: "buffers",
    Category.INPUT: "batch",
}

_WAITING = "activations of other micro-batches"
TENSOR_ITEMS = frozenset(
    {*_EXACT.values(), "optimizer state", "master weights", "activations", _WAITING, "temporaries", "communication"}
)
"""The names of those items of an estimate that are tensors, so that they count toward a budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The simulated memory of one rank at its peak, as data.

    ``classes`` maps categories to bytes. ``waiting_bytes`` of these are activations of other micro-batches in flight.
    ``allocator`` is what the device's caching allocator holds for these tensors, or ``None`` on a CPU.
    """

    classes: Mapping[str, int]
    waiting_bytes: int
    allocator: AllocatorUse | None = None
    has_stand_ins: bool = False
    """Whether the trace had to assume which kernels the device runs, because this machine lacks the device.

    This is so for each device with a caching allocator.
    """


def budget_items(
    memory: RankMemory,
    optimizers: Sequence[OptimizerUse],
    outside: Iterable[BudgetItem],
    *,
    has_pipeline: bool = False,
) -> tuple[BudgetItem, ...]:
    """Return the parts of a device's memory at the peak, as items for the estimate. The parts do not overlap.

    ``optimizers`` has one entry per stage of the rank and gives the error and the master weights. ``outside`` are items outside
    the allocator: context, library workspaces, communicators. On a GPU the last item is what published runs hold in addition to
    all of these.
    """
    classes, is_gpu = memory.classes, memory.allocator is not None
    exact = {
        category: _item(name, classes.get(category.value, 0), COUNTED_ERROR, Basis.EXACT)
        for category, name in _EXACT.items()
    }
    is_stood_in = is_gpu or memory.has_stand_ins
    error = _ACTIVATION_ERROR[is_stood_in]

    def modelled(name: str, bytes_: int, relative_error: float) -> BudgetItem:
        return _item(name, bytes_, relative_error, Basis.MODELLED)

    parts = (
        exact[Category.PARAMETER],
        exact[Category.GRADIENT],
        *_optimizer_items(classes.get(Category.OPTIMIZER_STATE, 0), optimizers),
        modelled("activations", classes.get(Category.ACTIVATION, 0) - memory.waiting_bytes, error),
        modelled(_WAITING, memory.waiting_bytes, error),
        modelled("temporaries", classes.get(Category.TEMPORARY, 0), _TEMPORARY_ERROR[is_stood_in]),
        modelled("communication", classes.get(Category.COMMUNICATION, 0), _COMMUNICATION_ERROR),
        exact[Category.BUFFER],
        exact[Category.INPUT],
        *_allocator_items(memory),
        *outside,
    )
    return (*parts, _unaccounted(parts, has_pipeline)) if is_gpu else parts


def _unaccounted(parts: Iterable[BudgetItem], has_pipeline: bool) -> BudgetItem:  # noqa: FBT001 - a key of the table
    share, most_bytes, error, source = _UNACCOUNTED[has_pipeline]
    bytes_ = min(int(share * sum(part.bytes or 0 for part in parts)), most_bytes)
    return _item("not accounted for", bytes_, error, Basis.ASSUMED, f"{source} (docs/project/claims.md)")


def has_caching_allocator(device: Device) -> bool:
    """Whether torch's caching allocator serves the device. It does not serve CPUs, nor devices that XLA compiles for.

    Example:
        >>> from plimsoll.planning.costing.devices import find_device
        >>> [has_caching_allocator(find_device(name)) for name in ("H100", "laptop-CPU", "TPU-v5e")]
        [True, False, False]
    """
    return runs_gpu_kernels(device.name) and not device.name.startswith("TPU")


def tensor_room(device: Device, layout: Layout, token_bytes: int = 0) -> int:
    """Return the bytes that a device leaves for tensors: its memory minus the framework's memory, minus the bytes of published
    runs that the items do not explain. ``token_bytes`` is that of ``framework_items``.
    """
    share, most_bytes = _UNACCOUNTED[layout.pp > 1][:2] if has_caching_allocator(device) else (0.0, 0)
    room = max(int(device.memory_bytes / (1 + share)), device.memory_bytes - most_bytes)
    return room - sum(item.bytes or 0 for item in framework_items(device, layout, token_bytes))


def kernel_items(op_names: Iterable[str]) -> tuple[BudgetItem, ...]:
    """Return items for memory inside kernels that a trace without the device cannot show, such as workspaces of convolutions.

    Example:
        >>> [item.name for item in kernel_items(["mm", "convolution", "convolution_backward"])]
        ['workspaces of convolutions']
    """
    if not any("convolution" in name for name in op_names):
        return ()
    note = "the kernel library on the device chooses them; on a CPU they took up to 2.4 times the bytes of inputs and outputs"
    return (_item("workspaces of convolutions", None, 0.0, Basis.UNSUPPORTED, note),)


def _item(name: str, bytes_: int | None, relative_error: float, basis: Basis, note: str = "") -> BudgetItem:
    return BudgetItem(name=name, bytes=bytes_, relative_error=relative_error, basis=basis, note=note)


def _optimizer_items(state_bytes: int, optimizers: Sequence[OptimizerUse]) -> list[BudgetItem]:
    """Return an item for the optimizer's state and an item for master weights. The state's item carries the notes about the
    optimizer.
    """
    if not optimizers:
        return []
    master = sum(use.total_master_bytes for use in optimizers)
    first, error = optimizers[0], max(COUNTED_ERROR, *(use.relative_error for use in optimizers))
    return [
        _item("optimizer state", state_bytes - master, error, first.basis, "; ".join(first.notes)),
        _item("master weights", master, COUNTED_ERROR, Basis.EXACT),
    ]


def _allocator_items(memory: RankMemory) -> list[BudgetItem]:
    """Return items for the bytes that the caching allocator reserves but no live tensor uses, at the moment when the reserved
    bytes are most.
    """
    use = memory.allocator
    if use is None:
        return []
    cached = use.reserved_peak_bytes - sum(memory.classes.values()) - use.rounding_bytes
    return [
        _item("allocator rounding", use.rounding_bytes, 0.1, Basis.MODELLED, "blocks of 512 bytes"),
        _item("fragmentation", cached, _FRAGMENTATION_ERROR, Basis.MODELLED, "reserved but not in use at the peak"),
    ]


# Outside the tensors ------------------------------------------------------------------------------------------------

_SMALL_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * KIB
_LARGE_WORKSPACE_BYTES = 8 * 4096 * KIB
_HANDLES = 2
"""The number of cuBLAS handles of a process, each with a workspace: one of the forward thread, one of autograd's thread."""
_PAIR_BYTES = 544 * MIB
_RING_BYTES = 688 * MIB
_MEASURED_CHANNELS = 24
_PEER_BYTES = 447 * MIB
"""The bytes of NCCL buffers per peer: a seventh of 3.28 GB, measured for an all-to-all among eight ranks."""
_NETWORK_PEER_BYTES = 2 * 2 * 10 * MIB
"""The bytes of NCCL buffers per peer over the network: two channels in each direction, each of 10 MiB."""
_KERNELS_BYTES = 164 * MIB
_KERNELS = "kernels that are loaded when first used: 0.16 GiB in a run on an H100 (vllm-project/vllm#12126)"
_NVLINK = (
    "NVIDIA/nccl#964: 544 MiB for a group of two A100, 688 MiB for more, over NVLink with 24 channels; #1685: 3.28 GB for an "
    "all-to-all among eight H100; #1424: two channels per peer over the network"
)
_PCIE = f"{_NVLINK}; over PCIe 4 channels are assumed, and bytes grow with channels (#864)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """Known figures of one family of devices, as data: the bytes of a CUDA context, and the number of NCCL's channels between
    devices of one node.
    """

    context_bytes: int
    context_error: float
    context_source: str
    workspace_bytes: int
    channels: int
    channels_error: float
    channels_source: str


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
_DESKTOP_AMPERE = replace(_AMPERE, channels=4, channels_error=1.0, channels_source=_PCIE)
_BEFORE_AMPERE = replace(_DESKTOP_AMPERE, context_error=0.6)
_FIGURES = {
    **dict.fromkeys(("RTX-3060", "A10G", "RTX-A4000", "RTX-A5000"), _DESKTOP_AMPERE),
    **dict.fromkeys(("RTX-4060-Ti", "RTX-4070", "RTX-4070-Ti-SUPER", "RTX-4080", "L4"), _ADA),
    **dict.fromkeys(("Titan-RTX", "T4", "P100"), _BEFORE_AMPERE),
    "RTX-5080": replace(_ADA, context_error=0.6),
    "V100-16GB": replace(_AMPERE, context_error=0.6),
    "V100-32GB": replace(_AMPERE, context_error=0.6),
    "RTX-3090": _DESKTOP_AMPERE,
    "RTX-A6000": _DESKTOP_AMPERE,
    "A100-40GB": _AMPERE,
    "A100-80GB": _AMPERE,
    "A100-40GB-PCIe": _DESKTOP_AMPERE,
    "A100-80GB-PCIe": _DESKTOP_AMPERE,
    "H100-SXM": _HOPPER,
    "H100-96GB": _HOPPER,
    "H100-PCIe": replace(_HOPPER, channels=4, channels_error=1.0, channels_source=_PCIE),
    "H200": _HOPPER,
    "B200": _HOPPER,
    "GB200": _HOPPER,
    "B300": _HOPPER,
    "GB300": _HOPPER,
    "GH200-96GB": _HOPPER,
    "L40S": _ADA,
    "RTX-4090": _ADA,
    "RTX-5090": replace(_ADA, context_error=0.6),
}
_WITHOUT_CONTEXT = {"laptop-CPU"}
"""Devices without a CUDA context.

On a CPU, libraries use host memory like every program, and device memory is not set aside.
"""


def framework_items(device: Device, layout: Layout, token_bytes: int = 0) -> tuple[BudgetItem, ...]:
    """Return items for the memory that one training process holds on its device in addition to the tensors of a trace.

    There is one item for the context, one for the workspaces, and one for each group of ranks that communicates. A CPU gets an
    empty tuple. The workspaces of cuBLAS come from the caching allocator, so torch counts them as allocated. The other items
    are outside the allocator. ``token_bytes`` is the size of a token that DeepEP sends, or 0 without DeepEP.

    Example:
        >>> from plimsoll.planning.costing.devices import find_device
        >>> items = framework_items(find_device("A100-80GB"), Layout(tp=2))
        >>> [(item.name, item.bytes // MIB) for item in items]
        [('CUDA context', 381), ('kernels', 164), ('cuBLAS workspaces', 16), ('NCCL buffers (tp)', 544)]

    Source: given in the note of every item.
    """
    if device.name in _WITHOUT_CONTEXT:
        return ()
    groups = _groups(layout)
    figures = _FIGURES.get(device.name.partition("@")[0])
    if figures is None and device.is_described:
        figures = replace(_BEFORE_AMPERE, context_error=1.0)
    if figures is None:
        note = (
            f"not measured for {device.name}: on that device, subtract torch's reserved bytes from the driver's count"
        )
        names = ("device context", "library workspaces", *(f"buffers ({group.name})" for group in groups))
        return tuple(_item(name, None, 0.0, Basis.UNSUPPORTED, note) for name in names)
    workspaces = "ATen/cuda/CublasHandlePool.cpp of torch 2.13: one per handle and stream, for forward and for backward"
    context, error, source = figures.context_bytes, figures.context_error, figures.context_source
    return (
        _item("CUDA context", context, error, Basis.ASSUMED, source),
        _item("kernels", _KERNELS_BYTES, 0.6, Basis.ASSUMED, _KERNELS),
        _item("cuBLAS workspaces", _HANDLES * figures.workspace_bytes, _WORKSPACE_ERROR, Basis.EXACT, workspaces),
        *(
            _deepep_buffers(each.ranks, token_bytes)
            if token_bytes and each.name == "ep"
            else _communicator(each, figures, device.ranks_per_node)
            for each in groups
        ),
    )


_CHANNELS, _NODE, _ROW_EXTRA_BYTES, _NETWORK_TOKENS = 10, 8, 8 + 128 * (8 + 4 + 4), 128
_LINK_TOKENS = ((8, 256), (64, 288), (96, 480), (128, 560))
_MOST_LINK_TOKENS = 720
_DEEPEP = (
    "deepseek-ai/DeepEP: get_nvl_buffer_size_hint and get_rdma_buffer_size_hint of csrc/legacy/config.hpp, with the "
    "recommended configurations and 20 multiprocessors"
)


def _deepep_buffers(ranks: int, token_bytes: int) -> BudgetItem:
    """Return the item for the buffers that receive DeepEP's tokens, over links within a node and over the network.

    They have room for a number of tokens per channel and sender.
    """
    tokens = next((tokens for most, tokens in _LINK_TOKENS if ranks <= most), _MOST_LINK_TOKENS)
    row_bytes = token_bytes + _ROW_EXTRA_BYTES
    links = _CHANNELS * min(ranks, _NODE) * tokens * row_bytes
    network = 2 * _CHANNELS * (ranks // _NODE) * _NETWORK_TOKENS * (row_bytes + 16) if ranks > _NODE else 0
    return _item("DeepEP buffers (ep)", links + network, 0.3, Basis.ASSUMED, _DEEPEP)


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks that communicate, as data: how many they are, their distance in the numbering of ranks, and the pattern of their
    traffic.
    """

    name: str
    ranks: int
    stride: int
    traffic: str


def _groups(layout: Layout) -> list[_Group]:
    """Return the groups of communicating ranks that one rank belongs to. Ranks are numbered as in ``Layout``: tp fastest, then
    cp, dp, pp.

    Gradients are reduced over data-parallel and context-parallel ranks together. If parameters are spread over both tensor and
    pipeline ranks, these ranks have an extra group that computes the norm of all gradients.
    """
    groups = (
        _Group("tp", layout.tp, 1, "ring"),
        _Group("cp", layout.cp, layout.tp, "ring"),
        _Group("dp and cp" if layout.cp > 1 else "dp", layout.shards, layout.tp, "ring"),
        _Group("replicas", layout.replicas, layout.tp * layout.shards, "ring"),
        _Group("ep", layout.ep, layout.tp, "all-to-all"),
        _Group("pp", layout.pp, layout.tp * layout.dp * layout.cp, "neighbours"),
    )
    norm = _Group("norm", layout.tp * layout.pp, layout.shards, "ring")
    return [
        group for group in (*groups, norm) if group.ranks > 1 and (group is not norm or min(layout.tp, layout.pp) > 1)
    ]


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
    return _item(f"NCCL buffers ({group.name})", int(bytes_), error, Basis.ASSUMED, figures.channels_source)
