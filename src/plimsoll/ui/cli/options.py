"""The options that several commands share, each with its one help text."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.errors import InvalidStrategy

if TYPE_CHECKING:
    import torch


class OptimizerName(enum.StrEnum):
    """Optimizers that the command line can plan for."""

    ADAMW = "adamw"
    SGD = "sgd"
    NONE = "none"


TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:function returning (model, batch) or (model, batch, loss); "
        "a Hugging Face config.json; or a name from the catalogue, such as llama-tiny.",
        show_default=False,
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", "-b", metavar="BYTES", help='Peak of the whole step, with its unit: "70GiB" or "80GB".'),
]
StrategyOption = Annotated[
    str,
    typer.Option(
        "--strategy",
        "-s",
        help="auto, none, full, every:K, sqrt, input-only, selective:attention|mlp|norm|<op list>, int8, int4, fp8, "
        "offload, or hybrid:N,K.",
    ),
]
RegionsOption = Annotated[
    list[str] | None,
    typer.Option("--regions", metavar="PATTERN", help="Modules to manage, such as 'model.layers.*'; may be repeated."),
]
OptimizerOption = Annotated[
    OptimizerName, typer.Option("--optimizer", help="Whose state and step the budget has to hold as well.")
]
DeviceProfileOption = Annotated[
    str | None,
    typer.Option("--device-profile", metavar="NAME", help="Plan for a device that is not here: H100-SXM, A100-80GB …"),
]
DeviceOption = Annotated[str, typer.Option("--device", help="Where configurations are built: cpu, cuda, cuda:1.")]
BatchOption = Annotated[int | None, typer.Option("--batch", min=1, help="Examples per batch, for configurations.")]
SequenceOption = Annotated[int | None, typer.Option("--seq", min=1, help="Tokens per example, for configurations.")]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Training steps to measure.")]
AllowOption = Annotated[
    str,
    typer.Option("--allow", metavar="LIST", help="What auto may do: recompute,compress,offload,collectives or some."),
]
MaxErrorOption = Annotated[
    str,
    typer.Option(
        "--max-error", metavar="SHARE", help="Relative error that lossy codecs may cause in the gradient: 1%."
    ),
]
HostBudgetOption = Annotated[
    str | None, typer.Option("--host-budget", metavar="BYTES", help="What offloaded values may take: 64GiB.")
]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        metavar="PATTERN=DECISION",
        help="Decide by pattern, such as 'layers.*.mlp::silu=compress:int8'; may be repeated.",
    ),
]
LinkOption = Annotated[str | None, typer.Option("--link", help="Where offloaded values go: host (from a GPU) or disk.")]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save the result as JSON.", dir_okay=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, errors as well.")]
PlanFileOption = Annotated[
    Path | None, typer.Option("--plan", "-p", metavar="FILE", help="A saved plan; without one, plan first.")
]
ExplainOption = Annotated[bool, typer.Option("--explain", help="Say for every value what was decided, and why.")]

_OF_PLANNING = (
    "--budget",
    "--strategy",
    "--regions",
    "--allow",
    "--max-error",
    "--host-budget",
    "--override",
    "--link",
)
"""What decides how a plan is made."""


def given(context: typer.Context) -> list[str]:
    """The options that stand on the command line, by their long names."""
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name
        and parameter.opts[0].startswith("--")
        and getattr(context.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    ]


def refuse_beside_plan(context: typer.Context) -> None:
    """Refuse options that decide how a plan is made where a saved one is used.

    Raises:
        InvalidStrategy: names them.
    """
    options = given(context)
    ignored = [name for name in options if name in _OF_PLANNING]
    if "--plan" in options and ignored:
        raise InvalidStrategy(
            f"{' and '.join(ignored)} would have no effect beside --plan.",
            why="the saved plan says what is decided already",
            next="leave out either --plan or the others",
        )


def refuse_without_plan(context: typer.Context) -> None:
    """Refuse options that decide how a plan is made where there is none; an allowed error stands for itself.

    Raises:
        InvalidStrategy: names them.
    """
    ignored = [name for name in given(context) if name in _OF_PLANNING and name != "--max-error"]
    if ignored:
        raise InvalidStrategy(
            f"{' and '.join(ignored)} would have no effect.",
            why="without --plan, --budget, a --strategy or an --override, the model's own checkpointing is verified",
            next="add --budget or --strategy to verify a plan, or leave them out",
        )


def make_optimizer(name: OptimizerName, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    """The named optimizer over the model's parameters, or none."""
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name is OptimizerName.NONE or not parameters:
        return None
    if name is OptimizerName.ADAMW:
        return torch.optim.AdamW(parameters)
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
