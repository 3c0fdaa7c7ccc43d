"""``plimsoll explain TARGET|PLAN``: shows a step's peak, the tensors that hold it, and the changes that would lower the
peak.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plimsoll.artifacts.store import is_saved, load_plan
from plimsoll.errors import InvalidStrategy
from plimsoll.estimator.targets.recipe import check_target
from plimsoll.ui.cli import commands, options, ranks, terminal

ExplainedArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|PLAN",
        help="package.module:function, a Hugging Face config.json, a name from the catalogue, or a saved plan.",
        show_default=False,
    ),
]
StrategyOption = Annotated[
    str | None,
    options.of_plan(
        "--strategy",
        "-s",
        metavar="NAME",
        help="Explain the step under none, full, every:K, sqrt, input-only or selective:…; by default, the unchanged step.",
    ),
]
PlanOption = Annotated[
    Path | None, options.of_plan("--plan", "-p", metavar="FILE", help="Explain the step under a saved plan.")
]
_OF_A_PLAN = ("--json", "--output")
"""The only options that have an effect if the command explains a saved plan, and not the step of a target (a model with its
batch).
"""


@commands.command
def explain(
    context: typer.Context,
    subject: ExplainedArgument,
    *,
    strategy: StrategyOption = None,
    plan: PlanOption = None,
    regions: options.RegionsOption = None,
    building: options.Building,
    device_profile: options.DeviceProfileOption = None,
    compiled: options.CompileOption = None,
    to: options.Output,
) -> None:
    """Explain a step's memory peak: what is resident, what recomputation holds, and what would lower the peak.

    Example: plimsoll explain llama-tiny --strategy full
    """
    with ranks.one_process("explain", is_json=to.json):
        if _is_saved(subject):
            _explain_saved(context, subject, to)
            return
        check_target(subject)
        import plimsoll
        from plimsoll.ui.cli import work

        if strategy is not None and plan is not None:
            raise InvalidStrategy(
                "--strategy and --plan were both given.",
                why="a step can be explained under a strategy or under a plan, but not under both",
                next="leave --strategy or --plan out",
            )
        if regions and plan is not None:
            raise InvalidStrategy(
                "--regions would have no effect beside --plan.",
                why="the plan names the modules that it decides about",
                next="leave --regions out, or give a --strategy instead of the plan",
            )
        loaded = work.load(subject, building, is_meta=device_profile is not None, compiled=compiled)
        explained = strategy or work.load_saved(plan)
        explanation = loaded.ask(plimsoll.explain, explained, regions=regions or None, device_profile=device_profile)
        terminal.hand_over(explanation, to)


def _is_saved(target: str) -> bool:
    """Return whether the argument names a file that Plimsoll wrote, and not a model configuration."""
    return Path(target).is_file() and is_saved(target)


def _explain_saved(context: typer.Context, target: str, to: options.Output) -> None:
    plan = load_plan(target)
    ignored = [name for name in options.given(context) if name not in _OF_A_PLAN]
    if ignored:
        raise InvalidStrategy(
            f"{' and '.join(ignored)} would have no effect on a saved plan.",
            why="the reasons of a saved plan are in its file, and nothing is traced",
            next=f"leave these options out, or run plimsoll explain TARGET --plan {target} to replay the plan on a target",
        )
    terminal.hand_over(plan, to, explain=True)
