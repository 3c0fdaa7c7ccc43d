"""An op in, what it has to do with other ranks or with the routing of tokens out: what must not simply run once more.

A collective that is run again on one rank alone waits for ever. An op that chooses experts and tokens (top-k, sort,
``nonzero``) and chooses otherwise the second time makes gradients of tokens that forward never sent there.
"""

from __future__ import annotations

from typing import Any

import torch

IS_COLLECTIVE = "is a collective"
"""The obstacle of ops that talk to other ranks."""
IS_ROUTING = "decides which token goes where"
"""The obstacle of ops whose results choose tokens, experts or rows."""
_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor", "symm_mem"})
_WITHOUT_ALIASES = "c10d"
"""The namespace whose schemas do not say what they write: their first argument holds what comes in."""
_WAIT = frozenset({"wait_tensor"})
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


def is_wait(func: torch._ops.OpOverload) -> bool:
    """Whether the op ends a collective: it returns its argument, with the contents that it did not have before."""
    return func.namespace in _NAMESPACES and _name(func) in _WAIT


def undeclared_writes(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a collective writes without its schema saying so."""
    return args[:1] if func.namespace == _WITHOUT_ALIASES else ()


def is_routing(func: torch._ops.OpOverload) -> bool:
    """Whether what the op returns chooses tokens, experts or rows."""
    return func.namespace == "aten" and _name(func) in _ROUTES


def masks_of(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The Boolean tensors by which an op selects."""
    if func.namespace != "aten" or _name(func) not in _SELECTS:
        return []
    found: list[torch.Tensor] = []
    pending: list[Any] = list(args)
    while pending:
        value = pending.pop()
        if isinstance(value, list | tuple):
            pending.extend(value)
        elif isinstance(value, torch.Tensor) and value.dtype is torch.bool:
            found.append(value)
    return found


def group_text(value: Any) -> str:
    """A process group, or its name, as text that is the same on every rank; empty for other values.

    Groups' names are numbered and differ between the rows of one mesh; what a group is for, and its size, do not.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return ""
    group = value
    if isinstance(value, torch.ScriptObject):
        group = distributed.ProcessGroup.unbox(value)
    elif isinstance(value, str):
        group = torch._C._distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]  # GroupName is a str
    if not isinstance(group, distributed.ProcessGroup):
        return ""
    return f"{group.group_desc} of {group.size()}"


def _name(func: torch._ops.OpOverload) -> str:
    return str(func._schema.name.split("::")[1])
