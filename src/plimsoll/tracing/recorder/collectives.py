"""Which ops must not simply run once more: those that talk to other ranks, and those that route tokens.

A collective that is run again on one rank alone waits for ever. An op that chooses experts and tokens (top-k, sort,
``nonzero``) and chooses otherwise the second time makes gradients of tokens that forward never sent there.
"""

from __future__ import annotations

import functools
import traceback
from typing import Any

import torch

from plimsoll.tracing.recorder.calling import flat_tensors
from plimsoll.tracing.torch_internals import resolve_group

IS_ROUTING = "decides which token goes where"
"""The obstacle of ops whose results choose tokens, experts or rows."""
_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor", "symm_mem"})
_REPEATABLE = frozenset({"_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
_POINT_TO_POINT = frozenset({"isend", "irecv", "batch_p2p_ops"})
WITHOUT_ALIASES = "c10d"
"""The namespace whose schemas do not say what they write: their first argument holds what comes in."""
_CALLERS = frozenset({"torch.distributed.distributed_c10d", "torch.distributed._functional_collectives"})
"""Modules of torch through which every collective of a model goes."""
_GROUPS = frozenset({"group_name", "process_group"})
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
_SELECTS = frozenset({"index", "_index_put_impl_", "index_put", "index_put_", "masked_select", "nonzero"})
"""Ops that take rows where a mask is true."""


def is_collective(func: torch._ops.OpOverload) -> bool:
    """Whether the op talks to other ranks, or waits for what they send."""
    return func.namespace in _NAMESPACES and _name(func) not in _NO_MESSAGE


def names_collective(cost_key: str) -> bool:
    """Whether an op that a trace knows by its cost key talks to other ranks."""
    return cost_key.partition(".")[0] in _NAMESPACES


def is_repeatable_collective(func: torch._ops.OpOverload) -> bool:
    """Whether a collective is a function of its arguments: those of ``c10d`` are awaited outside of any op."""
    return func.namespace in _REPEATABLE and _name(func) not in _POINT_TO_POINT


def is_wait(func: torch._ops.OpOverload) -> bool:
    """Whether the op ends a collective: it returns its argument, with the contents that it did not have before."""
    return func.namespace in _NAMESPACES and _name(func) == "wait_tensor"


def undeclared_writes(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a collective writes without its schema saying so."""
    return args[:1] if func.namespace == WITHOUT_ALIASES else ()


def is_routing(func: torch._ops.OpOverload) -> bool:
    """Whether what the op returns chooses tokens, experts or rows."""
    return func.namespace == "aten" and _name(func) in _ROUTES


def masks_of(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The Boolean tensors by which an op selects."""
    if func.namespace != "aten" or _name(func) not in _SELECTS:
        return []
    return [tensor for tensor in flat_tensors(args) if tensor.dtype is torch.bool]


@functools.cache
def group_arguments(func: torch._ops.OpOverload) -> frozenset[str]:
    """The arguments by which a collective is told its process group."""
    return _GROUPS.intersection(argument_names(func)) if is_collective(func) else frozenset()


@functools.cache
def argument_names(func: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of an op's arguments, in order."""
    return tuple(argument.name for argument in func._schema.arguments)


def failed_in_collective(error: BaseException) -> bool:
    """Whether an error, or what caused it, came out of a collective: another rank is gone or does something else.

    torch raises plain errors there, so where it was raised tells.
    """
    frames = traceback.walk_tb(error.__traceback__)
    is_here = isinstance(error, RuntimeError) and any(f.f_globals.get("__name__") in _CALLERS for f, _ in frames)
    return is_here or (error.__cause__ is not None and failed_in_collective(error.__cause__))


def peers_of(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The global ranks between which a collective runs."""
    names = group_arguments(func)
    listed = zip(argument_names(func), args, strict=False) if names else ()
    groups = [_group(value) for name, value in (*listed, *kwargs.items()) if name in names]
    return tuple(
        rank for group in groups if group is not None for rank in torch.distributed.get_process_group_ranks(group)
    )


def group_text(value: Any) -> str:
    """A process group, or its name, as text that is the same on every rank; empty for other values.

    Groups' names are numbered and differ between the rows of one mesh; what a group is for, and its size, do not.
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
