"""What a training under ``attach`` says about itself: one line, progress, and the text and the numbers of its handle."""

from __future__ import annotations

import io
import logging
import math
import sys

import pytest
import torch

import plimsoll
from plimsoll.artifacts.progress import bar
from plimsoll.errors import BudgetBelowFloor, InvalidOption, PlanMismatch
from plimsoll.session import messages
from plimsoll.session.attachment import Attachment
from plimsoll.session.messages import announce
from plimsoll.units import MIB, format_bytes
from steps import Stack, mean_square

BUDGET = 2 * MIB


def train(steps: int, **options: object) -> Attachment:
    torch.manual_seed(0)
    model = Stack(4, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = plimsoll.attach(model, BUDGET, optimizer=optimizer, **options)
    for _ in range(steps):
        mean_square(model(torch.randn(384, 32))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return handle


@pytest.fixture(autouse=True)
def quick_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning counts as quick on a busy machine too."""
    monkeypatch.setattr(messages, "_QUIET_SECONDS", math.inf)


@pytest.fixture
def no_logging(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """A program that does not configure logging. Pytest adds its own handlers to all loggers."""
    library = logging.getLogger("plimsoll")
    monkeypatch.setattr(library, "hasHandlers", lambda: False)
    monkeypatch.setattr(library, "level", logging.NOTSET)
    return library


def test_one_line_is_printed_once_a_step_under_the_plan_was_measured(no_logging, capsys):
    train(1).remove()
    assert capsys.readouterr().err == ""
    train(6).remove()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("plimsoll: budget 2.0 MiB · peak ")
    assert "planned" in line
    assert " measured · +" in line
    assert line.endswith(" of 4 blocks")


def test_a_removed_handle_says_so():
    handle = train(4)
    assert "training under a plan" in str(handle)
    handle.remove()
    assert "removed, the model is unmanaged" in str(handle)


@pytest.mark.long
def test_planning_that_takes_seconds_is_announced_once_when_it_begins(no_logging, capsys, monkeypatch):
    monkeypatch.setattr(messages, "_QUIET_SECONDS", 0.0)
    handle = train(1)
    first = capsys.readouterr().err
    assert first == "plimsoll: planning for budget 2.0 MiB in the first two training steps\n"
    handle.remove()
    train(6).remove()
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["planning", "budget"]


def test_a_callback_for_progress_takes_the_place_of_that_line(no_logging, capsys, monkeypatch):
    monkeypatch.setattr(messages, "_QUIET_SECONDS", 0.0)
    train(1, progress=lambda stage, share: None).remove()
    assert capsys.readouterr().err == ""
    train(1, progress="bar").remove()
    assert "planning for budget" in capsys.readouterr().err, "no bar is drawn into a file"


def test_a_higher_level_of_the_logger_keeps_the_lines_away(no_logging, capsys, monkeypatch):
    monkeypatch.setattr(messages, "_QUIET_SECONDS", 0.0)
    no_logging.setLevel(logging.WARNING)
    train(4).remove()
    assert capsys.readouterr().err == ""


def test_a_program_with_logging_gets_a_record_instead(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="plimsoll"):
        train(4).remove()
    [record] = [each for each in caplog.records if each.name.startswith("plimsoll") and each.levelno == logging.INFO]
    assert record.getMessage().startswith("plimsoll: budget 2.0 MiB")
    assert capsys.readouterr().err == ""


def test_only_the_first_rank_speaks(no_logging, capsys, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    announce("a line")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    announce("a line")
    assert capsys.readouterr().err == "plimsoll: a line\n"


def test_a_handle_shows_what_happens_and_its_figures():
    handle = train(0)
    assert "the next training step will be traced" in repr(handle)
    assert "<pre>plimsoll.attach(Stack, budget 2.0 MiB)" in handle._repr_html_()
    assert handle.metrics() == {}
    handle.remove()
    with train(3) as handle:
        assert repr(handle).splitlines()[1].strip() == handle.figures.line
        assert len(repr(handle).splitlines()) < 5
        assert "<svg" in handle._repr_html_()


def test_the_plan_and_its_handle_name_the_same_peaks():
    torch.manual_seed(0)
    model = Stack(4, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    with plimsoll.attach(model, BUDGET, optimizer=optimizer) as handle:
        for _ in range(4):
            model(torch.randn(384, 32)).exp().mul(0.5).square().mean().backward()  # a loss outside of the model
            optimizer.step()
            optimizer.zero_grad()
        figures, plan, shown = handle.figures, handle.plan, repr(handle)
    traced, planned, measured, unseen = map(
        format_bytes,
        (plan.predicted_peak_bytes, figures.planned_peak_bytes, figures.measured_peak_bytes, figures.unseen_bytes),
    )
    assert figures.unseen_bytes > 0
    assert figures.planned_peak_bytes == plan.predicted_peak_bytes + figures.unseen_bytes
    assert f"planned {planned} = {traced} in the traced step (the peak in .plan) + {unseen}" in shown
    assert f"need {unseen} more" in plan.notes[-1]
    assert f"planned to peak at {planned}" in plan.notes[-1]
    assert plan.notes[-1].endswith(f"steps is {measured}")


def test_metrics_are_numbers_with_units_and_agree_with_the_plan():
    with train(3) as handle:
        found = handle.metrics()
        plan = handle.plan
    assert all(isinstance(value, int | float) for value in found.values())
    assert all(name.rpartition("_")[2] in ("bytes", "seconds", "percent", "count") for name in found)
    assert found["plimsoll/budget_bytes"] == BUDGET
    assert plan.predicted_peak_bytes <= found["plimsoll/planned_peak_bytes"] <= BUDGET
    assert plan.baseline_peak_bytes <= found["plimsoll/unmanaged_peak_bytes"]
    assert 0 < found["plimsoll/measured_peak_bytes"] <= BUDGET


def test_an_applied_plan_shows_its_figures_too():
    model, batch = Stack(4, 32), torch.randn(384, 32)
    plan = plimsoll.plan(model, batch, 2 * MIB, loss=mean_square)
    with plimsoll.apply(model, plan) as handle:
        assert handle.metrics()["plimsoll/measured_peak_bytes"] == 0
        for _ in range(3):
            model.zero_grad()
            mean_square(model(batch)).backward()
        assert 0 < handle.metrics()["plimsoll/measured_peak_bytes"] <= 2 * MIB
        assert repr(handle).startswith("plimsoll.apply(Stack, plan 'auto')\n  budget 2.0 MiB")


def test_progress_ends_when_the_plan_for_the_budget_exists():
    reports: list[tuple[str, float]] = []
    with train(3, progress=lambda *report: reports.append(report)):
        stages = [stage for stage, _ in reports]
    assert reports[-1] == ("done", 1.0)
    assert stages.count("done") == 1
    assert stages.index("tracing") < stages.index("measuring the first step") < stages.index("solving")


def test_a_bar_replaces_its_line_and_disappears_at_the_end(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    bar("tracing", 0.5)
    bar("done", 1.0)
    drawn, cleared = terminal.getvalue().split("\r\x1b[2K")[1:]
    assert " 50% tracing" in drawn
    assert cleared == ""


def test_no_bar_is_drawn_into_a_file(capsys):
    bar("tracing", 0.5)
    assert capsys.readouterr().err == ""


def test_another_progress_is_refused_at_once():
    with pytest.raises(InvalidOption, match="progress='fast'"):
        plimsoll.attach(Stack(1, 8), BUDGET, progress="fast")


def test_a_refusal_names_the_batch_that_its_budget_is_for():
    model = Stack(3, 32)
    plimsoll.attach(model, "100KiB")

    def training() -> None:
        for _ in range(3):
            mean_square(model(torch.randn(64, 32))).backward()

    with pytest.raises(BudgetBelowFloor) as refused:
        training()
    assert refused.value.next.endswith("The budget is for this batch, f32[64x32]; larger ones may need more")


def test_the_plan_of_a_training_cannot_be_verified_with_another_loss_and_says_so():
    handle = train(4)
    handle.remove()
    with pytest.raises(PlanMismatch, match="attach made it for its training") as refused:
        plimsoll.verify(handle.model, torch.randn(384, 32), handle.plan, loss=mean_square)
    assert "verify a plan of plimsoll.plan" in refused.value.next
