"""Temporarily fine-tunes a model with adapters: its own weights are frozen, added small matrices are trained.

LoRA (Hu et al. 2022) adds ``B A x`` to linear layers. QLoRA (Dettmers et al. 2023) also holds their weights in 4 bits, and
dequantizes them for each product, once in forward and again in backward. Stacks of experts are in 4 bits too: forward
dequantizes a stack, and autograd saves the result unless the block is recomputed, as under bitsandbytes'
``replace_parameter_4bit``. Bottleneck adapters (Houlsby et al. 2019) follow the attention and the feed-forward module of every
block. A trace of the adapted model shows what autograd then saves.

Known weaknesses: adapters have the dtype of the weights that they are added to, as in torchtune, and in peft with
``autocast_adapter_dtype=False``; they do not have dropout; experts stacked in one tensor do not get adapters.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from plimsoll.artifacts.job import Techniques
from plimsoll.errors import InvalidOption
from plimsoll.estimator.local_rank.roles import is_experts

_IN_BLOCKS = re.compile(r"\.\d+\.")
_LAYERS = {
    "qv": re.compile(r"(^|[._])(q|v|query|value|c_attn|qkv)(_proj|_lin)?$"),
    "attention": re.compile(r"attn|attention", re.IGNORECASE),
    "all": re.compile(""),
}
"""For each value of ``lora-on``, a pattern for the names of the linear layers within blocks that get adapters."""
_IN_KERNEL = re.compile(r"(^|\.)mixer\.out_proj$")
"""Mamba's kernels read the weight of this layer and do not call the layer, so peft refuses adapters on it."""
_AFTER = re.compile(r"\.\d+\.(\w*attn|\w*attention|mlp|ffn|feed_forward)$", re.IGNORECASE)
_BLOCK_ELEMENTS = 64
_NESTED_ELEMENTS = 256


@contextlib.contextmanager
def adapted(model: nn.Module, how: Techniques) -> Iterator[tuple[str, ...]]:
    """Make ``model`` train only adapters inside the ``with`` statement. It yields notes about the change for the user.

    Raises:
        InvalidOption: the model does not have a layer for adapters.

    Example:
        >>> model = nn.ModuleList([nn.Sequential(nn.Linear(8, 8))])
        >>> with adapted(model, Techniques(lora=2)):
        ...     sum(p.numel() for p in model.parameters() if p.requires_grad)
        32
        >>> sum(p.numel() for p in model.parameters())
        72
    """
    rank = how.lora or how.qlora
    if not rank and not how.adapters:
        yield ()
        return
    undo: list[Callable[[], None]] = []
    try:
        for parameter in model.parameters():
            undo.append(lambda p=parameter, needed=parameter.requires_grad: p.requires_grad_(needed))  # type: ignore[misc]
            parameter.requires_grad_(False)
        count = _add_low_rank(model, how, undo) if rank else _add_bottlenecks(model, how.adapters, undo)
        if not count:
            raise InvalidOption(
                f"{how} does not match any layer of {type(model).__name__}.",
                why="adapters are added to linear layers of its blocks that have the names used by transformers",
                next="use lora-on=all, or build the model with its adapters and pass that model",
            )
        stacks = [
            module for name, module in model.named_modules() if _IN_BLOCKS.search(f".{name}") and is_experts(module)
        ]
        notes = [f"{count} adapters are trained; all other parameters are frozen"]
        if stacks and rank:
            notes.append("the stacks of experts do not get adapters")
        if stacks and how.qlora:
            for module in stacks:
                _quantize_stacks(module, undo)
            notes.append(
                "the stacks of experts are in 4 bits; a dequantized stack is kept for backward unless its block is recomputed"
            )
        yield tuple(notes)
    finally:
        for each in reversed(undo):
            each()


def _add_low_rank(model: nn.Module, how: Techniques, undo: list[Callable[[], None]]) -> int:
    pattern = _LAYERS[how.lora_on or "all"]
    found = 0
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or not _IN_BLOCKS.search(f".{name}"):
            continue
        if _IN_KERNEL.search(name):
            continue
        is_adapted = pattern.search(name) is not None
        if not is_adapted and not how.qlora:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        base = _FourBitLinear(module) if how.qlora else module
        _swap(
            parent, name.rpartition(".")[2], _LowRank(base, module, how.lora or how.qlora) if is_adapted else base, undo
        )
        found += is_adapted
    return found


def _add_bottlenecks(model: nn.Module, width: int, undo: list[Callable[[], None]]) -> int:
    modules = [(name, module) for name, module in model.named_modules() if _AFTER.search(f".{name}")]
    for name, module in modules:
        weight = next((each for each in module.parameters() if each.dim() == 2), None)
        features = getattr(getattr(model, "config", None), "hidden_size", None)
        if weight is not None:
            parent = model.get_submodule(name.rpartition(".")[0])
            _swap(
                parent, name.rpartition(".")[2], _Bottleneck(module, features or weight.shape[1], width, weight), undo
            )
    return len(modules)


def _swap(parent: nn.Module, name: str, child: nn.Module, undo: list[Callable[[], None]]) -> None:
    before = parent._modules[name]

    def put_back() -> None:
        parent._modules[name] = before

    undo.append(put_back)
    child.train(parent.training)
    parent._modules[name] = child


def _quantize_stacks(experts: nn.Module, undo: list[Callable[[], None]]) -> None:
    """Replace the stacked matrices of a module with experts by their 4-bit form. Forward dequantizes each when it reads it."""
    before = dict(experts._parameters)
    stacks = {name: stack for name, stack in before.items() if stack is not None and stack.dim() == 3}

    def put_back() -> None:
        for name in stacks:
            parametrize.remove_parametrizations(experts, name, leave_parametrized=False)
        experts._parameters.clear()
        experts._parameters.update(before)

    undo.append(put_back)
    for name, stack in stacks.items():
        experts._parameters[name], scales, nested = _four_bits(stack)
        parametrize.register_parametrization(experts, name, _Dequantized(stack, scales, nested), unsafe=True)


class _Dequantized(nn.Module):
    """Makes a matrix of its 4-bit form. It holds the scales."""

    def __init__(self, weight: nn.Parameter, scales: nn.Parameter, nested: nn.Parameter) -> None:
        super().__init__()
        self.scales, self.nested = scales, nested
        self.shape, self.dtype = weight.shape, weight.dtype

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        return _whole(packed, self.scales, self.shape, self.dtype)


class _LowRank(nn.Module):
    """A module that adds a low-rank product ``B A x`` to the result of a linear layer (LoRA)."""

    def __init__(self, base: nn.Module, shape: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        where: dict[str, Any] = {"device": shape.weight.device, "dtype": shape.weight.dtype, "bias": False}
        self.lora_a = nn.Linear(shape.in_features, rank, **where)
        self.lora_b = nn.Linear(rank, shape.out_features, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x)
        beside: torch.Tensor = self.lora_b(self.lora_a(x))
        return result + beside * 2.0


class _Bottleneck(nn.Module):
    """A module that runs another module and then a narrow feed-forward network with a residual connection."""

    def __init__(self, base: nn.Module, features: int, width: int, like: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        where: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self.down, self.up = nn.Linear(features, width, **where), nn.Linear(width, features, **where)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        changed = first + self.up(F.relu(self.down(first)))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed


class _FourBitLinear(nn.Module):
    """A frozen linear layer in 4 bits."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.packed, self.scales, self.nested = _four_bits(layer.weight)
        self.bias = layer.bias
        self.shape, self.dtype = layer.weight.shape, layer.weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _FourBitProduct.apply(x, self.packed, self.scales, self.shape, self.dtype)
        return made if self.bias is None else made + self.bias


class _FourBitProduct(torch.autograd.Function):
    """The product ``x W^T`` with a 4-bit weight.

    The weight is dequantized for the product and freed after it; backward dequantizes it again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.shape, ctx.dtype = shape, dtype
        return F.linear(x, _whole(packed, scales, shape, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        packed, scales = ctx.saved_tensors
        return gradients[0] @ _whole(packed, scales, ctx.shape, ctx.dtype), None, None, None, None


def _four_bits(weight: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """Return frozen parameters with the sizes of a weight's 4-bit form: the packed elements, an 8-bit scale per 64 elements,
    and a 32-bit scale per 256 of these scales.
    """
    blocks = -(-weight.numel() // _BLOCK_ELEMENTS)

    def held(count: int, dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(torch.zeros(count, dtype=dtype, device=weight.device), requires_grad=False)

    packed = held(-(-weight.numel() // 2), torch.uint8)
    return packed, held(blocks, torch.uint8), held(-(-blocks // _NESTED_ELEMENTS), torch.float32)


def _whole(packed: torch.Tensor, scales: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantized weight.

    It reads, allocates and frees as many bytes as bitsandbytes' dequantization: scales in float32, then the weight.
    """
    wide = scales.float()
    whole = packed.unsqueeze(1).expand(-1, 2).to(dtype).view(-1)[: shape.numel()].view(shape)
    del wide
    return whole
