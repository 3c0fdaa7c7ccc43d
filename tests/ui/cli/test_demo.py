"""The demo trains the same model twice and says whether the runs agree."""

from __future__ import annotations

import pytest

from fakes import FakeVerbs
from plimsoll.errors import BudgetBelowFloor
from plimsoll.ui.demo import story
from plimsoll.ui.demo.story import Batches, read_corpus
from plimsoll.ui.demo_terminal import draw_spark
from samples import make_mismatch, make_receipt

pytest.importorskip("transformers")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = story.DemoSetup
    sizes = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "batch": 2, "sequence": 32}
    monkeypatch.setattr(story, "DemoSetup", lambda **given: setup(**sizes, **given))


@pytest.mark.usefixtures("_small")
def test_the_demo_ends_with_the_proof(run, verbs: FakeVerbs):
    shown = run("demo", "--steps", "3").out
    assert [name for name, _ in verbs.calls] == ["plan", "verify", "apply"]
    assert verbs.calls[0][1]["budget"] == story.BUDGET
    assert verbs.calls[1][1]["optimizer"].state
    for part in ("3 losses identical bit for bit", "12 of 12 gradients equal bit for bit", "What happened"):
        assert part in shown
    assert "✗" not in shown


@pytest.mark.usefixtures("_small")
def test_the_demo_fails_when_gradients_differ(run, verbs: FakeVerbs):
    verbs.receipt = make_receipt(gradient_mismatches=(make_mismatch(),))
    assert "✗ 11 of 12 gradients" in run("demo", "--steps", "2", "--budget", "64MiB", code=1).words
    assert verbs.calls[0][1]["budget"] == "64MiB"


@pytest.mark.usefixtures("_small")
def test_a_refused_demo_names_a_budget_and_no_option_that_it_lacks(run, monkeypatch: pytest.MonkeyPatch):
    def refuse(*given: object) -> None:
        raise BudgetBelowFloor(
            "too little.", why="it is so", next='budget="90MiB" (94371840 bytes), or allow=("tile",)'
        )

    monkeypatch.setattr(story, "prepare", refuse)
    said = run("demo", "--budget", "64MiB", code=3).err
    assert "  next  --budget 90MiB (94371840 bytes)\n" in said


def test_the_corpus_is_real_text_and_batches_repeat():
    corpus = read_corpus()
    assert len(corpus) > 1_000_000
    assert b"import" in corpus
    one, two = (Batches(corpus, batch=2, sequence=16, seed=3) for _ in range(2))
    assert one.draw()["input_ids"].equal(two.draw()["input_ids"])
    assert one.draw()["input_ids"].equal(two.draw()["input_ids"])
    assert one.draw()["input_ids"].shape == (2, 16)


def test_a_training_with_the_same_seed_repeats_itself():
    setup = story.DemoSetup(hidden_size=32, intermediate_size=64, layers=2, batch=2, sequence=32, steps=3)
    losses = []
    for _ in range(2):
        model = story.make_model(setup)
        optimizer = story.make_optimizer(model, setup)
        batches = Batches(read_corpus(), batch=2, sequence=32, seed=0)
        run = story.Run()
        for _ in range(setup.steps):
            story.take_step(model, optimizer, batches.draw(), run)
        losses.append(run.losses)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_a_spark_line_falls_with_the_loss():
    assert draw_spark([3.0, 2.0, 1.0]) == "█▅▁"
    assert draw_spark([1.0, 1.0]) == "▁▁"
    assert draw_spark([]) == ""
