"""Shows progress as a live bar on stderr; without a terminal as a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from plimsoll.artifacts.progress import Progress as Report

_QUIET_SECONDS = 2.0
"""What is over sooner needs no progress in a log."""


@contextlib.contextmanager
def show_progress(console: Console) -> Iterator[Report]:
    """Show the stages that are reported until the block ends; the bar then disappears.

    Args:
        console: one that writes to stderr, so that what is piped stays clean.

    Example:
        >>> with show_progress(Console(stderr=True)) as report:
        ...     report("tracing", 0.5)
    """
    with _solver_output_on_stderr():
        yield from _show(console)


@contextlib.contextmanager
def _solver_output_on_stderr() -> Iterator[None]:
    """Libraries in C++ print to the process's stdout, where results go; send them to its stderr."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # no stdout at all
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _show(console: Console) -> Iterator[Report]:
    if not console.is_terminal:
        yield _line_reporter(console)
        return
    columns = (TextColumn("[progress.description]{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)

        def report(stage: str, share: float) -> None:
            progress.update(task, description=stage, completed=share)

        yield report


def _line_reporter(console: Console) -> Report:
    """Write a line when a stage goes on for a while, at most one every two seconds."""
    last_seconds = time.monotonic()

    def report(stage: str, share: float) -> None:
        nonlocal last_seconds
        now_seconds = time.monotonic()
        if share < 1.0 and now_seconds - last_seconds >= _QUIET_SECONDS:
            last_seconds = now_seconds
            console.print(f"{stage}: {share:.0%}", highlight=False, markup=False)

    return report
