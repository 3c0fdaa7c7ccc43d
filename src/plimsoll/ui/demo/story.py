"""Runs the demo and collects its evidence: plan, receipt, and the same training without and with the plan."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import plimsoll
from plimsoll.artifacts.progress import Progress
from plimsoll.ui.demo.corpus import Batches, read_corpus
from plimsoll.ui.demo.training import DemoSetup, Run, make_model, make_optimizer, take_step

if TYPE_CHECKING:
    import torch

    from plimsoll import Plan, Receipt

OnStep = Callable[[int, float, float], None]
"""Takes the number of the step, its loss and its seconds."""

BUDGET = "256MiB"
"""About 40% of the way from the smallest peak that a plan can reach (148 MiB) to that of plain training (422 MiB)."""

VERIFIED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What is known before the training: the plan and the proof that it holds."""

    plan: Plan
    receipt: Receipt
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Everything that the demo saw."""

    plan: Plan
    receipt: Receipt
    unmanaged: Run
    managed: Run
    are_weights_identical: bool

    @property
    def are_losses_identical(self) -> bool:
        """Whether both trainings gave the same loss in every step, to the last bit."""
        return self.unmanaged.losses == self.managed.losses

    @property
    def is_success(self) -> bool:
        """Whether everything that the demo claims holds."""
        return self.receipt.verdict.is_pass and self.are_losses_identical and self.are_weights_identical

    @property
    def measured_overhead(self) -> float:
        """Extra time as a share: the median over steps of managed over plain, the first (recording) step left out."""
        pairs = list(zip(self.managed.step_seconds, self.unmanaged.step_seconds, strict=True))
        return statistics.median(ours / plain for ours, plain in pairs[1:] or pairs) - 1.0


def prepare(setup: DemoSetup, budget: str, on_stage: Progress) -> Preparation:
    """Plan the training step under the budget and verify the plan.

    Args:
        setup: what will be trained.
        budget: as ``plimsoll.plan`` takes it.
        on_stage: is told how far it is.

    Raises:
        PlimsollError: the budget is none, or below the floor.
    """
    model = make_model(setup)
    optimizer = make_optimizer(model, setup)
    batch = _batches(setup).draw()
    plan = plimsoll.plan(model, batch, budget, optimizer=optimizer, progress=on_stage)
    # One step makes the optimizer's state, so that the receipt measures it as well.
    take_step(model, optimizer, batch, Run())
    optimizer.zero_grad(set_to_none=True)
    receipt = plimsoll.verify(model, batch, plan, optimizer=optimizer, steps=VERIFIED_STEPS, progress=on_stage)
    return Preparation(plan=plan, receipt=receipt, parameters=sum(p.numel() for p in model.parameters()))


def compare_training(setup: DemoSetup, ready: Preparation, on_plain_step: OnStep, on_managed_step: OnStep) -> Story:
    """Train twice from the same seed, plainly and under the plan, and compare bit for bit.

    The two trainings take turns, step by step, so that what else the machine does meets both alike.

    Args:
        setup: what is trained.
        ready: from ``prepare``.
        on_plain_step: is told about every step of the plain training.
        on_managed_step: is told about every step of the managed one.
    """
    plain, managed = make_model(setup), make_model(setup)
    plain_lane = (plain, make_optimizer(plain, setup), Run(), on_plain_step)
    managed_lane = (managed, make_optimizer(managed, setup), Run(), on_managed_step)
    batches = _batches(setup)
    with plimsoll.apply(managed, ready.plan):
        for step in range(setup.steps):
            batch = batches.draw()
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
