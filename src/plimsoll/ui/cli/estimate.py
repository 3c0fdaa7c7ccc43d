"""``plimsoll estimate TARGET``: what every rank of a training job holds and how fast it is, on devices that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plimsoll.artifacts.estimate import Estimate
from plimsoll.errors import InvalidOption, PlanFileError
from plimsoll.ui.cli import options, ranks, terminal

DeviceNameOption = Annotated[
    str, typer.Option("--device", "-d", metavar="NAME", help="From the catalogue: H100-SXM, A100-80GB, laptop-CPU …")
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision", metavar="NAME", help="fp32, bf16, fp16, bf16-mixed or fp16-mixed; by default the model's own."
    ),
]
OptimizerNameOption = Annotated[
    str,
    typer.Option("--optimizer", metavar="NAME", help="adamw, adamw-fused, adamw-8bit, sgd, adafactor, muon … or none."),
]
MasterWeightsOption = Annotated[
    bool, typer.Option("--master-weights", help="The optimizer keeps a copy of narrow weights in float32.")
]
LayoutOption = Annotated[
    str,
    typer.Option(
        "--layout",
        "-l",
        metavar="DEGREES",
        help="How the step is spread over ranks: dp=8,tp=8,sp,pp=4,zero=1,micro-batches=64; also cp, ep, schedule, virtual.",
    ),
]
EstimateBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        metavar="BYTES",
        help='What the tensors of one rank may take: "70GiB", or auto for the device.',
    ),
]
EstimateStrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy", "-s", help="none, full, every:K, sqrt, selective:… or auto (the default with a budget)."
    ),
]
PlansOption = Annotated[
    Path | None,
    typer.Option("--plans", metavar="DIR", help="Save the plan of every stage in this directory.", file_okay=False),
]


def estimate(
    target: options.TargetArgument,
    *,
    device: DeviceNameOption = "H100-SXM",
    batch: options.BatchOption = None,
    seq: options.SequenceOption = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerNameOption = "adamw",
    master_weights: MasterWeightsOption = False,
    layout: LayoutOption = "",
    budget: EstimateBudgetOption = None,
    strategy: EstimateStrategyOption = None,
    plans: PlansOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
) -> None:
    """Estimate the whole training budget of a model on devices that are not here.

    Example: plimsoll estimate llama-3-70b --layout dp=64,zero=3 --strategy full
    """
    import plimsoll
    from plimsoll.errors import BudgetBelowFloor
    from plimsoll.ui.cli.progress import show_progress

    with ranks.one_process("estimate", is_json=json):
        with show_progress(terminal.stderr()) as report:
            found = plimsoll.estimate(
                target,
                batch,
                device=device,
                sequence=seq,
                precision=precision,
                optimizer=optimizer,
                has_master_weights=master_weights,
                layout=layout,
                budget=budget,
                strategy=strategy,
                progress=report,
            )
        if plans is not None:
            _save_plans(found, plans)
        if output is not None:
            found.save(output)
        terminal.print_result(found, is_json=json, saved_to=output)
        if found.does_fit is False:
            raise typer.Exit(BudgetBelowFloor.exit_code)


def _save_plans(found: Estimate, directory: Path) -> None:
    """One file per plan, named by pipeline rank and stage; an existing file is replaced."""
    if not any(stage.plans for stage in found.stages):
        raise InvalidOption(
            "There are no plans to save.",
            why="everything fits as it is"
            if found.strategy == "auto"
            else f"strategy {found.strategy!r} was simulated, not planned under a budget",
            next="give --budget and leave --strategy out, or leave --plans out",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanFileError(
            f"{directory} cannot be made.",
            why=error.strerror or type(error).__name__,
            next="name a directory that you may write to",
        ) from error
    for stage in found.stages:
        for number, plan in enumerate(stage.plans):
            plan.save(directory / f"rank-{stage.stage}-stage-{number}.json")
