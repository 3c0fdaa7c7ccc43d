"""Runs the demo: plans and verifies a small Llama, then trains it without and with the plan and compares both."""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import plimsoll
from plimsoll.artifacts.progress import Progress

if TYPE_CHECKING:
    import torch

    from plimsoll import Plan, Receipt

VOCABULARY = 256
"""The size of the vocabulary. Each byte is one token."""

_MOST_BYTES = 4_000_000


def read_corpus() -> bytes:
    """Return the source text of the standard library's own modules, in alphabetical order, up to about 4 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(root.glob("*.py")):
        text = path.read_bytes()
        parts.append(text)
        size += len(text)
        if size >= _MOST_BYTES:
            break
    return b"\n".join(parts)


class Batches:
    """An endless source of random batches. With the same seed, it draws the same batches in the same order.

    Args:
        corpus: the text to draw from.
        batch: examples per batch.
        sequence: bytes per example.
        seed: the seed of the draws.
    """

    def __init__(self, corpus: bytes, *, batch: int, sequence: int, seed: int) -> None:
        import torch

        self._tokens = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
        self._random = torch.Generator().manual_seed(seed)
        self._batch = batch
        self._sequence = sequence

    def draw(self) -> dict[str, torch.Tensor]:
        """Draw the next batch and return it as keyword arguments for a transformers model. The tokens are also the labels."""
        import torch

        starts = torch.randint(len(self._tokens) - self._sequence, (self._batch,), generator=self._random)
        rows = [self._tokens[start : start + self._sequence] for start in starts.tolist()]
        tokens = torch.stack(rows).long()
        return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSetup:
    """Data: sizes of the demo's model and training. The model is a small Llama that a laptop trains in a minute or two."""

    hidden_size: int = 256
    intermediate_size: int = 688
    layers: int = 8
    heads: int = 4
    batch: int = 4
    sequence: int = 512
    steps: int = 30
    seed: int = 0
    learning_rate: float = 1e-3


@dataclass(slots=True)
class Run:
    """Data: the losses and step times (in seconds) of one training."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def fastest_seconds(self) -> float:
        """The seconds of the fastest step. Other programs on the machine disturbed that step least."""
        return min(self.step_seconds)


def make_model(setup: DemoSetup) -> torch.nn.Module:
    """Make a transformers Llama with random weights that depend only on the seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(setup.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=setup.hidden_size,
        intermediate_size=setup.intermediate_size,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.heads,
        num_key_value_heads=setup.heads,
        max_position_embeddings=setup.sequence,
        use_cache=False,
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model.train()


def make_optimizer(model: torch.nn.Module, setup: DemoSetup) -> torch.optim.Optimizer:
    """Make AdamW, the usual optimizer for such models."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=setup.learning_rate)


def take_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], run: Run
) -> None:
    """Run an ordinary training step and append it to ``run``. The code is plain PyTorch, without any call of Plimsoll."""
    started_seconds = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    run.losses.append(loss.item())
    run.step_seconds.append(time.perf_counter() - started_seconds)


OnStep = Callable[[int, float, float], None]
"""A function that is called after each step with the number of the step, its loss and its seconds."""

BUDGET = "256MiB"
"""The default budget.

It is about 40% of the way from the smallest peak that a plan can reach (148 MiB) to the peak of plain training (422 MiB).
"""

VERIFIED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Data: what the demo has before the training: the plan, its receipt (the evidence for the plan), and the model's number of
    parameters.
    """

    plan: Plan
    receipt: Receipt
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Data: all results of the demo."""

    plan: Plan
    receipt: Receipt
    unmanaged: Run
    managed: Run
    are_weights_identical: bool

    @property
    def are_losses_identical(self) -> bool:
        """Whether both trainings gave bit-equal losses in every step."""
        return self.unmanaged.losses == self.managed.losses

    @property
    def is_success(self) -> bool:
        """Whether the receipt (the evidence for the plan) passes, and losses and weights of both trainings are bit-equal."""
        return self.receipt.verdict.is_pass and self.are_losses_identical and self.are_weights_identical

    @property
    def measured_overhead(self) -> float:
        """The extra time of the training with the plan, as a share of the plain training's time.

        This is the median over the steps' ratios, without the first step, because Plimsoll records that step.
        """
        pairs = list(zip(self.managed.step_seconds, self.unmanaged.step_seconds, strict=True))
        return statistics.median(ours / plain for ours, plain in pairs[1:] or pairs) - 1.0


def prepare(setup: DemoSetup, budget: str, on_stage: Progress) -> Preparation:
    """Plan the training step under the budget and verify the plan.

    Args:
        setup: what will be trained.
        budget: the budget in a form that ``plimsoll.plan`` takes.
        on_stage: called with the stage and the share of it that is done.

    Raises:
        PlimsollError: the budget is invalid, or below the smallest reachable peak.
    """
    model = make_model(setup)
    optimizer = make_optimizer(model, setup)
    batch = _batches(setup).draw()
    # One step makes the optimizer's state, so that plan and receipt measure it too.
    take_step(model, optimizer, batch, Run())
    optimizer.zero_grad(set_to_none=True)
    plan = plimsoll.plan(model, batch, budget, optimizer=optimizer, progress=on_stage)
    receipt = plimsoll.verify(model, batch, plan, optimizer=optimizer, steps=VERIFIED_STEPS, progress=on_stage)
    return Preparation(plan=plan, receipt=receipt, parameters=sum(p.numel() for p in model.parameters()))


def compare_training(setup: DemoSetup, ready: Preparation, on_plain_step: OnStep, on_managed_step: OnStep) -> Story:
    """Train twice from the same seed, without and with the plan, and compare bit for bit.

    The two trainings alternate step by step, so that other programs on the machine disturb both equally.

    Args:
        setup: what is trained.
        ready: the result of ``prepare``.
        on_plain_step: called after each step of the plain training.
        on_managed_step: called after each step of the managed training.
    """
    plain, managed = make_model(setup), make_model(setup)
    plain_lane = (plain, make_optimizer(plain, setup), Run(), on_plain_step)
    managed_lane = (managed, make_optimizer(managed, setup), Run(), on_managed_step)
    batches = _batches(setup)
    with plimsoll.apply(managed, ready.plan):
        for step in range(setup.steps):
            batch = batches.draw()
            # The order alternates, so that neither training always runs second.
            lanes = (plain_lane, managed_lane) if step % 2 == 0 else (managed_lane, plain_lane)
            for model, optimizer, run, on_step in lanes:
                take_step(model, optimizer, batch, run)
                on_step(step, run.losses[-1], run.step_seconds[-1])
    return Story(
        plan=ready.plan,
        receipt=ready.receipt,
        unmanaged=plain_lane[2],
        managed=managed_lane[2],
        are_weights_identical=_is_same(plain.state_dict(), managed.state_dict()),
    )


def _batches(setup: DemoSetup) -> Batches:
    return Batches(read_corpus(), batch=setup.batch, sequence=setup.sequence, seed=setup.seed)


def _is_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    import torch

    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
