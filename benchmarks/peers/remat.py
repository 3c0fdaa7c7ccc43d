"""torch_remat (PyPI ``torch-remat``): every block is recomputed but for the parts of it that are marked to be saved.

It is checkpointing that skips the marked parts in the recompute. Its users mark parts in the source of the model. Here the
children of a block are wrapped from outside, so that transformers' models need no change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.blocks import repeated_blocks


@contextlib.contextmanager
def apply(model: nn.Module, saved: Sequence[str] = ()) -> Iterator[nn.Module]:
    """Recompute every block, except its children named in ``saved``: what those keep for backward stays."""
    import torch_remat

    with contextlib.ExitStack() as stack:
        for number, block in enumerate(repeated_blocks(model)):
            for name, child in block.named_children():
                if name in saved:
                    _replace_forward(stack, child, _kept(child.forward, name))
            # It leaves the generators alone, so that dropout would draw another mask in the recompute.
            hooks = (_Generators(next(block.parameters()).device),)
            recomputed = torch_remat.checkpoint(region_name=f"block {number}", recompute_state_hooks=hooks)
            _replace_forward(stack, block, recomputed(block.forward))
        yield model


def _kept(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Save what ``forward`` keeps for backward, and its outputs, which the rest of the block reads in the recompute."""
    import torch_remat

    region = torch_remat.region(forward, name, recompute=False)

    def run(*args: Any, **kwargs: Any) -> Any:
        output = region(*args, **kwargs)
        outputs = output if isinstance(output, tuple | list) else (output,)
        torch_remat.recompute_needs_tensor(*[each for each in outputs if isinstance(each, torch.Tensor)])
        return output

    return run


def _replace_forward(stack: contextlib.ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward  # type: ignore[method-assign]
    stack.callback(delattr, module, "forward")


class _Generators:
    """The state of the device's random generator, put back before a block is recomputed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def snapshot(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    def restore(self, state: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)
