"""``plimsoll show`` prints a saved artifact, such as a plan; ``plimsoll report`` makes an HTML page from several.

Neither needs torch.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.store import Artifact, load_any
from plimsoll.errors import InvalidReport, PlanFileError
from plimsoll.ui.cli import commands, options, ranks, terminal

FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE",
        help="Files that other commands saved with --output, all about one model.",
        show_default=False,
    ),
]
PageOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the page here.", dir_okay=False)
]
TimelineOption = Annotated[
    Path | None,
    typer.Option(
        "--timeline", metavar="FILE", help="Write the memory timeline for ui.perfetto.dev here.", dir_okay=False
    ),
]
FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A file that another command saved with --output.", show_default=False)
]


ExportOption = Annotated[
    Path | None,
    typer.Option(
        "--export-sac",
        metavar="FILE",
        help="Write the plan as a policy for torch's selective activation checkpointing: a Python file that needs only torch.",
        dir_okay=False,
    ),
]


@commands.command
def show(
    file: FileArgument,
    *,
    explain: options.ExplainOption = False,
    export_sac: ExportOption = None,
    json: options.JsonOption = False,
) -> None:
    """Show a saved plan, receipt, comparison, verdict, finding, advice, explanation, estimate, fit or gradient
    traffic.

    Example: plimsoll show plan.json --explain
    """
    with ranks.one_process("show", is_json=json):
        artifact = load_any(file)
        if export_sac is not None:
            _export(file, artifact, export_sac)
        terminal.hand_over(artifact, options.Output(json=json), explain=explain)


def _export(file: Path, artifact: Artifact, policy: Path) -> None:
    if not isinstance(artifact, Plan):
        raise PlanFileError(
            f"{file} does not hold a plan.",
            why="only a plan can be written as a policy",
            next="give a file that `plimsoll plan --output` wrote",
        )
    artifact.export("sac", policy)


@commands.command
def report(files: FilesArgument, *, output: PageOption = None, timeline: TimelineOption = None) -> None:
    """Make one HTML page of saved plans, receipts, comparisons, verdicts, findings and advice about one model.

    Example: plimsoll report plan.json receipt.json comparison.json -o page.html
    """
    from plimsoll.artifacts.files import write_whole
    from plimsoll.ui.html.page import build_html
    from plimsoll.ui.perfetto import render_perfetto

    with ranks.one_process("report"):
        _check_places(files, output, timeline)
        artifacts = [load_any(file) for file in files]
        texts = {}
        if output is not None:
            texts[output] = build_html(artifacts, [str(file) for file in files])
        if timeline is not None:
            texts[timeline] = render_perfetto([artifact for artifact in artifacts if isinstance(artifact, Plan)])
        for place, text in texts.items():
            write_whole(text, place)
            terminal.say(f"saved to {place}")


def _check_places(files: list[Path], output: Path | None, timeline: Path | None) -> None:
    """Raise an error if a report has no output file, would overwrite an input, or would write two outputs to one path."""
    places = [place for place in (output, timeline) if place is not None]
    if not places:
        raise InvalidReport(
            "The report has no output file.",
            why="neither --output nor --timeline was given",
            next=f"run plimsoll report {shlex.join(map(str, files))} -o page.html",
        )
    read = {file.resolve() for file in files}
    for place in places:
        if place.resolve() in read:
            raise InvalidReport(
                f"{place} would be overwritten.",
                why="it is also one of the files that the report is made from",
                next="give --output and --timeline other names, such as page.html and trace.json",
            )
    if len({place.resolve() for place in places}) < len(places):
        raise InvalidReport(
            f"--output and --timeline are both {output}.",
            why="the page and the timeline are two files, and one would overwrite the other",
            next="give them two different names",
        )
