"""Micro-batch and plan chosen together: on the CPU with everything measured, and for a device that is not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plimsoll
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.fit import Fit
from plimsoll.artifacts.store import from_json
from plimsoll.errors import InvalidBatch, InvalidBudget, InvalidOption, PlimsollError
from plimsoll.estimator.fit.search import Shape
from plimsoll.estimator.fit.single_device import MicroBatches
from plimsoll.ui.terminal import render_artifact
from plimsoll.units import KIB
from steps import Stack, mean_square, stack
from unchanged import unchanged


def fit_elsewhere(budget: int | str = "600KiB", **how: Any) -> Fit:
    """The stack of blocks on a GPU that is not here."""
    model, batch, loss = stack()
    given = {"model": model, "batch": batch, "loss": loss, "device_profile": "H100-SXM", "most_batch": 256}
    return plimsoll.fit(budget=budget, **given | how)


@pytest.fixture(scope="module")
def elsewhere() -> Fit:
    return fit_elsewhere(optimizer=torch.optim.AdamW, most_solves=4)


@pytest.mark.long
def test_a_device_that_is_not_here_gets_the_largest_throughput_within_the_budget(elsewhere: Fit):
    best, unmanaged = elsewhere.best_point, elsewhere.best_unmanaged
    assert best.predicted_peak_bytes <= elsewhere.budget_bytes
    assert best.micro_batch > unmanaged.micro_batch
    assert elsewhere.gain > 0
    assert best.items_per_second == max(point.items_per_second for point in elsewhere.points if point.does_fit)
    assert any(not point.does_fit for point in elsewhere.points)
    assert elsewhere.measured is None
    assert elsewhere.items_name == "examples"


def test_the_best_point_is_traced_itself_and_carries_its_plan(elsewhere: Fit):
    best = elsewhere.best_point
    assert best.is_traced
    assert f"f32[{best.micro_batch}x32]" in elsewhere.plan.signature
    assert elsewhere.plan.predicted_peak_bytes == best.predicted_peak_bytes
    assert elsewhere.traces < len(elsewhere.points)


def test_a_predicted_point_is_that_of_the_step_traced_there(elsewhere: Fit):
    point = next(p for p in elsewhere.points if p.does_fit and not p.is_traced and not p.is_unmanaged)
    model = Stack()
    direct = plimsoll.plan(
        model,
        torch.randn(point.micro_batch, 32),
        elsewhere.budget_bytes,
        loss=mean_square,
        optimizer=torch.optim.AdamW(model.parameters()),
        device_profile="H100-SXM",
    )
    assert direct.baseline_peak_bytes == point.unmanaged_peak_bytes
    assert direct.predicted_peak_bytes == point.predicted_peak_bytes


def test_a_fit_comes_back_from_json_and_is_shown(elsewhere: Fit):
    assert from_json(to_json(elsewhere)) == elsewhere
    text = str(elsewhere)
    for part in (
        "Frontier",
        "examples/s predicted (± 30%, modelled)",
        "keep all",
        "over budget",
        "best",
        "the plan gives",
    ):
        assert part in text
    render_artifact(elsewhere)


@pytest.mark.long
def test_on_the_device_itself_the_best_plan_is_run_and_nothing_is_left_behind():
    model, batch, loss = stack(rows=47)
    with unchanged(model):
        found = plimsoll.fit(model, batch, "300KiB", loss=loss, global_batch=47)
    best = found.best_point
    assert [point.micro_batch for point in found.points] == [1, 47]
    assert [point.accumulation for point in found.points] == [47, 1]
    assert best.micro_batch == 47
    assert not best.is_unmanaged
    assert found.measured.measured_peak_bytes <= found.budget_bytes
    assert found.measured.measured_seconds > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "measured" in str(found)


def test_accumulation_adds_the_gradients_that_are_there_and_the_optimizers_step_once():
    alone = fit_elsewhere("1MiB", most_batch=2, optimizer=torch.optim.AdamW)
    often = fit_elsewhere("1MiB", most_batch=2, optimizer=torch.optim.AdamW, accumulation=4)
    one, four = alone.points[-1], often.points[-1]
    assert four.step_seconds == pytest.approx(4 * four.micro_seconds + four.optimizer_seconds)
    assert four.items_per_second > one.items_per_second
    assert four.unmanaged_peak_bytes >= one.unmanaged_peak_bytes


def test_with_a_global_batch_micro_batches_divide_it():
    found = fit_elsewhere(global_batch=6)
    assert all(point.micro_batch * point.accumulation == 6 for point in found.points)


@pytest.mark.long
def test_where_nothing_fits_single_changes_say_what_would():
    found = fit_elsewhere("100KiB", global_batch=2)
    assert found.best is None
    assert found.exit_code == 3
    by_name = {change.name: change for change in found.changes}
    more = next(change for name, change in by_name.items() if "more memory" in name)
    assert more.does_fit
    assert more.predicted_peak_bytes > 100 * KIB
    alone = by_name["no accumulation: gradients of one micro-batch"]
    direct = fit_elsewhere("100KiB", most_batch=1, most_solves=1)
    assert alone.predicted_peak_bytes == direct.points[0].predicted_peak_bytes
    assert by_name[next(name for name in by_name if name.startswith("compress"))].does_fit is None
    sharded = by_name["ZeRO stage 3 over 8 ranks"]
    assert sharded.predicted_peak_bytes < more.predicted_peak_bytes
    assert "ZeRO stage 1 over 8 ranks" not in by_name
    parallel = by_name["tensor parallel over 2 ranks"]
    assert parallel.does_fit is None
    assert parallel.note
    assert "unsupported" in str(found)


@pytest.mark.parametrize(
    ("how", "error", "part"),
    [
        ({"global_batch": 8, "accumulation": 2}, InvalidOption, "contradict"),
        ({"global_batch": 0}, InvalidOption, "global_batch"),
        ({"most_batch": True}, InvalidOption, "most_batch"),
        ({"sequences": [4]}, InvalidOption, "cannot be used with this batch"),
        ({"sequences": []}, InvalidOption, "empty"),
        ({"sequences": 0}, InvalidOption, "sequences"),
        ({"model": "llama-tiny"}, InvalidOption, "has its own batch and loss"),
        ({"budget": None}, InvalidBudget, "missing"),
        ({"budget": "24G"}, InvalidBudget, "24GiB"),
    ],
)
def test_what_cannot_be_meant_is_refused(how: dict[str, Any], error: type[PlimsollError], part: str):
    with pytest.raises(error) as caught:
        fit_elsewhere(**how)
    assert part in str(caught.value)


def test_token_batches_are_resized_along_both_dimensions():
    batches = MicroBatches({"input_ids": torch.arange(12).view(2, 6), "scale": torch.tensor(2.0)}, (4, 9))
    made = batches.of(Shape(3, 9))
    assert made["input_ids"].shape == (3, 9)
    assert made["input_ids"][2].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert made["scale"] == 2.0
    assert (batches.items_name, batches.sequences) == ("tokens", (4, 9))


def test_a_function_may_make_the_batches():
    batches = MicroBatches(lambda size, sequence: torch.zeros(size, sequence), (8,))
    assert batches.of(Shape(3, 8)).shape == (3, 8)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.tensor(1.0), "does not contain a tensor with examples"),
        (torch.zeros(0, 4), r"\(0, 4\), does not contain any examples"),
    ],
)
def test_a_batch_without_examples_is_refused(batch: torch.Tensor, message: str):
    with pytest.raises(InvalidBatch, match=message):
        MicroBatches(batch, None)


@pytest.mark.long
def test_layouts_are_searched_with_batch_and_plan_and_the_faster_sequence_is_taken():
    how = {"layout": "ranks=2,tp=1", "global_batch": 4, "device_profile": "H100-SXM"}
    found = plimsoll.fit("llama-tiny", 1, "auto", sequences=(64, 128), **how)
    assert found.layout.ranks == 2
    assert found.layout.dp * found.layout.micro_batches == 4
    assert len(found.layouts) > 1
    assert found.layouts[0].layout == found.layout
    alone = [plimsoll.fit("llama-tiny", 1, "auto", sequences=each, **how) for each in (64, 128)]
    assert found.throughput.tokens_per_second == max(each.throughput.tokens_per_second for each in alone)


@pytest.mark.long
def test_changes_count_the_state_that_options_of_an_optimizer_add():
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4)])

    def peaks(optimizer: torch.optim.Optimizer) -> dict[str, int | None]:
        how: dict[str, Any] = {"loss": torch.sum, "device_profile": "H100-SXM", "most_batch": 8}
        found = plimsoll.fit(model, torch.ones(8, 256), "1MiB", optimizer=optimizer, **how)
        assert found.best is None
        return {change.name: change.predicted_peak_bytes for change in found.changes}

    name = "ZeRO stage 1 over 8 ranks"
    plain, heavy = (peaks(torch.optim.SGD(model.parameters(), lr=0.1, momentum=m))[name] for m in (0.0, 0.9))
    shard_bytes = sum(parameter.nbytes for parameter in model.parameters()) // 8
    assert heavy - plain >= shard_bytes
    found = peaks(torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True))
    assert name not in found
    assert found["an 8-bit optimizer, or more ranks"] is None


def test_layouts_are_searched_for_the_loss_that_is_given():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
    how: dict[str, Any] = {"layout": "ranks=1", "global_batch": 8, "device_profile": "H100-SXM"}
    found = plimsoll.fit(model, torch.ones(8, 64), "1GiB", loss=torch.sum, **how)
    assert found.facts.batch == 8
    for ignored in ({"most_batch": 2}, {"most_solves": 1}):
        with pytest.raises(InvalidOption, match=f"{next(iter(ignored))}=. cannot be combined with layout="):
            plimsoll.fit(model, torch.ones(8, 64), "1GiB", loss=torch.sum, **how, **ignored)
    with pytest.raises(InvalidOption, match="A function as batch="):
        plimsoll.fit(model, lambda examples, tokens: torch.ones(examples, 64), "1GiB", loss=torch.sum, **how)


def test_layouts_want_a_global_batch_a_device_and_an_optimizer_by_name():
    with pytest.raises(InvalidOption, match="global_batch=None"):
        plimsoll.fit("llama-tiny", None, "auto", layout="ranks=4", device_profile="H100-SXM")
    with pytest.raises(InvalidOption, match="accumulation=2"):
        plimsoll.fit("llama-tiny", None, "auto", layout="ranks=4", accumulation=2, global_batch=8)
    with pytest.raises(InvalidOption, match="needs layout="):
        plimsoll.fit("llama-tiny", None, "200MiB", optimizer="adamw")
