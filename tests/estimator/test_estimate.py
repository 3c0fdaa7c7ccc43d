"""Estimates of small catalogue models, traced with fake tensors: parts add up, layouts divide, wrong questions are refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

import plimsoll
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.store import load_any
from plimsoll.errors import (
    InvalidBudget,
    InvalidLayout,
    InvalidOption,
    InvalidStrategy,
    InvalidTarget,
    UnknownDevice,
    UnknownOptimizer,
)
from plimsoll.estimator import estimate as estimating
from plimsoll.estimator.budget import framework_items
from plimsoll.estimator.catalogue.models import known_models
from plimsoll.lengths import longest_sequence
from plimsoll.planning.costing.devices import find_device
from plimsoll.ui.terminal import render_artifact
from plimsoll.units import format_bytes

SIZES: dict[str, Any] = {"sequence": 256}


def on_gpu(**how: Any) -> Estimate:
    return plimsoll.estimate("llama-tiny", 1, **(SIZES | {"device": "H100"} | how))


def bytes_of(estimate: Estimate, name: str, stage: int = 0) -> int:
    return next((item.bytes or 0 for item in estimate.stages[stage].items if item.name == name), 0)


def test_items_add_up_to_what_the_allocator_reserves_and_what_lies_outside_of_it():
    stage = on_gpu().stages[0]
    beside = {item.name for item in framework_items(find_device("H100-SXM"), Layout())}
    inside = [item for item in stage.items if item.name not in beside]
    assert len(beside) == len(stage.items) - len(inside) == 3
    outside = sum(item.bytes or 0 for item in stage.items if item.name in beside)
    accounted, beyond = stage.reserved_bytes + outside, stage.items[-1]
    assert stage.total_bytes == accounted + (beyond.bytes or 0)
    assert beyond.name == "not accounted for"
    assert beyond.bytes == int(0.06 * accounted)
    assert beyond.error_bytes == beyond.bytes

    live = sum(
        item.bytes or 0
        for item in inside
        if item.name not in ("allocator rounding", "fragmentation", "not accounted for")
    )
    assert live == stage.allocated_bytes
    assert all(item.relative_error > 0 for item in stage.items if item.bytes)


@pytest.mark.long
def test_throughput_is_as_certain_as_the_runs_of_its_kind_that_were_tuned_on():
    assert on_gpu(precision="bf16").throughput.relative_error == 0.12
    assert on_gpu(device="L40S", precision="bf16").throughput.relative_error == 0.3
    assert on_gpu(precision="fp32").throughput.relative_error == 0.3


def test_a_question_asked_again_is_answered_without_torch():
    on_gpu()
    again = f"import sys, plimsoll; plimsoll.estimate('llama-tiny', 1, device='A100', **{SIZES}); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", again], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.long
def test_a_cpu_has_no_caching_allocator_and_no_framework():
    stage = plimsoll.estimate("llama-tiny", 1, device="laptop-CPU", **SIZES).stages[0]
    assert stage.reserved_bytes is None
    assert stage.total_bytes == stage.allocated_bytes


def test_state_divides_as_zero_says():
    whole = on_gpu()
    layouts = {zero: on_gpu(layout=f"dp=4,zero={zero},micro-batches=2") for zero in (1, 2, 3)}
    state = bytes_of(whole, "optimizer state")
    for found in layouts.values():
        assert bytes_of(found, "optimizer state") == pytest.approx(state / 4, rel=0.01)
    gradients = [bytes_of(layouts[zero], "gradients") for zero in (1, 2, 3)]
    assert gradients[0] > 1.5 * gradients[1]
    assert bytes_of(layouts[3], "parameters") < bytes_of(layouts[1], "parameters")


def test_early_stages_hold_more_micro_batches_and_all_stages_all_parameters():
    found = on_gpu(layout="pp=2,micro-batches=8", optimizer="none")
    assert [stage.in_flight for stage in found.stages] == [2, 1]
    assert bytes_of(found, "activations of other micro-batches", 0) > 0
    assert bytes_of(found, "activations of other micro-batches", 1) == 0
    whole = bytes_of(on_gpu(), "parameters")
    assert sum(bytes_of(found, "parameters", stage) for stage in (0, 1)) == whole
    assert [stage.regions for stage in found.stages] == ["model.layers.0–1", "model.layers.2–3"]
    assert found.throughput.step_seconds > sum(
        found.stages[0].seconds.forward_seconds + found.stages[0].seconds.backward_seconds for _ in range(8)
    )


def test_interleaved_stages_of_a_rank_are_counted_together():
    plain = on_gpu(layout="pp=2,micro-batches=4")
    interleaved = on_gpu(layout="pp=2,schedule=interleaved,virtual=2,micro-batches=4")
    for name in ("parameters", "optimizer state"):
        both = [sum(bytes_of(each, name, stage) for stage in (0, 1)) for each in (plain, interleaved)]
        assert both[0] == both[1], name
    assert interleaved.stages[0].regions == "model.layers.0,2"
    assert interleaved.throughput.step_seconds < plain.throughput.step_seconds


@pytest.mark.long
def test_an_interleaved_pipeline_that_fits_a_budget_fits_every_larger_one():
    how: dict[str, Any] = {"layout": "pp=2,schedule=interleaved,virtual=2,micro-batches=4", "precision": "bf16"}

    def estimated(**more: Any) -> Estimate:
        return plimsoll.estimate("llama-tiny", **how, **more)

    recomputed = max(stage.recomputed_bytes for stage in estimated().stages)
    found = [estimated(budget=int(share * recomputed)) for share in (1.03, 1.07, 1.1, 1.3)]
    assert all(each.does_fit for each in found)
    assert found[-1].throughput.step_seconds < found[0].throughput.step_seconds
    for each in found:
        for stage in each.stages:
            for plan in stage.plans:
                assert plan.predicted_peak_bytes <= stage.allocated_bytes


@pytest.mark.long
def test_logits_wait_in_the_heads_stage_alone(tmp_path: Path):
    config = dict(known_models()["llama-tiny"].config) | {"vocab_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found, alone = (
        plimsoll.estimate(str(tmp_path), 1, device="H100", sequence=1024, layout=f"{layout},micro-batches=4")
        for layout in ("pp=2,schedule=interleaved,virtual=2", "pp=4")  # the same four stages
    )
    waiting = "activations of other micro-batches"
    of_block, of_head = bytes_of(alone, waiting, 1) // 2, bytes_of(alone, "activations", 3)
    assert (alone.stages[1].in_flight, found.stages[1].in_flight) == (3, 3)
    assert of_head > 2 * of_block
    assert of_block < bytes_of(found, waiting, 1) < 1.5 * of_head, "two would be those of the head"
    assert error_of(found, waiting, 1) == error_of(alone, waiting, 1), "bytes are counted, not rounded to micro-batches"


def error_of(estimate: Estimate, name: str, stage: int) -> float:
    return next(item.relative_error for item in estimate.stages[stage].items if item.name == name)


@pytest.mark.long
def test_tensor_parallel_ranks_hold_their_share():
    whole, half = on_gpu(optimizer="none"), on_gpu(layout="tp=2,sp", optimizer="none")
    assert bytes_of(half, "parameters") == pytest.approx(bytes_of(whole, "parameters") / 2, rel=0.05)
    assert bytes_of(half, "activations") < 0.75 * bytes_of(whole, "activations")
    assert half.stages[0].seconds.communication_seconds > 0
    assert half.facts.parameters == whole.facts.parameters


def test_a_budget_gives_every_stage_a_plan_that_keeps_to_it(tmp_path: Path):
    layout = "pp=2,micro-batches=4"
    free, full = on_gpu(layout=layout), on_gpu(layout=layout, strategy="full")
    low, high = max(stage.allocated_bytes for stage in full.stages), free.stages[0].allocated_bytes
    budget = (low + high) // 2
    found = on_gpu(layout=layout, budget=budget)
    assert found.strategy == "auto"
    assert all(stage.allocated_bytes <= budget for stage in found.stages)
    plan = found.stages[0].plans[0]
    assert plan.in_flight == 2
    assert plan.predicted_peak_bytes == found.stages[0].allocated_bytes
    assert free.throughput.step_seconds < found.throughput.step_seconds
    found.save(tmp_path / "estimate.json")
    assert load_any(tmp_path / "estimate.json") == found


def test_stages_are_cut_as_given_and_the_verdict_names_both_the_device_and_the_budget():
    found = on_gpu(layout="pp=2,micro-batches=4,stages=1,3", budget="60MiB")
    assert [stage.regions for stage in found.stages] == ["model.layers.0", "model.layers.1–3"]
    shown = str(found)
    assert " of 79.1 GiB; its tensors need " in shown
    assert "of a budget of 60.0 MiB" in shown
    with pytest.raises(InvalidLayout, match="does not cut 4 blocks into 2 stages"):
        on_gpu(layout="pp=2,micro-batches=4,stages=1,2")


def test_one_rank_idles_in_no_pipeline_and_may_ask_for_zero():
    found = on_gpu(layout="zero=1,micro-batches=3")
    assert not any("idle" in note for note in found.notes)
    assert bytes_of(found, "parameters") == bytes_of(on_gpu(), "parameters")
    assert any("does not shard anything" in note for note in found.notes)


@pytest.mark.long
def test_mfu_is_also_given_as_published_figures_count_it():
    found = on_gpu(precision="fp32")
    speed, facts = found.throughput, found.facts
    per_token = 6 * facts.parameters + 12 * facts.layers * facts.hidden * 256
    assert speed.published_mfu == pytest.approx(per_token * speed.tokens_per_second / 989.4e12)
    assert " by the convention of published figures)" in str(found)
    assert on_gpu(device="cpu", precision="fp32").throughput.published_mfu is None


@pytest.mark.long
def test_published_mfu_counts_heads_by_their_own_size_and_is_left_out_for_other_kinds_of_models(tmp_path: Path):
    config = dict(known_models()["llama-tiny"].config) | {"head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = plimsoll.estimate(str(tmp_path), 1, device="H100", **SIZES)
    speed, facts = found.throughput, found.facts
    assert facts.heads * facts.head_size != facts.hidden
    per_token = 6 * facts.parameters + 12 * facts.layers * facts.heads * 128 * 256
    assert speed.published_mfu == pytest.approx(per_token * speed.tokens_per_second / 989.4e12)
    assert plimsoll.estimate("t5-tiny", device="H100").throughput.published_mfu is None


@pytest.mark.long
def test_a_strategy_that_keeps_what_full_keeps_says_so():
    full = on_gpu(precision="bf16", strategy="full")
    longer = {precision: on_gpu(precision=precision, strategy="every:2") for precision in ("bf16", "fp32")}
    assert longer["bf16"].tightest.allocated_bytes == full.tightest.allocated_bytes
    assert any("every:2 takes as much as full here" in note for note in longer["bf16"].notes)
    for other in (full, longer["fp32"]):
        assert not any("as much as full" in note for note in other.notes)


def test_a_budget_that_nothing_reaches_is_said_not_to_fit():
    found = on_gpu(budget="2MiB")
    assert found.does_fit is False
    assert "does not fit" in str(found)


def test_too_close_to_call_is_neither_yes_nor_no():
    found = on_gpu()
    error = found.tightest.error_bytes
    assert error > 0
    total = found.tightest.total_bytes
    at = {size: msgspec.structs.replace(found, device_bytes=size).does_fit for size in (total, total * 3, total // 3)}
    assert at == {total: None, total * 3: True, total // 3: False}


def test_a_model_with_its_batch_is_estimated_like_a_name():
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4)])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = plimsoll.estimate(model, torch.randn(8, 32), device="cpu", loss=lambda y: y.square().mean())
    parameters = sum(p.numel() * 4 for p in model.parameters())
    assert bytes_of(found, "parameters") == parameters
    assert bytes_of(found, "optimizer state") == 2 * parameters
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_text_names_verdict_items_peak_and_speed():
    text = str(on_gpu(layout="pp=4,micro-batches=4"))
    for part in ("fits,", "parameters", "Peak of live tensors", "Stages", "tokens/s", "MFU", "± "):
        assert part in text, part


def test_a_narrow_terminal_shows_every_number_of_every_stage_whole():
    found = on_gpu(layout="pp=4,micro-batches=4", strategy="full")
    text = io.StringIO()
    screen = Console(file=text, width=80, color_system=None)
    screen.print(render_artifact(found))
    shown = text.getvalue()
    for stage in found.stages:
        for size in (stage.total_bytes, stage.allocated_bytes, stage.unmanaged_bytes, stage.recomputed_bytes):
            assert f" {format_bytes(size)} " in shown.partition("Stages")[2]
    assert "…" not in shown
    assert "Stages of model.layers" in shown


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"layout": "dp=4,zero=3"}, "FSDP2's defaults"),
        ({"device": "MI300X"}, "without device context, library workspaces, of"),
        ({"layout": "cp=2"}, "256 tokens (128 on a rank)"),
    ],
)
def test_the_text_says_what_sharding_does_what_is_left_out_and_whose_sequence_it_is(how: dict[str, Any], words: str):
    assert words in str(on_gpu(**how))


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"layout": "tp=3"}, InvalidLayout, "attention heads"),
        ({"layout": "pp=5,micro-batches=8"}, InvalidLayout, "4 blocks"),
        ({"device": "H1000"}, UnknownDevice, "H100"),
        ({"optimizer": "adamv"}, UnknownOptimizer, "adamw"),
        ({"strategy": "everything"}, InvalidStrategy, "everything"),
        ({"strategy": "int8"}, InvalidStrategy, "do not support the strategy"),
        ({"strategy": "hybrid:2,2"}, InvalidStrategy, "do not support the strategy"),
        ({"precision": "fp8"}, InvalidOption, "unsupported"),
        ({"optimizer": "none", "has_master_weights": True}, InvalidOption, "Master weights need an optimizer"),
        ({"layout": "dp=2,ep=2"}, InvalidLayout, "needs a model with experts"),
        ({"layout": "dp=2", "device": "cpu"}, InvalidLayout, "does not have a link"),
        ({"sequence": 255, "layout": "cp=2,dp=1"}, InvalidLayout, "255"),
    ],
)
def test_wrong_questions_are_refused_with_what_would_do(how: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        plimsoll.estimate("llama-tiny", 1, **(SIZES | {"device": "H100"} | how))


def test_a_question_that_no_model_could_answer_is_refused_before_one_is_traced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(estimating, "trace_target", lambda *_, **__: pytest.fail("traced"))
    with pytest.raises(UnknownOptimizer, match="adamv"):
        plimsoll.estimate("llama-3-405b", optimizer="adamv")
    with pytest.raises(InvalidTarget, match="llama-tiney"):
        plimsoll.estimate("llama-tiney", 1)
    with pytest.raises(InvalidOption, match="not a number of samples"):
        plimsoll.estimate("llama-tiny", torch.zeros(1))


@pytest.mark.parametrize(("name", "shown"), [("adamw", "adamw (loop)"), ("adamw-fused", "adamw (fused)")])
def test_the_form_in_an_optimizers_name_holds_on_a_cpu_too(name: str, shown: str):
    assert plimsoll.estimate("llama-tiny", 1, device="cpu", optimizer=name, **SIZES).optimizer == shown


def test_convolutions_in_f32_are_measured_against_the_peak_that_they_run_at():
    model = torch.nn.Sequential(*[torch.nn.Conv2d(64, 64, 3) for _ in range(3)])
    found = plimsoll.estimate(model, torch.randn(2, 64, 32, 32), device="H100", loss=lambda y: y.square().mean())
    flops = 2 * 2 * 64 * 64 * 9 * (3 * (30**2 + 28**2 + 26**2) - 30**2)  # the batch has no gradient
    assert found.throughput.mfu == pytest.approx(flops / found.throughput.step_seconds / 494.7e12, rel=0.02)


@pytest.mark.parametrize("target", ["vit-tiny", "clip-tiny", "whisper-tiny"])
def test_a_sequence_that_is_not_known_is_not_split(target: str):
    with pytest.raises(InvalidLayout, match="cp=2 is not supported"):
        plimsoll.estimate(target, layout="cp=2")


@pytest.mark.long
def test_a_sequence_is_divided_among_context_parallel_ranks_once():
    found = on_gpu(sequence=66, layout="cp=2", optimizer="none")
    assert found.facts.sequence == 33
    assert found.throughput.tokens_per_second == pytest.approx(66 / found.throughput.step_seconds)
    with pytest.raises(InvalidLayout, match="does not divide the sequence of the batch, 66"):
        on_gpu(sequence=66, layout="cp=2,tp=2,sp")


def test_a_large_vocabulary_is_told_what_a_chunked_loss_would_take_off(tmp_path: Path):
    sizes = {"vocab_size": 32000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plimsoll.estimate(str(tmp_path / "config.json"), 1, device="laptop-CPU", sequence=128)
    assert any("plimsoll.chunked.chunk_loss" in note for note in found.notes)


@pytest.mark.parametrize("sequence", [0, -256, True, 1.5, "256"])
def test_a_sequence_that_is_no_count_is_refused(sequence: Any):
    with pytest.raises(InvalidOption, match=r"sequence=.* is not a valid count"):
        plimsoll.estimate("llama-tiny", sequence=sequence)


@pytest.mark.parametrize("wrong", [{"layout": None}, {"techniques": None}, {"precision": 3}])
def test_options_of_a_wrong_type_are_refused_by_name(wrong: dict[str, Any]):
    for search in (plimsoll.estimate, longest_sequence):
        with pytest.raises(InvalidOption, match=next(iter(wrong))):
            search("llama-tiny", **wrong)


def test_a_device_without_room_for_tensors_is_refused_for_an_automatic_budget():
    with pytest.raises(InvalidBudget, match="leaves nothing for tensors"):
        on_gpu(device="0.5GiB+58TFLOPS+504GB/s", budget="auto")


def test_f32_gradients_of_a_model_in_16_bits_need_master_weights():
    model, batch = torch.nn.Sequential(torch.nn.Linear(8, 8)).bfloat16(), torch.zeros(4, 8, dtype=torch.bfloat16)
    how: dict[str, Any] = {"loss": lambda out: out.sum(), "techniques": "gradients=fp32"}
    with pytest.raises(InvalidOption, match="gradients=fp32 with parameters in bf16 needs master weights"):
        plimsoll.estimate(model, batch, **how)
    assert plimsoll.estimate(model, batch, has_master_weights=True, **how)


def test_a_loss_is_refused_for_a_target_by_name():
    for search in (plimsoll.estimate, longest_sequence):
        with pytest.raises(InvalidOption, match="loss= would not have an effect on llama-tiny"):
            search("llama-tiny", loss=lambda out: out.logits.sum())


def test_a_models_own_dtype_must_be_the_precision_that_the_estimate_names():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    batch = torch.zeros(4, 8)

    def parameter_bytes(**how: Any) -> int:
        return bytes_of(plimsoll.estimate(model, batch, loss=lambda out: out.sum(), **how), "parameters")

    sharded: dict[str, Any] = {"precision": "fsdp-bf16", "layout": "dp=2,zero=3"}
    for how in ({"precision": "bf16"}, {"precision": "fp16"}, sharded):
        with pytest.raises(InvalidTarget, match=r"needs parameters in .*float16; those of Sequential are in float32"):
            parameter_bytes(**how)
    whole = parameter_bytes(precision="fp32")
    assert whole == parameter_bytes() == parameter_bytes(precision="bf16-mixed")
    model, batch = model.bfloat16(), batch.bfloat16()
    with pytest.raises(InvalidTarget, match="needs parameters in float32"):
        parameter_bytes(precision="fp32")
    assert parameter_bytes(precision="bf16") == whole // 2
    assert parameter_bytes(**sharded) > 0
