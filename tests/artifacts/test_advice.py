"""Advice round-trips, and both of its texts say the same things, verdict first."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from advice_samples import make_advice
from plimsoll.artifacts.advice import CompilerCoverage, Recommendation
from plimsoll.artifacts.store import load_any
from plimsoll.ui.advice_terminal import render_advice


def shown(advice) -> str:
    console = Console(width=100, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render_advice(advice))
    return capture.get()


def test_advice_comes_back_exactly_as_it_was_saved(tmp_path: Path):
    advice = make_advice()
    advice.save(tmp_path / "advice.json")
    assert load_any(tmp_path / "advice.json") == advice


@pytest.mark.parametrize("view", [str, shown])
def test_the_verdict_comes_first_and_the_numbers_after(view):
    text = view(make_advice())
    assert "recompute some activations" in text.splitlines()[0] + text.splitlines()[1]
    positions = [text.index(word) for word in ("--budget 64MiB", "Where the memory is", "full", "Checklist", "Failure")]
    assert positions == sorted(positions)


@pytest.mark.parametrize("view", [str, shown])
def test_every_item_shows_its_outcome_and_its_next_step(view):
    text = view(make_advice())
    for words in ("not checked", "plimsoll verify TARGET -o receipt.json", "pass", "fail", "<b>8 MiB</b>", "print(x)"):
        assert words in text


@pytest.mark.parametrize("view", [str, shown])
def test_layers_that_save_the_same_are_one_row(view):
    assert "model.layers.0–3" in view(make_advice())


@pytest.mark.parametrize("view", [str, shown])
def test_a_compiler_that_was_not_asked_says_why(view):
    compiler = CompilerCoverage(is_measured=False, note="the model is on the meta device")
    assert "not checked: the model is on the meta device" in view(make_advice(compiler=compiler))


def test_shares_of_nothing_are_zero():
    empty = CompilerCoverage(is_measured=True)
    assert (empty.op_share, empty.time_share) == (0.0, 0.0)


def test_the_chosen_candidate_is_found():
    chosen = make_advice().chosen
    assert chosen is not None
    assert chosen.name == "auto"
    assert make_advice(candidates=()).chosen is None


def test_advice_without_a_command_shows_none():
    recommendation = Recommendation(kind=make_advice().recommendation.kind, headline="do nothing")
    assert "plimsoll plan" not in str(make_advice(recommendation=recommendation))
