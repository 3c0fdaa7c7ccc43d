"""Advice on real models: what holds the memory, which plan is taken, what the compiler sees, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import plimsoll
import zoo
from plimsoll.artifacts.advice import Advice, CheckOutcome, Kind
from plimsoll.artifacts.store import load_any
from plimsoll.chunked import chunk_loss
from plimsoll.errors import InvalidBudget, InvalidModel, PlanFileError, PlanMismatch
from plimsoll.session.training_step import TrainingStep
from plimsoll.units import format_bytes
from samples import make_receipt
from searchless import plan_without_search
from steps import Stack, gpt2, llama, mean_square, stack, vit
from unchanged import unchanged


class Talking(Stack):
    """Prints a value between its blocks: what comes after is captured on its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        print("mean", x.mean().item())
        return self.blocks[1](x)


def checks(advice: Advice) -> dict[str, CheckOutcome]:
    return {item.name: item.outcome for item in advice.checklist}


@pytest.fixture(scope="module")
def language_model() -> Advice:
    model, batch, _ = llama()
    model.model.layers = model.model.layers[:1]
    optimizer = torch.optim.AdamW(model.parameters())
    return plimsoll.advise(model, batch, allow="recompute", optimizer=optimizer, regions=["model.layers.0"])


@pytest.mark.long
def test_a_captured_language_model_may_rely_on_the_compiler(language_model: Advice):
    compiler = language_model.compiler
    assert compiler.op_share > 0.98
    assert compiler.time_share > 0.98
    assert "let it recompute" in compiler.advice[0]
    assert not any("dropout" in line for line in compiler.advice)  # Llama has none
    assert compiler.uncaptured == ()


def test_without_a_budget_a_cpu_gets_a_frontier_and_its_knee(language_model: Advice):
    names = [candidate.name for candidate in language_model.candidates]
    assert names[0] == "none"
    assert {"full", "auto, 25% to the floor", "auto, 50% to the floor", "auto, 75% to the floor"} <= set(names)
    assert language_model.recommendation.kind is Kind.MANAGE
    assert language_model.recommendation.headline.startswith("if the step fits, do nothing")
    chosen = language_model.chosen
    assert chosen.name == "auto (recompute)"
    full = next(candidate for candidate in language_model.candidates if candidate.name == "full")
    assert chosen.predicted_overhead < full.predicted_overhead


def test_fused_attention_passes_and_its_optimizer_state_is_counted(language_model: Advice):
    assert checks(language_model)["attention-backward"] is CheckOutcome.PASS
    state = next(part for part in language_model.bottleneck.parts if part.name == "optimizer state")
    parameters = next(part for part in language_model.bottleneck.parts if part.name == "parameters")
    assert state.bytes == pytest.approx(2 * parameters.bytes, rel=0.01)


def test_advice_is_text_and_a_file(language_model: Advice, tmp_path: Path):
    language_model.save(tmp_path / "advice.json")
    assert load_any(tmp_path / "advice.json") == language_model
    assert language_model.recommendation.headline in str(language_model)


@pytest.mark.long
def test_dropout_warns_of_the_compilers_own_recomputation_and_fails_written_out_attention():
    model, batch, _ = gpt2()
    model.transformer.h = model.transformer.h[:1]
    advice = plimsoll.advise(model, batch, "1GiB", target="pkg:step", regions=["transformer.h.0.attn"])
    assert any("dropout" in line and "wrong" in line for line in advice.compiler.advice)
    assert checks(advice)["attention-backward"] is CheckOutcome.FAIL
    assert advice.recommendation.kind is Kind.DO_NOTHING
    assert [candidate.name for candidate in advice.candidates if candidate.is_chosen] == ["none"]


@pytest.mark.long
def test_a_vision_model_counts_examples_and_leaves_everything_as_it_was():
    model, batch, _ = vit()
    optimizer = torch.optim.AdamW(model.parameters())
    with unchanged(model, optimizer):
        advice = plimsoll.advise(model, batch, "1GiB", optimizer=optimizer, regions=["vit.layers.0.layernorm_before"])
    throughput = next(item for item in advice.checklist if item.name == "throughput")
    assert "4 examples" in throughput.evidence
    assert advice.compiler.time_share > 0.9


def test_breaks_leave_a_part_to_the_plan_and_reads_of_values_stop_cuda_graphs(capsys):
    advice = plimsoll.advise(Talking(2), torch.randn(64, 32), "1GiB", loss=mean_square)
    capsys.readouterr()
    assert advice.compiler.graphs == 2
    assert 0.5 < advice.compiler.op_share < 1
    assert any("print" in entry.code for entry in advice.compiler.breaks)
    assert any("reads a value" in hazard.what for hazard in advice.hazards)


def test_where_state_holds_the_memory_managing_activations_is_not_the_answer():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    advice = plimsoll.advise(model, torch.randn(4, 256), loss=mean_square, optimizer=optimizer, compile_seconds=0)
    assert advice.bottleneck.part == "state"
    assert advice.recommendation.kind is Kind.LOOK_ELSEWHERE
    explained = plimsoll.explain(model, torch.randn(4, 256), loss=mean_square, optimizer=optimizer)
    eight_bits = next(change for change in explained.changes if change.name == "optimizer state in 8 bits")
    (remedy,) = (reason for reason in advice.recommendation.reasons if reason.startswith(eight_bits.name))
    assert f"peaks at {format_bytes(eight_bits.predicted_peak_bytes)} instead of" in remedy
    assert any("sharding" in reason for reason in advice.recommendation.reasons)
    assert advice.compiler.note == "it was not asked"


@pytest.mark.long
def test_where_the_logits_hold_the_peak_a_chunked_loss_is_the_answer():
    model, batch = zoo.build("llama", vocab_size=8192), zoo.words(tokens=64, vocabulary=8192)
    advice = plimsoll.advise(model, batch, compile_seconds=0)
    head = next(part for part in advice.bottleneck.parts if part.name == "head and loss")
    assert advice.bottleneck.part == "head and loss"
    assert head.bytes >= 3 * 2 * 64 * 8192 * 4  # logits, their log-softmax, and a gradient of each kind
    (chunked,) = (reason for reason in advice.recommendation.reasons if "chunk_loss(model)" in reason)
    with chunk_loss(model):
        step = TrainingStep(model, (), batch)
        assert format_bytes(step.measure_peak().peak_bytes) in chunked


@pytest.mark.long
def test_other_forms_are_planned_and_explained_where_they_are_allowed():
    model, batch, loss = stack(rows=512)
    free = plimsoll.advise(model, batch, loss=loss, allow="recompute", compile_seconds=0)
    budget_bytes = (free.bottleneck.peak_bytes + free.bottleneck.floor_bytes) // 2
    with unchanged(model):
        advice = plimsoll.advise(model, batch, budget_bytes, loss=loss, max_error="2%", compile_seconds=0)
    found = {candidate.name: candidate for candidate in advice.candidates}
    assert {"int8", "auto (recompute)", "auto (recompute + compress)", "auto (recompute + offload)"} <= set(found)
    assert found["int8"].predicted_error > 0
    chosen = advice.chosen
    assert chosen.predicted_peak_bytes <= budget_bytes
    assert all(candidate.reason for candidate in advice.candidates)
    assert f"--budget {budget_bytes}B" in advice.recommendation.command


def test_a_budget_below_every_floor_is_advice_too():
    model, batch, loss = stack()
    advice = plimsoll.advise(model, batch, "10KiB", loss=loss, allow="recompute", compile_seconds=0)
    assert advice.recommendation.kind is Kind.DOES_NOT_FIT
    assert advice.chosen is None
    assert checks(advice)["granularity-chosen"] is CheckOutcome.FAIL


def test_a_device_that_is_not_here_is_planned_for_and_not_measured():
    model, batch, loss = stack()
    advice = plimsoll.advise(model, batch, loss=loss, device_profile="H100-SXM")
    assert advice.recommendation.kind is Kind.DO_NOTHING
    assert advice.budget_bytes is not None
    assert not advice.compiler.is_measured
    assert checks(advice)["activations-by-layer"] is CheckOutcome.NOT_CHECKED


@pytest.mark.long
def test_a_receipt_of_this_step_is_taken_and_one_of_another_is_refused(tmp_path: Path):
    model, batch, loss = stack()
    plan = plan_without_search((model, batch, loss))
    path = tmp_path / "receipt.json"
    plimsoll.verify(model, batch, plan, loss=loss, steps=2).save(path)
    advice = plimsoll.advise(model, batch, loss=loss, allow="recompute", receipt=path, compile_seconds=0)
    assert checks(advice)["determinism-tested"] is CheckOutcome.PASS
    assert checks(advice)["recompute-profiled"] is CheckOutcome.PASS

    with unchanged(model), pytest.raises(PlanMismatch) as caught:
        plimsoll.advise(model, batch, loss=loss, receipt=make_receipt())
    assert "ffff" in caught.value.found
    assert plan.fingerprint in caught.value.found
    with pytest.raises(PlanMismatch) as caught:
        plimsoll.advise(model, torch.randn(7, 32), loss=loss, receipt=path)
    assert "another step" in caught.value.found


def test_a_verdict_of_another_batch_is_refused():
    model, batch, loss = stack()
    plan = plan_without_search((model, batch, loss))
    verdict = plimsoll.probe(model, batch, plan, loss=loss, steps=4)
    with pytest.raises(PlanMismatch) as caught:
        plimsoll.advise(model, torch.randn(7, 32), loss=loss, verdict=verdict, compile_seconds=0)
    assert "verdict is of another step" in caught.value.found


def test_bad_input_is_refused_before_anything_runs(tmp_path: Path):
    model, batch, loss = stack()
    plan = plan_without_search((model, batch, loss))
    plan.save(tmp_path / "plan.json")
    for how, error, words in (
        ({"receipt": tmp_path / "plan.json"}, PlanFileError, "holds a plan, not a receipt"),
        ({"verdict": tmp_path / "missing.json"}, PlanFileError, "missing.json"),
        ({"budget": "24G"}, InvalidBudget, "24G"),
    ):
        with pytest.raises(error, match=words):
            plimsoll.advise(model, batch, loss=loss, **how)
    with plimsoll.apply(model, plan), pytest.raises(InvalidModel):
        plimsoll.advise(model, batch, loss=loss)
