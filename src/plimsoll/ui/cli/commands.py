"""The common parts of commands: groups of options, and help in sections.

A section is the ``rich_help_panel`` of a command or an option. This module writes the sections, because Typer's own panels cut
off words on a narrow terminal.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from plimsoll.errors import InvalidOption
from plimsoll.ui.cli import early, terminal

R = TypeVar("R")
_UsageError: Any = typer.BadParameter.__base__  # the class of all usage errors, which Typer does not name

FIRST_STEPS = {
    "plimsoll demo": "see what Plimsoll does, in a few minutes",
    "plimsoll plan llama-tiny --budget 90MiB": "plan a model from the catalogue",
    "plimsoll plan my.module:make --budget 8GB": "plan your own model: make() returns (model, batch)",
}
EXIT_CODES = {
    "0": "success",
    "1": "a verification or a probe failed",
    "2": "bad input",
    "3": "the budget is below the smallest reachable peak, or an offload failed",
    "4": "a recomputed value differs from the value of forward",
    "130": "interrupted",
}
_OTHERS = "Options"


class Command(TyperCommand):
    """A command of the command line whose help lists its options in sections."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the arguments for the usage line.

        Newer versions of Typer put braces around required arguments; this override removes them.
        """
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the paragraphs of the help. This override keeps the example on one line, so that a user can copy it."""
        self.help = (self.help or "").replace("\n\nExample: ", "\n\n\b\nExample: ")
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options of each section. Typer's own method writes all options in one list."""
        _write_sections(formatter, _options(self, ctx))


class Commands(TyperGroup):
    """The group of all commands. Its help shows the commands in sections, the options, the first steps and the exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. This override prints usage errors as JSON if ``--json`` was typed."""
        is_json = "--json" in (*ctx._protected_args, *ctx.args)
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if not is_json:
                raise
            command = error.ctx.command_path if error.ctx else ctx.command_path
            wrong = InvalidOption(
                error.format_message(), why=f"{command} does not accept these arguments", next=f"run {command} --help"
            )
            with terminal.exit_codes(is_json=True):
                raise wrong from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the first sentence of its help, in sections, then the options."""
        commands = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        rows: list[tuple[Any, tuple[str, str]]] = [
            (command.rich_help_panel, (str(command.name), command.get_short_help_str(limit=1000)))
            for command in commands
            if isinstance(command, Command)
        ]
        _write_sections(formatter, [*rows, *_options(self, ctx)])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the first steps and the exit codes at the end of the help."""
        _write_sections(formatter, [("First steps", row) for row in FIRST_STEPS.items()])
        _write_sections(formatter, [("Exit codes", row) for row in EXIT_CODES.items()])


def _options(command: Any, ctx: Any) -> list[tuple[Any, tuple[str, str]]]:
    """Return each argument and option of a command, as the title of its section and its row: name and help text."""
    rows: list[tuple[Any, tuple[str, str]]] = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            rows.append(("Arguments", (parameter.metavar, record[1])))
        else:
            rows.append((getattr(parameter, "rich_help_panel", None) or _OTHERS, record))
    return rows


def _write_sections(formatter: Any, rows: Iterable[tuple[Any, tuple[str, str]]]) -> None:
    """Write the rows of a command's help (option and text) under the titles of their sections.

    The sections are in the order of their first rows, but ``Options`` comes last.
    """
    sections: dict[str, list[tuple[str, str]]] = {}
    for title, row in rows:
        sections.setdefault(title, []).append(row)
    for title in sorted(sections, key=lambda title: title == _OTHERS):
        with formatter.section(title):
            formatter.write_dl(sections[title])


def command(function: Callable[..., R], *, plans_if_asked: bool = False) -> Callable[..., R]:
    """Return a command whose parameters may be groups of options (dataclasses). Typer sees each option of a group separately.

    If the command also has a parameter with the name of a group's option, the parameter replaces that option.

    Args:
        function: the command.
        plans_if_asked: whether the command makes a plan only if a budget, a strategy or an override is given.

    Example:
        >>> list(inspect.signature(command(lambda **groups: None)).parameters)
        ['groups']
    """
    hints = get_type_hints(function, include_extras=True)
    own = inspect.signature(function).parameters
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for name, parameter in own.items():
        kind = hints.get(name, Any)
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind))
            continue
        assert isinstance(kind, type)
        groups[name] = kind
        annotations = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=annotations[field.name]
            )
            for field in fields(kind)
            if field.name not in own
        ]

    def run(**typed: Any) -> R:
        with terminal.exit_codes(is_json=typed.get("json", False), speaks=terminal.is_first_rank()):
            early.refuse_early(run.__name__, typed, plans_if_asked=plans_if_asked)
            for line in early.notice(run.__name__, typed):
                terminal.say_soon(line)
        grouped = {
            name: kind(**{field.name: typed.pop(field.name) for field in fields(kind) if field.name not in own})
            for name, kind in groups.items()
        }
        return function(**typed, **grouped)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect.signature
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
