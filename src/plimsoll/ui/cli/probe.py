"""``plimsoll probe TARGET``: trains with and without a plan, from the same weights on the same data, and judges the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plimsoll.ui.cli import commands, options, ranks, terminal

ProbeStepsOption = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="Maximum number of training steps of each run.")
]
RunOption = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR",
        help="Save progress in this directory. After an interruption, the same command resumes from it.",
        file_okay=False,
    ),
]
TargetLossOption = Annotated[
    float | None,
    typer.Option(
        "--target-loss",
        metavar="LOSS",
        help="Count the steps and seconds until this loss is reached; by default the baseline's final loss.",
    ),
]
ChunkOption = Annotated[
    int, typer.Option("--chunk", min=1, metavar="N", help="The two runs take turns; steps per turn.")
]
EarlyOption = Annotated[bool, typer.Option("--early/--no-early", help="Stop as soon as the answer is clear.")]


@commands.command
def probe(
    context: typer.Context,
    target: options.TargetArgument,
    *,
    steps: ProbeStepsOption = 1000,
    plan: options.PlanFileOption = None,
    run: RunOption = None,
    held_out: options.HeldOutOption = None,
    target_loss: TargetLossOption = None,
    seed: options.SeedOption = 0,
    chunk: ChunkOption = 20,
    early: EarlyOption = True,
    asked: options.Planning,
    building: options.Building,
    to: options.Output,
) -> None:
    """Train with and without a plan, from the same weights on the same data, and report whether the plan harms training.

    A target may return a data loader or a list of batches instead of one batch. Exits with 1 unless the verdict is GOOD or
    IDENTICAL.

    Example: plimsoll probe llama-tiny --steps 200 --strategy int8 --run probe-int8
    """
    import plimsoll
    from plimsoll.ui.cli import work

    with ranks.one_process("probe", is_json=to.json):
        options.refuse_beside_plan(context)
        make_optimizer = work.optimizer_factory(building.optimizer)
        saved = work.load_saved(plan)
        loaded = work.load(target, building, budget=asked.budget)
        used = saved or work.make_plan(loaded, asked)
        data = work.data_for(loaded.target)
        try:
            with terminal.show_progress() as report:
                verdict = plimsoll.probe(
                    loaded.target.model,
                    data.batches,
                    used,
                    steps=steps,
                    loss=loaded.target.loss,
                    optimizer=make_optimizer,
                    held_out=held_out,
                    target_loss=target_loss,
                    seed=seed,
                    run=run,
                    chunk_steps=chunk,
                    early=early,
                    data=data.description,
                    progress=report,
                )
        except KeyboardInterrupt:
            kept = (
                "no progress was saved: there is no --run DIR"
                if run is None
                else f"the same command resumes from {run}"
            )
            terminal.stderr().print(kept, markup=False)
            raise
        terminal.hand_over(verdict, to)
        terminal.end(verdict.exit_code)
