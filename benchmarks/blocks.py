"""A model in, its repeated blocks out: what peers wrap."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def block_lists(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """``(parent, attribute, list)`` of the outermost lists of two or more modules of one class."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(block) for block in child}) == 1:
            yield model, name, child
        else:
            yield from block_lists(child)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Every member of `block_lists`."""
    return [block for _, _, blocks in block_lists(model) for block in blocks]
