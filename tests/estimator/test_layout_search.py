"""A search over layouts finds what trying all of them finds, and reads what it leaves open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.artifacts.job import Layout, ModelFacts
from plimsoll.artifacts.store import load_any
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.estimate_job import EstimateJob
from plimsoll.estimator.layout_search import LayoutSearch
from plimsoll.estimator.layout_space import LayoutSpace
from plimsoll.estimator.lowering import SwitchFigures
from plimsoll.estimator.setting import Setting
from plimsoll.planning.costing.devices import find_device

LLAMA = ModelFacts(name="m", architecture="Llama", layers=8, heads=8, kv_heads=8, intermediate=256, sequence=1024)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIMSOLL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def space(text: str) -> LayoutSpace:
    found = LayoutSpace.read(text)
    assert found is not None
    return found


def test_a_space_has_every_layout_of_its_ranks_and_samples():
    found = list(space("ranks=8,samples=32").layouts(2, LLAMA))
    assert {(each.tp, each.pp, each.dp) for each in found} == {
        (tp, pp, 8 // tp // pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8
    }
    assert all(each.ranks == 8 and each.dp * each.micro_batches * 2 == 32 for each in found)
    assert all(each.sequence_parallel == (each.tp > 1) for each in found)
    assert {each.zero for each in found if each.pp == 1 and each.dp > 1} == {1, 3}
    assert {each.zero for each in found if each.pp > 1 and each.dp > 1} == {1}


def test_what_is_given_stays_and_what_does_not_divide_is_left_out():
    given = "tp=2,schedule=interleaved,virtual=2,stages=torchtitan"
    found = list(space(f"ranks=8,samples=32,{given}").layouts(1, LLAMA))
    assert {each.pp for each in found} == {2, 4}, (
        "an interleaved schedule has a pipeline, and 8 blocks are 8 stages at most"
    )
    assert all(each.tp == each.virtual_stages == 2 for each in found)
    assert not list(space("ranks=8,samples=32,tp=3").layouts(1, LLAMA))
    experts = ModelFacts(name="m", architecture="M", layers=8, heads=8, kv_heads=8, experts=4)
    assert {each.ep for each in space("ranks=8,samples=32,tp=1,pp=1").layouts(1, experts)} == {1, 2, 4}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ranks=8", "lacks samples="),
        ("samples=8,tp=2", "lacks ranks="),
        ("ranks=0,samples=8", "does not define a search over layouts"),
        ("ranks=8,samples=many", "does not define a search over layouts"),
        ("ranks=8,samples=8,tp=x", "tp=x is not a valid degree"),
        ("ranks=8,samples=8,zero=", "zero= is not a valid degree"),
        ("ranks=8,samples=8,cp=0", "cp=0 is too small"),
        ("ranks=8,samples=8,pp=0", "pp=0 is too small"),
    ],
)
def test_half_a_space_is_refused(text: str, found: str):
    with pytest.raises(InvalidLayout, match=found):
        LayoutSpace.read(text)


def test_one_layout_is_no_space():
    assert LayoutSpace.read("dp=8,zero=3") is LayoutSpace.read("") is None


class _Job:
    """A job whose seconds and bytes are formulas; ``measured`` lists what was asked of all of them."""

    measured: ClassVar[list[tuple[Layout, str]]] = []

    def __init__(self, layout: Layout, batch: int, budget_bytes: int) -> None:
        self.layout = layout
        self.batch = batch
        self.setting = Setting(
            device=find_device("H100"), layout=layout, optimizer=None, has_master_weights=False, strategy="auto",
            budget_bytes=budget_bytes,
        )  # fmt: skip

    def measure(self, strategy: str) -> SwitchFigures:
        self.measured.append((self.layout, strategy))
        kept = 100 * self.batch // (self.layout.tp * self.layout.pp) + 8 // self.layout.tp
        seconds = (1 + self.layout.tp / 10 + self.layout.pp / 20) * (1 + 1 / self.batch)
        budget_bytes = self.setting.budget_bytes or 0
        peak = {"none": kept, "full": kept // 3}.get(strategy, max(kept // 4, min(kept, budget_bytes)))
        factor = 1.0 if strategy == "none" or kept <= budget_bytes else 1.3 if strategy == "full" else 1.2
        return SwitchFigures(peak, seconds * factor)

    def least_bytes(self) -> int:
        return (100 * self.batch // (self.layout.tp * self.layout.pp) + 8 // self.layout.tp) // 5

    def least_seconds(self) -> float:
        return 1 + self.layout.tp / 10 + self.layout.pp / 20


class _Gathering(_Job):
    """A job that only data parallelism shards: it gathers for long, once per micro-batch, and computes the fastest."""

    def measure(self, strategy: str) -> SwitchFigures:
        self.measured.append((self.layout, strategy))
        return SwitchFigures(
            1, self.least_seconds() + self.layout.micro_batches * (0.1 if self.layout.zero == 3 else 0.001)
        )

    def least_seconds(self) -> float:
        return (1.0 if self.layout.zero == 3 else 1.2) + 0.1 * (self.layout.tp + self.layout.pp)


@pytest.mark.parametrize("budget_bytes", [20, 60, 150, 1000])
def test_the_search_finds_what_planning_everything_finds(budget_bytes: int):
    def make(layout: Layout, batch: int) -> Any:
        return _Job(layout, batch, budget_bytes)

    _Job.measured.clear()
    wanted = space("ranks=8,samples=64")
    job, choices = LayoutSearch(wanted, make, "auto", LLAMA).run(None)
    planned = sum(strategy == "auto" for _, strategy in _Job.measured)
    every = [(_Job(layout, 1, budget_bytes), layout) for layout in wanted.layouts(1, LLAMA)]
    solved = [made.measure("auto") for made, _ in every]
    fitting = [figures.step_seconds for figures in solved if figures.peak_bytes <= budget_bytes]
    assert choices[0].step_seconds <= min(fitting)
    assert choices[0].peak_bytes <= budget_bytes
    assert choices[0].layout == job.layout
    assert [each.step_seconds for each in choices] == sorted(each.step_seconds for each in choices)
    assert planned < sum(len(list(wanted.layouts(1 << power, LLAMA))) for power in range(7)) / 2
    if budget_bytes == 1000:
        assert planned == 0
        assert choices[0].batch > 1, "fixed costs are spread over more samples"


class _Uncertain(_Job):
    """A job whose whole memory is 1.1 times its tensors and may be a fifth more. The device has 60 bytes."""

    def measure_device(self, strategy: str) -> tuple[int, int]:
        peak_bytes = self.measure(strategy).peak_bytes
        return round(1.1 * peak_bytes), round(0.2 * peak_bytes)

    def within(self, budget_bytes: int) -> _Uncertain:
        other = _Uncertain(self.layout, self.batch, budget_bytes)
        other.setting = replace(self.setting, budget_bytes=budget_bytes)
        return other


def test_what_a_search_recommends_fits_the_device_with_its_error():
    def make(layout: Layout, batch: int) -> Any:
        job = _Uncertain(layout, batch, 90)
        job.setting = replace(job.setting, device=replace(job.setting.device, memory_bytes=60))
        return job

    wanted = space("ranks=8,samples=64")
    edge = LayoutSearch(wanted, make, "auto", LLAMA).run(None)[1][0]
    assert 1.3 * edge.peak_bytes > 60
    job, choices = LayoutSearch(wanted, make, "auto", LLAMA, is_for_device=True).run(None)
    best = choices[0]
    assert best.layout == job.layout
    assert 1.3 * best.peak_bytes <= 60
    faster = [each for each in choices if each.step_seconds < best.step_seconds]
    assert faster
    assert all(each.is_too_close for each in faster)
    assert not best.is_too_close


def test_a_layout_that_is_slow_with_one_sample_is_found_with_several():
    def make(layout: Layout, batch: int) -> Any:
        return _Gathering(layout, batch, 1000)

    _Job.measured.clear()
    wanted = space("ranks=8,samples=64")
    job, choices = LayoutSearch(wanted, make, "none", LLAMA).run(None)
    at_first = sorted(
        (_Gathering(layout, 1, 1000).measure("none").step_seconds, str(layout)) for layout in wanted.layouts(1, LLAMA)
    )
    assert "zero=3" not in "".join(layout for _, layout in at_first[:2])
    assert (job.layout.dp, job.layout.zero, choices[0].batch) == (8, 3, 8)
    larger = [layout for layout, _ in _Job.measured if layout.dp * layout.micro_batches < 64]
    assert larger
    assert all(layout.tp == layout.pp == 1 for layout in larger), "the others' bounds are too slow from the start"


@pytest.mark.parametrize("layout", ["dp=8,zero=3", "dp=8,zero=1", "pp=2"])
def test_the_bound_of_larger_micro_batches_holds_and_is_close(layout: str, monkeypatch: pytest.MonkeyPatch):
    bounds = []

    def spy(job: EstimateJob, *given: Any) -> Any:
        bounds.append(job.least_seconds())
        return run(job, *given)

    run = EstimateJob.run
    monkeypatch.setattr(EstimateJob, "run", spy)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(4)])
    steps = []
    for rows in (512, 4096):
        batch = torch.ones(rows, 4096, device="meta")
        how: dict[str, Any] = {"device": "H100", "layout": f"{layout},micro-batches={32768 // rows}"}
        steps.append(plimsoll.estimate(model, batch, loss=torch.sum, **how).throughput.step_seconds)
    assert 0.8 * min(steps) < bounds[0] < min(steps)
    assert bounds[1] < steps[1]
    assert (steps[1] < steps[0]) == ("dp" in layout), "a pipeline idles longer with fewer micro-batches"


@pytest.mark.long
def test_an_estimate_of_a_space_is_that_of_its_fastest_layout(tmp_path: Path):
    how: dict[str, Any] = {"device": "H100", "precision": "bf16", "sequence": 256, "budget": "20MiB"}
    found = plimsoll.estimate("llama-tiny", 1, layout="ranks=2,samples=4,tp=1", **how)
    each = [
        plimsoll.estimate("llama-tiny", 1, layout=layout, **how)
        for layout in ("dp=2,zero=1,micro-batches=2", "dp=2,zero=3,micro-batches=2", "pp=2,micro-batches=4")
    ]
    assert found.throughput.step_seconds == min(one.throughput.step_seconds for one in each if one.does_fit)
    assert found.layouts[0].layout == found.layout
    assert "The fastest layouts of 2 ranks" in str(found)
    found.save(tmp_path / "found.json")
    assert load_any(tmp_path / "found.json") == found


def test_where_nothing_fits_the_layout_that_comes_down_lowest_is_shown():
    found = plimsoll.estimate(
        "llama-tiny", 1, device="H100", precision="bf16", sequence=256, layout="ranks=2,samples=4,tp=1", budget="1MiB"
    )
    assert found.does_fit is False
    lowest = min(each.peak_bytes for each in found.layouts)
    assert found.layouts[0].peak_bytes <= 1.2 * lowest


@pytest.mark.long
def test_a_layout_that_fits_only_below_full_recomputation_is_found():
    how: dict[str, Any] = {"device": "H100", "precision": "bf16", "sequence": 256}
    full = plimsoll.estimate("llama-tiny", 4, strategy="full", **how).tightest.allocated_bytes
    floor = plimsoll.estimate("llama-tiny", 4, budget="1MiB", **how).tightest.allocated_bytes
    assert floor < full
    found = plimsoll.estimate("llama-tiny", 4, layout="ranks=1,samples=4", budget=(floor + full) // 2, **how)
    assert found.does_fit
    assert (found.strategy, found.layouts[0].strategy) == ("auto", "auto")
    too_much = plimsoll.estimate("llama-tiny", 4, layout="ranks=1,samples=4", budget=floor - 1, **how)
    assert too_much.does_fit is False
    assert too_much.tightest.allocated_bytes == too_much.layouts[0].peak_bytes == floor


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", ["dp=8,zero=3", "pp=2,micro-batches=4", "pp=2,schedule=interleaved,virtual=2,micro-batches=4"]
)
def test_no_plan_needs_less_than_the_bound_of_its_layout(layout: str, monkeypatch: pytest.MonkeyPatch):
    bounds = []

    def spy(job: EstimateJob, *given: Any) -> Any:
        bounds.append(job.least_bytes())
        return run(job, *given)

    run = EstimateJob.run
    monkeypatch.setattr(EstimateJob, "run", spy)
    found = plimsoll.estimate(
        "llama-tiny", 2, device="H100", precision="bf16", sequence=128, layout=layout, budget="1MiB"
    )
    lowest = max(stage.allocated_bytes for stage in found.stages)
    assert 0.6 * lowest < bounds[0] <= lowest


def test_a_model_of_ones_own_keeps_its_batch():
    model = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    found = plimsoll.estimate(
        nn.Sequential(*model), torch.ones(8, 64), loss=torch.sum, device="H100", layout="ranks=4,samples=64"
    )
    assert found.layout.ranks == 4
    assert found.facts.batch == 8
    assert found.layout.dp * found.layout.micro_batches * 8 == 64


def test_numbers_that_leave_no_layout_are_refused():
    with pytest.raises(InvalidLayout, match="No layout of 7 ranks"):
        plimsoll.estimate("llama-tiny", 1, device="H100", layout="ranks=7,samples=8,pp=1")
