"""Decides which steps over the budget are reported to the user: new ones as a warning, recurrences as a log line."""

from __future__ import annotations

from plimsoll.session.step_levels import is_more

_EACH_OF = 8
"""Each of the first 8 recurrences is logged, and then only the 16th, the 32nd and so on. A loop may exceed the budget in every
fourth step (a penalty that is computed now and then).
"""


class SaidOverruns:
    """Remembers the last overrun (a step that exceeded its budget) that a warning named, and how often it has come back."""

    def __init__(self) -> None:
        self._cause, self._bytes = "", 0
        self._has_kept = False
        self.recurrences = 0
        """How often the overrun has come back after steps that kept to the budget."""

    def budget_kept(self) -> None:
        """Note that a step has kept to the budget."""
        self._has_kept = True

    def is_new(self, cause: str, peak_bytes: int) -> bool:
        """Return True if this overrun should be a warning: it has another cause than the last one, or took more bytes."""
        if cause == self._cause and not is_more(peak_bytes, self._bytes):
            return False
        self._cause, self._bytes = cause, peak_bytes
        self._has_kept, self.recurrences = False, 0
        return True

    def has_come_back(self) -> bool:
        """Call this for an overrun that is not new. Return True if it should be logged.

        A state that lasts is reported once: quantization that began in mid-run exceeded the lowest plan's peak in every later
        step.
        """
        if not self._has_kept:
            return False
        self._has_kept, self.recurrences = False, self.recurrences + 1
        return self.recurrences <= _EACH_OF or self.recurrences.bit_count() == 1
