"""Writes artifacts as JSON files: versioned, tagged, and whole or not at all. ``store`` reads them."""

from __future__ import annotations

import contextlib
import math
import secrets
from pathlib import Path
from typing import Any

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.errors import PlanFileError

TAG = "plimsoll"
"""The first field of every file; its value is the artifact's kind."""
NUMBER = "plimsoll.number"


def to_json(artifact: ArtifactBase) -> str:
    """The artifact as indented JSON with its tag first.

    Example:
        >>> to_json(plan).splitlines()[1]  # doctest: +SKIP
        '  "plimsoll": "plan",'
    """
    fields: dict[str, Any] = _wrap_odd_numbers(msgspec.to_builtins(artifact))
    encoded = msgspec.json.encode({TAG: artifact.KIND} | fields)
    return msgspec.json.format(encoded, indent=2).decode()


def _wrap_odd_numbers(node: Any) -> Any:
    """Infinity and NaN have no JSON: write them as ``{"plimsoll.number": "inf"}`` so that they come back."""
    if isinstance(node, float) and not math.isfinite(node):
        return {NUMBER: repr(node)}
    if isinstance(node, dict):
        return {key: _wrap_odd_numbers(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_wrap_odd_numbers(value) for value in node]
    return node


def write_whole(text: str, path: str | Path) -> None:
    """Write text to a file that appears whole or not at all; an existing file is replaced.

    Its name until then is random: on a disk that machines share, two processes may have the same id.

    Raises:
        PlanFileError: the place cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise _not_writable(target, error) from error
        raise


def _not_writable(target: Path, error: OSError) -> PlanFileError:
    return PlanFileError(
        f"{target} cannot be written.",
        why=error.strerror or type(error).__name__,
        next="give a file in a directory that exists and that you may write to",
    )
