"""Graphs and failed frames of Dynamo in, the places where capturing stopped out: why, and at which line of whose code."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch._dynamo.utils import get_compilation_metrics
from torch.fx import GraphModule

from plimsoll.artifacts.advice import GraphBreak

_UNKNOWN = "Unknown"
"""How Dynamo starts the reason of a frame that was taken up anew because of a function that it calls."""
_IN_A_CALL = "step_unsupported"
"""Dynamo's word for a line whose call met something that cannot be captured; that is listed by itself."""
_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)")
_Place = tuple[str, str, int]
"""Reason, file and line."""


class BreakBook:
    """Collects breaks: those that end a graph, and those that made Dynamo leave a whole frame to Python."""

    def __init__(self) -> None:
        self._found: Counter[_Place] = Counter()
        self._started_microseconds = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Frames that fail to be captured while the block runs are noted at its end, also after an error."""
        self._started_microseconds = time.time_ns() // 1000
        try:
            yield
        finally:
            self._note_frames()

    def note(self, graph: GraphModule) -> None:
        """Note why a graph ends where it does, unless the function simply returned."""
        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return
        frame = reason.user_stack[-1] if reason.user_stack else None
        place = ("", 0) if frame is None else (frame.filename, frame.lineno or 0)
        self._found[_readable(reason.reason), *place] += 1

    def _note_frames(self) -> None:
        inner: dict[str, tuple[str, str, int]] = {}
        for entry in get_compilation_metrics():
            if (entry.start_time_us or 0) < self._started_microseconds:
                continue
            if entry.fail_type is not None:
                reason = f"{_readable(entry.fail_reason or entry.fail_type)}; {_frame(entry.co_name)} is not captured"
                self._found[reason, entry.fail_user_frame_filename or "", entry.fail_user_frame_lineno or 0] += 1
            for text in entry.restart_reasons or ():
                if not text.startswith(_UNKNOWN):  # the innermost function that met it comes last
                    inner[_readable(text)] = (_frame(entry.co_name), entry.co_filename or "", entry.co_firstlineno or 0)
        known = {reason for reason, _, _ in self._found}
        for reason, (name, file, line) in inner.items():
            if not any(text.startswith(reason) for text in known):
                self._found[f"{reason}, in {name}", file, line] += 1

    def entries(self) -> tuple[GraphBreak, ...]:
        """Every place once, those that were met most often first."""
        return tuple(
            GraphBreak(
                reason=reason,
                file=shorten(file) if file else "",
                line=line,
                code=_code(file, line),
                count=count,
            )
            for (reason, file, line), count in self._found.most_common()
        )


def shorten(file: str) -> str:
    """A path as its reader knows it: from the working directory, or from the top of the installed package."""
    _, found, inside = file.replace(os.sep, "/").rpartition("/site-packages/")
    if found:
        return inside
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def _code(file: str, line: int) -> str:
    """The line itself; the head of a function says nothing that its name does not."""
    text = linecache.getline(file, line).strip() if file else ""
    return "" if text.startswith(("@", "def ")) else text


def _readable(text: str) -> str:
    """The first line of a reason; what follows it are hints for Dynamo's developers."""
    first = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return "something in this call cannot be captured" if first == _IN_A_CALL else first


def _frame(name: str | None) -> str:
    """The function that Dynamo left to Python; the rest of one, after a break, goes by a made-up name."""
    resumed = _RESUMED.fullmatch(name or "")
    if resumed is None:
        return name or "the function"
    return f"the rest of {resumed['name']} after line {resumed['line']}"
