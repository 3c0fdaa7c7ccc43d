"""Examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import plimsoll

MODULES = sorted(module.name for module in pkgutil.walk_packages(plimsoll.__path__, "plimsoll."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
