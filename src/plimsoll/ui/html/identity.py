"""Artifacts in, the one model that they are about out; artifacts of different models are refused with both shown."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.finding import Finding
from plimsoll.artifacts.store import Reportable
from plimsoll.errors import InvalidReport, PlanMismatch


@dataclass(frozen=True, slots=True)
class Subject:
    """What one artifact, or all together, are about; what an artifact does not say is empty."""

    source: str
    model: str
    fingerprint: str
    signature: str


def common_subject(artifacts: Sequence[Reportable], names: Sequence[str] = ()) -> Subject:
    """What all artifacts are about.

    Args:
        artifacts: those of one page.
        names: what to call them in messages, such as their files; by default their kinds.

    Raises:
        InvalidReport: there are none.
        PlanMismatch: two of them are about different models or batches.
    """
    if not artifacts:
        raise InvalidReport(
            "There is nothing to report.",
            why="no artifact was given",
            next="give a plan, a receipt or a comparison: `plimsoll report plan.json -o page.html`",
        )
    sources = names or [f"the {artifact.KIND}" for artifact in artifacts]
    subjects = [_subject(artifact, source) for artifact, source in zip(artifacts, sources, strict=True)]
    for one, other in itertools.combinations(subjects, 2):
        _refuse_other(one, other)
    return Subject(
        source="",
        model=_first(subject.model for subject in subjects),
        fingerprint=_first(subject.fingerprint for subject in subjects),
        signature=_first(subject.signature for subject in subjects),
    )


def _first(texts: Iterable[str]) -> str:
    """The first that is not empty, if any."""
    return next((text for text in texts if text), "")


def _subject(artifact: Reportable, source: str) -> Subject:
    if isinstance(artifact, Comparison):
        return Subject(source, artifact.model, "", artifact.signature)
    if isinstance(artifact, Finding):
        return Subject(source, artifact.model, "", "")
    return Subject(source, artifact.model, artifact.fingerprint, artifact.signature)


def _refuse_other(one: Subject, other: Subject) -> None:
    """Both are about the same model and batch, as far as they say."""
    advice = "make one page for each: `plimsoll report FILE -o page.html`"
    if _differ(one.model, other.model) or _differ(one.fingerprint, other.fingerprint):
        raise PlanMismatch(
            f"{one.source} and {other.source} are about different models.",
            why=f"{one.source}: {_describe(one)}; {other.source}: {_describe(other)}",
            next=advice,
        )
    if _differ(one.signature, other.signature):
        raise PlanMismatch(
            f"{one.source} and {other.source} are about different batches of {one.model}.",
            why=f"{one.source}: {one.signature}; {other.source}: {other.signature}",
            next=advice,
        )


def _differ(one: str, other: str) -> bool:
    return bool(one and other and one != other)


def _describe(subject: Subject) -> str:
    mark = f", fingerprint {subject.fingerprint}" if subject.fingerprint else ""
    return f"{subject.model or 'a model without a name'}{mark}"
