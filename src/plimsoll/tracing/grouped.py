"""The operands of a grouped matrix product (the experts of a mixture) in, its fake result out.

torch's own fake form takes bfloat16 alone, while its kernels run in every type (2.9 to 2.13). Which rows go to which
expert depends on data, how many rows there are does not: tokens × experts per token.

Source: ``create_grouped_gemm_output_tensor`` in ``aten/src/ATen/native/GroupedMMUtils.h``: rows start at multiples of 16 bytes.
"""

from __future__ import annotations

import torch

GROUPED_MM = torch.ops.aten._grouped_mm.default
_ALIGNMENT_BYTES = 16


def grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """An empty tensor with the geometry of ``aten._grouped_mm(left, right, offs)``.

    Args:
        left: rows of all groups ``[rows, in]``, or one matrix per group ``[groups, rows, in]``.
        right: one matrix per group ``[groups, in, out]``, or columns of all groups ``[in, out]``.
        offs: where groups end along the dimension that they share.
        bias: none is supported by torch either.
        out_dtype: type of the result; by default that of ``left``.
    """
    dtype = out_dtype or left.dtype
    if left.dim() == right.dim() == 2:
        sizes = [0 if offs is None else offs.shape[0], left.shape[0], right.shape[1]]
    elif left.dim() == right.dim():
        sizes = [left.shape[0], left.shape[1], right.shape[2]]
    else:
        sizes = [left.shape[-2], right.shape[-1]]
    lanes = _ALIGNMENT_BYTES // dtype.itemsize
    width = -(-sizes[-1] // lanes) * lanes
    strides = [sizes[1] * width, width, 1] if len(sizes) == 3 else [width, 1]
    return torch.empty_strided(sizes, strides, dtype=dtype, device=left.device)
