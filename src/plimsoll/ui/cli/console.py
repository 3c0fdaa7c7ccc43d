"""Consoles that show control characters of names and files instead of obeying them, and JSON without any."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment


def stdout() -> Console:
    """The console for results. Made anew so that it follows a redirected stream."""
    return _guarded(Console(highlight=False, soft_wrap=False))


def stderr() -> Console:
    """The console for progress and errors."""
    return _guarded(Console(stderr=True, highlight=False))


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys instead of showing it: escapes, and marks that turn the direction of text."""


class _Shown(RenderHook):
    """Shows control characters of names and files as signs; those of the console itself, colours among them, stay."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Signs(each) for each in renderables]


@dataclass(frozen=True, slots=True)
class _Signs:
    inner: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.inner, options):
            yield segment if segment.control else Segment(_CONTROLS.sub(_sign, segment.text), segment.style)


def _sign(found: re.Match[str]) -> str:
    """The picture of an old control character, for others the sign of what cannot be shown."""
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\ufffd"


def _guarded(console: Console) -> Console:
    console.push_render_hook(_Shown())
    return console


def write_json(text: str) -> None:
    """Write JSON to stdout at once, with escapes for what a terminal would obey."""
    sys.stdout.write(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")
    sys.stdout.flush()
