"""``plimsoll run SCRIPT``: runs a training script under a budget, without a change of its code."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from plimsoll.errors import InvalidBudget, InvalidTarget, PlimsollError
from plimsoll.ui.cli import commands, terminal
from plimsoll.units import format_bytes

ENVIRONMENT = "PLIMSOLL_BUDGET"
"""The environment variable that has the budget if ``--budget`` is not given. Only ``plimsoll run`` reads it."""

ScriptArgument = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.", show_default=False)
]
ArgumentsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments of the script.", show_default=False)
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="BYTES",
        help=f"Bytes with a unit, such as 70GiB, or auto; by default the environment variable {ENVIRONMENT}.",
        show_default=False,
    ),
]
ModuleOption = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")]


class RunCommand(commands.Command):
    """The command ``plimsoll run``. Of the arguments after SCRIPT, only ``--budget`` is its own, as with ``python``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Typer alone would take a script's ``-momentum`` for ``-m -o -m …``."""
        if args and args[-1] == "--budget":
            return super().parse_args(ctx, args)  # its value is missing, which Typer says
        own, scripts = _split(args)
        return super().parse_args(ctx, [*own, "--", *scripts])


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of ``plimsoll run``, and SCRIPT with the script's arguments.

    Example:
        >>> _split(["-m", "train", "-momentum", "0.9", "--budget", "1GiB", "--", "--budget", "3"])
        (['-m', '--budget', '1GiB'], ['train', '-momentum', '0.9', '--budget', '3'])
    """
    own: list[str] = []
    scripts: list[str] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word == "--":
            return own, [*scripts, *left]
        if word == "--budget":
            own += [word, *left[:1]]
            del left[:1]
        elif word.startswith("--budget=") or (word.startswith("-") and not scripts):
            own.append(word)
        else:
            scripts.append(word)
    return own, scripts


def run(
    script: ScriptArgument,
    arguments: ArgumentsArgument = None,
    *,
    budget: BudgetOption = None,
    module: ModuleOption = False,
) -> None:
    """Run a training script under a memory budget, without a change of its code.

    The budget is attached to the model that an optimizer trains, in the model's first training call, as by plimsoll.attach.

    Arguments after SCRIPT go to the script, except --budget. After -- all arguments go to the script.

    Example: plimsoll run train.py --budget 70GiB …
    """
    try:
        _check(script, budget or os.environ.get(ENVIRONMENT), is_module=module)
        _run(script, arguments or [], budget or os.environ[ENVIRONMENT], is_module=module)
    except PlimsollError as error:
        if terminal.is_first_rank():
            terminal.print_error(error)
        raise typer.Exit(error.exit_code) from error


def _check(script: str, budget: str | None, *, is_module: bool) -> None:
    """Refuse a missing budget or script before torch is imported."""
    from plimsoll.session.options import Budget

    if not budget:
        raise InvalidBudget(
            "plimsoll run needs a budget.",
            why=f"neither --budget nor the environment variable {ENVIRONMENT} says how much memory a training step may take",
            next=f"plimsoll run {shlex.quote(script)} --budget 70GiB, or --budget auto for the whole device",
        )
    Budget.required(budget)
    if not is_module and not Path(script).is_file() and not Path(script, "__main__.py").is_file():
        raise InvalidTarget(
            f"The file {script} does not exist.",
            why="plimsoll run starts a Python file, as python does",
            next="check the path, or name a module with plimsoll run -m",
        )


def _run(script: str, arguments: list[str], budget: str, *, is_module: bool) -> None:
    from plimsoll.session.attach_on_call import AttachOnCall

    sys.argv[:] = [script, *arguments]
    if is_module:
        sys.path.insert(0, str(Path.cwd()))
    elif Path(script).is_file():  # a directory with a __main__.py is put there by runpy
        # where python puts it, so that the script's imports work
        sys.path.insert(0, str(Path(script).resolve().parent))
    ending: SystemExit | None = None
    with AttachOnCall(budget, {}) as found:
        try:
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit as exit_:  # sys.exit(main()) is a usual end of a script
            ending = exit_
        figures = None if found.handle is None else found.handle.figures
    if found.handle is None:
        terminal.say_soon(
            f"plimsoll: the budget {budget} was not used: no model that an optimizer trains was called in training mode."
        )
    elif figures is not None and figures.measured_peak_bytes:
        peak, limit = format_bytes(figures.measured_peak_bytes), format_bytes(figures.budget_bytes or 0)
        terminal.say_soon(f"plimsoll: the highest measured peak was {peak}. The budget was {limit}.")
    if ending is not None:
        raise ending
