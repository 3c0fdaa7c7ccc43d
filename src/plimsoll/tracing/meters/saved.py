"""Finds the tensors that existing autograd graphs have saved for their backward. Python does not know most of them.

Every node of a graph has an attribute ``_raw_saved_...`` for each saved tensor, or for a list of them. Its ``data`` is the
tensor itself, or the object that a pack hook has returned. Reading it runs no hook. Seen in torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch


def saved_tensors(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that the autograd graphs of ``roots`` have saved and not yet freed. Objects that pack hooks have
    returned are left out.

    Example:
        >>> rows = torch.ones(2, 3, requires_grad=True)
        >>> [tensor.shape for tensor in saved_tensors([rows.exp().sum()])]
        [torch.Size([2, 3])]
    """
    found = []
    left = [node for root in roots if (node := _node_of(root)) is not None]
    seen = set(left)
    while left:
        node = left.pop()
        saved = _saved_by(node)
        found += [each for each in saved if isinstance(each, torch.Tensor)]
        # A backward has freed this node, and so the nodes below it. A loop that collects its losses may have a million of them.
        if saved and all(each is None for each in saved):
            continue
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        left.extend(following)
    return found


def _node_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    # reading it raises for a view whose base was written in a way that autograd forbids (FSDP1)
    except RuntimeError:
        return None


def _saved_by(node: Any) -> list[Any]:
    """Return what a node has saved. An entry is ``None`` if it was freed."""
    found: list[Any] = []
    kind: Any = type(node)
    for name in _names_of(kind):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # a backward has freed the list
            found.append(None)
            continue
        found += [getattr(each, "data", None) for each in (saved if isinstance(saved, tuple | list) else (saved,))]
    return found


@functools.cache
def _names_of(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
