"""Make two short texts: a fingerprint for the structure of a model, and a signature for a call.

Neither text depends on the values of tensors. Two models with equal fingerprints run the same program. Two calls with equal
signatures take the same path through the model (as far as shapes, types and flags decide that).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.fsdp2 import every_gradient
from plimsoll.tracing.local_tensors import layout_of
from plimsoll.tracing.recorder.calling import name_of
from plimsoll.tracing.recorder.opkey import dtype_name
from plimsoll.tracing.zero import shape_of

_HASH_LENGTH = 12
AUTOCAST = "autocast "
"""The beginning of the part of a signature that says which dtype autocast casts to."""
EVALUATION = "evaluation"
"""The part of a signature that says that no module is in training mode."""


def fingerprint(model: nn.Module, regions: Iterable[str] = ()) -> str:
    """Return a text such as ``LlamaForCausalLM-1a2b3c4d5e6f``: the model's class, and a hash of its structure.

    The structure is the class of each submodule, properties of each parameter and buffer, and the names of the regions (planned
    modules). Only the name of a class counts: its file differs where it runs as a script. The properties are name, shape, dtype
    and ``requires_grad``. A tied parameter counts under each of its names. For a DTensor, the global shape counts, with
    placements and mesh shape, which are the same on all ranks. Wrappers around the model by ``DistributedDataParallel`` and
    torch.compile do not count.
    """
    model = inner_module(model)
    digest = hashlib.sha256()
    for name, module in model.named_modules(remove_duplicate=False):
        digest.update(f"module {name} {type(module).__qualname__}\n".encode())
    first: dict[int, str] = {}
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            twin = first.setdefault(id(tensor), name)
            digest.update(f"{kind} {name} {twin} {_described(tensor)} {tensor.requires_grad}\n".encode())
    for region in regions:
        digest.update(f"region {region}\n".encode())
    return f"{type(model).__name__}-{digest.hexdigest()[:_HASH_LENGTH]}"


def signature(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, loss: Any = None) -> str:
    """Return a text that describes what decides the path of a step, such as ``input_ids=i64[2x512]; labels=i64[2x512];
    training; loss: output``.

    It describes the arguments of the call, the model's training flags, whether gradients exist already (accumulation), and the
    loss.
    """
    parts = [_describe(value) for value in args]
    parts += [f"{name}={_describe(kwargs[name])}" for name in sorted(kwargs)]
    model = inner_module(model)
    parts.append(_training(model))
    parts += casts_in_force()
    if every_gradient(model):
        parts.append("accumulating")
    parts.append("loss: " + ("output" if loss is None else name_of(loss)))
    return "; ".join(parts)


def casts_in_force() -> list[str]:
    """Return a list of texts such as ``autocast cpu bf16``: one for the CPU and one for CUDA, if autocast is on there now."""
    return [
        f"{AUTOCAST}{device} {dtype_name(torch.get_autocast_dtype(device))}"
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]


def _described(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}[{'x'.join(map(str, shape_of(tensor)))}]{layout_of(tensor)}"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _described(value) + "*" * value.requires_grad
    if isinstance(value, bool | int | float | str) or value is None:
        return repr(value)
    leaves, _ = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return type(value).__name__
    return f"{type(value).__name__}({', '.join(map(_describe, leaves))})"


def _training(model: nn.Module) -> str:
    training = [name for name, module in model.named_modules() if module.training]
    count = sum(1 for _ in model.modules())
    if len(training) == count:
        return "training"
    if not training:
        return EVALUATION
    return f"training {len(training)}/{count} {hashlib.sha256(' '.join(training).encode()).hexdigest()[:6]}"
