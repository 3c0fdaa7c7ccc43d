"""Examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import plimsoll
from long_cases import mostly_short

MODULES = sorted(module.name for module in pkgutil.walk_packages(plimsoll.__path__, "plimsoll."))
LONG = ["plimsoll.lengths", "plimsoll.estimator.longest_sequence"]
"""Their examples trace and plan at several lengths."""
FRAMEWORKS = [name for name in MODULES if name.startswith("plimsoll.integrations.")]
"""An import takes up to ten seconds."""
EXTRAS = {"jax", "keras", "tensorflow"}
"""Other frameworks, which may be absent."""


@pytest.mark.parametrize("name", mostly_short(MODULES, *LONG, *FRAMEWORKS))
def test_examples_in_docstrings_hold(name: str):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name not in EXTRAS:
            raise
        pytest.skip(f"{missing.name} is an extra, and is not installed")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
