"""Artifacts of one model in, a page on disk out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plimsoll.artifacts.store import Artifact, write_whole
from plimsoll.ui.html.write import build_html


def report(artifacts: Artifact | Sequence[Artifact], path: str | Path) -> None:
    """Write one HTML page about one model: memory over time, decisions, time against peak, evidence.

    The page needs no network and no server; it weighs about 5 MiB, nearly all of it the drawing library.

    Args:
        artifacts: a plan, receipt, comparison, verdict, finding or advice, or several about one model and batch.
        path: where to; an existing file is replaced, whole or not at all.

    Raises:
        PlanMismatch: the artifacts are about different models or batches.
        InvalidReport: there are no artifacts.
        PlanFileError: the place cannot be written.

    Example:
        >>> plimsoll.report([plan, receipt], "page.html")  # doctest: +SKIP
    """
    several = list(artifacts) if isinstance(artifacts, Sequence) else [artifacts]
    write_whole(build_html(several), path)
