"""``plimsoll diagnose TARGET`` or ``plimsoll diagnose BASELINE PLAN``: where the overhead of a plan goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.artifacts.finding import Finding
from plimsoll.errors import InvalidTrace
from plimsoll.ui.cli import options, ranks, terminal

if TYPE_CHECKING:
    from plimsoll.estimator.targets.target import TargetOptions
    from plimsoll.ui.cli.work import PlanRequest

SubjectArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|TRACE",
        help="A target to profile, as for verify; or the trace of the step without a plan: a Chrome trace of "
        "torch.profiler (.json, .json.gz) or a SQLite export of Nsight Systems.",
        show_default=False,
    ),
]
PlanTraceArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[TRACE]", help="The trace of the step with the plan, of the same kind.", show_default=False
    ),
]
KeepOption = Annotated[
    Path | None,
    typer.Option("--keep-traces", metavar="DIR", help="Keep the two Chrome traces there.", file_okay=False),
]
_OF_TRACES = ("--output", "--json")
"""The options that mean something beside two traces."""
_TRACE_ENDINGS = (".json.gz", ".sqlite", ".sqlite3", ".db", ".nsys-rep", ".qdrep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """How a target is profiled, and where its traces stay."""

    steps: int
    keep_traces: Path | None


def diagnose(
    context: typer.Context,
    subject: SubjectArgument,
    trace: PlanTraceArgument = None,
    *,
    plan: options.PlanFileOption = None,
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
    keep_traces: KeepOption = None,
    output: options.OutputOption = None,
    json: options.JsonOption = False,
) -> None:
    """Say where the overhead of a plan goes: recomputation, memory, launches, waiting, copies, lost fusion.

    Example: plimsoll diagnose llama-tiny --strategy full
    """
    from plimsoll.estimator.targets.target import TargetOptions
    from plimsoll.ui.cli import work

    with ranks.one_process("diagnose", is_json=json):
        if trace is not None:
            _refuse_ignored(context)
            finding = _of_traces(subject, trace)
        else:
            _refuse_single_trace(subject)
            options.refuse_beside_plan(context)
            request = work.PlanRequest(
                budget=budget,
                strategy=strategy,
                regions=tuple(regions or ()),
                allowed=work.Allowed(
                    allow=allow,
                    max_error=max_error,
                    host_budget=host_budget,
                    overrides=tuple(override or ()),
                    link=link,
                ),
            )
            how = TargetOptions(batch=batch, sequence=seq, device=device)
            profiled = Profiled(steps=steps, keep_traces=keep_traces)
            finding = _of_target(subject, how, optimizer, plan, request, profiled)
        if output is not None:
            finding.save(output)
        terminal.print_result(finding, is_json=json, saved_to=output)


def _of_traces(baseline: str, plan: Path) -> Finding:
    import plimsoll
    from plimsoll.ui.cli.progress import show_progress

    with show_progress(terminal.stderr()) as report:
        return plimsoll.diagnose(baseline, plan, progress=report)


def _of_target(
    text: str,
    how: TargetOptions,
    optimizer: options.OptimizerName,
    plan: Path | None,
    request: PlanRequest,
    profiled: Profiled,
) -> Finding:
    import plimsoll
    from plimsoll.ui.cli import work
    from plimsoll.ui.cli.progress import show_progress

    saved = work.load_saved(plan)
    loaded = work.load(text, how, optimizer, (request.strategy,))
    used = saved or work.make_plan(loaded, request)
    with show_progress(terminal.stderr()) as report:
        return plimsoll.diagnose(
            loaded.target.model,
            loaded.target.batch,
            used,
            loss=loaded.target.loss,
            steps=profiled.steps,
            keep_traces=profiled.keep_traces,
            progress=report,
        )


def _refuse_ignored(context: typer.Context) -> None:
    """Two traces are compared as they are."""
    ignored = [name for name in options.given(context) if name not in _OF_TRACES]
    if ignored:
        raise InvalidTrace(
            f"{' and '.join(ignored)} would have no effect on two traces.",
            why="what was profiled is in the traces already",
            next="leave out what has no effect, or profile a target: plimsoll diagnose TARGET --plan plan.json",
        )


def _refuse_single_trace(subject: str) -> None:
    if subject.endswith(_TRACE_ENDINGS):
        raise InvalidTrace(
            f"{subject} alone cannot be diagnosed.",
            why="an overhead is the difference of two profiles, one without and one with the plan",
            next=f"plimsoll diagnose {subject} PLAN_TRACE; an .nsys-rep has to be exported with nsys export --type sqlite",
        )
