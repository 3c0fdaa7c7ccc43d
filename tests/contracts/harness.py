"""A way to build a model and a training step in, the proof that managing it changes no bit out.

``assert_unchanged`` runs the same steps on two equal models, one of them managed, and compares everything that a step makes:
what it returns, every gradient, every buffer, every parameter after an optimizer step, and the state of the generator.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.plan import ValueDecision
from plimsoll.artifacts.receipt import RegionOutcome
from plimsoll.engine.apply import Handle
from plimsoll.engine.inspection import Inspector
from plimsoll.engine.offload.protocol import Link
from plimsoll.engine.offload.transfers import TransfersUnderWay
from plimsoll.engine.program import Shared
from plimsoll.engine.region_inputs import LinkTable
from plimsoll.engine.replay_rng import generators_of
from plimsoll.engine.sampling import SentinelPolicy
from plimsoll.engine.stored_forms import Packer
from plimsoll.tracing.regions import find_regions

Step = Callable[[nn.Module, int], Any]
"""Runs forward and backward of the given step and returns tensors to compare (the loss, gradients of inputs)."""

LEARNING_RATE = 0.05


class Names:
    """The names of all values but those that contain one of ``kept``."""

    def __init__(self, kept: Sequence[str] = ()) -> None:
        self._kept = tuple(kept)

    def __contains__(self, name: object) -> bool:
        return not any(part in str(name) for part in self._kept)

    def __or__(self, more: frozenset[str]) -> Names:
        """The same names: they are without an end."""
        return self


class FormOf:
    """The form of every value whose name contains a part: a mapping without an end."""

    def __init__(self, packs: Mapping[str, str]) -> None:
        self._packs = packs

    def __bool__(self) -> bool:
        return bool(self._packs)

    def __contains__(self, name: object) -> bool:
        return any(part in str(name) for part in self._packs)

    def __getitem__(self, name: str) -> str:
        return next(form for part, form in self._packs.items() if part in name)


@dataclass
class Drops:
    """Stands for a ``RegionPlan`` that drops everything but what it keeps or packs, whatever the values are called."""

    name: str
    kept: tuple[str, ...] = ()
    packs: Mapping[str, str] = field(default_factory=dict)
    is_boundary_dropped: bool = False
    is_input_lossy: bool = False
    has_offload: bool = False
    is_left_alone: bool = False
    call: int = 0
    steady_inputs: tuple[str, ...] = ()
    spare_bytes: int = 0
    decisions: tuple[ValueDecision, ...] = ()
    dropped: Names = field(init=False)
    packed: FormOf = field(init=False)

    def __post_init__(self) -> None:
        self.dropped = Names((*self.kept, *self.packs))
        self.packed = FormOf(self.packs)

    @property
    def effect(self) -> object:
        return (self.call, self.kept, tuple(self.packs.items()), self.is_boundary_dropped, self.is_left_alone)


def manage(
    model: nn.Module,
    regions: Iterable[str] | None = None,
    *,
    kept: tuple[str, ...] = (),
    packs: Mapping[str, str] | None = None,
    boundaries: Sequence[int] = (),
    sentinel_every: int = 1,
    verify_every: int = 0,
    link: Link | None = None,
) -> Handle:
    """The model with everything dropped in its regions, but for what is kept or packed.

    ``packs`` maps parts of values' names to codecs or the link; ``boundaries`` are regions whose input is dropped too.
    """
    shared = Shared(
        links=LinkTable(),
        packer=Packer(link),
        transfers=TransfersUnderWay(),
        policy=SentinelPolicy(every=sentinel_every),
        inspector=Inspector(verify_every, device_of(model)),
        generators=generators_of([parameter.device for parameter in model.parameters()]),
    )
    names = find_regions(model) if regions is None else regions
    drops = [Drops(name, kept, packs or {}, index in boundaries) for index, name in enumerate(names)]
    return Handle(model, SimpleNamespace(regions=drops, compiled=(), tiles=()), shared)


def device_of(model: nn.Module) -> torch.device:
    """Where its parameters are; the CPU for a model without any."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def train(model: nn.Module, step: Step, steps: int) -> list[dict[str, torch.Tensor]]:
    """Everything that ``steps`` training steps make, step by step."""
    trail = []
    for index in range(steps):
        torch.manual_seed(100 + index)
        made = [leaf for leaf in tree_leaves(step(model, index)) if isinstance(leaf, torch.Tensor)]
        record = {f"returned {i}": tensor.detach().clone() for i, tensor in enumerate(made)}
        for number, generator in enumerate(generators_of([device_of(model)])):
            record[f"generator {number}"] = generator.get_state()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                record[f"gradient {name}"] = parameter.grad.clone()
        record.update({f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()})
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
        model.zero_grad(set_to_none=True)
        trail.append(record)
    return trail


def differences(expected: Sequence[dict[str, torch.Tensor]], found: Sequence[dict[str, torch.Tensor]]) -> list[str]:
    """What differs in any bit (NaN equals NaN), by step."""
    wrong = []
    for index, (first, second) in enumerate(zip(expected, found, strict=True)):
        wrong += [f"step {index}: only one run has {name}" for name in sorted(first.keys() ^ second.keys())]
        for name in first.keys() & second.keys():
            if not equal_bits(first[name], second[name]):
                wrong.append(f"step {index}: {name}")
    return wrong


def unexplained(
    expected: Sequence[dict[str, torch.Tensor]],
    again: Sequence[dict[str, torch.Tensor]],
    found: Sequence[dict[str, torch.Tensor]],
) -> list[str]:
    """What differs in ``found`` by more than a second run of the plain model does: in any bit, where that repeats itself."""
    noise = set(differences(expected, again))
    return [wrong for wrong in differences(expected, found) if wrong not in noise] + [
        f"step {index}: {name}, far beyond the noise"
        for index, (first, second, third) in enumerate(zip(expected, again, found, strict=True))
        for name in first.keys() & third.keys()
        if f"step {index}: {name}" in noise
        and (third[name] - first[name]).double().norm() > 10 * (second[name] - first[name]).double().norm()
    ]


def equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal shape, dtype and values; NaN equals NaN, minus zero is not zero."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_complex():
        return equal_bits(torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj()))
    if not first.is_floating_point():
        return torch.equal(first, second)
    same = (first == second) & (first.signbit() == second.signbit())
    return bool((same | (first.isnan() & second.isnan())).all())


ATOMIC_MODELS = ("mixtral",)
"""Models that call an op which raises in strict deterministic mode on a GPU.

transformers counts tokens per expert with ``torch.histc``, which adds atomically and raises (older torch for every dtype, newer
torch for floats alone). It counts whole numbers here, whose sum is the same in every order.
"""


@contextlib.contextmanager
def kernels_for(model: str) -> Iterator[None]:
    """Keep the suite's strict mode, but let `ATOMIC_MODELS` run their op without a deterministic form.

    Other models stay strict: ``warn_only`` also takes determinism from fused attention's backward. `unexplained` compares a
    model that differs from itself with its own second run, which proves less than equal bits do.
    """
    if model not in ATOMIC_MODELS or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # each such op says so
            yield
    finally:
        torch.use_deterministic_algorithms(True)


def hidden_share(copying_seconds: float, computing_seconds: float, both_seconds: float) -> float:
    """How much of the shorter of two kinds of work is hidden behind the longer one: 1 all of it, 0 nothing.

    Example:
        >>> hidden_share(copying_seconds=5.0, computing_seconds=55.0, both_seconds=57.5)
        0.5
    """
    return (copying_seconds + computing_seconds - both_seconds) / min(copying_seconds, computing_seconds)


@dataclass
class Report:
    """How the managed run was served."""

    outcomes: tuple[RegionOutcome, ...]
    obstacles: dict[str, dict[str, str]]

    @property
    def engines(self) -> set[Engine]:
        return {outcome.engine for outcome in self.outcomes}

    @property
    def dropped_bytes(self) -> int:
        return sum(outcome.dropped_bytes for outcome in self.outcomes)

    @property
    def dropped_share(self) -> float:
        """Bytes of the managed regions' own saved storages that are dropped, as a share."""
        return self.dropped_bytes / sum(outcome.activation_bytes for outcome in self.outcomes)


def assert_unchanged(
    build: Callable[[], nn.Module],
    step: Step,
    *,
    steps: int = 3,
    engine: Engine | None = Engine.RECIPE,
    **settings: Any,
) -> Report:
    """Train with and without a plan that drops everything; nothing may differ, and something must have been dropped.

    Args:
        build: makes the model; called once, under a fixed seed.
        step: one training step.
        steps: how many; the first records.
        engine: what must serve every region (``None``: anything).
        settings: passed to ``manage``.
    """
    torch.manual_seed(0)
    plain = build()
    managed = copy.deepcopy(plain)
    expected = train(plain, step, steps)
    with manage(managed, **settings) as handle:
        found = train(managed, step, steps)
        report = Report(handle.outcomes(), handle.obstacles())
    assert differences(expected, found) == []
    assert any("gradient" in name for name in expected[0]), "the step made no gradient, so nothing was compared"
    if engine is not None:
        assert report.engines == {engine}, report.outcomes
    if engine is Engine.RECIPE:
        assert report.dropped_bytes > 0, report.obstacles
    return report


class Block(nn.Module):
    """A residual block around whatever is given: enough saved tensors to drop."""

    def __init__(self, inner: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.inner = inner
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inner(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks between an entrance and a head; the regions are the blocks."""

    def __init__(self, *blocks: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.entrance = nn.Linear(8, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entrance(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack_of(inner: Callable[[], nn.Module] = nn.Identity, count: int = 3) -> Callable[[], nn.Module]:
    """How to build a stack of ``count`` blocks around ``inner()``."""
    return lambda: Stack(*(Block(inner()) for _ in range(count)))


def batch(step: int, *shape: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The same numbers for the same step, whatever the global generator does."""
    return torch.randn(*(shape or (5, 8)), generator=torch.Generator().manual_seed(1000 + step)).to(device)


def plain_step(model: nn.Module, step: int) -> torch.Tensor:
    """Forward, a loss that weighs every output differently, backward."""
    loss = weigh(model(batch(step)))
    loss.backward()
    return loss


def weigh(*outputs: torch.Tensor) -> torch.Tensor:
    """A scalar to which every element of every output contributes its own gradient."""
    weights = [torch.linspace(-1, 1, each.numel(), device=each.device).view(each.shape) for each in outputs]
    return sum((output.float() * weight).sum() for output, weight in zip(outputs, weights, strict=True))
