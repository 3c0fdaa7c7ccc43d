"""Let a model compute with fake CPU tensors inside a block, even if the model is on the meta device.

Fake tensors have shapes, strides and dtypes, but no values. Values that a step computes from integers only (positions, masks,
the padding test that decides whether there is a mask at all) are small, and Python code often reads them. So they are computed
for real, and a fake trace takes the same branches as a real step.

Known weakness: some tensors are real because they came from real integers. If fake values are written into such a tensor in
place, the tensor does not change.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from plimsoll.errors import TracingFailed
from plimsoll.tracing.recorder.calling import flat_tensors

_MOST_REAL_FLOAT_BYTES = 4 * 2**20
_MOST_REAL_INTEGER_BYTES = 64 * 2**20
"""The largest size in bytes of a result that is computed for real: of an integer tensor here, and of a float tensor in the
constant above.

Only results that do not depend on a fake tensor are computed for real.
"""
_GROUPED_MM = torch.ops.aten._grouped_mm.default
_ROW_ALIGNMENT_BYTES = 16
_DEVICE_OF = torch.ops.prim.device.default


@contextlib.contextmanager
def faked(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Return a context manager that yields the fake mode. Inside its block, fake tensors replace the model's parameters and
    buffers, so that the model computes without data.

    Tied parameters stay tied.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _swapped(model, mode), mode, KnownValues():
        yield mode


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode | None) -> torch.Tensor:
    """Return a fake CPU tensor with the size, strides, dtype and ``requires_grad`` of ``tensor``. If ``mode`` is ``None``,
    return a tensor on the meta device instead.

    Raises:
        TracingFailed: the tensor is not strided: the size of a sparse tensor depends on its data.
    """
    if tensor.layout is not torch.strided:
        raise TracingFailed(
            f"A {str(tensor.layout).removeprefix('torch.')} tensor cannot be traced without its device.",
            why="its number of elements depends on its data, and a fake tensor knows only shapes",
            next="trace on the device itself (with real tensors, without device_profile=)",
        )
    device = "meta" if mode is None else "cpu"
    with mode or contextlib.nullcontext():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad) if tensor.is_leaf else fake


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """Return a copy of the batch with fake tensors in place of its tensors. Integer tensors that have values stay real: they
    are copied.
    """

    @functools.cache  # a tensor that is passed twice stays one tensor
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return _with_attributes(_known_copy(tensor) if _has_known_values(tensor) else fake_like(tensor, mode), tensor)

    return tree_map_only(torch.Tensor, convert, batch)


def _has_known_values(tensor: torch.Tensor) -> bool:
    is_real = not tensor.is_meta and not isinstance(tensor, FakeTensor)
    return is_real and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _known_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().cpu()
    return copy.clone() if copy.untyped_storage()._cdata == tensor.untyped_storage()._cdata else copy


@contextlib.contextmanager
def _swapped(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    twin = functools.cache(functools.partial(_twin, mode=mode))  # tied parameters stay one tensor
    originals: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None:
                        originals.append((table, name, tensor))
                        table[name] = twin(tensor)
        yield
    finally:
        for table, name, tensor in originals:
            table[name] = tensor


def _twin(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if _has_known_values(tensor):
        return _with_attributes(_known_copy(tensor), tensor)
    fake = fake_like(tensor, mode)
    if tensor.grad is not None:
        fake.grad = fake_like(tensor.grad, mode)
    return _with_attributes(fake, tensor)


def _with_attributes(fake: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Give ``fake`` the attributes that the user's code has set on ``tensor``, and return it."""
    for name, value in vars(tensor).items():
        vars(fake).setdefault(name, value)
    return fake


class KnownValues(TorchDispatchMode):
    """A dispatch mode that computes small results for real, if an op does not depend on a fake tensor (positions, masks).

    All other ops go to the fake mode below.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked several times per op, and the fake mode is slow to answer
        kwargs = kwargs or {}
        if func is _GROUPED_MM:
            return _grouped_product(*args, **kwargs)
        tensors = flat_tensors([args, list(kwargs.values())])
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not tensors:
                raise
        else:
            if not all(_is_small(tensor) for tensor in flat_tensors(out)):
                return out
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_small(tensor: torch.Tensor) -> bool:
    is_inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    most_bytes = _MOST_REAL_FLOAT_BYTES if is_inexact else _MOST_REAL_INTEGER_BYTES
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= most_bytes


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty tensor with the geometry of the result of ``aten._grouped_mm``, which multiplies each expert of a mixture
    with its rows.

    torch's own fake implementation accepts only bfloat16, but its kernels run in all dtypes (2.9 to 2.13). Which rows go to
    which expert depends on data. The number of rows does not: tokens × experts per token.

    Source: ``create_grouped_gemm_output_tensor`` in ``aten/src/ATen/native/GroupedMMUtils.h``: rows start at multiples of 16
    bytes.

    ``left`` has the rows of all groups ``[rows, in]`` or one matrix per group ``[groups, rows, in]``. ``right`` has one matrix
    per group ``[groups, in, out]`` or the columns of all groups ``[in, out]``. ``offs`` are the ends of the groups.
    """
    dtype = out_dtype or left.dtype
    if left.dim() == right.dim() == 2:
        sizes = [0 if offs is None else offs.shape[0], left.shape[0], right.shape[1]]
    elif left.dim() == right.dim():
        sizes = [left.shape[0], left.shape[1], right.shape[2]]
    else:
        sizes = [left.shape[-2], right.shape[-1]]
    lanes = _ROW_ALIGNMENT_BYTES // dtype.itemsize
    width = -(-sizes[-1] // lanes) * lanes
    strides = [sizes[1] * width, width, 1] if len(sizes) == 3 else [width, 1]
    return torch.empty_strided(sizes, strides, dtype=dtype, device=left.device)
