"""``plimsoll advise TARGET``: finds out whether memory is the bottleneck, what helps, and what the compiler captures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plimsoll.ui.cli import commands, options, ranks, terminal

ReceiptOption = Annotated[
    Path | None,
    typer.Option("--receipt", metavar="FILE", help="Receipt saved by verify, used as evidence in the checklist."),
]
VerdictOption = Annotated[
    Path | None,
    typer.Option("--verdict", metavar="FILE", help="Verdict saved by probe, used as evidence in the checklist."),
]
CompileSecondsOption = Annotated[
    float,
    typer.Option(
        "--compile-seconds", min=0, metavar="SECONDS", help="Time limit for the trial of torch.compile; 0 skips it."
    ),
]


@commands.command
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
    compiled: options.CompileOption = None,
    building: options.Building,
    device_profile: options.DeviceProfileOption = None,
    compile_seconds: CompileSecondsOption = 60.0,
    to: options.Output,
) -> None:
    """Report whether memory is the bottleneck, what helps, and what still has to be checked.

    Example: plimsoll advise llama-tiny --budget 90MiB
    """
    import plimsoll
    from plimsoll.artifacts.advice import Kind
    from plimsoll.errors import BudgetBelowFloor
    from plimsoll.ui.cli import work

    with ranks.one_process("advise", is_json=to.json):
        loaded = work.load(target, building, is_meta=device_profile is not None, compiled=compiled)
        advice = loaded.ask(
            plimsoll.advise,
            budget,
            regions=regions or None,
            device_profile=device_profile,
            allow=allow,
            max_error=max_error,
            host_budget=host_budget,
            link=link,
            receipt=receipt,
            verdict=verdict,
            compile_seconds=compile_seconds,
            target=_words(target, building, compiled),
        )
        terminal.hand_over(advice, to)
        terminal.end(BudgetBelowFloor.exit_code if advice.recommendation.kind is Kind.DOES_NOT_FIT else 0)


def _words(target: str, building: options.Building, compiled: options.Compiled | None) -> str:
    """Return the target (the text that names model and batch) and its options as text, so that the commands in the advice run
    the same step.
    """
    import shlex

    words = [shlex.quote(target)]
    if compiled is not None:
        words.append(f"--compile {compiled}")
    if building.batch is not None:
        words.append(f"--batch {building.batch}")
    if building.seq is not None:
        words.append(f"--seq {building.seq}")
    if building.device != "cpu":
        words.append(f"--device {building.device}")
    if building.optimizer is not options.OptimizerName.ADAMW:
        words.append(f"--optimizer {building.optimizer}")
    return " ".join(words)
