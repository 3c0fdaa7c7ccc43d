"""The published runs: each fully specified, split by a rule that nobody can tune."""

from __future__ import annotations

import hashlib

import pytest
from benchmarks.claims import published
from benchmarks.claims.published import Compared, compare, estimate_run, lines, read_runs

from plimsoll.errors import InvalidLayout
from plimsoll.estimator.parallelism.layouts import read_layout
from plimsoll.planning.costing.devices import find_device

pytestmark = pytest.mark.long

RUNS = read_runs()


def test_there_are_eighty_runs_with_a_figure_each_and_names_of_their_own():
    assert len(RUNS) >= 80
    assert len({run.name for run in RUNS}) == len(RUNS)
    assert all(run.tokens_per_second or run.seconds or run.memory_bytes for run in RUNS)


@pytest.mark.parametrize("table", sorted({run.table for run in RUNS}))
def test_layouts_and_devices_of_a_table_exist(table: str):
    for run in RUNS:
        if run.table == table:
            assert read_layout(run.layout).ranks >= 1
            assert find_device(run.device).memory_bytes > 0


def test_half_of_the_runs_are_held_out_by_the_digest_of_their_names():
    held = [run for run in RUNS if run.is_held_out]
    assert 0.4 < len(held) / len(RUNS) < 0.6
    assert all(int(hashlib.sha256(run.name.encode()).hexdigest()[0], 16) % 2 for run in held)


def test_a_small_run_is_compared_and_a_held_out_one_is_only_summed():
    run = min((r for r in RUNS if r.model == "mpt-125m" and not r.is_held_out), key=lambda r: r.batch * r.sequence)
    figures = list(compare(run, estimate_run(run)))
    assert [each.what for each in figures] == ["speed"]
    assert figures[0].published == run.tokens_per_second
    held = next(r for r in RUNS if r.is_held_out)
    other = Compared(run=held, what="speed", published=1.0, ours=1.2, bar=0.1)
    text = "\n".join(lines([*figures, other], ()))
    assert run.name in text
    assert held.name not in text
    assert "20.0%" in text
    assert not other.is_within


def test_a_run_that_cannot_be_estimated_is_named_and_the_others_go_on(monkeypatch, capsys):
    def estimate(run):
        if "8192 6" in run.name:
            raise InvalidLayout("no", why="of a test", next="none")
        return estimate_run(run)

    monkeypatch.setattr(published, "estimate_run", estimate)
    small = [run for run in RUNS if (run.model == "mpt-125m" and run.sequence == 512) or "mpt-760m 8192 6" in run.name]
    monkeypatch.setattr(published, "read_runs", lambda: small)
    assert published.main([small[-1].table]) == 1
    printed = capsys.readouterr().out
    assert "not estimated: " in printed
    assert "| held out: speed" in printed or "| tuning: speed" in printed
