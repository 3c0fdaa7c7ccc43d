"""Tensors in; whether they hold the same bits, or a checksum of them, out. NaN equals NaN."""

from __future__ import annotations

from typing import Any

import torch

from plimsoll.tracing.recorder.geometry import Geometry, is_plain

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by bytes, to look at bits."""
_ROW = 512


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as integers: bits are compared, not values."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGER_OF_SIZE[tensor.element_size()])


def fingerprint(tensor: torch.Tensor) -> int:
    """A checksum of all bytes of the tensor's storage and their places; needs no memory of that size."""
    storage = tensor.untyped_storage()
    count = storage.nbytes()
    if count == 0:
        return 0
    width = 8 if count % 8 == 0 else 1
    dtype = torch.int64 if width == 8 else torch.uint8
    flat = torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (count // width,))  # type: ignore[call-overload]
    rest = flat.numel() % _ROW
    rows = flat[rest:].view(-1, _ROW)
    parts = (flat[:rest], rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64))
    return int(sum((part * torch.arange(1, part.numel() + 1, device=part.device)).sum() for part in parts))


def content_fingerprint(tensor: torch.Tensor) -> int:
    """A checksum of the tensor's elements in their order, however they lie on their storage."""
    count = tensor.numel() * tensor.element_size()
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == count
    return fingerprint(tensor if is_whole else tensor.detach().clone(memory_format=torch.contiguous_format))


def same_bits(first: torch.Tensor, second: Any) -> bool:
    """Whether two tensors lie alike and hold the same bits."""
    if not isinstance(second, torch.Tensor) or not is_plain(first) or not is_plain(second):
        return False
    return Geometry.of(first) == Geometry.of(second) and same_contents(first, second)


def same_contents(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of equal shape and dtype hold the same bits, element by element."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.numel() == 0:
        return True
    if first.is_complex():
        first, second = torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj())
    if first.stride() != second.stride():
        first, second = first.contiguous(), second.contiguous()
    if torch.equal(as_integers(first), as_integers(second)):
        return True
    if not first.dtype.is_floating_point:
        return False
    both_nan = first.isnan() & second.isnan()
    return bool((both_nan | (as_integers(first) == as_integers(second))).all())
