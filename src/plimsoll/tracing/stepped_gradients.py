"""The objects in ``parameter.grad`` when an optimizer steps parameters while backward runs: a gradient whose uses are watched,
and a stand-in for a gradient that was freed. Private names of torch: seen in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plimsoll.errors import PlanMismatch
from plimsoll.tracing.torch_internals import current_graph_task, without_torch_function

SHAPE_READS = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "layout",
                "is_meta",
                "requires_grad",
                "is_leaf",
                "grad_fn",
                "itemsize",
            )
        ),
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.numel,
        torch.Tensor.dim,
        torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]  # a property of the C class
        torch.Tensor.is_floating_point,
        torch.Tensor.untyped_storage,
    }
)
"""Attributes and methods of a tensor that give sizes and the like, but no values. A stand-in without values supports them."""

_OF_SHAPE = SHAPE_READS | {
    *(getattr(torch.Tensor, name).__get__ for name in ("is_sparse", "is_cuda", "is_quantized", "is_nested")),
    torch.Tensor.is_contiguous,
    torch.Tensor.storage_offset,
    torch.Tensor._is_zerotensor,
    torch.Tensor.is_coalesced,
    torch.Tensor.__hash__,
    torch.zeros_like,
    torch.empty_like,
}
"""Attributes and functions of a gradient that do not use its values. Code that counts bytes uses them."""


class WatchedGradient(torch.Tensor):
    """A gradient that tells a function when its values are read or written. It shares the memory of the true gradient."""

    _on_use: Callable[[str], None]

    @staticmethod
    def of(gradient: torch.Tensor, on_use: Callable[[str], None]) -> WatchedGradient:
        """Return ``gradient`` as a watched one. ``on_use`` gets the name of the function that uses its values."""
        watched = gradient.as_subclass(WatchedGradient)
        watched._on_use = on_use
        return watched

    def plain(self) -> torch.Tensor:
        """Return the gradient as a usual tensor with the same memory."""
        with without_torch_function():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            if func not in _OF_SHAPE:
                found = next(_watched((args, tuple(kwargs.values()))), None)
                if found is not None:
                    found._on_use(getattr(func, "__name__", str(func)))
            return func(*args, **kwargs)


def _watched(given: Any) -> Any:
    """Yield the watched gradients among the arguments of a function."""
    if isinstance(given, WatchedGradient):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _watched(each)


class SteppedGradient(torch.Tensor):
    """Stands for the gradient of a parameter that was stepped in backward. It has shape and dtype, but no memory. Reading its
    values raises an error in words, so no code can mistake a freed gradient for a missing one. That holds for code in C++ too.
    """

    @staticmethod
    def like(
        tensor: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return a stand-in for a gradient like ``tensor``, or like it on another device or with another dtype."""
        return torch.Tensor._make_wrapper_subclass(
            SteppedGradient,
            tensor.shape,
            strides=tensor.stride(),
            storage_size=0,
            dtype=dtype or tensor.dtype,
            device=device or tensor.device,
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub describes a disabled method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return SteppedGradient.like(args[0])
        if func is aten._to_copy.default:  # a loop may move the model after its last step
            given = kwargs or {}
            return SteppedGradient.like(args[0], dtype=given.get("dtype"), device=given.get("device"))
        if current_graph_task() >= 0 and func in (aten.add_.Tensor, aten.add.Tensor):
            raise PlanMismatch(
                "A second backward adds to the gradient of a parameter that was stepped in the first backward.",
                why="the plan steps each parameter as soon as its gradient is complete, so gradients cannot accumulate",
                next=NEXT,
            )
        raise PlanMismatch(
            f"{func.overloadpacket.__name__} uses the gradient of a parameter that was stepped in backward already.",
            why="the plan steps each parameter as soon as its gradient is complete, and frees the gradient; clipping, "
            "accumulation, zero_grad(set_to_none=False) and norms of gradients need all gradients at once",
            next=NEXT,
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub lacks the name
        return f"<gradient of shape {tuple(self.shape)}, used and freed in backward>"


NEXT = (
    "leave 'step-in-backward' out of allow= for this loop, and start again from a checkpoint: the weights of this step "
    "have changed already"
)
"""What to do after a step whose parameters were stepped too early."""
