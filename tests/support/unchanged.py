"""Checks that a block of code leaves every bit and every attribute of a model and its optimizer as they were."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils._pytree import tree_flatten

from plimsoll.session import optimizer_watch

_HOOKS = [name for name in vars(nn.Module()) if "hook" in name]


@contextlib.contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Compare parameters, gradients, buffers, flags, hooks, forwards, optimizer, profiler and random state around the block."""
    # Hooks of an attachment that an earlier test has dropped are removed when the next one is made.
    gc.collect()
    while optimizer_watch._ABANDONED:
        optimizer_watch._ABANDONED.pop().remove()
    before = snapshot(model, optimizer)
    yield
    after = snapshot(model, optimizer)
    differing = [name for name in before.keys() | after.keys() if not _is_same(before.get(name), after.get(name))]
    assert not differing, differing


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything that Plimsoll could have touched, by name; tensors as copies, identities where the object matters."""
    found: dict[str, Any] = {
        "random state": torch.get_rng_state(),
        "is a profiler on": torch._C._autograd._profiler_enabled(),
        "global optimizer hooks": [
            list(torch_optimizer._global_optimizer_pre_hooks),
            list(torch_optimizer._global_optimizer_post_hooks),
        ],
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "threads": torch.get_num_threads(),
        "is grad enabled": torch.is_grad_enabled(),
    }
    for name, module in model.named_modules():
        found[f"{name} attributes"] = sorted(vars(module))
        found[f"{name} training"] = module.training
        found[f"{name} own forward"] = vars(module).get("forward")
        found[f"{name} hooks"] = [sorted(getattr(module, hooks) or ()) for hooks in _HOOKS if hooks in vars(module)]
    for name, parameter in model.named_parameters():
        found[f"{name} object"] = (id(parameter), parameter._version, parameter.requires_grad, id(parameter.grad))
        found[f"{name} value"] = parameter.detach().clone()
        found[f"{name} gradient"] = None if parameter.grad is None else parameter.grad.clone()
        found[f"{name} gradient hooks"] = bool(parameter._backward_hooks)
    for name, buffer in model.named_buffers():
        found[f"{name} buffer object"] = (id(buffer), buffer._version)
        found[f"{name} buffer"] = buffer.clone()
    if optimizer is not None:
        leaves, layout = tree_flatten([optimizer.state_dict(), len(optimizer.state)])
        found["optimizer layout"] = str(layout)
        found.update(
            {
                f"optimizer {i}": leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
                for i, leaf in enumerate(leaves)
            }
        )
    return found


def _is_same(one: Any, other: Any) -> bool:
    tensors = [isinstance(thing, torch.Tensor) for thing in (one, other)]
    if any(tensors):
        return all(tensors) and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
