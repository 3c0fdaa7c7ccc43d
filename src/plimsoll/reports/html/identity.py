"""Artifacts in, the one model that they are about out; artifacts of different models are refused with both shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.store import Artifact
from plimsoll.errors import InvalidReport, PlanMismatch


@dataclass(frozen=True, slots=True)
class Subject:
    """What one artifact is about; a comparison has no fingerprint."""

    source: str
    model: str
    signature: str
    fingerprint: str = ""


def common_subject(artifacts: Sequence[Artifact], names: Sequence[str] = ()) -> Subject:
    """What all artifacts are about.

    Args:
        artifacts: those of one page.
        names: what to call them in messages, such as their files; by default their kinds.

    Raises:
        InvalidReport: there are none.
        PlanMismatch: two of them are about different models or batches.
    """
    subjects = [
        _subject(artifact, name)
        for artifact, name in zip(artifacts, names or [f"the {artifact.KIND}" for artifact in artifacts], strict=True)
    ]
    if not subjects:
        raise InvalidReport(
            "There is nothing to report.",
            why="no artifact was given",
            next="give a plan, a receipt or a comparison: `plimsoll report plan.json -o page.html`",
        )
    first = max(subjects, key=lambda subject: bool(subject.fingerprint))
    for other in subjects:
        _refuse_other(first, other)
    return first


def _subject(artifact: Artifact, source: str) -> Subject:
    if isinstance(artifact, Comparison):
        return Subject(source, artifact.model, artifact.signature)
    return Subject(source, artifact.model, artifact.signature, artifact.fingerprint)


def _refuse_other(first: Subject, other: Subject) -> None:
    advice = "make one page for each: `plimsoll report FILE -o page.html`"
    if first.model != other.model or (other.fingerprint and first.fingerprint != other.fingerprint):
        raise PlanMismatch(
            f"{first.source} and {other.source} are about different models.",
            why=f"{first.source}: {_describe(first)}; {other.source}: {_describe(other)}",
            next=advice,
        )
    if first.signature != other.signature:
        raise PlanMismatch(
            f"{first.source} and {other.source} are about different batches of {first.model}.",
            why=f"{first.source}: {first.signature}; {other.source}: {other.signature}",
            next=advice,
        )


def _describe(subject: Subject) -> str:
    mark = f", fingerprint {subject.fingerprint}" if subject.fingerprint else ""
    return f"{subject.model}{mark}"
