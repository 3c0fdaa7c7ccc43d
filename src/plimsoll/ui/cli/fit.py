"""``plimsoll fit TARGET``: choose micro-batch, sequence, accumulation and plan for the most throughput under a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.ui.cli import options, ranks, terminal

if TYPE_CHECKING:
    from plimsoll.artifacts.fit import Fit

FitBudgetOption = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        metavar="BYTES",
        help='Peak of the whole step: "70GiB", "80GB", or auto for the device\'s memory.',
    ),
]
SequencesOption = Annotated[
    list[int] | None,
    typer.Option("--seq", min=1, help="Tokens per example; may be repeated, to choose from several."),
]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option("--global-batch", min=1, metavar="N", help="Examples per optimizer step; the rest is accumulation."),
]
AccumulationOption = Annotated[
    int, typer.Option("--accumulation", min=1, metavar="N", help="Micro-batches per optimizer step.")
]
MostBatchOption = Annotated[
    int, typer.Option("--most-batch", min=1, metavar="N", help="No larger micro-batch is looked at.")
]
SolvesOption = Annotated[int, typer.Option("--solves", min=1, metavar="N", help="Plans to solve at most.")]
PlanOutputOption = Annotated[
    Path | None,
    typer.Option("--save-plan", metavar="FILE", help="Save the best point's plan as JSON.", dir_okay=False),
]


def fit(
    target: options.TargetArgument,
    *,
    budget: FitBudgetOption,
    seq: SequencesOption = None,
    global_batch: GlobalBatchOption = None,
    accumulation: AccumulationOption = 1,
    most_batch: MostBatchOption = 1024,
    optimizer: options.OptimizerOption = options.OptimizerName.ADAMW,
    regions: options.RegionsOption = None,
    device_profile: options.DeviceProfileOption = None,
    device: options.DeviceOption = "cpu",
    solves: SolvesOption = 16,
    save_plan: PlanOutputOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
) -> None:
    """Find the micro-batch and the plan with the most tokens (or examples) per second under a memory budget.

    Example: plimsoll fit llama-3-8b --budget 75GiB --device-profile H100-SXM --seq 2048 --seq 8192
    """
    import plimsoll
    from plimsoll.estimator.targets.target import TargetOptions
    from plimsoll.ui.cli import work
    from plimsoll.ui.cli.progress import show_progress

    with ranks.one_process("fit", is_json=json):
        is_text = ":" not in target
        how = TargetOptions(
            sequence=max(seq) if seq and is_text else None, device=device, is_meta=device_profile is not None
        )
        loaded = work.load(target, how, optimizer)
        with show_progress(terminal.stderr()) as report:
            found = plimsoll.fit(
                loaded.target.model,
                loaded.target.batch,
                budget,
                sequences=seq or None,
                global_batch=global_batch,
                accumulation=accumulation,
                most_batch=most_batch,
                loss=loaded.target.loss,
                optimizer=loaded.optimizer,
                regions=tuple(regions) if regions else None,
                device_profile=device_profile,
                most_solves=solves,
                progress=report,
            )
        if output is not None:
            found.save(output)
        terminal.print_result(found, is_json=json, saved_to=output)
        if save_plan is not None:
            _save_plan(found, save_plan, is_json=json)
        if found.exit_code:
            raise typer.Exit(found.exit_code)


def _save_plan(found: Fit, file: Path, *, is_json: bool) -> None:
    if found.plan is not None:
        found.plan.save(file)
    if not is_json:
        said = f"plan saved to {file}" if found.plan is not None else f"there is no plan: {file} was not written"
        terminal.stdout().print(said, markup=False, soft_wrap=True)
