"""Every error says what was found, why, and what to do next."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from plimsoll import errors
from plimsoll.errors import BudgetBelowFloor, PlimsollError, ReplayMismatch, SavedTensorModified

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PlimsollError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_shows_its_three_parts(kind: type[PlimsollError]):
    error = kind("budget 6.0 GiB is below 7.3 GiB.", why="4.1 GiB fixed", next="budget 7.3 GiB")
    assert str(error) == "budget 6.0 GiB is below 7.3 GiB.\n  why   4.1 GiB fixed\n  next  budget 7.3 GiB"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling_and_copying(kind: type[PlimsollError]):
    error = kind("a", why="b", next="c")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert (twin.found, twin.why, twin.next) == ("a", "b", "c")


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_in_the_tree_of_the_module_docstring(kind: type[PlimsollError]):
    assert kind.__name__ in (errors.__doc__ or "")
    assert kind.__doc__


def test_exit_codes_tell_the_families_apart():
    assert PlimsollError.exit_code == 2
    assert BudgetBelowFloor.exit_code == 3
    assert ReplayMismatch.exit_code == SavedTensorModified.exit_code == 4
