"""Describe an op call: the key of its cost, its number of FLOPs, and the bytes that it moves.

The key contains the op, the dtypes, sizes and strides of its tensors, and its constants: calls with equal keys cost the same. A
fraction that elementwise arithmetic scales by, or a drop rate, does not matter. So blocks that differ only in such a number
have equal keys.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

import torch

from plimsoll.artifacts.trace import OpSpec
from plimsoll.tracing.recorder.calling import flat_tensors
from plimsoll.tracing.recorder.collectives import argument_names, group_arguments, group_text
from plimsoll.tracing.recorder.flops import count_flops

_LONGEST_KEY = 512
_ANY_FRACTION = frozenset(
    f"aten::{name}{end}" for name in ("add", "sub", "rsub", "mul", "div", "bernoulli") for end in ("", "_")
)
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_ATTENTION = re.compile(
    r"^_scaled_dot_product_(flash|efficient|cudnn|fused)_attention(_for_cpu|_overrideable)?(?=_backward$|$)"
)
_COLLECTIVES = "plimsoll"
"""The namespace of our ops that take the place of collectives. Each of these ops has an argument ``group``."""

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a short name of a dtype, such as ``f32`` for ``torch.float32``. For rare dtypes, return their own name."""
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = "x".join(map(str, value.shape))
        if value.layout is not torch.strided:  # without the number of its elements, which differs from batch to batch
            layout = str(value.layout).removeprefix("torch.")
        else:
            layout = "" if value.is_contiguous() else "s" + ",".join(map(str, value.stride()))
        return f"{dtype_name(value.dtype)}[{sizes}]{layout}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_describe(item) for item in value) + "]"
    if isinstance(value, torch.dtype):  # a cast to another dtype moves other bytes
        return dtype_name(value)
    if isinstance(value, int | float | bool | str) or value is None:
        return repr(value)
    return type(value).__name__


def op_name(func: torch._ops.OpOverload) -> str:
    """Return the name of an op, such as ``mm`` for ``aten.mm.default``. Ops of other namespaces keep the namespace
    (``mylib.scan``).
    """
    namespace, name = func._schema.name.split("::")
    return name if namespace == "aten" else f"{namespace}.{name}"


def value_stem(name: str) -> str:
    """Return the name of the values that an op makes: the op's own name, but the same name for all kernels of fused attention.

    The device, the versions of torch and cuDNN, and the mask decide which kernel attention takes. All of them return output,
    logsumexp, seed and offset in this order, so a plan for one kernel holds for the others.

    Example:
        >>> value_stem("mm"), value_stem("_scaled_dot_product_cudnn_attention")
        ('mm', 'scaled_dot_product_attention')
        >>> value_stem("_scaled_dot_product_flash_attention_for_cpu_backward")
        'scaled_dot_product_attention_backward'
    """
    return _ATTENTION.sub("scaled_dot_product_attention", name)


def cost_key(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the key of an op's cost: a text that is equal for calls that cost the same.

    Long keys (lists of hundreds of tensors) end in a hash.
    """
    groups = group_arguments(func)
    takes_any = func._schema.name in _ANY_FRACTION

    def described(name: str, value: Any) -> str:
        if takes_any and isinstance(value, float) and not value.is_integer():
            return "fraction"
        return group_text(value) if name in groups else _describe(value)

    named = "".join(f";{name}={described(name, value)}" for name, value in kwargs.items() if value is not None)
    listed = (described(name, value) for name, value in zip(argument_names(func), args, strict=False))
    text = f"{func}({';'.join(listed)}{named})"
    if len(text) <= _LONGEST_KEY:
        return text
    return f"{text[: _LONGEST_KEY // 2]}…{hashlib.sha256(text.encode()).hexdigest()[:16]})"


def op_spec(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpSpec:
    """Return the FLOPs of an op (by a formula) and the bytes that it moves (each tensor is read or written once).

    An op without a formula counts one operation per element that it makes or updates. That is too few for fused optimizers, but
    their bytes take longer anyway. A collective counts 0 FLOPs and the size of the whole tensor, and has the group that it runs
    over.
    """
    inputs = flat_tensors(args) + flat_tensors(list(kwargs.values()))
    outputs = flat_tensors(out) if func._schema.returns else _updated(func, args, kwargs)
    if func.namespace == _COLLECTIVES:
        return _collective_spec(func, args, kwargs, inputs + outputs)
    is_attention = op_name(func).startswith("_scaled_dot_product")
    flops = count_flops(func, args, kwargs, out)
    moved = sum(math.prod(tensor.shape) * tensor.element_size() for tensor in inputs + outputs)
    floats = [tensor.dtype for tensor in inputs + outputs if tensor.dtype.is_floating_point]
    return OpSpec(
        name=op_name(func),
        flops=sum(math.prod(tensor.shape) for tensor in outputs) if flops is None else flops,
        moved_bytes=moved,
        dtype=dtype_name(floats[0]) if floats else "i64",
        product=_product(op_name(func), args),
        is_causal=is_attention and dict(zip(argument_names(func), args, strict=False)).get("is_causal") is True,
    )


def _product(name: str, args: tuple[Any, ...]) -> tuple[int, int, int, int] | None:
    """Return batch, rows, columns and inner size of a matrix product, or ``None`` for another op."""
    if name not in _PRODUCTS:
        return None
    left, right = (arg for arg in args if isinstance(arg, torch.Tensor)) if name in ("mm", "bmm") else args[1:3]
    return (math.prod(left.shape[:-2]), left.shape[-2], right.shape[-1], left.shape[-1])


def _updated(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an op without results updates in place, such as the parameters in a multi-tensor or fused step of
    an optimizer.
    """
    updated = [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        # Fused steps declare that they write gradients, but do so only to remove a scale from them.
        and (argument.name != "grads" or kwargs.get("grad_scale") is not None)
    ]
    return flat_tensors(updated)


def _collective_spec(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> OpSpec:
    named = dict(zip(argument_names(func), args, strict=False)) | kwargs
    return OpSpec(
        name=op_name(func),
        flops=0,
        moved_bytes=max(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors),
        dtype=dtype_name(tensors[0].dtype),
        group=named["group"],
        copies=named.get("copies", 0.0),
    )
