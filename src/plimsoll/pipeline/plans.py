"""Model and batch in, a plan out; a plan in, the managed model out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.store import load_plan
from plimsoll.artifacts.trace import Trace
from plimsoll.costing.devices import find_device
from plimsoll.costing.measured import measured_costs
from plimsoll.costing.roofline import roofline_costs
from plimsoll.errors import BudgetAboveDevice
from plimsoll.pipeline.confirm import confirmed
from plimsoll.pipeline.matching import refuse_other_model
from plimsoll.planning.solve import Planner, solve
from plimsoll.recording.calling import Loss, split_batch
from plimsoll.runtime.apply import Handle, apply_plan
from plimsoll.tracing.trace import trace as trace_step
from plimsoll.units import format_bytes, parse_bytes

Progress = Callable[[str, float], None]

AUTO_MARGIN = 0.08
"""``budget="auto"`` leaves this share of the device's memory free: allocator fragmentation, libraries' workspaces, others."""


def plan(
    model: nn.Module,
    batch: Any,
    budget: int | str | None = None,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str = "auto",
    regions: Sequence[str] | None = None,
    device_profile: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide for every saved activation whether to keep or recompute it, so that the training step fits ``budget``.

    One step is traced on the model's own device at the lowest memory (or with fake tensors, for a model on the meta
    device or a ``device_profile``); model, gradients, buffers and random state are left as they were. With a budget and
    a real device the plan is then run once and measured; where the measured peak exceeds the budget, the difference is
    taken off and it is solved again.

    Args:
        model: any eager PyTorch model, on its device, in the mode in which it trains.
        batch: a tensor (one argument), a tuple (positional) or a dict (keywords).
        budget: bytes, as an int or as text with a unit (``"70GiB"``); bounds the peak of everything that the training
            step allocates on the device: parameters, gradients, optimizer state, activations, temporaries. ``"auto"`` is
            the device's memory less 8%. ``None``: no limit (useful with a named ``strategy``).
        loss: from the model's output to a scalar; by default ``output.loss``, or the output itself if it is a scalar.
        optimizer: with it the budget also holds the optimizer's state and its step; without it, forward, backward and
            gradients.
        strategy: ``auto`` (the budgeted optimum), or ``none``, ``full``, ``every:k``, ``sqrt``, ``input-only``,
            ``selective:attention|mlp|norm|<op list>``.
        regions: module paths to manage, ``*`` for one level (``"model.layers.*"``); by default the repeated blocks.
        device_profile: plan for a device that is not here, from the catalogue (``"H100-SXM"``).
        progress: told the stage and the share done.

    Returns:
        A plan: printable, savable, with the status, the predicted peak and seconds, the lower bound and both gaps.

    Raises:
        InvalidBudget: no unit, an ambiguous unit, or nothing positive.
        BudgetBelowFloor: no plan fits; says the floor, who holds it, and what to do.
        BudgetAboveDevice: more than the device has.
        InvalidModel, InvalidBatch, InvalidLoss, InvalidRegions, InvalidStrategy, UnknownDevice, TracingFailed: as named.

    Example:
        >>> import torch, plimsoll
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
        >>> made = plimsoll.plan(model, torch.randn(32, 64), loss=lambda y: y.square().mean())
        >>> made.status.value
        'OPTIMAL'

    Source: design notes in ``docs/design/``. Known weakness: bounds and costs are those of a model of the machine; only
    the measured peak and ``plimsoll.verify`` speak of the machine itself.
    """
    report = progress or (lambda stage, share: None)
    report("reading the request", 0.0)
    asked_bytes = None if budget is None or budget == "auto" else parse_bytes(budget)
    device = None if device_profile is None else find_device(device_profile)
    traced = trace_step(
        model,
        batch,
        loss=loss,
        optimizer=optimizer,
        regions=regions,
        device_name=None if device is None else device.name,
        progress=_part(report, 0.0, 0.5),
    )
    report("costing", 0.5)
    costs = roofline_costs(traced, device or find_device("CPU")) if traced.is_fake else measured_costs(traced)
    budget_bytes = resolve_budget(budget, asked_bytes, costs)
    report("solving", 0.55)
    planner = Planner(traced, costs)
    solved = solve(traced, costs, budget_bytes=budget_bytes, strategy=strategy, planner=planner)
    if budget_bytes is None or traced.is_fake or not solved.status.is_usable:
        report("done", 1.0)
        return solved
    args, kwargs = split_batch(batch)
    checked = confirmed(
        model,
        args,
        kwargs,
        solved,
        resolve=lambda excess_bytes: solve(
            traced, costs, budget_bytes=budget_bytes, strategy=strategy, excess_bytes=excess_bytes, planner=planner
        ),
        loss=loss,
        optimizer=optimizer,
        progress=_part(report, 0.7, 1.0),
    )
    report("done", 1.0)
    return checked


def apply(model: nn.Module, plan: Plan, *, sentinel_every: int = 1) -> Handle:
    """Manage ``model`` as ``plan`` says, until ``handle.remove()`` or the end of the ``with`` block.

    The model's code, parameters and ``state_dict`` stay as they are; a region that keeps everything is not touched at
    all. The first call of each managed region records and verifies it (about three times the forward), later calls run
    with two hooks and a guard.

    Args:
        model: the model that the plan was made for.
        plan: a plan with a usable status.
        sentinel_every: rebuilt values are compared with samples from forward in every n-th call of a region; larger
            numbers cost less on models that are bound by launches.

    Returns:
        A handle; also a context manager.

    Raises:
        PlanMismatch: the plan was made for another model; both fingerprints are shown.
        PlanNotUsable: the plan's status says that there is nothing to apply.

    Example:
        >>> with plimsoll.apply(model, plan):  # doctest: +SKIP
        ...     for batch in batches:
        ...         model(**batch).loss.backward()
    """
    refuse_other_model(model, plan)
    return apply_plan(model, plan, sentinel_every=sentinel_every)


def load(path: str | Path) -> Plan:
    """Read a plan that ``plan.save`` wrote. Plans hold decisions, never code; loading one runs nothing.

    Raises:
        PlanFileError: not a plan, truncated, or written by a newer version.
    """
    return load_plan(path)


def resolve_budget(budget: int | str | None, asked_bytes: int | None, costs: Costs) -> int | None:
    """The budget in bytes: ``"auto"`` from the device's memory; refused where the device has less.

    Raises:
        BudgetAboveDevice: more than the device has.
    """
    memory_bytes = costs.memory_bytes
    if budget == "auto":
        if memory_bytes is None:
            raise BudgetAboveDevice(
                f"The memory of {costs.device} is not known.",
                why="budget='auto' takes the device's memory less a margin",
                next="name the budget in bytes",
            )
        return int(memory_bytes * (1 - AUTO_MARGIN))
    if asked_bytes is not None and memory_bytes is not None and asked_bytes > memory_bytes:
        raise BudgetAboveDevice(
            f"budget {format_bytes(asked_bytes)} is more than {costs.device} has, {format_bytes(memory_bytes)}.",
            why="a plan for memory that is not there would run out of it",
            next=f'budget "{memory_bytes}B" or less, or budget="auto"',
        )
    return asked_bytes


def _part(report: Progress, start: float, end: float) -> Progress:
    """Map a stage's own progress into a share of the whole."""
    return lambda stage, share: report(stage, start + (end - start) * share)


def trace_and_cost(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    regions: Sequence[str] | None,
    progress: Progress | None,
) -> tuple[Trace, Costs]:
    """A measured trace of a real model, for several plans of one step."""
    traced = trace_step(model, batch, loss=loss, optimizer=optimizer, regions=regions, progress=progress)
    costs = roofline_costs(traced, find_device("CPU")) if traced.is_fake else measured_costs(traced)
    return traced, costs
