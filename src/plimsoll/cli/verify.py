"""``plimsoll verify TARGET``: run a plan beside the unmanaged model and compare gradients, peak and time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli import options, terminal

PlanFileOption = Annotated[
    Path | None, typer.Option("--plan", "-p", metavar="FILE", help="A saved plan; without one, plan first.")
]


def verify(
    target: options.TargetArgument,
    *,
    plan: PlanFileOption = None,
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
    steps: options.StepsOption = 5,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
) -> None:
    """Check a plan: gradients bit for bit, measured peak and time against predicted. Exits with 1 if it fails.

    Example: plimsoll verify llama-tiny --plan plan.json
    """
    import plimsoll
    from plimsoll.artifacts.store import load_plan
    from plimsoll.cli import work
    from plimsoll.cli.progress import show_progress
    from plimsoll.cli.target import TargetOptions
    from plimsoll.reports.receipt_terminal import render_receipt

    with terminal.exit_codes(is_json=json):
        saved = load_plan(plan) if plan is not None else None
        loaded = work.load(target, TargetOptions(batch=batch, sequence=seq, device=device), optimizer)
        request = work.PlanRequest(
            budget=budget,
            strategy=strategy,
            regions=tuple(regions or ()),
            allowed=work.Allowed(
                allow=allow, max_error=max_error, host_budget=host_budget, overrides=tuple(override or ()), link=link
            ),
        )
        checked = saved or work.make_plan(loaded, request)
        with show_progress(terminal.stderr()) as report:
            receipt = plimsoll.verify(
                loaded.target.model,
                loaded.target.batch,
                checked,
                loss=loaded.target.loss,
                optimizer=loaded.optimizer,
                steps=steps,
                progress=report,
            )
        if output is not None:
            receipt.save(output)
        terminal.print_result(receipt, render_receipt(receipt), is_json=json)
        if receipt.exit_code:
            raise typer.Exit(receipt.exit_code)
