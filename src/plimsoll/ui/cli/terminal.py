"""Writes the output of commands, for people or as JSON: consoles, progress, artifacts, errors and exit codes.

Progress is a live bar on stderr, or an occasional line if stderr is not a terminal. An artifact is a saved result, such as a
plan. ``commands.EXIT_CODES`` explains the exit codes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment
from rich.text import Text

from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.progress import Progress as Report
from plimsoll.artifacts.store import Artifact
from plimsoll.errors import BudgetBelowFloor, InvalidTarget, PlanFileError, PlimsollError
from plimsoll.ui.cli.flags import as_typed


class _Console(Console):
    """A console that prints nothing more after its reader has closed the pipe (``| head``), so that the command ends
    normally.
    """

    def on_broken_pipe(self) -> None:
        _write_nowhere(2 if self.stderr else 1)


def _write_nowhere(descriptor: int) -> None:
    """Redirect a file descriptor to the null device. Otherwise Python would fail when it flushes its buffer at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def stdout() -> Console:
    """Return a new console for results on stdout. A new console at each call follows a stream that was redirected."""
    return _guarded(_Console(highlight=False, soft_wrap=False))


def stderr() -> Console:
    """Return a new console for progress and errors on stderr."""
    return _guarded(_Console(stderr=True, highlight=False))


TORCHRUN = "TORCHELASTIC_RUN_ID"
"""torch recognises a process of torchrun by this environment variable. Other launchers set RANK for whole machines, each of
which has a log of its own.
"""


def is_under_torchrun() -> bool:
    """Return True if torchrun started this process."""
    return TORCHRUN in os.environ


def is_first_rank() -> bool:
    """Return True if this process writes what all ranks of a torchrun have in common."""
    return not is_under_torchrun() or os.environ.get("RANK", "0") == "0"


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal: escapes, marks that change the direction of text, and lone surrogates."""


_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")


class _Shown(RenderHook):
    """A hook of the console that replaces control characters in names and file contents by visible signs, so that they cannot
    control the terminal.

    The codes that the console itself writes are kept.
    """

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Signs(each) for each in renderables]


@dataclass(frozen=True, slots=True)
class _Signs:
    inner: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.inner, options):
            yield segment if segment.control else Segment(_CONTROLS.sub(_sign, segment.text), segment.style)


def _sign(found: re.Match[str]) -> str:
    """Return the visible sign that replaces a control character: the Unicode picture of an ASCII control character, else
    U+FFFD.
    """
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\ufffd"


def _guarded(console: Console) -> Console:
    console.push_render_hook(_Shown())
    return console


def write_json(text: str) -> None:
    """Write JSON to stdout and flush. Control characters are written as JSON escapes, and so are all characters beyond ASCII
    if stdout is not UTF-8: JSON files are.
    """
    text = _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    if sys.stdout.encoding.lower().replace("-", "") != "utf8":
        text = _BEYOND_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        _write_nowhere(1)


if TYPE_CHECKING:
    from pathlib import Path

    from plimsoll.artifacts.plan import Plan
    from plimsoll.ui.cli.options import Output

INTERRUPTED = 130
_QUIET_SECONDS = 2.0
"""The least time in seconds between two progress lines in a log."""
_REPEAT_SECONDS = 15.0
"""The time in seconds after which a log repeats the latest progress line, so that its reader knows that work continues."""


@contextlib.contextmanager
def show_progress(console: Console | None = None) -> Iterator[Report]:
    """Show the stages that the block reports. When the block ends, the progress bar disappears.

    Args:
        console: a console on stderr, so that piped output stays clean. By default, only the first rank shows progress.

    Example:
        >>> with show_progress(Console(stderr=True)) as report:
        ...     report("tracing", 0.5)
    """
    with _solver_output_on_stderr():
        yield from _show(console or _Console(stderr=True, highlight=False, quiet=not is_first_rank()))


@contextlib.contextmanager
def _solver_output_on_stderr() -> Iterator[None]:
    """Redirect stdout to stderr inside the block, because C++ libraries print to stdout, which is for results."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # stdout is closed
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _show(console: Console) -> Iterator[Report]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        with _line_reporter(console) as report:
            yield report
        return
    # a stage may name the user's file, and brackets in it are not markup
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)

        def report(stage: str, share: float) -> None:
            progress.update(task, description=stage, completed=share)

        yield report


@contextlib.contextmanager
def _line_reporter(console: Console) -> Iterator[Report]:
    """A context that gives a function of a stage and the share done (0 to 1), which writes a progress line at most once in two
    seconds. If a stage takes long, the line is repeated every 15 seconds, with the time since the start.
    """
    started_seconds = last_seconds = time.monotonic()
    latest, is_over = "", threading.Event()

    def report(stage: str, share: float) -> None:
        nonlocal last_seconds, latest
        now_seconds, latest = time.monotonic(), f"{stage}: {share:.0%}"
        if share < 1.0 and now_seconds - last_seconds >= _QUIET_SECONDS:
            last_seconds = now_seconds
            console.print(latest, highlight=False, markup=False)

    def repeat() -> None:
        while not is_over.wait(_REPEAT_SECONDS):
            if latest:
                console.print(
                    f"{latest}, {time.monotonic() - started_seconds:.0f} s so far", highlight=False, markup=False
                )

    repeater = threading.Thread(target=repeat, daemon=True)
    repeater.start()
    try:
        yield report
    finally:
        is_over.set()
        repeater.join()


def render_error_json(error: PlimsollError) -> str:
    """Return an error as JSON: its class, its three parts (what was found, why, what to do next) and its exit code.

    Example:
        >>> print(render_error_json(PlimsollError("a", why="b", next="c")))  # doctest: +ELLIPSIS
        {
          "plimsoll": "error",
          "error": "PlimsollError",
          ...
    """
    found, why, next_step = as_typed(error)
    fields = {
        "plimsoll": "error",
        "error": type(error).__name__,
        "found": found,
        "why": why,
        "next": next_step,
        "exit_code": error.exit_code,
    }
    return json.dumps(fields, indent=2, ensure_ascii=False)


def print_error(error: PlimsollError) -> None:
    """Write an error to stderr for a person: what was found, why, and what to do next. Options are written as flags."""
    console = stderr()
    found, why, next_step = as_typed(error)
    console.print(Text.assemble((f"{type(error).__name__}: ", "bold red"), found), soft_wrap=True)
    console.print(Text.assemble(("  why   ", "dim"), why), soft_wrap=True)
    console.print(Text.assemble(("  next  ", "bold green"), next_step), soft_wrap=True)
    if isinstance(error, BudgetBelowFloor):
        for line in error.others:
            console.print(Text(f"  {line}"), soft_wrap=True)


@contextlib.contextmanager
def exit_codes(*, is_json: bool = False, speaks: bool = True) -> Iterator[None]:
    """If the block raises a ``PlimsollError``, write a message and exit with the error's code.

    Other errors keep their traceback.

    Args:
        is_json: write the error as JSON to stdout instead of text to stderr.
        speaks: whether to write the error. If several ranks have the same error, only one writes it.

    Raises:
        typer.Exit: with the error's code, see ``commands.EXIT_CODES``.
    """
    try:
        with _writable_stdout(), no_exits():
            yield
    except PlimsollError as error:
        if speaks and is_json:
            write_json(render_error_json(error))
        elif speaks:
            print_error(error)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as interrupt:
        stderr().print("interrupted")
        raise typer.Exit(INTERRUPTED) from interrupt


@contextlib.contextmanager
def no_exits() -> Iterator[None]:
    """Raise ``InvalidTarget`` if the user's code in the block calls ``sys.exit``.

    Whatever its exit code, the result is then missing.
    """
    try:
        yield
    except SystemExit as error:
        raise InvalidTarget(
            f"The target ended the process: sys.exit({error.code!r}).",
            why="the target's code (a model, a batch or a loss) called sys.exit before the step was finished, so there is no "
            "result",
            next="remove the call, or raise an exception that says what is wrong",
        ) from error


@contextlib.contextmanager
def _writable_stdout() -> Iterator[None]:
    """If stdout cannot be written in the block, for example on a full disk, print an error without a traceback and exit."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise
        _write_nowhere(1)
        failure = PlanFileError(
            "The result cannot be written to stdout.",
            why=error.strerror or type(error).__name__,
            next="free some space, or redirect stdout to another place",
        )
        print_error(failure)
        raise typer.Exit(failure.exit_code) from error


def say_soon(text: str) -> None:
    """Write one line to stderr at once, before slow imports, so that the user knows that the command has begun.

    Only the first rank writes it.
    """
    if is_first_rank():
        stderr().print(text, markup=False, soft_wrap=True)


def say(text: str) -> None:
    """Write one line to stdout, without markup or wrapping."""
    stdout().print(text, markup=False, soft_wrap=True)


def hand_over(artifact: Artifact, to: Output, *, explain: bool = False, is_aside: bool = False) -> None:
    """Output the result of a command. Save the artifact to ``to.output`` if that file was given, and write the artifact to
    stdout as JSON or as text.

    With ``explain``, the text contains each decision with its reason. With ``is_aside``, the text goes to stderr, because the
    command writes something else to stdout.
    """
    from plimsoll.ui.terminal import render_artifact

    failure: PlanFileError | None = None
    if to.output is not None:
        try:
            artifact.save(to.output)
        except PlanFileError as error:  # show the result before the error: it may have taken hours
            failure = error
    if to.json:
        write_json(to_json(artifact))
    else:
        (stderr() if is_aside else stdout()).print(render_artifact(artifact, with_details=explain), crop=False)
    if failure is not None:
        print_error(failure)
        raise typer.Exit(failure.exit_code) from failure
    if to.output is not None and not to.json:
        say(f"\nsaved to {to.output}")


def save_beside(plan: Plan | None, name: str, file: Path, to: Output) -> None:
    """Save a plan that a command has made in addition to its main result, and print where. With JSON output, print nothing.

    ``plan`` is ``None`` if the command has made none; then a line says that there is none. ``name`` is the word for the plan in
    that line.
    """
    if plan is not None:
        plan.save(file)
    if not to.json:
        say(f"{name} saved to {file}" if plan is not None else f"no {name} was made, so {file} was not written")


def end(exit_code: int) -> None:
    """Exit the command with the code. If the code is 0, do nothing."""
    if exit_code:
        raise typer.Exit(exit_code)
