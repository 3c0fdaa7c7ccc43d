"""Which tests `make test` leaves to `make contracts`: marks for some cases of a test, and which files have long tests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], count: int) -> list[Any]:
    """All of these cases, for ``parametrize``. Those that are not among ``count``, spread evenly over all, are marked long."""
    every = list(cases)
    assert 0 < count < len(every), f"{count} of {len(every)} cases leave nothing out"
    short = {place * (len(every) - 1) // max(count - 1, 1) for place in range(count)}
    return [case if place in short else _long(case) for place, case in enumerate(every)]


def all_but(cases: Iterable[Any], *short: Any) -> list[Any]:
    """All of these cases, for ``parametrize``. Those that are not named as ``short`` are marked as long."""
    every = list(cases)
    assert all(case in every for case in short), f"{short} are not all among the cases"
    return [case if case in short else _long(case) for case in every]


def mostly_short(cases: Iterable[Any], *long: Any) -> list[Any]:
    """All of these cases, for ``parametrize``. Those that are named as ``long`` are marked so."""
    every = list(cases)
    assert all(case in every for case in long), f"{long} are not all among the cases"
    return [_long(case) if case in long else case for case in every]


def is_long(text: str) -> bool:
    """Whether the text of a test file marks the file as long as a whole: `make test` does not import it."""
    return re.search(r"^pytestmark = \[?\s*pytest\.mark\.long\b", text, re.MULTILINE) is not None


def has_long_tests(text: str) -> bool:
    """Whether the text of a test file marks anything as long: if not, `make contracts` does not import it."""
    return re.search(r"\bpytest\.mark\.long\b|^from long_cases import ", text, re.MULTILINE) is not None


def _long(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.long])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
