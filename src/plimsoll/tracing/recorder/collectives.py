"""Ops that must not simply run again: ops that communicate with other ranks, and ops that route tokens.

If one rank alone repeats a collective, it waits forever. If an op that chooses experts and tokens (top-k, sort, ``nonzero``)
chooses differently the second time, backward computes gradients for tokens that forward never sent there.
"""

from __future__ import annotations

import functools
import traceback
from typing import Any

import torch

from plimsoll.tracing.recorder.calling import flat_tensors
from plimsoll.tracing.torch_internals import resolve_group

IS_ROUTING = "chooses where tokens are routed"
"""The obstacle (the reason why an op must not run again) of ops whose results choose tokens, experts or rows."""
_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor", "symm_mem"})
_REPEATABLE = frozenset({"_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
_POINT_TO_POINT = frozenset({"isend", "irecv", "batch_p2p_ops"})
WITHOUT_ALIASES = "c10d"
"""The namespace of ops whose schemas do not declare that they write. Their first argument receives the data."""
_CALLERS = frozenset({"torch.distributed.distributed_c10d", "torch.distributed._functional_collectives"})
"""Names of torch's modules that each collective of a model passes through."""
_GROUPS = frozenset({"group_name", "process_group"})
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NO_MESSAGE = frozenset({"_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group"})
_ROUTES = frozenset(
    {
        "topk",
        "kthvalue",
        "argmax",
        "argmin",
        "sort",
        "argsort",
        "msort",
        "nonzero",
        "nonzero_static",
        "bincount",
        "histc",
        "multinomial",
        "searchsorted",
        "bucketize",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
    }
)
_CHOOSES_ALIKE = frozenset(
    {"topk", "kthvalue", "argmax", "argmin", "sort", "argsort", "msort", "searchsorted", "bucketize"}
)
"""Routing ops whose results have the same sizes in each run, and on a CPU the same bits for the same arguments."""
_SELECTS = frozenset({"index", "_index_put_impl_", "index_put", "index_put_", "masked_select", "nonzero"})
"""Names of ops that take rows where a mask is true."""


def is_collective(func: torch._ops.OpOverload) -> bool:
    """Return True if the op communicates with other ranks, or waits for their data."""
    return func.namespace in _NAMESPACES and _name(func) not in _NO_MESSAGE


def names_collective(cost_key: str) -> bool:
    """Return True if the op with this cost key (the text that names an op and its arguments in a trace) communicates with other
    ranks.
    """
    return cost_key.partition(".")[0] in _NAMESPACES


def is_repeatable_collective(func: torch._ops.OpOverload) -> bool:
    """Return True if the results of a collective depend only on its arguments.

    The collectives of ``c10d`` are excluded: they are awaited outside of any op.
    """
    return func.namespace in _REPEATABLE and _name(func) not in _POINT_TO_POINT


def is_wait(func: torch._ops.OpOverload) -> bool:
    """Return True if the op ends a collective. Such an op returns its argument, whose contents have arrived now."""
    return func.namespace in _NAMESPACES and _name(func) == "wait_tensor"


def undeclared_writes(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments that a collective writes although its schema does not say so."""
    return args[:1] if func.namespace == WITHOUT_ALIASES else ()


def is_routing(func: torch._ops.OpOverload) -> bool:
    """Return True if the results of the op choose tokens, experts or rows."""
    return func.namespace == "aten" and _name(func) in _ROUTES


def chooses_alike(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Return True if a routing op chooses the same for the same arguments: a sort or a top-k on a CPU, in one process.

    On a GPU equal numbers may come in another order. With several ranks, one that chose differently would leave the others
    waiting. Stand-ins (fake tensors) have the device of the trace, and not the device that the plan is for.
    """
    is_shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_shared or _name(func) not in _CHOOSES_ALIKE:
        return False
    return all(tensor.device.type == "cpu" and type(tensor) in _PLAIN for tensor in flat_tensors(args))


def masks_of(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the Boolean tensors among the arguments that an op selects by, or an empty list if the op does not select."""
    if func.namespace != "aten" or _name(func) not in _SELECTS:
        return []
    return [tensor for tensor in flat_tensors(args) if tensor.dtype is torch.bool]


@functools.cache
def group_arguments(func: torch._ops.OpOverload) -> frozenset[str]:
    """Return the names of the arguments that pass the process group to a collective. For other ops the result is empty."""
    return _GROUPS.intersection(argument_names(func)) if is_collective(func) else frozenset()


@functools.cache
def argument_names(func: torch._ops.OpOverload) -> tuple[str, ...]:
    """Return the names of an op's arguments, in the order of its schema."""
    return tuple(argument.name for argument in func._schema.arguments)


def failed_in_collective(error: BaseException) -> bool:
    """Return True if an error, or its cause, was raised in a collective. Then another rank has died, or runs other code.

    torch raises plain errors in collectives, so the place where the error was raised decides.
    """
    frames = traceback.walk_tb(error.__traceback__)
    is_here = isinstance(error, RuntimeError) and any(f.f_globals.get("__name__") in _CALLERS for f, _ in frames)
    return is_here or (error.__cause__ is not None and failed_in_collective(error.__cause__))


def peers_of(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the global ranks that take part in a collective. For other ops the result is empty."""
    names = group_arguments(func)
    listed = zip(argument_names(func), args, strict=False) if names else ()
    groups = [_group(value) for name, value in (*listed, *kwargs.items()) if name in names]
    return tuple(
        rank for group in groups if group is not None for rank in torch.distributed.get_process_group_ranks(group)
    )


def group_text(value: Any) -> str:
    """Return a process group, or a group's name, as text that is equal on all ranks. Return "" for other values.

    Names of groups contain numbers and differ between the rows of one mesh. A group's description and size do not differ.
    """
    group = _group(value)
    return "" if group is None else f"{group.group_desc} of {group.size()}"


def _group(value: Any) -> torch.distributed.ProcessGroup | None:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    group = value
    if isinstance(value, torch.ScriptObject):
        group = distributed.ProcessGroup.unbox(value)
    elif isinstance(value, str):
        group = resolve_group(value)
    return group if isinstance(group, distributed.ProcessGroup) else None


def _name(func: torch._ops.OpOverload) -> str:
    return str(func._schema.name.split("::")[1])
