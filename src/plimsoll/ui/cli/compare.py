"""``plimsoll compare TARGET``: strategies side by side on one model and batch, measured."""

from __future__ import annotations

from typing import Annotated

import typer

from plimsoll.ui.cli import options, ranks, terminal

StrategiesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        "-s",
        help="May be repeated. By default none, full, every:2, sqrt, selective:attention, and with a budget auto.",
    ),
]
_DEFAULT = ("none", "full", "every:2", "sqrt", "selective:attention")


def compare(
    target: options.TargetArgument,
    *,
    strategy: StrategiesOption = None,
    budget: options.BudgetOption = None,
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
    """Measure several strategies on one model and batch. Exits with 1 if one of them changes the gradients.

    Example: plimsoll compare llama-tiny --strategy full --strategy auto --budget 200MiB
    """
    import plimsoll
    from plimsoll.estimator.targets.target import TargetOptions
    from plimsoll.ui.cli import work
    from plimsoll.ui.cli.progress import show_progress

    with ranks.exit_codes(is_json=json) as crew:
        how = TargetOptions(batch=batch, sequence=seq, device=crew.device(device))
        strategies = strategy or [*_DEFAULT, *(["auto"] if budget else [])]
        loaded = crew.load(lambda: work.load(target, how, optimizer, strategies))
        with show_progress(terminal.progress()) as report:
            comparison = plimsoll.compare(
                loaded.target.model,
                loaded.target.batch,
                strategies,
                budget=budget,
                loss=loaded.target.loss,
                optimizer=loaded.optimizer,
                regions=tuple(regions) if regions else None,
                steps=steps,
                allow=allow,
                max_error=max_error,
                host_budget=host_budget,
                overrides=tuple(override or ()),
                link=link,
                progress=report,
            )
        if crew.speaks:
            if output is not None:
                comparison.save(output)
            terminal.print_result(comparison, is_json=json, saved_to=output)
        if comparison.exit_code:
            raise typer.Exit(comparison.exit_code)
