"""The cheapest changes that make a job fit: which are tried, which are shown, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.job import Layout, Techniques, read_techniques
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.fitting_changes import SHOWN, find_fitting_changes
from plimsoll.estimator.parallelism.layouts import read_layout
from plimsoll.units import MIB
from ui.view_samples import make_estimate

JOB = {"batch": "", "layout": "", "optimizer": "adamw", "strategy": "", "budget": "", "techniques": ""}


def sized(
    total: float, *, seconds: float = 1.0, layout: str = "", techniques: str = "", strategy: str = "none"
) -> Estimate:
    """An estimate whose tightest rank needs ``total`` of the device."""
    found = make_estimate(1)
    device_bytes = found.device_bytes
    stage = found.tightest
    items = [msgspec.structs.replace(stage.items[0], bytes=int(total * device_bytes), relative_error=0.0)]
    ranks = read_layout(layout) if layout else Layout()
    speed = msgspec.structs.replace(found.throughput, step_seconds=seconds, samples_per_second=ranks.dp / seconds)
    return msgspec.structs.replace(
        found,
        stages=(msgspec.structs.replace(stage, items=tuple(items), whole_error=None),),
        layout=ranks,
        techniques=read_techniques(techniques) if techniques else Techniques(),
        throughput=speed,
        strategy=strategy,
        budget_bytes=None,
    )


class Asked:
    """Answers with the share of the device that a function of the options gives, and remembers what was asked."""

    def __init__(self, share: Any) -> None:
        self.share = share
        self.options: list[Mapping[str, str]] = []

    def __call__(self, options: Mapping[str, str]) -> Estimate:
        self.options.append(options)
        total, seconds = self.share(options)
        return sized(total, seconds=seconds, layout=options["layout"])


def test_a_job_that_fits_is_not_changed():
    asked = Asked(lambda options: (0.5, 1.0))
    assert find_fitting_changes(sized(0.5), JOB, asked) == ()
    assert asked.options == []


def test_the_three_cheapest_single_changes_are_shown_in_order():
    def share(options: Mapping[str, str]) -> tuple[float, float]:
        seconds = {"full": 1.3}.get(options["strategy"], 1.1 if options["optimizer"] == "adamw-8bit" else 1.2)
        return 0.5, seconds

    found = find_fitting_changes(sized(1.5), JOB, Asked(share))
    assert len(found) == SHOWN
    assert found[0].options == {"optimizer": "adamw-8bit"}
    assert [each.rank_seconds_per_sample for each in found] == sorted(each.rank_seconds_per_sample for each in found)


def test_changes_are_joined_only_if_single_ones_do_not_fit():
    def share(options: Mapping[str, str]) -> tuple[float, float]:
        changed = sum(options[name] != JOB[name] for name in JOB) - bool(options["batch"])
        return (0.5 if changed > 1 else 1.5), 1.0

    asked = Asked(share)
    found = find_fitting_changes(sized(2.0), JOB, asked)
    assert found
    assert all(len(change.options) > 1 for change in found)
    assert found[0].name == "recompute every block and compute the loss in chunks"


def test_adapters_come_last_because_they_train_something_else():
    found = find_fitting_changes(
        sized(2.0),
        JOB,
        Asked(lambda options: (0.5 if "lora" in options["techniques"] or options["strategy"] else 1.5, 1.0)),
    )
    assert "adapters" in found[-1].name


def test_as_many_ranks_as_it_takes_are_named():
    def share(options: Mapping[str, str]) -> tuple[float, float]:
        return (0.5 if "dp=32" in options["layout"] else 1.5), 1.0

    (found,) = find_fitting_changes(sized(9.0), JOB, Asked(share))
    assert found.options["layout"] == "dp=32,zero=3"
    assert found.ranks == 32


def test_a_change_that_cannot_be_estimated_is_left_out():
    def refuse(options: Mapping[str, str]) -> Estimate:
        raise InvalidLayout("no links", why="none", next="none")

    assert find_fitting_changes(sized(2.0), JOB, refuse) == ()


def test_the_users_own_techniques_and_layout_are_kept():
    asked = Asked(lambda options: (1.5, 1.0))
    job = {**JOB, "techniques": "tf32", "layout": "dp=2,sp,tp=2"}
    find_fitting_changes(sized(2.0, layout="dp=2,tp=2,sp", techniques="tf32"), job, asked)
    assert all(options["techniques"].startswith("tf32") for options in asked.options)
    assert all("tp=2" in options["layout"] for options in asked.options)


def test_under_a_budget_the_strategy_stays_the_plans():
    asked = Asked(lambda options: (1.5, 1.0))
    find_fitting_changes(sized(2.0, strategy="auto"), {**JOB, "budget": "auto"}, asked)
    assert {options["strategy"] for options in asked.options} == {""}


def test_a_plan_leaves_as_much_free_as_its_error_bar_is_wide():
    """With ``--budget auto`` a plan fills the device, so such a job is always too close to call."""

    def answer(options: Mapping[str, str]) -> Estimate:
        if not options["budget"]:
            return sized(1.5)
        found = sized(0.95)
        live_bytes = int(found.device_bytes * 0.9)
        if options["budget"] != "auto":
            live_bytes = int(options["budget"].removesuffix("MiB")) * MIB
        item = msgspec.structs.replace(found.tightest.items[0], bytes=live_bytes, relative_error=0.2)
        stage = msgspec.structs.replace(found.tightest, items=(item,), allocated_bytes=live_bytes)
        return msgspec.structs.replace(found, stages=(stage,))

    changes = find_fitting_changes(sized(1.5), JOB, answer)
    found = next(change for change in changes if change.name == "plan recomputation for the device's memory")
    assert found.options["budget"].endswith("MiB")
    device_bytes = sized(1.5).device_bytes
    assert 0.97 * device_bytes < found.total_bytes + found.error_bytes <= device_bytes


def test_long_sequences_fit_by_offloading_and_adapters_by_frozen_weights_in_4_bits():
    def share(options: Mapping[str, str]) -> tuple[float, float]:
        return (0.5 if "offload" in options["techniques"] or "qlora" in options["techniques"] else 1.5), 1.0

    job = {**JOB, "techniques": "lora=16,lora-on=all"}
    found = find_fitting_changes(sized(2.0, techniques="lora=16,lora-on=all"), job, Asked(share))
    techniques = [change.options["techniques"] for change in found]
    assert techniques == [
        "lora=16,lora-on=all,loss=chunked,offload=activations,expandable-segments",
        "qlora=16,lora-on=all",
    ]


@pytest.mark.parametrize("batch", [1, 3])
def test_an_odd_micro_batch_is_not_halved(batch: int):
    asked = Asked(lambda options: (1.5, 1.0))
    job = sized(2.0)
    facts = msgspec.structs.replace(job.facts, batch=batch)
    find_fitting_changes(msgspec.structs.replace(job, facts=facts), JOB, asked)
    assert {options["batch"] for options in asked.options} == {""}
