"""The demo trains the same model twice and says whether the runs agree."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fakes import FakeVerbs
from plimsoll.ui.cli.app import app
from plimsoll.ui.demo import story, training
from plimsoll.ui.demo.corpus import Batches, read_corpus
from plimsoll.ui.demo_terminal import draw_spark
from samples import make_mismatch, make_receipt

pytest.importorskip("transformers")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = training.DemoSetup
    sizes = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "batch": 2, "sequence": 32}
    monkeypatch.setattr(training, "DemoSetup", lambda **given: setup(**sizes, **given))


@pytest.mark.usefixtures("_small")
def test_the_demo_ends_with_the_proof(runner: CliRunner, verbs: FakeVerbs):
    result = runner.invoke(app, ["demo", "--steps", "3"])
    assert result.exit_code == 0, result.output
    assert [name for name, _ in verbs.calls] == ["plan", "verify", "apply"]
    assert verbs.calls[0][1]["budget"] == story.BUDGET
    assert verbs.calls[1][1]["optimizer"].state
    assert "3 losses identical bit for bit" in result.stdout
    assert "12 of 12 gradients equal bit for bit" in result.stdout
    assert "What happened" in result.stdout
    assert "✗" not in result.stdout


@pytest.mark.usefixtures("_small")
def test_the_demo_fails_when_gradients_differ(runner: CliRunner, verbs: FakeVerbs):
    verbs.receipt = make_receipt(gradient_mismatches=(make_mismatch(),))
    result = runner.invoke(app, ["demo", "--steps", "2", "--budget", "64MiB"])
    assert result.exit_code == 1
    assert verbs.calls[0][1]["budget"] == "64MiB"
    assert "✗ 11 of 12 gradients" in " ".join(result.stdout.split())


@pytest.mark.usefixtures("_small")
def test_the_demo_refuses_a_budget_with_two_readings(runner: CliRunner, verbs: FakeVerbs):
    result = runner.invoke(app, ["demo", "--budget", "24G"])
    assert result.exit_code == 2
    assert "two readings" in result.stderr


def test_the_corpus_is_real_text_and_batches_repeat():
    corpus = read_corpus()
    assert len(corpus) > 1_000_000
    assert b"import" in corpus
    one, two = (Batches(corpus, batch=2, sequence=16, seed=3) for _ in range(2))
    assert one.draw()["input_ids"].equal(two.draw()["input_ids"])
    assert one.draw()["input_ids"].equal(two.draw()["input_ids"])
    assert one.draw()["input_ids"].shape == (2, 16)


def test_a_training_with_the_same_seed_repeats_itself():
    setup = training.DemoSetup(hidden_size=32, intermediate_size=64, layers=2, batch=2, sequence=32, steps=3)
    losses = []
    for _ in range(2):
        model = training.make_model(setup)
        optimizer = training.make_optimizer(model, setup)
        batches = Batches(read_corpus(), batch=2, sequence=32, seed=0)
        run = training.Run()
        for _ in range(setup.steps):
            training.take_step(model, optimizer, batches.draw(), run)
        losses.append(run.losses)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_a_spark_line_falls_with_the_loss():
    assert draw_spark([3.0, 2.0, 1.0]) == "█▅▁"
    assert draw_spark([1.0, 1.0]) == "▁▁"
    assert draw_spark([]) == ""
