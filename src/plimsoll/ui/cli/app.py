"""The command line: every subcommand is registered here, and lies in the file of its verb or of the verb next to it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from plimsoll.ui.cli import (
    advise,
    compress_gradients,
    demo,
    diagnose,
    estimate,
    explain,
    plan,
    probe,
    show,
    verify,
)

app = typer.Typer(
    name="plimsoll",
    help="Fits PyTorch training under a memory budget in bytes, at the least cost in time, and proves that it did.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
app.command()(demo.demo)
app.command()(plan.plan)
app.command()(show.show)
app.command()(verify.verify)
app.command()(estimate.estimate)
app.command()(estimate.fit)
app.command()(verify.compare)
app.command()(advise.advise)
app.command()(explain.explain)
app.command()(probe.probe)
app.command()(diagnose.diagnose)
app.command()(compress_gradients.compress_gradients)
app.command()(show.report)


def _print_version(*, is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"plimsoll {version('plimsoll')}")
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
    """Fits PyTorch training under a memory budget in bytes, at the least cost in time, and proves that it did.

    Exit codes: 0 all is well; 1 verification or a probe failed; 2 bad input; 3 the budget is below the floor;
    4 a replay did not match; 130 interrupted.
    """


def main() -> None:
    """Run the command line."""
    # While memory is measured on a CPU, torch's allocator warns once a second about releases that its log lacks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    app(prog_name="plimsoll")
