"""The command line. Each subcommand is registered here; its code is in the file of the same name or of a related subcommand."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import plimsoll
from plimsoll.ui.cli import (
    advise,
    commands,
    compress_gradients,
    demo,
    diagnose,
    estimate,
    explain,
    plan,
    probe,
    run,
    show,
    verify,
)

app = typer.Typer(
    name="plimsoll",
    help="Fits PyTorch training under a memory budget in bytes, at the least cost in time, and proves that it did.",
    cls=commands.Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
for _section, _verbs in {
    "Plan": (demo.demo, plan.plan, estimate.fit),
    "Check": (verify.verify, verify.compare, probe.probe),
    "Understand": (explain.explain, advise.advise, diagnose.diagnose, show.show, show.report),
    "Estimate": (estimate.estimate, compress_gradients.compress_gradients),
}.items():
    for _verb in _verbs:
        app.command(cls=commands.Command, rich_help_panel=_section)(_verb)
app.command(cls=run.RunCommand, rich_help_panel="Plan")(run.run)


def _print_version(*, is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"plimsoll {plimsoll.__version__}")
        raise typer.Exit


@app.callback()
def callback(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=lambda on: _print_version(is_wanted=on)
        ),
    ] = False,
) -> None:
    """Fits PyTorch training under a memory budget in bytes, at the least cost in time, and proves that it did."""


def main() -> None:
    """Run the command line."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, as by >&-
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - it stays open
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 gets question marks
    # While memory is measured on a CPU, torch warns once a second about freed memory that its profiler did not record.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    app(prog_name="plimsoll")
