"""Let ops on fake CPU tensors decompose in the same way as on the device that the plan is for.

What a step saves for backward depends on the kernel. On a CPU, dropout is ``empty_like → bernoulli_ → div_ → mul`` and keeps a
mask in the activations' dtype; on a GPU, dropout is one op with a byte mask. The kernel is chosen by functions that torch
decomposes before anything else sees them. Some of these functions choose by device. Inside the block, they do for CPU tensors
what torch does for CUDA tensors (2.9 to 2.13).

Autocast differs too: if the caller's autocast is on (for "cuda", or for "cpu" without CUDA), the block uses its dtype, and
CUDA's list of ops that stay in float32.

Attention takes the first kernel in torch's order that supports the call: cuDNN's, if torch prefers it (`prefers_cudnn`), then
flash, then memory-efficient, then the kernel made of matrix products. A kernel that is disabled by ``torch.backends.cuda`` or
``torch.nn.attention.sdpa_kernel`` is skipped.

Sources: ``aten/src/ATen/native/Dropout.cpp``, ``transformers/attention.cpp``, ``transformers/cuda/sdp_utils.cpp``,
``layer_norm.cpp``, ``SoftMax.cpp``, ``autocast_mode.h`` in PyTorch. Known weaknesses: GPUs too old for flash attention are not
recognised, and an order set by ``sdpa_kernel(..., set_priority=True)`` is ignored. Heads larger than 128 are assumed not to be
supported by cuDNN (newer versions support some). Convolutions and batch norm keep the CPU's form, which saves the same tensors
as cuDNN's except its small reserve. None of this was compared with a GPU yet.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.library import Library

from plimsoll.artifacts.trace import runs_gpu_kernels as runs_gpu_kernels
from plimsoll.tracing.torch_internals import AUTOCAST_CPU, below_autograd, dispatch_keys, excluding_keys

_ATEN = torch.ops.aten
_NARROW_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_MOST_HEAD_SIZE = 256
_FLASH_ALIGNMENT = 8
_CUDNN_FIRST = 91500
"""The version of cuDNN above which torch prefers cuDNN: since 9.15.1 it supports sequences of any length (pytorch#169849)."""
_CUDNN_MOST_HEAD_SIZE = 128
_CUDNN_MOST_LATENT = (192, 128)
"""The head sizes of queries and of values in multi-head latent attention. cuDNN supports this pair too."""
_HOPPER_OR_BLACKWELL = re.compile(r"(?<![a-z])(gh|h|gb|b)[1-9]00(?![0-9])|(?<![a-z])h20(?![0-9])")
"""A pattern that matches the names of data center GPUs of compute capability 9.0 and 10.x."""
_FLOAT32_UNDER_CUDA_AUTOCAST = (
    "softmax.int",
    "log_softmax.int",
    "layer_norm",
    "group_norm",
    "nll_loss",
    "cross_entropy_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "kl_div",
    "binary_cross_entropy_with_logits",
    "exp",
    "log",
    "pow.Tensor_Scalar",
    "rsqrt",
    "reciprocal",
    "softplus",
    "cumsum",
    "sum",
    "sum.dim_IntList",
)
"""Names of ops that CUDA's autocast runs in float32, that models use, and that CPU autocast leaves in the narrow dtype."""


@contextlib.contextmanager
def target_kernels(device_name: str) -> Iterator[None]:
    """Return a context manager. Inside its block, ops on CPU tensors use the kernels of the named device.

    If the named device is a CPU, the context manager does nothing.
    """
    if not runs_gpu_kernels(device_name):
        yield
        return
    with contextlib.ExitStack() as stack:
        library = Library("aten", "IMPL")
        stack.callback(library._destroy)
        library.impl("scaled_dot_product_attention", _attention(with_cudnn=prefers_cudnn(device_name)), "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("rms_norm", _rms_norm, "AutogradCPU")
        library.impl("softmax.int", _softmax(_ATEN._softmax.default), "AutogradCPU")
        library.impl("log_softmax.int", _softmax(_ATEN._log_softmax.default), "AutogradCPU")
        caller = next((device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)), None)
        if caller is not None:
            with warnings.catch_warnings():  # torch warns about replaced kernels, which is intended here
                warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
                for name in _FLOAT32_UNDER_CUDA_AUTOCAST:
                    library.impl(name, _in_float32(name), "AutocastCPU")
            stack.enter_context(torch.autocast("cpu", dtype=torch.get_autocast_dtype(caller)))
        yield


def _in_float32(name: str) -> Callable[..., Any]:
    """Return a kernel for the op ``name`` that first casts its narrow floating-point tensors to float32, as CUDA's autocast
    does.
    """
    packet, _, overload = name.partition(".")
    op = getattr(getattr(_ATEN, packet), overload or "default")
    below = dispatch_keys(AUTOCAST_CPU)

    def cast(value: Any) -> Any:
        is_narrow = isinstance(value, torch.Tensor) and value.dtype in _NARROW_DTYPES
        return value.float() if is_narrow else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with excluding_keys(below):
            return op(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return kernel


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002, FBT001 - aten's signature
    if train and 0 < p < 1 and input.numel() > 0:
        return _ATEN.native_dropout.default(input, p, train)[0]  # type: ignore[no-any-return]
    return _ATEN.dropout.default.decompose(input, p, train)  # type: ignore[no-any-return]


def prefers_cudnn(device_name: str) -> bool:
    """Return True if torch tries cuDNN's attention first on this device. It does so since cuDNN 9.15.1, for compute capability
    9 and 10.

    A CPU build of torch lacks cuDNN. Then the version in torch's wheels for CUDA 13 is assumed, which is newer.
    ``TORCH_CUDNN_SDPA_DEPRIORITIZED=1``, a disabled kernel and deterministic mode have the same effect as in torch.

    Example:
        >>> prefers_cudnn("A100-80GB")
        False
    """
    is_allowed = torch.backends.cuda.cudnn_sdp_enabled() and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    is_repeatable = torch.are_deterministic_algorithms_enabled()
    if not is_allowed or (is_repeatable and not torch.is_deterministic_algorithms_warn_only_enabled()):
        return False
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return (version is None or version > _CUDNN_FIRST) and _has_capability_9_or_10(device_name)


def _has_capability_9_or_10(device_name: str) -> bool:
    if not device_name.startswith("cuda"):
        return _HOPPER_OR_BLACKWELL.search(device_name.lower()) is not None
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability(torch.device(device_name))
    is_old = int((torch.version.cuda or "13").partition(".")[0]) < 13
    return major in (9, 10) and (not is_old or minor in (0, 3))


def _attention(*, with_cudnn: bool) -> Callable[..., torch.Tensor]:
    """Return a function that computes attention on CPU tensors with the kernel that torch chooses on a GPU. ``with_cudnn`` says
    whether torch tries cuDNN's kernel first.
    """

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - aten's signature
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        is_dense = query.dim() == 4 and query.shape[-1] == key.shape[-1]
        has_equal_heads = is_dense and query.shape[1] == key.shape[1] == value.shape[1]
        is_fused = is_dense and (has_equal_heads or enable_gqa)
        needs_gradient = any(t.requires_grad for t in (query, key, value))
        if is_fused and with_cudnn and _fits_cudnn(query, key, value, dropout_p):
            bias = _attention_bias(attn_mask, query, key)
            cudnn = _ATEN._scaled_dot_product_cudnn_attention.default
            return cudnn(query, key, value, bias, needs_gradient, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
        if is_fused and attn_mask is None and _fits_flash(query, value):
            head_size = query.shape[-1]
            padding = -head_size % _FLASH_ALIGNMENT
            q, k, v = (torch.nn.functional.pad(t, (0, padding)) if padding else t for t in (query, key, value))
            scale = head_size**-0.5 if scale is None else scale
            flash = _ATEN._scaled_dot_product_flash_attention.default
            out = flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :head_size] if padding else out  # type: ignore[no-any-return]
        if (
            has_equal_heads
            and query.dtype in (*_NARROW_DTYPES, torch.float32)
            and torch.backends.cuda.mem_efficient_sdp_enabled()
        ):
            bias = _attention_bias(attn_mask, query, key)
            efficient = _ATEN._scaled_dot_product_efficient_attention.default
            return efficient(query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
        math = _ATEN._scaled_dot_product_attention_math.default
        return math(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]

    return attend


def _fits_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> bool:
    """Return True if cuDNN's attention kernel supports these shapes."""
    sizes = query.shape[-1], value.shape[-1]
    return (
        query.dtype in _NARROW_DTYPES
        and (max(sizes) <= _CUDNN_MOST_HEAD_SIZE or sizes == _CUDNN_MOST_LATENT)
        and not any(size % 8 for size in sizes)
        and key.shape[2] != 1
        and not (dropout_p and query.shape[2] == 1)
    )


def _fits_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if the flash attention kernel supports these shapes.

    If the values have another head size than the queries, it does not, and the memory-efficient kernel is used.
    """
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and query.dtype in _NARROW_DTYPES
        and query.shape[-1] == value.shape[-1] <= _FLASH_MOST_HEAD_SIZE
    )


def _attention_bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the attention mask as an additive mask, expanded to all heads, as fused kernels expect it."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        additive = torch.zeros_like(mask, dtype=query.dtype)
        mask = additive.masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _softmax(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a kernel for softmax or log-softmax that does on CPU tensors what a GPU does: it casts float16 to float32 inside
    the op.
    """

    def kernel(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:  # noqa: A002 - aten's
        if input.dtype is torch.float16 and dtype is torch.float32:
            return op(input, dim, True)
        return op(input if dtype is None else input.to(dtype), dim, False)

    return kernel


def _rms_norm(
    input: torch.Tensor,  # noqa: A002 - aten's signature
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    return _FusedRmsNorm.apply(input, weight, normalized_shape, eps)  # type: ignore[no-any-return]


class _FusedRmsNorm(torch.autograd.Function):
    """An autograd function that calls CUDA's fused RMS norm for CPU tensors. On a GPU this op has an autograd formula, and on a
    CPU torch would decompose it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, shape: list[int], eps: float | None
    ) -> torch.Tensor:
        with below_autograd():
            out, reciprocal = _ATEN._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, reciprocal)
        ctx.shape = shape
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, reciprocal = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1]]
        backward = _ATEN._fused_rms_norm_backward.default
        to_input, to_weight = backward(gradients[0], x, ctx.shape, reciprocal, weight, mask)
        return to_input, to_weight, None, None
