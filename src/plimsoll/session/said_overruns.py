"""Decides which steps over the budget are reported to the user: new ones as a warning, recurrences as a log line."""

from __future__ import annotations

from collections import Counter

from plimsoll.session.step_levels import is_more

_EACH_OF = 8
"""Each of the first 8 recurrences is logged, and then only the 16th, the 32nd and so on. A loop may exceed the budget in every
fourth step (a penalty that is computed now and then), or in every step (quantization that began in mid-run).
"""


_Kind = tuple[str, bool]
"""An overrun's cause, and whether the step ran under the plan with the lowest peak."""


class SaidOverruns:
    """Remembers the overruns (steps that exceeded their budget) that warnings named, and how often each kind has come back."""

    def __init__(self) -> None:
        self._bytes: dict[_Kind, int] = {}
        self._recurrences: Counter[_Kind] = Counter()
        self._latest: _Kind = ("", False)

    @property
    def recurrences(self) -> int:
        """How often an overrun like the latest one, with no more bytes, has come since its warning."""
        return self._recurrences[self._latest]

    def is_new(self, peak_bytes: int, cause: str = "", *, is_lowest: bool = False) -> bool:
        """Return True if this overrun should be a warning: no overrun of its cause was named, or it took more bytes than those,
        or it is the first one under the plan with the lowest peak (``is_lowest``).

        A loop may alternate between several kinds of steps. The inner steps of a MAML loop gave ten warnings in each outer step
        while only the last one was remembered.
        """
        self._latest = kind = (cause, is_lowest)
        if kind in self._bytes and not is_more(peak_bytes, self._bytes[kind]):
            return False
        self._bytes[kind], self._recurrences[kind] = peak_bytes, 0
        return True

    def is_logged(self) -> bool:
        """Count an overrun that is not new. Return True if it should be logged."""
        self._recurrences[self._latest] += 1
        return self.recurrences <= _EACH_OF or self.recurrences.bit_count() == 1
