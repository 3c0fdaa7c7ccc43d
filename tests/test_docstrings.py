"""Examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import plimsoll

MODULES = sorted(module.name for module in pkgutil.walk_packages(plimsoll.__path__, "plimsoll."))
EXTRAS = {"jax", "keras", "tensorflow"}
"""Other frameworks, which may be absent."""


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name not in EXTRAS:
            raise
        pytest.skip(f"{missing.name} is an extra, and is not installed")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
