"""Which steps over the budget are reported: new ones as a warning, recurrences in the log, a lasting state once."""

from __future__ import annotations

from plimsoll.session.said_overruns import SaidOverruns
from plimsoll.units import MIB


def reported(peaks: list[int]) -> list[str]:
    """What is reported of each step of a training, whose budget is 10 MiB."""
    said, found = SaidOverruns(), []
    for peak_mib in peaks:
        if peak_mib <= 10:
            said.budget_kept()
            found.append("")
        elif said.is_new("cause", peak_mib * MIB):
            found.append("new")
        else:
            found.append("again" if said.has_come_back() else "silent")
    return found


def test_a_lasting_state_is_reported_once_and_a_larger_peak_is_new():
    assert reported([9, 12, 12, 12, 13, 12]) == ["", "new", "silent", "silent", "new", "silent"]


def test_what_comes_back_is_reported_again():
    assert reported([12, 9, 12, 12, 9, 12]) == ["new", "", "again", "silent", "", "again"]


def test_of_many_recurrences_fewer_and_fewer_are_reported():
    found = [text for text in reported([12, 9] * 40) if text]
    assert [at for at, text in enumerate(found) if text == "again"] == [*range(1, 9), 16, 32]
