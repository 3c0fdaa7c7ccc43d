"""The options that several commands share. Each has the same help text in all commands."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from plimsoll.errors import InvalidOption, InvalidStrategy
from plimsoll.units import parse_count


class OptimizerName(enum.StrEnum):
    """The optimizers that the command line can plan for."""

    ADAMW = "adamw"
    SGD = "sgd"
    NONE = "none"


class Compiled(enum.StrEnum):
    """The part of a model that torch.compile compiles: the whole model, or each repeated block separately."""

    WHOLE = "whole"
    BLOCKS = "blocks"


of_plan = functools.partial(typer.Option, rich_help_panel="What the plan may do")
of_target = functools.partial(typer.Option, rich_help_panel="The model and its batch")
of_result = functools.partial(typer.Option, rich_help_panel="The result")
"""Functions that declare an option in one section of a command's help. There is one function per section."""

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:function returning (model, batch) or (model, batch, loss); "
        "a Hugging Face config.json; timm/NAME or diffusers/CLASS; or a name from the catalogue, such as llama-tiny.",
        show_default=False,
    ),
]
BudgetOption = Annotated[
    str | None,
    of_plan(
        "--budget",
        "-b",
        metavar="BYTES",
        help='Memory limit for the peak of the whole step, with a unit: "70GiB" or "80GB".',
    ),
]
StrategyOption = Annotated[
    str,
    of_plan(
        "--strategy",
        "-s",
        metavar="NAME",
        help="auto, none, full, every:K, sqrt, input-only, selective:attention|mlp|norm|<op list>, int8, int4, fp8, "
        "offload, or hybrid:N,K.",
    ),
]
RegionsOption = Annotated[
    list[str] | None,
    of_plan("--regions", metavar="PATTERN", help="Modules to manage, such as 'model.layers.*'; may be repeated."),
]
OptimizerOption = Annotated[
    OptimizerName, of_target("--optimizer", help="Optimizer. Its state and its step count toward the budget.")
]
DeviceProfileOption = Annotated[
    str | None,
    of_target("--device-profile", metavar="NAME", help="Plan for a device that is not present: H100-SXM, A100-80GB …"),
]
DeviceOption = Annotated[
    str,
    of_target(
        "--device",
        metavar="NAME",
        help="Device to build the model on: cpu, cuda, cuda:1; not for a package.module:function.",
    ),
]


def parse_sequence(text: str | int) -> int:
    """Parse a length of sequences, such as ``4096`` or ``32k``, which is 32,768. Typer calls this for every ``--seq``."""
    if isinstance(text, int):
        return text
    try:
        is_long = text.isdecimal() and len(text) > len(str(2**63))
        return (
            int(text[:1000]) if is_long else parse_count(text, thousand=1024)
        )  # too long a number is refused by its length
    except InvalidOption as error:
        raise typer.BadParameter(f"{error.found} {error.next[:1].upper()}{error.next[1:]}.") from error


BatchOption = Annotated[
    int | None, of_target("--batch", min=1, metavar="N", help="Examples per batch; not for a package.module:function.")
]
SequenceOption = Annotated[
    int | None,
    of_target(
        "--seq",
        parser=parse_sequence,
        metavar="N",
        help="Tokens per example, such as 4096 or 32k; not for a package.module:function.",
    ),
]
CompileOption = Annotated[
    Compiled | None,
    of_target("--compile", help="Compile with torch.compile: the whole model, or each block separately."),
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Training steps to measure.")]
AllowOption = Annotated[
    str,
    of_plan(
        "--allow",
        metavar="LIST",
        help="What strategy auto may do, any of: recompute,tile,compress,offload,offload-state,step-in-backward,collectives.",
    ),
]
MaxErrorOption = Annotated[
    str,
    of_plan(
        "--max-error", metavar="SHARE", help="Largest relative gradient error that lossy codecs may cause, such as 1%."
    ),
]
HostBudgetOption = Annotated[
    str | None, of_plan("--host-budget", metavar="BYTES", help="Most bytes for offloaded values, such as 64GiB.")
]
OverrideOption = Annotated[
    list[str] | None,
    of_plan(
        "--override",
        metavar="PATTERN=DECISION",
        help="Fix the decision for matching values, such as 'layers.*.mlp::silu=compress:int8'; may be repeated.",
    ),
]
LinkOption = Annotated[
    str | None, of_plan("--link", metavar="NAME", help="Where to offload values: host (from a GPU) or disk.")
]
OutputOption = Annotated[
    Path | None, of_result("--output", "-o", metavar="FILE", help="Save the result as JSON.", dir_okay=False)
]
JsonOption = Annotated[bool, of_result("--json", help="Print the result, or the error, as JSON.")]
PlanFileOption = Annotated[
    Path | None, of_plan("--plan", "-p", metavar="FILE", help="Use this saved plan. Without it, make a plan first.")
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Random seed.")]
HeldOutOption = Annotated[
    int | None,
    typer.Option(
        "--held-out", min=0, metavar="N", help="Hold out this many batches at the end of the data for evaluation."
    ),
]
ExplainOption = Annotated[bool, of_result("--explain", help="Print every decision and its reason.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Building:
    """A group of options: how a target (the model and batch) is built, and which optimizer trains it."""

    optimizer: OptimizerOption = OptimizerName.ADAMW
    device: DeviceOption = "cpu"
    batch: BatchOption = None
    seq: SequenceOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A group of command-line options that decide how a plan is made, such as budget and strategy."""

    budget: BudgetOption = None
    strategy: StrategyOption = "auto"
    regions: RegionsOption = None
    allow: AllowOption = "recompute"
    max_error: MaxErrorOption = "0"
    host_budget: HostBudgetOption = None
    override: OverrideOption = None
    link: LinkOption = None

    def words(self) -> dict[str, Any]:
        """Return these options, except the strategy, as keyword arguments of public functions such as ``plimsoll.plan``."""
        return {"budget": self.budget} | limits(asdict(self))

    @property
    def asks_for_plan(self) -> bool:
        """Whether a budget, a strategy or an override asks for a plan. Without one, everything is kept."""
        return asks_for_plan(asdict(self))


def asks_for_plan(typed: Mapping[str, Any]) -> bool:
    """Return whether options ask for a plan: a budget, a strategy or an override.

    ``typed`` maps the names of options to their values. It may lack options that a command does not have.
    """
    return bool(typed.get("budget") or typed.get("strategy") not in (None, [], "auto") or typed.get("override"))


def limits(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that limit what plans may do, as keyword arguments of public functions such as ``plimsoll.plan``.

    ``typed`` maps the names of options to their values. It may lack options that a command does not have.
    """
    return {
        "regions": typed.get("regions") or None,
        "allow": typed.get("allow", "recompute"),
        "max_error": typed.get("max_error", "0"),
        "host_budget": typed.get("host_budget"),
        "overrides": tuple(typed.get("override") or ()),
        "link": typed.get("link"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A group of options: where to save the result, and whether to print it as JSON."""

    output: OutputOption = None
    json: JsonOption = False


_OF_PLANNING = tuple(f"--{field.name.replace('_', '-')}" for field in fields(Planning))
"""The names of the command-line options that decide how a plan is made. They do not affect a saved plan."""


def given(context: typer.Context) -> list[str]:
    """Return the long names of the options that the user typed, and not those with default values."""
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name
        and parameter.opts[0].startswith("--")
        and getattr(context.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    ]


def refuse_beside_plan(context: typer.Context) -> None:
    """Raise an error if planning options were typed together with ``--plan``, because a saved plan ignores them.

    Raises:
        InvalidStrategy: ``--plan`` and planning options were typed. The message names the options.
    """
    options = given(context)
    ignored = [name for name in options if name in _OF_PLANNING]
    if "--plan" in options and ignored:
        raise InvalidStrategy(
            f"{' and '.join(ignored)} would have no effect together with --plan.",
            why="the saved plan already contains every decision",
            next="leave out either --plan or the other options",
        )


def refuse_without_plan(context: typer.Context) -> None:
    """Raise an error if planning options were typed although the command makes no plan.

    ``--max-error`` is allowed, because it also limits the measured error of a model without a plan.

    Raises:
        InvalidStrategy: planning options were typed. The message names them.
    """
    ignored = [name for name in given(context) if name in _OF_PLANNING and name != "--max-error"]
    if ignored:
        raise InvalidStrategy(
            f"{' and '.join(ignored)} would have no effect.",
            why="without --plan, --budget, --strategy or --override, verify checks the model's own checkpointing and makes "
            "no plan",
            next="add --budget or --strategy to verify a plan, or leave these options out",
        )
