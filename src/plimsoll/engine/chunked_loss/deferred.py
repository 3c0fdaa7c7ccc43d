"""What a head returns while its loss is chunked: hidden states that stand for logits, and know what is done to them.

Between the head and the loss models cast, scale, cap or slice their logits. Casts do nothing here (the loss computes in
float32 anyway), scales and one softcap are noted, slices of positions are taken of the hidden states. Anything else needs
the logits themselves, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from plimsoll.errors import InvalidModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeferredLogits:
    """Logits that are not computed: ``hidden`` are the states that the head was given.

    The logits would be ``linear(hidden) * inner``, then, where ``is_capped``, their tanh, times ``outer``.
    """

    hidden: torch.Tensor
    classes: int
    inner: float = 1.0
    is_capped: bool = False
    outer: float = 1.0
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape that the logits would have."""
        return torch.Size((*self.hidden.shape[:-1], self.classes))

    @property
    def device(self) -> torch.device:
        """Where the logits would be."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.hidden.dim()

    def dim(self) -> int:
        """The number of dimensions."""
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> DeferredLogits:
        """The loss is computed in float32 in any case."""
        return replace(self, dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        """Another dtype; logits on another device would have to be moved."""
        dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), self.dtype)
        elsewhere = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.device | str)]
        if any(torch.device(place) != self.device for place in elsewhere):
            raise _refused("moves them to another device")
        return replace(self, dtype=dtype)

    def contiguous(self) -> DeferredLogits:
        """Hidden states are laid out by the loss."""
        return self

    def __getitem__(self, index: Any) -> DeferredLogits:
        parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, slice) or part is Ellipsis for part in parts):
            raise _refused("takes positions one by one")
        reaches_classes = Ellipsis in parts or len(parts) >= self.dim()
        if reaches_classes and parts[-1] is not Ellipsis and parts[-1] != slice(None):
            raise _refused("takes a part of the classes")
        return replace(self, hidden=self.hidden[index])

    def __mul__(self, factor: Any) -> DeferredLogits:
        factor = _number(factor)
        if self.is_capped:
            return replace(self, outer=self.outer * factor)
        return replace(self, inner=self.inner * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        return self * (1.0 / _number(divisor))

    def tanh(self) -> DeferredLogits:
        """The cap; only one."""
        if self.is_capped:
            raise _refused("caps them twice")
        return replace(self, is_capped=True)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.tanh and len(args) == 1 and isinstance(args[0], cls):
            return args[0].tanh()
        raise _refused(f"calls {func.__name__} on them")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refused(f"uses their {name}")


def _number(factor: Any) -> float:
    if isinstance(factor, int | float) and not isinstance(factor, bool):
        return float(factor)
    raise _refused(f"scales them by a {type(factor).__name__}")


class _NoLogits(InvalidModel, AttributeError):
    """Also an ``AttributeError``: whoever asks whether there is an attribute gets no for an answer."""


def _refused(what: str) -> InvalidModel:
    return _NoLogits(
        f"The loss is chunked, so there are no logits, but something {what}.",
        why="under chunk_loss a call with labels and gradients computes the loss from hidden states; output.logits stands "
        "for logits that are never made",
        next="call the model without labels or under torch.no_grad() for logits, or handle.remove()",
    )
