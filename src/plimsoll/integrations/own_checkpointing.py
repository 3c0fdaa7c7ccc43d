"""Switches off, for a while, the activation checkpointing that a framework has set on a model.

A budget decides for every saved activation, and a layer that runs again as a whole leaves it nothing to decide. Frameworks
keep the switch in two places: a flag on modules (transformers, diffusers, timm) and torch's wrapper modules (FSDP plugins).
"""

from __future__ import annotations

import contextlib

from torch import nn

# The module is private by its name alone; seen in torch 2.9 to 2.13.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

_FLAGS = ("gradient_checkpointing", "grad_checkpointing")


def switch_off(model: nn.Module, undo: contextlib.ExitStack) -> int:
    """Let every layer run once, as if it were not checkpointed; ``undo`` puts back what was there.

    Returns:
        How many layers were checkpointed, or offloaded.
    """
    count = 0
    for module in model.modules():
        for flag in _FLAGS:
            if vars(module).get(flag) is True:
                undo.callback(setattr, module, flag, True)
                setattr(module, flag, False)
                count += 1
        if isinstance(module, ActivationWrapper) and "forward" not in vars(module):
            undo.callback(vars(module).pop, "forward", None)
            vars(module)["forward"] = next(module.children())
            count += 1
    return count
