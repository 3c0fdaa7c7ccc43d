"""``plimsoll verify`` and ``plimsoll compare``: check a plan, or measure several strategies, against a step without a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.artifacts.costs import CostSource
from plimsoll.errors import InvalidOption
from plimsoll.ui.cli import commands, options, ranks, terminal

if TYPE_CHECKING:
    from plimsoll.artifacts.plan import Plan
    from plimsoll.ui.cli.work import Loaded

PlanFileOption = Annotated[
    Path | None,
    options.of_plan(
        "--plan",
        "-p",
        metavar="FILE",
        help="Verify this saved plan. Without a plan, a budget and a strategy, verify the model's own checkpointing, "
        "offloading or compiled memory budget.",
    ),
]
IntermediateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--intermediate",
        metavar="PATTERN",
        help="Also compare the outputs of these modules and their gradients: 'model.layers.*.mlp'; may be repeated.",
    ),
]
CurveOption = Annotated[
    int, typer.Option("--curve", min=0, metavar="STEPS", help="Also compare the losses over this many training steps.")
]
RevisedPlanOption = Annotated[
    Path | None,
    options.of_result(
        "--revised-plan",
        metavar="FILE",
        help="For a plan made with --device-profile: if its predictions are off here, solve it again with measured costs and "
        "save it in this new file.",
        dir_okay=False,
    ),
]
StrategiesOption = Annotated[
    list[str] | None,
    options.of_plan(
        "--strategy",
        "-s",
        metavar="NAME",
        help="Strategy to measure; may be repeated. Default: none, full, every:2, sqrt, selective:attention, and auto if there "
        "is a budget. With --compile: none, full, and torch's own memory-budget:0.7, 0.5, 0.3, 0, checkpoint, "
        "checkpoint:selective.",
    ),
]


@partial(commands.command, plans_if_asked=True)
def verify(
    context: typer.Context,
    target: options.TargetArgument,
    *,
    plan: PlanFileOption = None,
    asked: options.Planning,
    building: options.Building,
    steps: options.StepsOption = 5,
    intermediate: IntermediateOption = None,
    curve: CurveOption = 0,
    revised_plan: RevisedPlanOption = None,
    compiled: options.CompileOption = None,
    to: options.Output,
) -> None:
    """Check a plan: compare gradients bit for bit, and peak and time with the prediction. Exits with 1 if it fails.

    Without a plan, a budget and a strategy: check the model's own activation checkpointing.

    Example: plimsoll verify llama-tiny --plan plan.json
    """
    import plimsoll
    from plimsoll.ui.cli import work

    with ranks.exit_codes(is_json=to.json) as crew:
        is_own = plan is None and not asked.asks_for_plan
        building = replace(building, device=crew.device(building.device))

        def load() -> Loaded:
            saved = _saved(context, plan, revised_plan, is_own=is_own)
            return replace(work.load(target, building, compiled=compiled, budget=asked.budget), saved=saved)

        loaded = crew.load(load)
        checked = loaded.saved if is_own or loaded.saved is not None else work.make_plan(loaded, asked)
        receipt = loaded.ask(
            plimsoll.verify,
            checked,
            steps=steps,
            intermediates=tuple(intermediate or ()),
            curve_steps=curve,
            max_error=asked.max_error if checked is None else "0",
        )
        if crew.speaks:
            terminal.hand_over(receipt, to)
            if revised_plan is not None:
                terminal.save_beside(receipt.revised_plan, "revised plan", revised_plan, to)
        terminal.end(receipt.exit_code)


def _saved(context: typer.Context, plan: Path | None, revised_plan: Path | None, *, is_own: bool) -> Plan | None:
    """Load the plan that ``--plan`` names, or return ``None`` without ``--plan``. First raise an error if options were typed
    that do not have an effect.
    """
    from plimsoll.ui.cli.work import load_saved

    options.refuse_beside_plan(context)
    if is_own:
        options.refuse_without_plan(context)
    saved = load_saved(plan)
    _check_revised(revised_plan, saved)
    return saved


def _check_revised(file: Path | None, plan: Plan | None) -> None:
    """Check that ``--revised-plan`` can have an effect and names a new file.

    Raises:
        InvalidOption: the plan cannot be revised, because its costs were measured; or the file already exists.
    """
    if file is None:
        return
    if plan is None or plan.cost_source is not CostSource.ROOFLINE:
        made = (
            "--plan was not given" if plan is None else f"the plan was made on {plan.cost_device} with measured costs"
        )
        raise InvalidOption(
            "--revised-plan would have no effect.",
            why=f"{made}; verify solves a plan again only if it was made without the device",
            next="leave --revised-plan out, or give a plan made with --device-profile",
        )
    if file.exists():
        raise InvalidOption(
            f"{file} already exists.",
            why="--revised-plan does not replace existing files",
            next="give --revised-plan a new name",
        )


@commands.command
def compare(
    target: options.TargetArgument,
    *,
    strategy: StrategiesOption = None,
    asked: options.Planning,
    compiled: options.CompileOption = None,
    building: options.Building,
    steps: options.StepsOption = 5,
    to: options.Output,
) -> None:
    """Measure several strategies on one model and batch. Exits with 1 if one of them changes the gradients.

    Example: plimsoll compare llama-tiny --strategy full --strategy auto --budget 90MiB
    """
    import plimsoll
    from plimsoll.ui.cli import work

    with ranks.exit_codes(is_json=to.json) as crew:
        building = replace(building, device=crew.device(building.device))
        loaded = crew.load(lambda: work.load(target, building, compiled=compiled, budget=asked.budget))
        comparison = loaded.ask(plimsoll.compare, strategy, steps=steps, **asked.words())
        if crew.speaks:
            terminal.hand_over(comparison, to)
        terminal.end(comparison.exit_code)
