"""``plimsoll diagnose TARGET`` or ``plimsoll diagnose BASELINE PLAN``: splits the extra time of a plan into causes.

A target is a model with its batch. ``BASELINE`` and ``PLAN`` are traces of the step without and with the plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plimsoll.errors import InvalidOption, InvalidTrace
from plimsoll.estimator.targets.recipe import check_target
from plimsoll.ui.cli import commands, options, ranks, terminal

SubjectArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|TRACE",
        help="A target to profile, as for verify. Or a trace of the step without a plan: a Chrome trace of "
        "torch.profiler (.json, .json.gz), or a SQLite export of Nsight Systems.",
        show_default=False,
    ),
]
PlanTraceArgument = Annotated[
    Path | None,
    typer.Argument(metavar="TRACE", help="A trace of the step with the plan, in the same format.", show_default=False),
]
KeepOption = Annotated[
    Path | None,
    typer.Option("--keep-traces", metavar="DIR", help="Save the two Chrome traces in this directory.", file_okay=False),
]
_OF_TRACES = ("--output", "--json")
"""The only options that have an effect if two traces are given."""
_TRACE_ENDINGS = (".json.gz", ".sqlite", ".sqlite3", ".db", ".nsys-rep", ".qdrep")


@commands.command
def diagnose(
    context: typer.Context,
    subject: SubjectArgument,
    trace: PlanTraceArgument = None,
    *,
    plan: options.PlanFileOption = None,
    asked: options.Planning,
    compiled: options.CompileOption = None,
    building: options.Building,
    steps: options.StepsOption = 3,
    keep_traces: KeepOption = None,
    to: options.Output,
) -> None:
    """Report what a plan's overhead consists of: recomputation, memory, launches, waiting, copies, lost fusion.

    Example: plimsoll diagnose llama-tiny --strategy full
    """
    with ranks.one_process("diagnose", is_json=to.json):
        if trace is None:
            _refuse_single_trace(subject)
            options.refuse_beside_plan(context)
            check_target(subject)
            _refuse_without_plan(subject, plan, asked)
        import plimsoll
        from plimsoll.ui.cli import work

        if trace is not None:
            _refuse_ignored(context)
            with terminal.show_progress() as report:
                finding = plimsoll.diagnose(subject, trace, progress=report)
        else:
            saved = work.load_saved(plan)
            loaded = work.load(subject, building, compiled=compiled, budget=asked.budget)
            used = saved or work.make_plan(loaded, asked)
            with terminal.show_progress() as report:
                finding = plimsoll.diagnose(
                    loaded.target.model,
                    loaded.target.batch,
                    used,
                    loss=loaded.target.loss,
                    steps=steps,
                    keep_traces=keep_traces,
                    progress=report,
                )
        terminal.hand_over(finding, to)


def _refuse_ignored(context: typer.Context) -> None:
    """Raise an error if options were typed that have no effect on two traces."""
    ignored = [name for name in options.given(context) if name not in _OF_TRACES]
    if ignored:
        raise InvalidTrace(
            f"{' and '.join(ignored)} would have no effect on two traces.",
            why="the traces already contain the profiled steps, and nothing is run again",
            next="leave these options out, or profile a target: plimsoll diagnose TARGET --plan plan.json",
        )


def _refuse_without_plan(subject: str, plan: Path | None, asked: options.Planning) -> None:
    """Raise an error if no option changes the step, because the overhead to explain would be zero."""
    if plan is None and not asked.asks_for_plan:
        raise InvalidOption(
            "diagnose was given nothing to diagnose.",
            why="without a plan, a budget or a strategy every activation is kept, and there is no extra time to explain",
            next=f"name one: plimsoll diagnose {subject} --strategy full, or --budget 8GiB, or --plan plan.json",
        )


def _refuse_single_trace(subject: str) -> None:
    if subject.endswith(_TRACE_ENDINGS):
        raise InvalidTrace(
            f"{subject} alone cannot be diagnosed.",
            why="the overhead is the difference between two profiles, one without and one with the plan",
            next=f"plimsoll diagnose {subject} PLAN_TRACE; export an .nsys-rep first, with nsys export --type sqlite",
        )
