"""Whole probes of real models: good plans pass, bad ones are caught, and what a verdict says is what was logged."""

from __future__ import annotations

import functools
import importlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import plimsoll
import zoo
from analysis.probe.sample_job import make_batches, make_model, make_plan, read_log, stop_at
from plimsoll.analysis.probe.step import Blocks, Trainer
from plimsoll.analysis.probe.stream import Call
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.store import from_json
from plimsoll.artifacts.verdict import WHOLE_MODEL, Outcome, Ruling
from plimsoll.ui.demo.story import VOCABULARY, Batches, read_corpus
from unchanged import unchanged

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The benchmark's plans with codecs that harm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        codecs = importlib.import_module("benchmarks.bad_codecs")
        with codecs.registered():
            yield importlib.import_module("benchmarks.probe_verdicts")


def tiny_llama() -> nn.Module:
    return zoo.build("llama", vocab_size=VOCABULARY, num_attention_heads=2)


@functools.cache
def texts() -> list[dict[str, torch.Tensor]]:
    draws = Batches(read_corpus(), batch=4, sequence=32, seed=0)
    return [draws.draw() for _ in range(68)]


@functools.cache
def int8_plan() -> plimsoll.Plan:
    return plimsoll.plan(tiny_llama(), texts()[0], strategy="int8")


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "ruling"),
    [
        ("int8", Ruling.GOOD),
        ("sign-only", Ruling.RECOMPUTE_INSTEAD),
        ("stale-scale", Ruling.RECOMPUTE_INSTEAD),
    ],
)
def test_good_plans_pass_and_bad_ones_are_caught(form: str, ruling: Ruling, benchmark: ModuleType):
    plan = benchmark.in_other_form(int8_plan(), form)
    verdict = plimsoll.probe(tiny_llama(), texts(), plan, steps=60, chunk_steps=6, held_out=8)
    assert verdict.ruling is ruling, str(verdict)
    assert verdict.ruling.is_pass == (verdict.exit_code == 0)
    assert verdict.gradients[0].relative_error > 0


def test_a_lossless_plan_is_identical_and_stops_after_the_stated_number_of_steps():
    verdict = plimsoll.probe(make_model(), make_batches(), make_plan("full"), steps=300)
    assert verdict.ruling is Ruling.IDENTICAL
    assert (verdict.steps, verdict.is_early) == (100, True)
    assert verdict.curves.baseline_losses == verdict.curves.plan_losses
    assert all(entry.shift.value == 0 for entry in verdict.comparisons)


def test_the_log_and_the_verdict_say_the_same(tmp_path: Path):
    batches = make_batches()
    verdict = plimsoll.probe(
        make_model(), batches, make_plan(), steps=20, chunk_steps=10, held_out=4, run=tmp_path, early=False
    )
    steps = [line for line in read_log(tmp_path, "plan") if "loss" in line]
    assert [line["step"] for line in steps] == list(range(20))
    assert tuple(line["loss"] for line in steps) == verdict.curves.plan_losses
    assert tuple(line["gradient_norm"] for line in steps) == verdict.curves.plan_norms
    for line in steps:
        assert line["gradient_norm"] == pytest.approx(math.hypot(*line["block_norms"]))
    assert verdict.comparisons[0].block == WHOLE_MODEL
    assert [entry.block for entry in verdict.comparisons[1:]] == ["blocks.0", "blocks.1", "elsewhere"]
    lines = [json.loads(line) for line in (tmp_path / "plan.jsonl").read_text().splitlines()]
    assert sum("gradient" in line for line in lines) == 2
    peaks = [line["peak_bytes"] for line in lines if line.get("peak_bytes")]
    assert verdict.plan.measured_peak_bytes == max(peaks)
    assert verdict.plan.measured_peak_bytes < verdict.baseline.measured_peak_bytes


def test_the_losses_are_those_of_an_ordinary_training_loop():
    batches, sgd = make_batches(), functools.partial(torch.optim.SGD, lr=0.1)
    model, quiet = make_model(), make_model()
    for block in (*model.blocks, *quiet.blocks):  # what is random differs by seed; dropout is the only such thing here
        block.drop.p = 0.0
    plan = plimsoll.plan(quiet, batches[0], strategy="full")
    noisy = plimsoll.probe(make_model(), batches, make_plan(), steps=3, held_out=0, optimizer=sgd)
    verdict = plimsoll.probe(quiet, batches, plan, steps=3, held_out=0, optimizer=sgd)
    optimizer = sgd(model.parameters())
    expected = []
    for batch in batches[:3]:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert verdict.curves.baseline_losses == tuple(expected)
    assert noisy.curves.baseline_losses != tuple(expected)


class Doubled(torch.optim.SGD):
    """An optimizer that multiplies matrices, which autocast would round."""

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad @= 2 * torch.eye(parameter.shape[-1])
        super().step()


class Checkpointed(nn.Sequential):
    """Recomputes its forward in backward, where torch enters autocast again and casts the weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.long
def test_under_autocast_each_step_and_evaluation_casts_the_present_weights():
    layers = [kind(nn.Linear(8, 8, bias=False), nn.GELU()) for kind in (nn.Sequential, nn.Sequential, Checkpointed)]
    model, way = nn.Sequential(*layers), lambda output: output.square().mean()
    torch.manual_seed(0)
    batches = [torch.randn(4, 8) for _ in range(6)]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        plan = plimsoll.plan(model, batches[0], loss=way, strategy="full", regions=["0", "1"])
        verdict = plimsoll.probe(
            model, batches, plan, steps=5, loss=way, held_out=1, optimizer=functools.partial(Doubled, lr=1.0)
        )
    assert all(map(torch.equal, model.parameters(), before))
    optimizer, expected = Doubled(model.parameters(), lr=1.0), []
    for batch in batches[:5]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = way(model(batch))
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        held_out = float(way(model(batches[5])))
    assert verdict.curves.baseline_losses == verdict.curves.plan_losses == tuple(expected)
    assert verdict.baseline.held_out_loss == verdict.plan.held_out_loss == held_out


@pytest.mark.parametrize(
    "dtypes", [(torch.float64,), (torch.bfloat16, torch.float64), (torch.complex64, torch.float32)]
)
def test_gradient_norms_and_comparisons_cover_double_precision_and_imaginary_parts(dtypes: tuple[torch.dtype, ...]):
    model = nn.Module()
    for index, dtype in enumerate(dtypes):
        model.register_parameter(str(index), nn.Parameter(torch.ones(2, dtype=dtype)))
    blocks = Blocks(model, ())

    def put(value: complex) -> None:
        for parameter in model.parameters():
            values = torch.tensor([value, 0], dtype=torch.complex128)
            parameter.grad = (values if parameter.is_complex() else values.real).to(parameter.dtype)

    put(3 + 4j)
    square = sum(25.0 if dtype.is_complex else 9.0 for dtype in dtypes)
    norm, of_blocks = blocks.norms()
    assert norm == pytest.approx(square**0.5, rel=1e-12)
    assert of_blocks == pytest.approx((square**0.5,), rel=1e-12)
    before = blocks.take_gradients()
    put(3 - 4j)
    found = blocks.compare(0, before)
    product = sum(9.0 - 16.0 if dtype.is_complex else 9.0 for dtype in dtypes)
    assert (found.products, found.baseline_squares, found.plan_squares) == ((product,), (square,), (square,))


class TwiceIfCompiled(nn.Sequential):
    """Computes something else in compiled code, to tell which code ran."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if torch.compiler.is_compiling() else 1.0)


@pytest.mark.long
def test_the_baseline_of_a_plan_that_compiles_the_model_is_compiled_too():
    torch.manual_seed(0)
    model = TwiceIfCompiled(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)])
    batches, loss = [torch.randn(8, 16) for _ in range(4)], lambda output: output.square().mean()
    plan = plimsoll.plan(model, batches[0], loss=loss, strategy="full", compile=True)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    verdict = plimsoll.probe(model, batches, plan, steps=4, loss=loss, optimizer=sgd)
    assert not [note for note in verdict.notes if "the plan is wrong" in note]
    compiled, optimizer, expected = torch.compile(model), sgd(model.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(compiled(batch))
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    assert verdict.curves.baseline_losses == tuple(expected)


@pytest.mark.parametrize(("threads", "counts_waiting"), [(1, False), (2, True)])
def test_seconds_on_several_threads_are_those_that_pass(threads: int, counts_waiting: bool):
    model = nn.Linear(2, 1)

    def slow(output: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return output.sum()

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        record = Trainer(model, slow, Blocks(model, ())).step(0, Call((torch.ones(1, 2),), {}), optimizer)
    finally:
        torch.set_num_threads(before)
    assert (record.seconds >= 0.1) is counts_waiting


def test_one_fixed_batch_is_allowed_and_the_verdict_says_what_that_means():
    verdict = plimsoll.probe(make_model(), make_batches(1)[0], make_plan(), steps=6, chunk_steps=3)
    assert verdict.data == "one fixed batch"
    assert "overfit the only batch" in verdict.notes[0]
    assert verdict.plan.perplexity is None
    assert next(rule for rule in verdict.rules if rule.name == "held-out").outcome is Outcome.NOT_MEASURED


def test_a_target_that_diverges_is_told_from_a_plan_that_does():
    batches = make_batches()
    batches[4] = {"x": batches[4]["x"] * math.inf, "y": batches[4]["y"]}
    verdict = plimsoll.probe(make_model(), batches, make_plan(), steps=20, chunk_steps=4)
    assert verdict.ruling is Ruling.BASELINE_DIVERGED
    assert verdict.exit_code == 1
    assert "step 5" in verdict.reason
    assert from_json(to_json(verdict)) == verdict


def test_a_target_loss_is_not_reached_if_the_baseline_diverges_before_the_plan_takes_a_step():
    batches = make_batches()
    batches[3] = {"x": batches[3]["x"] * math.inf, "y": batches[3]["y"]}
    verdict = plimsoll.probe(make_model(), batches, make_plan(), steps=10, chunk_steps=5, target_loss=0.0)
    assert verdict.ruling is Ruling.BASELINE_DIVERGED
    assert verdict.baseline.steps_to_target is None
    assert verdict.plan.steps_to_target is None
    assert verdict.window == 1
    assert verdict.baseline.final_loss == verdict.curves.baseline_losses[2]


def test_a_verdict_reads_well_and_comes_back_from_json():
    verdict = plimsoll.probe(make_model(), make_batches(), make_plan(), steps=20, chunk_steps=5, early=False)
    text = str(verdict)
    shown = (str(verdict.ruling), verdict.ruling.advice, "held-out loss", "perplexity", "at equal parameters", "peak")
    assert [part for part in shown if part not in text] == []
    assert from_json(to_json(verdict)) == verdict


def test_every_ruling_knows_its_advice():
    assert all(ruling.advice.endswith(".") for ruling in Ruling)
    assert {ruling for ruling in Ruling if ruling.is_pass} == {Ruling.GOOD, Ruling.IDENTICAL}


def test_the_rules_need_no_torch():
    script = "import sys, plimsoll.analysis.probe.rules; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "False"


class Registering(nn.Module):
    """Registers one buffer in its first forward, and enlarges another."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.register_buffer("scales", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "calls"):
            self.register_buffer("calls", torch.zeros(()))
        if len(self.scales) < len(x):
            self.scales = torch.arange(1.0, len(x) + 1)
        self.calls += 1
        return nn.functional.gelu(self.line(x) * self.scales[: len(x), None] / self.calls)


class Hidden(nn.Module):
    """Holds state that is not a buffer: a counter, a generator and an average."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.calls = 0
        self.noise = torch.Generator().manual_seed(0)
        self.average = [torch.zeros(8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.average[0].lerp_(x.detach().mean(0), 0.5)
        noise = torch.rand(x.shape, generator=self.noise)
        return nn.functional.gelu(self.line(x) - self.average[0]) / (1 + self.calls) + 0.1 * noise


class Clipped(nn.Module):
    """Writes its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.line.weight.mul_(0.7)
        return nn.functional.gelu(self.line(x))


class CountingLoss:
    """A loss with state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output.square().mean() * self.calls


@pytest.mark.filterwarnings("ignore:plimsoll. a call of region")
@pytest.mark.parametrize("kind", [Registering, Hidden, Clipped])
def test_both_arms_begin_a_chunk_with_the_same_state_and_comparisons_change_none(kind: type[nn.Module], tmp_path: Path):
    torch.manual_seed(0)
    model, batches = nn.Sequential(kind(), kind()), [torch.randn(4, 8) for _ in range(6)]
    plan = plimsoll.plan(model, batches[0], loss=CountingLoss(), strategy="full")
    loss = CountingLoss()

    def probe(run: Path, progress: Callable[[str, float], None] | None = None) -> plimsoll.Verdict:
        return plimsoll.probe(model, batches, plan, steps=9, chunk_steps=3, loss=loss, run=run, progress=progress)

    with unchanged(model):
        verdict = probe(tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            probe(tmp_path / "resumed", stop_at(5))
        resumed = probe(tmp_path / "resumed")
    assert loss.calls == 0
    assert verdict.ruling is Ruling.IDENTICAL
    assert verdict.gradients[0].largest_error == 0
    assert resumed.curves == verdict.curves


@pytest.mark.filterwarnings("ignore:plimsoll. a call of region")
@pytest.mark.parametrize("kind", [Registering, Hidden, Clipped])
def test_in_one_chunk_a_model_with_state_trains_as_in_an_ordinary_loop(kind: type[nn.Module]):
    torch.manual_seed(0)
    model, batches = nn.Sequential(kind(), kind()), [torch.randn(4, 8) for _ in range(5)]
    plan = plimsoll.plan(model, batches[0], loss=CountingLoss(), strategy="full")
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    verdict = plimsoll.probe(model, batches, plan, steps=5, loss=CountingLoss(), optimizer=sgd, held_out=0)
    optimizer, loss, expected = sgd(model.parameters()), CountingLoss(), []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model(batch))
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    assert verdict.curves.baseline_losses == verdict.curves.plan_losses == tuple(expected)
