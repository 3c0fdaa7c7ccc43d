"""Writes what commands say, for people or as JSON: consoles, artifacts, errors and exit codes in one place.

Exit codes: 0 all is well; 1 verification failed; 2 bad input; 3 the budget is below the floor; 4 a replay did not match;
130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.store import Artifact
from plimsoll.errors import PlimsollError

INTERRUPTED = 130


def stdout() -> Console:
    """The console for results. Made anew so that it follows a redirected stream."""
    return Console(highlight=False, soft_wrap=False)


def stderr() -> Console:
    """The console for progress and errors."""
    return Console(stderr=True, highlight=False)


def progress() -> Console:
    """The console for progress; of several ranks only the first shows any."""
    return Console(stderr=True, highlight=False, quiet=os.environ.get("RANK", "0") != "0")


def print_json(artifact: Artifact) -> None:
    """Write an artifact for a machine."""
    sys.stdout.write(to_json(artifact) + "\n")


def render_error_json(error: PlimsollError) -> str:
    """The error's kind, its three parts and its exit code.

    Example:
        >>> print(render_error_json(PlimsollError("a", why="b", next="c")))  # doctest: +ELLIPSIS
        {
          "plimsoll": "error",
          "error": "PlimsollError",
          ...
    """
    fields = {
        "plimsoll": "error",
        "error": type(error).__name__,
        "found": error.found,
        "why": error.why,
        "next": error.next,
        "exit_code": error.exit_code,
    }
    return json.dumps(fields, indent=2, ensure_ascii=False)


def print_error(error: PlimsollError) -> None:
    """Write an error for a person: what was found, why, what to do next."""
    console = stderr()
    console.print(Text.assemble((f"{type(error).__name__}: ", "bold red"), error.found), soft_wrap=True)
    console.print(Text.assemble(("  why   ", "dim"), error.why), soft_wrap=True)
    console.print(Text.assemble(("  next  ", "bold green"), error.next), soft_wrap=True)


@contextlib.contextmanager
def exit_codes(*, is_json: bool = False) -> Iterator[None]:
    """Turn errors for users into a message and their exit code; errors of our own keep their traceback.

    Args:
        is_json: write the error as JSON to stdout instead of text to stderr.

    Raises:
        typer.Exit: with the code that the module's docstring lists.
    """
    try:
        yield
    except PlimsollError as error:
        if is_json:
            sys.stdout.write(render_error_json(error) + "\n")
        else:
            print_error(error)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as interrupt:
        stderr().print("interrupted")
        raise typer.Exit(INTERRUPTED) from interrupt


def print_result(artifact: Artifact, *, is_json: bool, saved_to: Path | None = None, text: str | None = None) -> None:
    """Write an artifact for a machine, or for a person with the place where it was saved; ``text`` is shown in its stead."""
    from plimsoll.ui.terminal import render_artifact

    if is_json:
        print_json(artifact)
        return
    if text is not None:
        stdout().print(Text(text), soft_wrap=True)
    else:
        stdout().print(render_artifact(artifact))
    if saved_to is not None:
        stdout().print(f"\nsaved to {saved_to}", markup=False, soft_wrap=True)
