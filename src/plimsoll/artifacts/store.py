"""Reads artifacts from their JSON files, exactly as they were saved, whichever kind and older schema a file holds.

The file says what it is (``"plimsoll": "plan"``) and which schema it follows. Reading one runs nothing: it is data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec

from plimsoll.artifacts.advice import Advice
from plimsoll.artifacts.base import NUMBER, TAG
from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.explained import Explanation
from plimsoll.artifacts.finding import Finding
from plimsoll.artifacts.fit import Fit
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.traffic import Traffic
from plimsoll.artifacts.verdict import Verdict
from plimsoll.errors import PlanFileError

Reportable = Plan | Receipt | Comparison | Advice | Verdict | Finding
"""What is about one step of one model: what an HTML page can be made of."""
Artifact = Reportable | Estimate | Explanation | Fit | Traffic
"""All that is saved and shown."""

_KINDS: dict[str, type[Artifact]] = {kind.KIND: kind for kind in get_args(Artifact)}


def from_json(text: str | bytes, *, source: str = "the text") -> Artifact:
    """An artifact of any kind from its JSON.

    Args:
        text: what ``to_json`` made.
        source: where it came from, for error messages.

    Raises:
        PlanFileError: truncated, not ours, of an unknown kind or of a newer schema.
    """
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanFileError(
            f"{source} is not whole JSON.",
            why=f"reading stopped: {error}",
            next="the file may have been cut off while it was copied: copy it again, or save the plan again",
        ) from error
    if not isinstance(fields, dict) or TAG not in fields:
        raise PlanFileError(
            f"{source} is JSON, but no plan.",
            why=f'it lacks the tag "{TAG}" that every file of Plimsoll starts with',
            next="give a file that plan.save() or `plimsoll plan --output` wrote",
        )
    kind = fields.pop(TAG)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise PlanFileError(
            f"{source} holds {kind!r}, which this version does not know.",
            why=f"it knows {', '.join(_KINDS)}",
            next="upgrade Plimsoll, or give another file",
        )
    type_ = _KINDS[kind]
    _check_version(fields.get("schema_version"), type_.SCHEMA_VERSION, kind=kind, source=source)
    try:
        return msgspec.convert(_unwrap_odd_numbers(fields), type=type_)
    except msgspec.ValidationError as error:
        raise PlanFileError(
            f"{source} is a damaged {kind}.",
            why=str(error),
            next=f"save the {kind} again; files of Plimsoll are not meant to be edited by hand",
        ) from error


def _unwrap_odd_numbers(node: Any) -> Any:
    if isinstance(node, dict):
        if node.keys() == {NUMBER} and node[NUMBER] in ("inf", "-inf", "nan"):
            return float(node[NUMBER])
        return {key: _unwrap_odd_numbers(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_unwrap_odd_numbers(value) for value in node]
    return node


def _check_version(found: object, known: int, *, kind: str, source: str) -> None:
    if not isinstance(found, int) or isinstance(found, bool):
        raise PlanFileError(
            f"{source} does not say which schema it follows.",
            why=f'"schema_version" is {found!r}',
            next=f"save the {kind} again",
        )
    if found > known:
        raise PlanFileError(
            f"{source} is a {kind} of schema {found}; this version reads schema {known} and older.",
            why="a newer Plimsoll wrote it",
            next=f"upgrade Plimsoll, or make the {kind} again with this version",
        )


def load_any(path: str | Path) -> Artifact:
    """Read a plan, receipt or comparison, whichever the file holds.

    Raises:
        PlanFileError: no such file, or nothing in it that this version can read.
    """
    source = Path(path)
    try:
        content = source.read_bytes()
    except OSError as error:
        raise PlanFileError(
            f"{source} cannot be read.",
            why=error.strerror or type(error).__name__,
            next="check the path; `plimsoll plan TARGET --budget 70GiB --output plan.json` writes a plan",
        ) from error
    return from_json(content, source=str(source))


def load_plan(path: str | Path) -> Plan:
    """Read a plan.

    Raises:
        PlanFileError: no such file, or it holds something else.
    """
    artifact = load_any(path)
    if not isinstance(artifact, Plan):
        raise PlanFileError(
            f"{path} holds a {artifact.KIND}, not a plan.",
            why="only a plan carries decisions",
            next=f"`plimsoll show {path}` shows it; give a plan here",
        )
    return artifact
