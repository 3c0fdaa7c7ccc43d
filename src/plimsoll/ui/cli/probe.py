"""``plimsoll probe TARGET``: train with and without a plan, from the same start on the same data, and judge the plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.ui.cli import options, ranks, terminal

if TYPE_CHECKING:
    from plimsoll.analysis.probe.step import MakeOptimizer
    from plimsoll.artifacts.plan import Plan
    from plimsoll.artifacts.verdict import Verdict
    from plimsoll.ui.cli.work import Loaded

ProbeStepsOption = Annotated[int, typer.Option("--steps", min=1, help="Training steps that each arm takes at most.")]
RunOption = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR",
        help="Keep the run here: the same command goes on after an interruption.",
        file_okay=False,
    ),
]
HeldOutOption = Annotated[
    int | None,
    typer.Option("--held-out", min=0, metavar="N", help="Batches at the end of the data that are kept for evaluation."),
]
TargetLossOption = Annotated[
    float | None,
    typer.Option("--target-loss", help="Count steps and seconds to this loss; by default the baseline's final one."),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of everything random.")]
ChunkOption = Annotated[
    int, typer.Option("--chunk", min=1, metavar="N", help="Steps that one arm takes before the other's turn.")
]
EarlyOption = Annotated[bool, typer.Option("--early/--no-early", help="Stop as soon as the answer is clear.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks of a probe besides its plan."""

    steps: int
    held_out: int | None
    target_loss: float | None
    seed: int
    run: Path | None
    chunk_steps: int
    is_early: bool


def probe(
    context: typer.Context,
    target: options.TargetArgument,
    *,
    steps: ProbeStepsOption = 1000,
    plan: options.PlanFileOption = None,
    run: RunOption = None,
    held_out: HeldOutOption = None,
    target_loss: TargetLossOption = None,
    seed: SeedOption = 0,
    chunk: ChunkOption = 20,
    early: EarlyOption = True,
    budget: options.BudgetOption = None,
    strategy: options.StrategyOption = "auto",
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
    output: options.OutputOption = None,
    json: options.JsonOption = False,
) -> None:
    """Train with and without a plan, from the same start on the same data, and say whether the plan harms training.

    A target may return a loader or a list of batches in place of one batch. Exits with 1 unless the verdict is GOOD or
    IDENTICAL.

    Example: plimsoll probe llama-tiny --steps 200 --strategy int8 --run probe-int8
    """
    from plimsoll.estimator.targets.target import TargetOptions
    from plimsoll.ui.cli import work

    with ranks.one_process("probe", is_json=json):
        options.refuse_beside_plan(context)
        make_optimizer = optimizer_factory(optimizer)
        saved = work.load_saved(plan)
        loaded = work.load(target, TargetOptions(batch=batch, sequence=seq, device=device), optimizer, (strategy,))
        request = work.PlanRequest(
            budget=budget,
            strategy=strategy,
            regions=tuple(regions or ()),
            allowed=work.Allowed(
                allow=allow, max_error=max_error, host_budget=host_budget, overrides=tuple(override or ()), link=link
            ),
        )
        asked = _Asked(
            steps=steps,
            held_out=held_out,
            target_loss=target_loss,
            seed=seed,
            run=run,
            chunk_steps=chunk,
            is_early=early,
        )
        verdict = _probe(loaded, saved or work.make_plan(loaded, request), make_optimizer, asked)
        if output is not None:
            verdict.save(output)
        terminal.print_result(verdict, is_json=json, saved_to=output)
        if verdict.exit_code:
            raise typer.Exit(verdict.exit_code)


def optimizer_factory(name: options.OptimizerName) -> MakeOptimizer:
    """What makes the optimizer of each arm.

    Raises:
        InvalidProbe: without an optimizer there is no training.
    """
    import functools

    import torch

    from plimsoll.errors import InvalidProbe

    if name is options.OptimizerName.NONE:
        raise InvalidProbe(
            "A probe trains, and --optimizer none does not.",
            why="a verdict on training needs steps that change the weights",
            next="leave --optimizer out for AdamW, or give sgd",
        )
    if name is options.OptimizerName.SGD:
        return functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    return torch.optim.AdamW


def _probe(loaded: Loaded, plan: Plan, make_optimizer: MakeOptimizer, asked: _Asked) -> Verdict:
    """Run the probe with its progress on stderr; say how to go on if it is interrupted."""
    import plimsoll
    from plimsoll.ui.cli.probe_data import data_for
    from plimsoll.ui.cli.progress import show_progress

    data = data_for(loaded.target)
    try:
        with show_progress(terminal.stderr()) as report:
            return plimsoll.probe(
                loaded.target.model,
                data.batches,
                plan,
                steps=asked.steps,
                loss=loaded.target.loss,
                optimizer=make_optimizer,
                held_out=asked.held_out,
                target_loss=asked.target_loss,
                seed=asked.seed,
                run=asked.run,
                chunk_steps=asked.chunk_steps,
                early=asked.is_early,
                data=data.description,
                progress=report,
            )
    except KeyboardInterrupt:
        kept = "nothing is kept without --run DIR" if asked.run is None else f"the same command goes on in {asked.run}"
        terminal.stderr().print(kept, markup=False)
        raise
