"""Advice round-trips, and its figures follow from what it holds."""

from __future__ import annotations

from pathlib import Path

from advice_samples import make_advice
from plimsoll.artifacts.advice import CompilerCoverage
from plimsoll.artifacts.store import load_any


def test_advice_comes_back_exactly_as_it_was_saved(tmp_path: Path):
    advice = make_advice()
    advice.save(tmp_path / "advice.json")
    assert load_any(tmp_path / "advice.json") == advice


def test_shares_of_nothing_are_zero():
    empty = CompilerCoverage(is_measured=True)
    assert (empty.op_share, empty.time_share) == (0.0, 0.0)


def test_the_chosen_candidate_is_found():
    chosen = make_advice().chosen
    assert chosen is not None
    assert chosen.name == "auto"
    assert make_advice(candidates=()).chosen is None
