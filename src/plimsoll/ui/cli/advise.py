"""``plimsoll advise TARGET``: is memory the bottleneck, what helps, what the compiler captures, what is still unchecked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.ui.cli import options, ranks, terminal

if TYPE_CHECKING:
    from plimsoll.estimator.targets.target import TargetOptions

ReceiptOption = Annotated[
    Path | None, typer.Option("--receipt", metavar="FILE", help="What verify saved: evidence for the checklist.")
]
VerdictOption = Annotated[
    Path | None, typer.Option("--verdict", metavar="FILE", help="What probe saved: evidence for the checklist.")
]
CompileSecondsOption = Annotated[
    float,
    typer.Option(
        "--compile-seconds", min=0, metavar="SECONDS", help="How long torch.compile may be asked; 0: not at all."
    ),
]


def advise(
    target: options.TargetArgument,
    *,
    budget: options.BudgetOption = None,
    max_error: options.MaxErrorOption = "0",
    receipt: ReceiptOption = None,
    verdict: VerdictOption = None,
    allow: options.AllowOption = "recompute,compress,offload",
    regions: options.RegionsOption = None,
    host_budget: options.HostBudgetOption = None,
    link: options.LinkOption = None,
    optimizer: options.OptimizerOption = options.OptimizerName.ADAMW,
    device_profile: options.DeviceProfileOption = None,
    device: options.DeviceOption = "cpu",
    batch: options.BatchOption = None,
    seq: options.SequenceOption = None,
    compile_seconds: CompileSecondsOption = 60.0,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
) -> None:
    """Say whether memory is the bottleneck, what helps, and what is still to be checked.

    Example: plimsoll advise llama-tiny --budget 200MiB
    """
    import plimsoll
    from plimsoll.artifacts.advice import Kind
    from plimsoll.errors import BudgetBelowFloor
    from plimsoll.estimator.targets.target import TargetOptions
    from plimsoll.ui.cli import work
    from plimsoll.ui.cli.progress import show_progress

    with ranks.one_process("advise", is_json=json):
        how = TargetOptions(batch=batch, sequence=seq, device=device, is_meta=device_profile is not None)
        loaded = work.load(target, how, optimizer)
        with show_progress(terminal.stderr()) as report:
            advice = plimsoll.advise(
                loaded.target.model,
                loaded.target.batch,
                budget,
                loss=loaded.target.loss,
                optimizer=loaded.optimizer,
                regions=tuple(regions) if regions else None,
                device_profile=device_profile,
                allow=allow,
                max_error=max_error,
                host_budget=host_budget,
                link=link,
                receipt=receipt,
                verdict=verdict,
                compile_seconds=compile_seconds,
                target=_words(target, how, optimizer),
                progress=report,
            )
        if output is not None:
            advice.save(output)
        terminal.print_result(advice, is_json=json, saved_to=output)
        if advice.recommendation.kind is Kind.DOES_NOT_FIT:
            raise typer.Exit(BudgetBelowFloor.exit_code)


def _words(target: str, how: TargetOptions, optimizer: options.OptimizerName) -> str:
    """The target as the next command has to name it, so that it means the same step."""
    import shlex

    words = [shlex.quote(target)]
    if how.batch is not None:
        words.append(f"--batch {how.batch}")
    if how.sequence is not None:
        words.append(f"--seq {how.sequence}")
    if how.device != "cpu":
        words.append(f"--device {how.device}")
    if optimizer is not options.OptimizerName.ADAMW:
        words.append(f"--optimizer {optimizer}")
    return " ".join(words)
