"""Names and amounts in, texts for charts out: escaped, short enough for an axis, in one unit per axis."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass

from plimsoll.units import GIB, KIB, MIB

_MOST_LETTERS = 36


def escape(text: str) -> str:
    """A text that plotly shows letter by letter: it would read tags and entities in it.

    Example:
        >>> escape("<b>layer</b>")
        '&lt;b&gt;layer&lt;/b&gt;'
    """
    return html.escape(" ".join(text.split()), quote=False)


def shorten(text: str, most_letters: int = _MOST_LETTERS) -> str:
    """A name cut in its middle, where names of one model are most alike.

    Example:
        >>> shorten("model.layers.31.self_attn.q_proj", 16)
        'model.l…n.q_proj'
    """
    if len(text) <= most_letters:
        return text
    head = (most_letters - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most_letters - 1 - head) :]}"


def sentence(text: str) -> str:
    """A text with the capital and the full stop of a sentence.

    Example:
        >>> sentence("every rule is clear")
        'Every rule is clear.'
    """
    stop = "" if text.endswith((".", "!", "?")) else "."
    return f"{text[:1].upper()}{text[1:]}{stop}" if text else ""


def label(text: str, most_letters: int = _MOST_LETTERS) -> str:
    """A name as an axis or an annotation shows it: short and escaped."""
    return escape(shorten(text, most_letters))


@dataclass(frozen=True, slots=True)
class Scale:
    """One unit for all amounts of an axis."""

    unit: str
    bytes_per_unit: int

    def of(self, bytes_: float) -> float:
        """The amount in the unit, with enough digits to draw it."""
        return round(bytes_ / self.bytes_per_unit, 4)


def byte_scale(amounts: Iterable[int]) -> Scale:
    """The largest unit in which the largest amount is at least one."""
    largest = max(amounts, default=0)
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if largest >= size:
            return Scale(unit, size)
    return Scale("B", 1)


def drawable(number: float | None) -> float | None:
    """The number, or ``None`` for what no chart can draw: JSON has neither infinity nor NaN."""
    return number if number is not None and math.isfinite(number) else None
