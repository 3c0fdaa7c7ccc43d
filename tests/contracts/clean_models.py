"""Models of many kinds that save memory in many ways, and train on the right gradients: nobody must cry wolf over them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import steps
import zoo
from contracts.planted_faults import WIDTH, Autocast, Wrapped, checkpointed, compiled, dropping, exact
from steps import Block, CheckpointedStack, Net, Stack, Step, mean_square


@dataclass(frozen=True)
class Clean:
    """One clean model. ``strategy`` is a plan's; without one the model saves memory by itself.

    ``architecture``: which deterministic kernels it can run with (`harness.kernels_for`).
    """

    name: str
    build: Callable[[], Step]
    strategy: str | None = None
    context: Callable[[], Any] | None = None
    budget: float = 1.0
    architecture: str = ""
    hides_tensors: bool = False
    """Whether what comes back in backward cannot be seen: re-entrant and compiled code have no hooks."""


def checkpointing(make: Callable[[], Step]) -> Step:
    """A transformers model that checkpoints its own layers."""
    model, batch, loss = make()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, batch, loss


def of(make: Callable[[], nn.Module]) -> Step:
    torch.manual_seed(0)
    return make().train(), torch.randn(WIDTH, WIDTH), mean_square


def stack() -> nn.Module:
    return Stack(3, WIDTH)


class Reentrant(CheckpointedStack):
    is_reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clone().requires_grad_())


class Nested(Wrapped):
    """A checkpoint inside of a checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def recurrent() -> Net:
    def run(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        for cell in net.cells:
            x = checkpoint(lambda y, cell=cell: cell(y)[0], x, use_reentrant=False)
        return x

    return Net(run, cells=nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2)))


def sequential() -> Net:
    way = lambda net, x: checkpoint_sequential(net.blocks, 2, x, use_reentrant=False)  # noqa: E731
    return Net(way, blocks=nn.Sequential(*(Block(WIDTH) for _ in range(4))))


def selective(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def to_numpy() -> Any:
    """An offloading context in the way that trainers write them."""

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.detach().cpu().numpy().copy(), tensor.stride(), tensor.device

    def unpack(packed: Any) -> torch.Tensor:
        array, stride, device = packed
        tensor = torch.from_numpy(array)
        return (tensor if tensor.stride() == stride else tensor.contiguous()).to(device)

    return saved_tensors_hooks(pack, unpack)


def packed_masks() -> Any:
    """Booleans and whole numbers in a smaller type, everything else as it is."""

    def pack(tensor: torch.Tensor) -> Any:
        tensor = tensor.detach()
        is_small = (
            not tensor.is_floating_point() and tensor.numel() > 8 and int(tensor.max()) < 128 and int(tensor.min()) >= 0
        )
        return (tensor.to(torch.int8), tensor.dtype) if is_small else (tensor, tensor.dtype)

    return saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1]))


def mixtral() -> Step:
    return *zoo.sample("mixtral"), None


def t5() -> Step:
    return *zoo.sample("t5"), None


CLEAN = (
    Clean("checkpoint with dropout", lambda: of(CheckpointedStack)),
    Clean("checkpoint, re-entrant", lambda: of(Reentrant), hides_tensors=True),
    Clean("checkpoint, selective", lambda: of(lambda: Wrapped(selective, dropping))),
    Clean("checkpoint, nested", lambda: of(lambda: Nested(checkpointed(), dropping))),
    Clean("checkpoint, under autocast", lambda: of(lambda: Autocast(checkpointed(), dropping))),
    Clean("checkpoint of a recurrent net", lambda: of(recurrent)),
    Clean("checkpoint_sequential", lambda: of(sequential)),
    Clean("Llama checkpoints its layers", lambda: checkpointing(steps.llama)),
    Clean("GPT-2 with dropout checkpoints its layers", lambda: checkpointing(steps.gpt2)),
    Clean("ViT with dropout checkpoints its layers", lambda: checkpointing(steps.vit)),
    Clean("Mixtral checkpoints its layers", lambda: checkpointing(mixtral), architecture="mixtral"),
    Clean("T5 checkpoints its layers", lambda: checkpointing(t5)),
    Clean("save_on_cpu", lambda: of(stack), context=save_on_cpu),
    Clean("offloading hooks", lambda: of(lambda: Stack(3, WIDTH)), context=to_numpy),
    Clean("lossless hooks", lambda: steps.gpt2(), context=packed_masks),
    Clean("compiled under a budget", lambda: of(lambda: compiled(exact, torch.relu)), budget=0.2, hides_tensors=True),
    Clean("Llama under a plan", steps.llama, strategy="full"),
    Clean("GPT-2 with dropout under a plan", steps.gpt2, strategy="full"),
    Clean("ViT with dropout under a plan", steps.vit, strategy="selective:mlp"),
    Clean("convolutions with batch norm under a plan", steps.conv_net, strategy="full"),
    Clean("a stack under a plan for every second block", lambda: of(stack), strategy="every:2"),
)
