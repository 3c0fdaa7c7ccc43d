"""Temporarily fine-tunes a model with adapters: its own weights are frozen, added small matrices are trained.

LoRA (Hu et al. 2022) adds ``B A x`` to linear layers. QLoRA (Dettmers et al. 2023) also holds their weights in 4 bits, and
dequantizes them for each product, once in forward and again in backward. Bottleneck adapters (Houlsby et al. 2019) follow the
attention and the feed-forward module of every block. A trace of the adapted model shows what autograd then saves.

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

from plimsoll.artifacts.job import Techniques
from plimsoll.errors import InvalidOption

_IN_BLOCKS = re.compile(r"\.\d+\.")
_LAYERS = {
    "qv": re.compile(r"(^|[._])(q|v|query|value|c_attn|qkv)(_proj|_lin)?$"),
    "attention": re.compile(r"attn|attention", re.IGNORECASE),
    "all": re.compile(""),
}
"""For each value of ``lora-on``, a pattern for the names of the linear layers within blocks that get adapters."""
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
        yield (f"{count} adapters are trained; all other parameters are frozen",)
    finally:
        for each in reversed(undo):
            each()


def _add_low_rank(model: nn.Module, how: Techniques, undo: list[Callable[[], None]]) -> int:
    pattern = _LAYERS[how.lora_on or "all"]
    found = 0
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or not _IN_BLOCKS.search(f".{name}"):
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
    """A frozen linear layer in 4 bits, with an 8-bit scale per 64 elements, and a 32-bit scale per 256 of these scales."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight
        blocks = -(-weight.numel() // _BLOCK_ELEMENTS)

        def held(count: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(count, dtype=dtype, device=weight.device), requires_grad=False)

        self.packed = held(-(-weight.numel() // 2), torch.uint8)
        self.scales = held(blocks, torch.uint8)
        self.nested = held(-(-blocks // _NESTED_ELEMENTS), torch.float32)
        self.bias = layer.bias
        self.shape, self.dtype = weight.shape, weight.dtype

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


def _whole(packed: torch.Tensor, scales: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantized weight.

    It reads, allocates and frees as many bytes as bitsandbytes' dequantization: scales in float32, then the weight.
    """
    wide = scales.float()
    whole = packed.unsqueeze(1).expand(-1, 2).to(dtype).view(-1)[: shape.numel()].view(shape)
    del wide
    return whole
