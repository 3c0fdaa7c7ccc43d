"""Bytes by category at the peak of one rank, its allocator and its framework in; the items of its memory budget out.

The error of an item is what comparisons with real steps leave open (``docs/estimate.md``). On a CPU the peak of live tensors
is compared with torch's own count; on a GPU the same trace takes the kernels that the device would run, which has been
compared with published figures only, so errors are wider there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plimsoll.artifacts.allocation import AllocatorUse
from plimsoll.artifacts.basis import Basis
from plimsoll.artifacts.estimate import BudgetItem
from plimsoll.artifacts.optimizer_use import OptimizerUse
from plimsoll.artifacts.trace import Category

_ACTIVATION_ERROR = {False: 0.02, True: 0.05}
_TEMPORARY_ERROR = {False: 0.03, True: 0.15}
"""By whether a GPU's kernels are stood in for: masks, statistics and workspaces differ between kernels and versions."""
_COMMUNICATION_ERROR = 0.2
"""Buffers follow FSDP2 and DDP of torch 2.13; settings of theirs change how many are alive at once."""
_FRAGMENTATION_ERROR = 0.8
"""Recorded on an A100: 210, 152, 157 and 924 MiB; simulated: 215, 165, 38 and 909 (``docs/allocator.md``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What was simulated for one rank, at the moment of its peak.

    ``classes`` are bytes by category, of which ``waiting_bytes`` are activations of other micro-batches in flight;
    ``waiting_error`` is by how much these may be off because they wait in other stages of the rank, as a share.
    ``allocator`` is what the device's caching allocator holds for them; a CPU has none.
    """

    classes: Mapping[str, int]
    waiting_bytes: int
    waiting_error: float = 0.0
    allocator: AllocatorUse | None = None


def budget_items(
    memory: RankMemory, optimizers: Sequence[OptimizerUse], outside: Iterable[BudgetItem]
) -> tuple[BudgetItem, ...]:
    """Every part of a device's memory at the peak, none of them counted twice.

    Args:
        memory: what the rank's step allocates.
        optimizers: whose state is among it, one per stage of the rank; their error and master weights are told apart.
        outside: what lies outside of the allocator: context, library workspaces, communicators.
    """
    classes, is_gpu = memory.classes, memory.allocator is not None
    exact = {
        category: _item(name, classes.get(category.value, 0), 0.0, Basis.EXACT) for category, name in _EXACT.items()
    }
    activations = classes.get(Category.ACTIVATION, 0) - memory.waiting_bytes
    error = _ACTIVATION_ERROR[is_gpu]
    items = [
        exact[Category.PARAMETER],
        exact[Category.GRADIENT],
        *_optimizer_items(classes.get(Category.OPTIMIZER_STATE, 0), optimizers),
        _item("activations", activations, error, Basis.MODELLED),
        _item("activations of other micro-batches", memory.waiting_bytes, error + memory.waiting_error, Basis.MODELLED),
        _item("temporaries", classes.get(Category.TEMPORARY, 0), _TEMPORARY_ERROR[is_gpu], Basis.MODELLED),
        _item("communication", classes.get(Category.COMMUNICATION, 0), _COMMUNICATION_ERROR, Basis.MODELLED),
        exact[Category.BUFFER],
        exact[Category.INPUT],
        *_allocator_items(memory),
    ]
    return (*items, *outside)


def kernel_items(op_names: Iterable[str]) -> tuple[BudgetItem, ...]:
    """What kernels allocate for themselves and a trace without the device does not show: workspaces of convolutions.

    Args:
        op_names: of the ops of a step.

    Example:
        >>> [item.name for item in kernel_items(["mm", "convolution", "convolution_backward"])]
        ['workspaces of convolutions']
    """
    if not any("convolution" in name for name in op_names):
        return ()
    note = "chosen by the kernel's library on the device; a CPU's took up to 2.4 times what the convolution reads and writes"
    return (_item("workspaces of convolutions", None, 0.0, Basis.UNSUPPORTED, note),)


_EXACT = {
    Category.PARAMETER: "parameters",
    Category.GRADIENT: "gradients",
    Category.BUFFER: "buffers",
    Category.INPUT: "batch",
}


def _item(name: str, bytes_: int | None, relative_error: float, basis: Basis, note: str = "") -> BudgetItem:
    return BudgetItem(name=name, bytes=bytes_, relative_error=relative_error, basis=basis, note=note)


def _optimizer_items(state_bytes: int, optimizers: Sequence[OptimizerUse]) -> list[BudgetItem]:
    """State and master weights; the notes of the optimizer's rules stand beside its state."""
    if not optimizers:
        return []
    master = sum(use.total_master_bytes for use in optimizers)
    first, error = optimizers[0], max(use.relative_error for use in optimizers)
    return [
        _item("optimizer state", state_bytes - master, error, first.basis, "; ".join(first.notes)),
        _item("master weights", master, 0.0, Basis.EXACT),
    ]


def _allocator_items(memory: RankMemory) -> list[BudgetItem]:
    """What the allocator holds beyond live tensors, when it holds most."""
    use = memory.allocator
    if use is None:
        return []
    cached = use.reserved_peak_bytes - sum(memory.classes.values()) - use.rounding_bytes
    return [
        _item("allocator rounding", use.rounding_bytes, 0.1, Basis.MODELLED, "blocks of 512 bytes"),
        _item("fragmentation", cached, _FRAGMENTATION_ERROR, Basis.MODELLED, "reserved, and not in use at the peak"),
    ]
