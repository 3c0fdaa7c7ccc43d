"""How a tensor lies on its storage: sizes, strides, offset, dtype; enough to make the same view of another storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes and strides in elements, offset in elements from the start of the storage, and dtype."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Geometry:
        return Geometry(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def view_on(self, base: torch.Tensor) -> torch.Tensor:
        """This geometry on the storage of ``base``."""
        if base.dtype is self.dtype:
            return torch.as_strided(base, self.size, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), self.offset, self.size, self.stride)


def has_lazy_bits(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bits are not its values (lazy conjugate or negation): a view cannot say that."""
    return tensor.is_conj() or tensor.is_neg()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense and strided with a storage of its own kind (no subclass that hides several)."""
    return tensor.layout is torch.strided and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
