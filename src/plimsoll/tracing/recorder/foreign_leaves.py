"""Keep the gradients of tensors that a trial's backward reaches and that are not parameters of the model.

A training loop may train tensors of its own together with a model: a soft prompt, a prefix within a cache, or the parameters of
a loss. Under ``torch.func.functional_call`` the model's weights may be computed from other tensors. Such a tensor may reach the
model inside of any object. So it is not searched for among the arguments, but in the graph of the loss: each has a node there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from plimsoll.tracing.fsdp2 import every_parameter, gathered_parameters, has_flat_parameters
from plimsoll.tracing.local_tensors import gradient_of
from plimsoll.tracing.recorder.calling import graph_nodes
from plimsoll.tracing.recorder.contents import put_back_entries
from plimsoll.tracing.stepped_gradients import SteppedGradient


@contextlib.contextmanager
def foreign_leaves_kept(model: nn.Module, loss: torch.Tensor) -> Iterator[None]:
    """Return a context manager for the backward, from ``loss``, of a trial step (a step that is run only to plan or verify).

    At its end, tensors that the backward adds gradients to, and that are not parameters of the model, have the gradients that
    they had before. Their hooks do not run in the block.
    """
    leaves = [] if has_flat_parameters(model) else _foreign_leaves(model, loss)
    with gradients_aside(leaves, [leaf._backward_hooks for leaf in leaves]):
        yield


@contextlib.contextmanager
def gradients_aside(leaves: Sequence[torch.Tensor], tables: Iterable[dict[Any, Any] | None] = ()) -> Iterator[None]:
    """Return a context manager that restores the gradients of these tensors at its end.

    A gradient that exists is replaced by zeros of its shape in the block, so that adding to it has its usual cost, and is never
    written. Hooks that run when a gradient is complete, and the hooks in ``tables``, do not run in the block.
    """
    gradients = [gradient_of(leaf) for leaf in leaves]
    stand_ins = [(leaf, leaf.grad) for leaf in leaves if leaf.is_leaf and isinstance(leaf.grad, SteppedGradient)]
    # torch 2.9 to 2.15 hold hooks for complete gradients in this dict, and handles refer to the same dict.
    every = [*(leaf._post_accumulate_grad_hooks for leaf in leaves), *tables]
    hooks = [(table, dict(table)) for table in every if table is not None]
    try:
        for table, _ in hooks:
            table.clear()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                leaf.grad = torch.zeros_like(gradient)
        for leaf, _ in stand_ins:
            leaf.grad = None
        yield
    finally:
        for table, entries in hooks:
            put_back_entries(table, entries)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not gradient_of(leaf):
                leaf.grad = gradient
        for leaf, stand_in in stand_ins:
            leaf.grad = stand_in


def _foreign_leaves(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a backward from ``loss`` adds gradients to and that are not parameters of the model."""
    # FSDP2 moves or keeps the gradients of gathered parameters itself.
    own = {id(each) for each in (*every_parameter(model), *gathered_parameters(model))}
    # only nodes that add to a gradient have a variable
    leaves = (getattr(node, "variable", None) for node in graph_nodes([loss]))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and id(leaf) not in own]
