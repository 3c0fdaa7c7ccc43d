"""Decides which steps over the budget are reported to the user: new ones as a warning, recurrences as a log line."""

from __future__ import annotations

from plimsoll.session.step_levels import is_more

_EACH_OF = 8
"""Each of the first 8 recurrences is logged, and then only the 16th, the 32nd and so on. A loop may exceed the budget in every
fourth step (a penalty that is computed now and then), or in every step (quantization that began in mid-run).
"""


class SaidOverruns:
    """Remembers the last overrun (a step that exceeded its budget) that a warning named, and how often it has come back."""

    def __init__(self) -> None:
        self._cause, self._bytes = ("", False), 0
        self.recurrences = 0
        """How often an overrun of the same cause, and of no more bytes, has come since the warning."""

    def is_new(self, peak_bytes: int, cause: str = "", *, is_lowest: bool = False) -> bool:
        """Return True if this overrun should be a warning: it has another cause than the last one, or took more bytes, or is
        the first one under the plan with the lowest peak (``is_lowest``).
        """
        if (cause, is_lowest) == self._cause and not is_more(peak_bytes, self._bytes):
            return False
        self._cause, self._bytes, self.recurrences = (cause, is_lowest), peak_bytes, 0
        return True

    def is_logged(self) -> bool:
        """Count an overrun that is not new. Return True if it should be logged."""
        self.recurrences += 1
        return self.recurrences <= _EACH_OF or self.recurrences.bit_count() == 1
