"""How tests run a function on real ranks, and how a rank tells what it was refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from benchmarks.launching import launch

from plimsoll.errors import PlimsollError, RankError

__all__ = ["Refusal", "Told", "launch", "on_ranks", "refused"]

Told = list[dict[str, Any]]
"""What each rank returned, rank 0 first."""


class Refusal(NamedTuple):
    """An error as a rank met it."""

    kind: str
    found: str
    why: str = ""
    next: str = ""
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0


def on_ranks(ranks: int, function: str, payload: Any = None) -> Any:
    """A fixture of one module: what every rank returned of one launch, which all tests of the module share."""

    @pytest.fixture(scope="module")
    def told() -> Told:
        return launch(ranks, function, payload)

    return told


def refused(call: Callable[[], object]) -> Refusal:
    """How a call failed: it has to."""
    start = time.perf_counter()
    try:
        call()
    except PlimsollError as error:
        ranks = error.ranks if isinstance(error, RankError) else ()
        return Refusal(type(error).__name__, error.found, error.why, error.next, ranks, time.perf_counter() - start)
    except Exception as error:  # noqa: BLE001 - a rank tells what it met, also where it is no error of ours
        return Refusal(type(error).__name__, str(error), seconds=time.perf_counter() - start)
    raise AssertionError("nothing was refused")
