"""``plimsoll show FILE``: what another command saved, to read. Needs neither torch nor the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.store import load_any
from plimsoll.ui.cli import options, ranks, terminal

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="What plan, verify, compare, probe, diagnose, advise, explain, estimate, fit or compress-gradients saved "
        "with --output.",
        show_default=False,
    ),
]


def show(file: FileArgument, *, explain: options.ExplainOption = False, json: options.JsonOption = False) -> None:
    """Show a saved plan, receipt, comparison, verdict, finding, advice, explanation, estimate, fit or gradient
    traffic.

    Example: plimsoll show plan.json --explain
    """
    with ranks.one_process("show", is_json=json):
        artifact = load_any(file)
        text = artifact.explain() if explain and isinstance(artifact, Plan) else None
        terminal.print_result(artifact, is_json=json, text=text)
