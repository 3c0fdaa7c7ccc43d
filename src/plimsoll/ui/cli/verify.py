"""``plimsoll verify TARGET``: hold a plan, or what the model does by itself, against the model with everything kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.artifacts.costs import CostSource
from plimsoll.errors import InvalidOption
from plimsoll.ui.cli import options, ranks, terminal

if TYPE_CHECKING:
    from plimsoll.artifacts.plan import Plan
    from plimsoll.artifacts.receipt import Receipt
    from plimsoll.ui.cli.work import Loaded

PlanFileOption = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        "-p",
        metavar="FILE",
        help="A saved plan. Without one, and without a budget or a strategy, the model's own checkpointing, offloading "
        "or compiled memory budget is verified.",
    ),
]
IntermediateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--intermediate",
        metavar="PATTERN",
        help="Compare what these modules make, and its gradient: 'model.layers.*.mlp'; may be repeated.",
    ),
]
CurveOption = Annotated[
    int, typer.Option("--curve", min=0, metavar="STEPS", help="Compare the losses of so many training steps.")
]
RevisedPlanOption = Annotated[
    Path | None,
    typer.Option(
        "--revised-plan",
        metavar="FILE",
        help="Where to save the plan that is solved again with measured costs, if the given one was made for a device that was "
        "not there and is off. A new file.",
        dir_okay=False,
    ),
]
_AUTO = "auto"


def verify(
    context: typer.Context,
    target: options.TargetArgument,
    *,
    plan: PlanFileOption = None,
    budget: options.BudgetOption = None,
    strategy: options.StrategyOption = _AUTO,
    regions: options.RegionsOption = None,
    allow: options.AllowOption = "recompute",
    max_error: options.MaxErrorOption = "0",
    host_budget: options.HostBudgetOption = None,
    override: options.OverrideOption = None,
    link: options.LinkOption = None,
    optimizer: options.OptimizerOption = options.OptimizerName.ADAMW,
    device: options.DeviceOption = "cpu",
    batch: options.BatchOption = None,
    seq: options.SequenceOption = None,
    steps: options.StepsOption = 5,
    intermediate: IntermediateOption = None,
    curve: CurveOption = 0,
    revised_plan: RevisedPlanOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
) -> None:
    """Check a plan: gradients bit for bit, measured peak and time against predicted. Exits with 1 if it fails.

    Without a plan, a budget and a strategy: check the model's own activation checkpointing.

    Example: plimsoll verify llama-tiny --plan plan.json
    """
    from plimsoll.estimator.targets.target import TargetOptions
    from plimsoll.ui.cli import work

    with ranks.exit_codes(is_json=json) as crew:
        is_own = plan is None and budget is None and strategy == _AUTO and not override
        how = TargetOptions(batch=batch, sequence=seq, device=crew.device(device))

        def load() -> Loaded:
            saved = _saved(context, plan, revised_plan, is_own=is_own)
            return replace(work.load(target, how, optimizer, (strategy,)), saved=saved)

        loaded = crew.load(load)
        request = work.PlanRequest(
            budget=budget,
            strategy=strategy,
            regions=tuple(regions or ()),
            allowed=work.Allowed(
                allow=allow, max_error=max_error, host_budget=host_budget, overrides=tuple(override or ()), link=link
            ),
        )
        checked = loaded.saved if is_own or loaded.saved is not None else work.make_plan(loaded, request)
        depth = _Depth(steps, tuple(intermediate or ()), curve, max_error if checked is None else "0")
        receipt = _verify(loaded, checked, depth)
        if crew.speaks:
            if output is not None:
                receipt.save(output)
            terminal.print_result(receipt, is_json=json, saved_to=output)
            if revised_plan is not None:
                _save_revised(receipt, revised_plan, is_json=json)
        if receipt.exit_code:
            raise typer.Exit(receipt.exit_code)


def _saved(context: typer.Context, plan: Path | None, revised_plan: Path | None, *, is_own: bool) -> Plan | None:
    """The plan that ``--plan`` names, if it names one, once options that would have no effect are refused."""
    from plimsoll.artifacts.store import load_plan

    options.refuse_beside_plan(context)
    if is_own:
        options.refuse_without_plan(context)
    saved = None if plan is None else load_plan(plan)
    _check_revised(revised_plan, saved)
    return saved


def _check_revised(file: Path | None, plan: Plan | None) -> None:
    """Refuse a place for a revised plan where there can be none, or where something is already.

    Raises:
        InvalidOption: says which.
    """
    if file is None:
        return
    if plan is None or plan.cost_source is not CostSource.ROOFLINE:
        made = "there is no --plan" if plan is None else f"the plan was made on {plan.cost_device} with measured costs"
        raise InvalidOption(
            "--revised-plan would have no effect.",
            why=f"{made}; only a plan made for a device that was not there is solved again",
            next="leave it out, or give a plan made with --device-profile",
        )
    if file.exists():
        raise InvalidOption(
            f"{file} is there already.",
            why="a revised plan replaces nothing by itself",
            next="give --revised-plan a new name",
        )


def _save_revised(receipt: Receipt, file: Path, *, is_json: bool) -> None:
    if receipt.revised_plan is not None:
        receipt.revised_plan.save(file)
    if not is_json:
        is_saved = receipt.revised_plan is not None
        said = f"revised plan saved to {file}" if is_saved else f"there is no revised plan: {file} was not written"
        terminal.stdout().print(said, markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Depth:
    """How much is compared."""

    steps: int
    intermediates: tuple[str, ...]
    curve_steps: int
    max_error: str


def _verify(loaded: Loaded, plan: Plan | None, depth: _Depth) -> Receipt:
    import plimsoll
    from plimsoll.ui.cli.progress import show_progress

    with show_progress(terminal.progress()) as report:
        return plimsoll.verify(
            loaded.target.model,
            loaded.target.batch,
            plan,
            loss=loaded.target.loss,
            optimizer=loaded.optimizer,
            steps=depth.steps,
            intermediates=depth.intermediates,
            curve_steps=depth.curve_steps,
            max_error=depth.max_error,
            progress=report,
        )
