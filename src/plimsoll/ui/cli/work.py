"""What several commands do with the public functions: load a target, make a plan, always with progress on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import plimsoll
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.store import load_plan
from plimsoll.errors import BudgetBelowFloor, PlanNotUsable
from plimsoll.estimator.targets.target import Target, TargetOptions, load_target
from plimsoll.planning.strategies import check_strategy
from plimsoll.ui.cli import terminal
from plimsoll.ui.cli.options import OptimizerName, make_optimizer
from plimsoll.ui.cli.progress import show_progress

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What a plan may do besides keeping, as written on the command line."""

    allow: str = "recompute"
    max_error: str = "0"
    host_budget: str | None = None
    overrides: tuple[str, ...] = ()
    link: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the command line asks of a plan."""

    budget: str | None
    strategy: str
    regions: tuple[str, ...] = ()
    device_profile: str | None = None
    allowed: Allowed = Allowed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A target with the optimizer that trains it, and the saved plan that is asked about, if one is."""

    target: Target
    optimizer: torch.optim.Optimizer | None
    saved: Plan | None = None


def load(text: str, how: TargetOptions, optimizer: OptimizerName, strategies: Sequence[str] = ()) -> Loaded:
    """Load a target and make the optimizer that is planned for.

    Args:
        text: the target, as typed.
        how: what the target is made with.
        optimizer: over the model's parameters.
        strategies: those that will be asked for; a wrong one is refused before the target is loaded.
    """
    for strategy in strategies:
        check_strategy(strategy)
    with show_progress(terminal.progress()) as report:
        report(f"loading {text}", 0.0)
        target = load_target(text, how)
    return Loaded(target=target, optimizer=make_optimizer(optimizer, target.model))


def load_saved(file: Path | None) -> Plan | None:
    """The plan that ``--plan`` names, if it names one."""
    return None if file is None else load_plan(file)


def make_plan(loaded: Loaded, request: PlanRequest) -> Plan:
    """Plan the loaded step as requested."""
    with show_progress(terminal.progress()) as report:
        return plimsoll.plan(
            loaded.target.model,
            loaded.target.batch,
            request.budget,
            loss=loaded.target.loss,
            optimizer=loaded.optimizer,
            strategy=request.strategy,
            regions=request.regions or None,
            device_profile=request.device_profile,
            allow=request.allowed.allow,
            max_error=request.allowed.max_error,
            host_budget=request.allowed.host_budget,
            overrides=request.allowed.overrides,
            link=request.allowed.link,
            progress=report,
        )


def refuse_unusable(plan: Plan) -> None:
    """End with a plan's own exit code where it may not be applied: a time-out is never success.

    Raises:
        typer.Exit: with the code of ``BudgetBelowFloor`` or ``PlanNotUsable``.
    """
    if not plan.status.is_usable:
        below_floor = plan.budget_bytes is not None and plan.budget_bytes < plan.floor_bytes
        raise typer.Exit(BudgetBelowFloor.exit_code if below_floor else PlanNotUsable.exit_code)
