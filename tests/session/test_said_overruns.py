"""Which steps over the budget are reported: new ones as a warning, recurrences in the log."""

from __future__ import annotations

from plimsoll.session.said_overruns import SaidOverruns
from plimsoll.units import MIB


def reported(peaks: list[int], *, is_lowest: bool = False) -> list[str]:
    """What is reported of each step of a training, whose budget is 10 MiB. Its last step runs at the lowest peak."""
    said, found = SaidOverruns(), []
    for number, peak_mib in enumerate(peaks, 1):
        if peak_mib <= 10:
            found.append("")
        elif said.is_new(peak_mib * MIB, "cause", is_lowest=is_lowest and number == len(peaks)):
            found.append("new")
        else:
            found.append("again" if said.is_logged() else "silent")
    return found


def test_a_lasting_state_is_a_warning_once_and_a_larger_peak_is_new():
    assert reported([9, 12, 12, 12, 13, 12]) == ["", "new", "again", "again", "new", "again"]


def test_what_comes_back_is_reported_again():
    assert reported([12, 9, 12, 12, 9, 12]) == ["new", "", "again", "again", "", "again"]


def test_of_many_recurrences_fewer_and_fewer_are_reported():
    found = [text for text in reported([12, 9] * 40) if text]
    assert [at for at, text in enumerate(found) if text == "again"] == [*range(1, 9), 16, 32]


def test_the_first_overrun_at_the_lowest_peak_is_new():
    assert reported([12, 11], is_lowest=True) == ["new", "new"]
    assert reported([12, 11]) == ["new", "again"]


def test_kinds_of_steps_that_alternate_are_each_a_warning_once():
    said = SaidOverruns()
    steps = [("inner", 12), ("outer", 15), ("inner", 12), ("outer", 15), ("inner", 13)]
    assert [said.is_new(peak_mib * MIB, cause) for cause, peak_mib in steps] == [True, True, False, False, True]
    assert not said.is_new(15 * MIB, "outer")
    assert said.is_logged()
    assert said.recurrences == 1
