"""Keep the gradients of tensors that a trial's backward reaches and that are not parameters of the model.

A training loop may train tensors of its own together with a model: a soft prompt, a prefix within a cache, the parameters of a
loss, or the weights from which ``torch.func.functional_call`` computes the model's. Such a tensor may reach the model inside of
any object. So it is not searched for among the arguments, but in the graph of the loss, where each one has a node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from plimsoll.tracing.fsdp2 import every_parameter, gathered_parameters, has_flat_parameters
from plimsoll.tracing.local_tensors import gradient_of
from plimsoll.tracing.recorder.contents import put_back_entries


@contextlib.contextmanager
def foreign_leaves_kept(model: nn.Module, loss: torch.Tensor) -> Iterator[None]:
    """Return a context manager to run a trial's backward from ``loss`` in.

    At its end, tensors that the backward adds gradients to, and that are not parameters of the model, have the gradients that
    they had before, and their hooks do not run in the block. As for parameters, a gradient that exists is replaced by zeros in
    the block, so that adding to it has its usual cost, and is never written.
    """
    leaves = [] if has_flat_parameters(model) else _foreign_leaves(model, loss)
    gradients = [gradient_of(leaf) for leaf in leaves]
    tables = [table for leaf in leaves for table in (hooks_of(leaf), leaf._backward_hooks)]
    hooks = [(table, dict(table)) for table in tables if table is not None]
    try:
        for table, _ in hooks:
            table.clear()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                leaf.grad = torch.zeros_like(gradient)
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        for table, entries in hooks:
            put_back_entries(table, entries)


def hooks_of(leaf: torch.Tensor) -> dict[int, Any] | None:
    """Return the hooks that run when a leaf's gradient is complete, or ``None`` if it does not have such hooks.

    torch 2.9 to 2.15 hold them in this dict, and handles refer to the same dict.
    """
    found: dict[int, Any] | None = leaf._post_accumulate_grad_hooks
    return found


def _foreign_leaves(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a backward from ``loss`` adds gradients to and that are not parameters of the model."""
    # FSDP2 moves the gradients of gathered parameters into those of the shards, or keeps them until ranks reduce them.
    own = {id(each) for each in (*every_parameter(model), *gathered_parameters(model))}
    left: list[Any] = [loss.grad_fn]
    seen = set(left)
    leaves: dict[int, torch.Tensor] = {}
    while left:
        node = left.pop()
        leaf = getattr(node, "variable", None)  # only nodes that add to a gradient have it
        if isinstance(leaf, torch.Tensor) and id(leaf) not in own:
            leaves[id(leaf)] = leaf
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        left.extend(following)
    return list(leaves.values())
