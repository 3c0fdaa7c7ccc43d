"""Models that train on wrong gradients, each for one classic reason, and the cause that verification has to name.

Each is right when it keeps everything: only recomputing, moving or compressing what backward needs makes it wrong.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from plimsoll.artifacts.fault import Cause
from plimsoll.artifacts.receipt import ReceiptVerdict
from steps import Block, Net, Stack, Step, mean_square, on

WIDTH = 32


@dataclass(frozen=True)
class Planted:
    """One fault: the step, what the verdict has to be, and the cause to name (``None``: gradients alone can show it)."""

    name: str
    build: Callable[[], nn.Module]
    cause: Cause | None
    verdict: ReceiptVerdict = ReceiptVerdict.GRADIENTS_DIFFER
    context: Callable[[], Any] | None = None
    budget: float = 1.0
    raises: bool = False
    """Whether the step fails by itself, and only the cause is to be named."""

    def step(self, device: torch.device) -> Step:
        torch.manual_seed(0)
        return on(device, (self.build().train(), torch.randn(WIDTH, WIDTH), mean_square))


class Wrapped(Stack):
    """Every block called through ``call``."""

    def __init__(self, call: Callable[[nn.Module, torch.Tensor], torch.Tensor], block: Callable[[], nn.Module]) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self._call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self._call(block, x)
        return x


def checkpointed(**options: Any) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    return lambda block, x: checkpoint(block, x, **{"use_reentrant": False, **options})


def reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x if x.requires_grad else x.clone().requires_grad_()
    return checkpoint(block, x, use_reentrant=True, preserve_rng_state=False)


def frozen_inputs(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Re-entrant checkpointing of a block whose input needs no gradient: its parameters get none either."""
    x = x if x.requires_grad else x.clone().requires_grad_()
    return checkpoint(block, x.detach(), use_reentrant=True) + x


def selective(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731 - it is an argument
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def shifted() -> Net:
    """Adds before it squares: backward saves the sum, recomputation needs the input."""
    way = lambda net, x: torch.tanh((x + net.shift) * 0.5) + net.inner(x + net.shift)  # noqa: E731
    return Net(way, shift=nn.Parameter(torch.randn(WIDTH)), inner=exact())


def overwrites_its_input(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    scratch = x * 1.0
    out = checkpoint(block, scratch, use_reentrant=False)
    scratch.data.zero_()  # an in-place op proper would be noticed by autograd
    return out


def counting() -> Net:
    """A buffer that moves with every call."""
    way = lambda net, x: net.inner(x) * torch.tanh(x + net.level.clone())  # noqa: E731
    return Net(way, level=nn.Buffer(torch.ones(1)), inner=exact())


class CountingStack(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        with torch.no_grad():
            for block in self.blocks:
                block.level.add_(1.0)
        return x


def normed() -> Net:
    way = lambda net, x: torch.relu(net.norm(net.linear(x)))  # noqa: E731
    return Net(way, norm=nn.BatchNorm1d(WIDTH), linear=nn.Linear(WIDTH, WIDTH))


def scaled_by_numpy() -> Net:
    """A scale from a generator that torch does not know."""
    way = lambda net, x: torch.tanh(net.inner(x) * float(net.random.uniform(0.5, 1.5)))  # noqa: E731
    return Net(way, inner=exact(), random=np.random.default_rng(0))


def of_its_own_generator() -> Net:
    """Noise from a generator of its own, which checkpointing does not put back."""

    def draw(net: Net, x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() == -1:
            net.generator.manual_seed(1)
        return net.inner(x) * torch.rand(x.shape, generator=net.generator).to(x.device)

    return Net(draw, inner=exact(), generator=torch.Generator().manual_seed(1))


def alternating() -> Net:
    """Takes the other branch in backward."""

    def branch(net: Net, x: torch.Tensor) -> torch.Tensor:
        is_backward = torch._C._current_graph_task_id() != -1
        y = torch.tanh(net.one(x)) if not is_backward else torch.sigmoid(net.other(x)) * 0.5 + net.one(x) * 0.1
        return torch.sin(y) * y

    return Net(branch, one=nn.Linear(WIDTH, WIDTH), other=nn.Linear(WIDTH, WIDTH))


class Evaluated(Wrapped):
    """Leaves its blocks in evaluation mode when forward ends, as a metric callback would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.train()
        x = super().forward(x)
        for block in self.blocks:
            block.eval()
        return x


class Autocast(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x).float()


def without_autocast(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), torch.autocast(x.device.type, enabled=False)

    return checkpoint(block, x, use_reentrant=False, context_fn=contexts, determinism_check="none")


class Noisy(torch.autograd.Function):
    """An op that never gives the same bits twice (its noise is far larger than rounding, so that a test can rely on it)."""

    draws = itertools.count()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.plimsoll_tests.unsteady(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@torch.library.custom_op("plimsoll_tests::unsteady", mutates_args=())
def unsteady(x: torch.Tensor) -> torch.Tensor:
    """Rounds its input in another way in backward than in forward: an atomic addition in another order."""
    return x * (1.0 if torch._C._current_graph_task_id() == -1 else 1.01)


def varying() -> Net:
    return Net(lambda net, x: torch.tanh(Noisy.apply(net.inner(x))), inner=exact())


def hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Callable[[], Any]:
    return lambda: saved_tensors_hooks(pack, unpack)


def is_activation(tensor: torch.Tensor) -> bool:
    return tensor.shape == (WIDTH, WIDTH) and not isinstance(tensor, nn.Parameter) and tensor.is_floating_point()


def address_keyed() -> Any:
    """A table of copies by address that outlives the tensors.

    Whether an address comes again is up to the allocator, so the last bits stand for it: of three tensors two share them. The
    shape is part of the key, since a wrong shape would be another fault.
    """
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> Any:
        return copies.setdefault((tensor.data_ptr() // 64 % 2, tensor.shape), tensor.detach().clone())

    return saved_tensors_hooks(pack, lambda copy: copy)


def first_in_first_out() -> Any:
    """Prefetches in forward order what backward needs in reverse."""
    waiting: deque[torch.Tensor] = deque()

    def pack(tensor: torch.Tensor) -> Any:
        if is_activation(tensor):
            waiting.append(tensor.detach().clone())
            return None
        return tensor.detach()

    return saved_tensors_hooks(pack, lambda packed: waiting.popleft() if packed is None else packed)


def half_copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that backward takes before it is complete."""
    copy = tensor.detach().clone()
    copy[tensor.shape[0] // 2 :] = 0
    return copy


def floored(tensor: torch.Tensor) -> Any:
    """int8 that rounds down instead of to the nearest."""
    if not is_activation(tensor):
        return tensor.detach()
    scale = tensor.abs().max() / 127
    return torch.floor(tensor.detach() / scale).to(torch.int8), scale


def unfloored(packed: Any) -> torch.Tensor:
    return packed[0].float() * packed[1] if isinstance(packed, tuple) else packed


def averaged(tensor: torch.Tensor) -> torch.Tensor:
    """One row instead of all: autograd broadcasts it without a word."""
    is_squared = is_activation(tensor) and bool((tensor >= 0).all())
    return tensor.detach().mean(0, keepdim=True) if is_squared else tensor.detach()


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """A square matrix taken for its transpose."""
    return tensor.detach().t().contiguous() if is_activation(tensor) else tensor.detach()


def dropped_gradient(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A recomputation that is cut from its input: nothing flows further up."""
    x = x if x.requires_grad else x.clone().requires_grad_()

    def cut_in_backward(y: torch.Tensor) -> torch.Tensor:
        return block(y.detach() if torch._C._current_graph_task_id() != -1 else y)

    return checkpoint(cut_in_backward, x, use_reentrant=True)


def plain() -> nn.Module:
    return Stack(3, WIDTH)


def dropping() -> nn.Module:
    return Block(WIDTH, dropout=0.2)


def exact() -> nn.Module:
    return Block(WIDTH, dropout=0.0)


def same(packed: Any) -> Any:
    return packed


def compiled(block: Callable[[], nn.Module], activation: Callable[[torch.Tensor], torch.Tensor]) -> Net:
    """A block and an activation below torch.compile with a memory budget."""
    net = Net(lambda net, x: net.run(x), blocks=nn.ModuleList([block()]))
    net.run = torch.compile(lambda x: activation(net.blocks[0](x)), backend="aot_eager_decomp_partition")
    return net


FAULTS = (
    Planted(
        "random state not restored",
        lambda: Wrapped(checkpointed(preserve_rng_state=False), dropping),
        Cause.RANDOM_STATE,
    ),
    Planted("random state not restored, re-entrant", lambda: Wrapped(reentrant, dropping), Cause.RANDOM_STATE),
    Planted("random state not restored, selective", lambda: Wrapped(selective, dropping), Cause.RANDOM_STATE),
    Planted("a generator of its own", lambda: Wrapped(checkpointed(), of_its_own_generator), Cause.RANDOM_STATE),
    Planted("a scale drawn by numpy", lambda: Wrapped(checkpointed(), scaled_by_numpy), Cause.CHANGED_CONTROL_FLOW),
    Planted(
        "another branch",
        lambda: Wrapped(checkpointed(determinism_check="none"), alternating),
        Cause.CHANGED_CONTROL_FLOW,
    ),
    Planted("an input written in place", lambda: Wrapped(overwrites_its_input, shifted), Cause.IN_PLACE_WRITE),
    Planted("a stale buffer", lambda: CountingStack(checkpointed(), counting), Cause.CHANGED_BUFFER),
    Planted(
        "running statistics moved twice",
        lambda: Wrapped(checkpointed(), normed),
        Cause.CHANGED_BUFFER,
        ReceiptVerdict.BUFFERS_DIFFER,
    ),
    Planted(
        "evaluation mode in backward",
        lambda: Evaluated(checkpointed(determinism_check="none"), dropping),
        Cause.CHANGED_CONTEXT,
        raises=True,
    ),
    Planted("autocast not restored", lambda: Autocast(without_autocast, exact), Cause.CHANGED_CONTEXT, raises=True),
    Planted("an op that is not deterministic", lambda: Wrapped(checkpointed(), varying), Cause.NON_DETERMINISTIC),
    Planted("no gradient for frozen inputs", lambda: Wrapped(frozen_inputs, exact), None),
    Planted("a detached recomputation", lambda: Wrapped(dropped_gradient, exact), None),
    Planted("an address used again", plain, Cause.TRANSFER, context=address_keyed),
    Planted("prefetched in the wrong order", plain, Cause.TRANSFER, context=first_in_first_out),
    Planted("a copy not complete", plain, Cause.TRANSFER, context=hooks(half_copied, same)),
    Planted("a biased codec", plain, Cause.TRANSFER, context=hooks(floored, unfloored)),
    Planted(
        "a lossy cast",
        plain,
        Cause.TRANSFER,
        context=hooks(lambda t: (t.detach().bfloat16(), t.dtype), lambda p: p[0].to(p[1])),
    ),
    Planted("a shape that broadcasts", plain, Cause.CHANGED_LAYOUT, context=hooks(averaged, same)),
    Planted("a wrong stride", plain, Cause.TRANSFER, context=hooks(transposed, same)),
    Planted(
        "compiled dropout below a budget of 1",
        lambda: compiled(dropping, F.gelu),
        Cause.COMPILED_RANDOMNESS,
        budget=0.0,
    ),
)
