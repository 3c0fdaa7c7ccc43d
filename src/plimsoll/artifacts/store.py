"""Reads artifacts (plans, receipts and other results) of all kinds from their JSON files, also from older schemas.

A file names its kind (``"plimsoll": "plan"``) and its schema. Reading loses nothing and does not execute anything, because
files contain only data.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from plimsoll.artifacts.advice import Advice
from plimsoll.artifacts.base import NUMBER, TAG, ArtifactBase
from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.explained import Explanation
from plimsoll.artifacts.files import FileRefused, ReadLimits, decode_json, read_file
from plimsoll.artifacts.finding import Finding
from plimsoll.artifacts.fit import Fit
from plimsoll.artifacts.lengths import SequenceLengths
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.traffic import Traffic
from plimsoll.artifacts.verdict import Verdict
from plimsoll.errors import PlanFileError
from plimsoll.units import MIB

Reportable = Plan | Receipt | Comparison | Advice | Verdict | Finding | Estimate | SequenceLengths
"""The types of artifacts that can be shown as an HTML page: results about one step of one model, estimates, and longest
sequences.
"""
Artifact = Reportable | Explanation | Fit | Traffic
"""The type of all artifacts: results that can be saved and shown, such as plans."""
Kind = TypeVar("Kind", bound=ArtifactBase)

_LIMITS = ReadLimits(most_bytes=128 * MIB)
_BEGINNING = re.compile(rb"\s*\{\s*\"" + TAG.encode() + rb"\"\s*:")
_MADE_BY = {
    Plan.KIND: "plimsoll plan TARGET --budget 70GiB --output plan.json",
    Receipt.KIND: "plimsoll verify TARGET --plan plan.json --output receipt.json",
    Verdict.KIND: "plimsoll probe TARGET --plan plan.json --output verdict.json",
}
"""The command that makes each kind of artifact, for error messages. Only kinds that some function takes as an argument are
listed.
"""
_KINDS: dict[str, type[Artifact]] = {kind.KIND: kind for kind in get_args(Artifact)}


def is_saved(path: str | Path) -> bool:
    """Return True if a file begins as all files of Plimsoll do. It may be gzipped."""
    try:
        return _BEGINNING.match(read_file(path, _LIMITS)) is not None
    except FileRefused:
        return False


def from_json(text: str | bytes, *, source: str = "the text") -> Artifact:
    """Return an artifact of any kind from its JSON.

    Args:
        text: the result of ``to_json``.
        source: a description of where the text came from, for error messages.

    Raises:
        PlanFileError: the text is truncated, was not written by Plimsoll, or has an unknown kind or a newer schema.
    """
    try:
        fields = decode_json(text, _LIMITS)
    except FileRefused as error:
        raise _refused(source, error) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise PlanFileError(
            f"{source} is not complete JSON.",
            why=f"parsing failed: {error}",
            next="copy the file again, since it may have been truncated, or save the plan again",
        ) from error
    if not isinstance(fields, dict) or TAG not in fields:
        raise PlanFileError(
            f"{source} is JSON, but not a file of Plimsoll.",
            why=f'it does not have the tag "{TAG}", which every file of Plimsoll starts with',
            next="give a file that a command of plimsoll wrote with --output, or that save() of its result wrote",
        )
    kind = fields.pop(TAG)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise PlanFileError(
            f"{source} holds {kind!r:.80}, which this version does not know.",
            why=f"this version knows {', '.join(_KINDS)}",
            next="upgrade Plimsoll, or give another file",
        )
    type_ = _KINDS[kind]
    _check_version(fields.get("schema_version"), type_.SCHEMA_VERSION, kind=kind, source=source)
    try:
        found = msgspec.convert(_unwrap_odd_numbers(fields), type=type_)
        is_current = found.schema_version == type_.SCHEMA_VERSION
        _check_fields(fields, msgspec.to_builtins(found) if is_current else fields, "$")
    except msgspec.ValidationError as error:
        raise PlanFileError(
            f"{source} is a damaged {kind}.",
            why=str(error),
            next=f"save the {kind} again, and do not edit the file by hand",
        ) from error
    return found


def _unwrap_odd_numbers(node: Any) -> Any:
    """Return data read from JSON with infinity and NaN put back as floats.

    The file contains objects such as ``{"plimsoll.number": "inf"}`` instead.
    """
    if isinstance(node, dict):
        if node.keys() == {NUMBER} and node[NUMBER] in ("inf", "-inf", "nan"):
            return float(node[NUMBER])
        return {key: _unwrap_odd_numbers(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_unwrap_odd_numbers(value) for value in node]
    return node


_AMOUNTS = ("by_category", "classes", "budget_bytes_of_ranks")
"""Names of artifact fields that map names to numbers of bytes."""
_DIFFERENCES = ("saved_bytes", "lowers_bytes")
"""Names of artifact fields in bytes that may be negative, because they are differences."""
_MOST_COUNT = 1e30
"""Bytes and counts above this are a damaged file."""


def _check_fields(given: object, known: object, place: str, *, is_amount: bool = False) -> None:
    """Raise an error for unknown or misspelt fields, which msgspec would silently drop, and for impossible amounts.

    Args:
        given: what the file holds, as plain values.
        known: the same fields as the decoded artifact has them.
        place: the path of both values in the artifact, in msgspec's notation.
        is_amount: whether the values are numbers of bytes, which must not be negative.

    Raises:
        msgspec.ValidationError: names the first wrong field.
    """
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            if key not in known:
                raise msgspec.ValidationError(f"Unknown field {key!r:.80} - at `{place}`")
            is_bytes = (key == "bytes" or key.endswith("_bytes")) and key not in _DIFFERENCES
            _check_fields(value, known[key], f"{place}.{key}", is_amount=is_amount or is_bytes or key in _AMOUNTS)
    elif isinstance(given, list) and isinstance(known, list | tuple):
        for index, (value, own) in enumerate(zip(given, known, strict=False)):
            _check_fields(value, own, f"{place}[{index}]")
    elif isinstance(given, int | float):
        # A loss or a gradient of a run that diverges may be as large as its dtype allows.
        is_too_large = (is_amount or isinstance(given, int)) and _MOST_COUNT < abs(given) < math.inf
        if is_too_large or (is_amount and given < 0):
            raise msgspec.ValidationError(
                f"{given:.6g} is not a valid {'amount of memory' if is_amount else 'number'} - at `{place}`"
            )


def _check_version(found: object, known: int, *, kind: str, source: str) -> None:
    """Raise ``PlanFileError`` if a file's schema version is not valid, or is newer than ``known``, the newest known version."""
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise PlanFileError(
            f"{source} does not have a valid schema version.",
            why=f'"schema_version" is {found!r:.80}',
            next=f"save the {kind} again",
        )
    if found > known:
        raise PlanFileError(
            f"{source} is a {kind} of schema {found}; this version reads schema {known} and older.",
            why="a newer Plimsoll wrote it",
            next=f"upgrade Plimsoll, or make the {kind} again with this version",
        )


def load_any(path: str | Path, *, kind: str = "") -> Artifact:
    """Read an artifact of any kind from a file. ``kind`` is the kind that the caller needs; an error says how to make one.

    Raises:
        PlanFileError: the file does not exist, or does not hold anything that this version can read.
    """
    try:
        content = read_file(path, _LIMITS)
    except FileRefused as error:
        raise _refused(str(path), error, kind) from error
    return from_json(content, source=str(path))


def _refused(source: str, error: FileRefused, kind: str = "") -> PlanFileError:
    return PlanFileError(
        f"{source} cannot be read.",
        why=str(error),
        next=f"check the path; `{_MADE_BY[kind]}` writes a {kind}"
        if kind in _MADE_BY
        else "check the path; plan, verify, estimate and the other commands write such a file with --output FILE",
    )


def load_plan(path: str | Path) -> Plan:
    """Read a plan.

    Raises:
        PlanFileError: the file does not exist, or does not hold a plan.
    """
    return of_kind(path, Plan)


def of_kind(given: Kind | str | Path, kind: type[Kind]) -> Kind:
    """Return ``given`` if it is an artifact of one kind, or read such an artifact if ``given`` is a path.

    Raises:
        PlanFileError: the file does not exist, or the artifact is of another kind.
    """
    artifact = load_any(given, kind=kind.KIND) if isinstance(given, str | Path) else given
    if isinstance(artifact, kind):
        return artifact
    name = str(given) if isinstance(given, str | Path) else "The object"
    raise PlanFileError(
        f"{name} holds a {getattr(artifact, 'KIND', type(artifact).__name__)}, not a {kind.KIND}.",
        why=f"only a {kind.KIND} holds what is needed here",
        next=f"give the file of a {kind.KIND}"
        + (f", which `{_MADE_BY[kind.KIND]}` writes" if kind.KIND in _MADE_BY else "")
        + "; `plimsoll show FILE` says what a file holds",
    )
