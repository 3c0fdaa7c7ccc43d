"""The small models and training steps that tests of the engine share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contracts.harness import Stack, batch, weigh
from plimsoll.artifacts.plan import RegionPlan, ValueDecision
from samples import filled
from steps import Net


@torch.jit.script
def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    """A compiled function: its constants are hidden from the guards."""
    return x * scale


class Inner(Net):
    """A function of tensors as a module, without parts."""

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def attention(width: int = 32, *, after: Callable[..., torch.Tensor] = torch.Tensor.mul, dropout: float = 0.0) -> Net:
    """One head; ``after`` is given what it makes and its input."""

    def attend(net: Net, x: torch.Tensor) -> torch.Tensor:
        q, k, v = net.qkv(x)[None].chunk(3, -1)
        return after(net.out(nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)[0]), x)

    return Net(attend, qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width))


class Lined(Net):
    """A linear layer that a function uses: ``function(line, *inputs)``."""

    def __init__(self, function: Callable[..., Any], width: int = 8) -> None:
        super().__init__(function, line=nn.Linear(width, width))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self.line, *inputs, **named)


class UpDown(Net):
    """Two linear layers that a function uses: ``function(up, down, x)``."""

    def __init__(self, function: Callable[..., torch.Tensor], inner: int = 32) -> None:
        super().__init__(function, up=nn.Linear(16, inner), down=nn.Linear(inner, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.up, self.down, x)


class Only(nn.Module):
    """A model that does nothing but to call its one region, ``block``."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.block(*inputs, **named)


class Wrapped(Only):
    """One region, ``block``, between an entrance and a head."""

    def __init__(self, block: nn.Module, width: int = 8) -> None:
        super().__init__(block)
        self.entrance = nn.Linear(8, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.entrance(x)))


class Through(Stack):
    """A stack that goes through its blocks in a way of its own: ``way(blocks, x)``."""

    def __init__(self, *blocks: nn.Module, way: Callable[..., torch.Tensor], width: int = 16) -> None:
        super().__init__(*blocks, width=width)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.way(self.blocks, self.entrance(x)))


def tied() -> Net:
    """Two layers that share their weight, which is read directly too."""

    def both(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.second(net.first(x).exp().tanh()) * nn.functional.linear(x, net.first.weight.t())

    net = Net(both, first=nn.Linear(32, 32), second=nn.Linear(32, 32))
    net.second.weight = net.first.weight
    return net


def step_on(data: Callable[[int], torch.Tensor] = batch, *, backwards: int = 1) -> Callable[..., torch.Tensor]:
    """A step on other data: forward, a loss that weighs every output, and as many backwards."""

    def step(model: nn.Module, index: int) -> torch.Tensor:
        loss = weigh(model(data(index)))
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
        return loss

    return step


def step_with_input(data: Callable[[int], torch.Tensor] = batch) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A step that returns the gradient of its input too."""

    def step(model: nn.Module, index: int) -> tuple[torch.Tensor, ...]:
        x = data(index).requires_grad_()
        loss = weigh(model(x))
        loss.backward()
        return loss, x.grad

    return step


class Births(TorchDispatchMode):
    """Weak references to every storage that ops make, by op."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.made.append((func._schema.name, StorageWeakRef(storage), storage.nbytes()))
        return out

    @property
    def alive(self) -> list[tuple[str, int]]:
        return [(name, size) for name, reference, size in self.made if not reference.expired()]

    @property
    def alive_bytes(self) -> int:
        return sum(size for _, size in self.alive)


def region_plan(name: str, *decisions: ValueDecision, call: int = 0, is_boundary_dropped: bool = False) -> RegionPlan:
    """A region that keeps everything but for these decisions."""
    return filled(RegionPlan, name=name, call=call, decisions=decisions, is_boundary_dropped=is_boundary_dropped)
