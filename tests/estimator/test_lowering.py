"""A framework's own switches within a budget: the best of all settings is found, and the framework takes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import plimsoll
import zoo
from long_cases import some
from metering import LiveStorages
from plimsoll.errors import InvalidOption
from plimsoll.estimator.lowering import SwitchFigures, lower
from plimsoll.estimator.switches import FRAMEWORKS, SwitchedModel, SwitchValues
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.host import host_forms_of_switches
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.sending import Sending
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import strategy_choices
from plimsoll.tracing.trace import trace

LLAMA = SwitchedModel(layers=16, has_host_link=True, may_leave_shards=True)
ALONE = SwitchedModel(layers=16)
MIXTURE = SwitchedModel(layers=5, has_experts=True, has_host_link=True)
DEEPSEEK = SwitchedModel(
    layers=5, has_experts=True, has_dense=True, has_shared_experts=True, has_compressed_keys=True, has_host_link=True
)
MODELS = {"llama": LLAMA, "no link": ALONE, "mixture": MIXTURE, "deepseek": DEEPSEEK}
_SENT = {"attn_norm": 0.5, "core_attn": 1.0, "attn_proj": 0.25, "qkv_linear": 0.5, "expert_fc1": 0.5, "moe_act": 1.0}
"""Of what a layer holds, in bytes."""


def simulated(setting: SwitchValues) -> SwitchFigures:
    """Layers of 10 bytes and a second, with what is sent gone and waited for in part; shards on the host are slow."""
    peak, seconds = simulated_strategy(setting.strategy)
    host = 0.0
    if setting.sending is not None:
        each = sum(_SENT.get(name, 0.1) for name in setting.sending.modules) or 1.0
        host = 16 * each * setting.sending.fraction
        seconds += max(0.0, host - 8) * (0.2 if setting.sending.modules else 0.5)
    if setting.on_host:
        peak, seconds, host = peak - 5, seconds * 3, 5
    return SwitchFigures(int(peak - host), seconds, int(host))


def simulated_strategy(strategy: str) -> tuple[float, float]:
    """Without anything sent: a fifth of a layer is attention's, another the norms'."""
    name, _, argument = strategy.partition(":")
    layers = 16
    if name == "selective":
        parts = {"core": (2, 0.1), "norm": (2, 0.3), "mlp": (4, 0.5), "moe-act": (1, 0.05), "shared": (1, 0.2)}
        saved = [parts.get(part, (1, 0.3)) for part in argument.split("+")]
        return layers * (10 - sum(size for size, _ in saved)), layers * (3 + sum(cost for _, cost in saved))
    count = {"none": 0, "full": layers}.get(name) if not argument else int(argument)
    if name == "nth":
        count = -(-layers // int(argument))
    if name == "every":
        return 10 * int(argument) + layers // int(argument), layers * 4.0
    return layers * 10 - 9 * count, layers * 3.0 + count


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("budget_bytes", [1000, 150, 120, 90, 60, 25, 10, 1])
def test_the_setting_with_the_least_time_within_the_budget_is_chosen(framework, model, budget_bytes):
    settings = [setting for row in FRAMEWORKS[framework](model) for setting in row]
    figures = [simulated(setting) for setting in settings]
    values, (chosen, *neighbours) = lower(framework, model, budget_bytes, simulated)
    within = [each.step_seconds for each in figures if each.peak_bytes <= budget_bytes]
    assert chosen.values == values.values
    if within:
        assert chosen.step_seconds == min(within)
        assert chosen.peak_bytes <= budget_bytes
    else:
        assert chosen.peak_bytes == min(each.peak_bytes for each in figures)
    assert neighbours
    assert chosen not in neighbours


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_is_sent_where_no_link_is_known(framework):
    settings = [setting for row in FRAMEWORKS[framework](ALONE) for setting in row]
    assert not any(setting.sending or setting.on_host or "offload" in setting.values for setting in settings)
    sending = [setting for row in FRAMEWORKS[framework](LLAMA) for setting in row if setting.sending or setting.on_host]
    assert sending
    assert len({setting.key for setting in sending}) == len(sending)


def test_what_is_made_again_is_not_sent():
    for row in FRAMEWORKS["megatron"](DEEPSEEK):
        for setting in row:
            again, sent = setting.values.get("recompute_modules", []), setting.values.get("offload_modules", [])
            assert not ("core_attn" in again and "core_attn" in sent)
            assert not ("moe" in again and {"moe_act", "expert_fc1"} & set(sent))
            assert not ("attn_proj" in sent and "core_attn" not in sent)


TINY: dict[str, Any] = {"sequence": 256, "device": "H100", "optimizer": "none"}


@pytest.mark.long
def test_an_estimate_is_that_of_the_chosen_switches():
    free = plimsoll.estimate("llama-tiny", 2, **TINY)
    peak_bytes = free.stages[0].allocated_bytes
    found = plimsoll.estimate("llama-tiny", 2, **TINY, budget=int(0.7 * peak_bytes), export="megatron")
    chosen, *neighbours = found.switches
    alone = plimsoll.estimate("llama-tiny", 2, **TINY, strategy=chosen.strategy)
    for each in (found, alone):
        assert each.stages[0].allocated_bytes == chosen.peak_bytes <= 0.7 * peak_bytes
        assert each.throughput.step_seconds == pytest.approx(chosen.step_seconds)
    assert all(each.step_seconds >= chosen.step_seconds for each in neighbours if each.peak_bytes <= 0.7 * peak_bytes)
    with pytest.raises(InvalidOption, match="cannot be combined with"):
        plimsoll.estimate("llama-tiny", 2, **TINY, strategy="full", export="megatron")


@pytest.mark.parametrize("framework", some(FRAMEWORKS, 2))
def test_offloading_is_chosen_where_nothing_else_is_as_fast(framework):
    """At nine tenths of what everything kept takes, or where nothing else gets to."""
    asked = {"sequence": 512, "device": "H100", "layout": "dp=8,zero=3"}
    if framework == "megatron":
        budget_bytes = int(0.9 * plimsoll.estimate("llama-tiny", 64, **asked).stages[0].allocated_bytes)
    else:
        lowest = plimsoll.estimate("llama-tiny", 64, **asked, budget="1KiB", export=framework)
        assert not lowest.does_fit
        budget_bytes = lowest.switches[0].peak_bytes
    found = plimsoll.estimate("llama-tiny", 64, **asked, budget=budget_bytes, export=framework)
    chosen = found.switches[0]
    assert any("offload" in name for name in chosen.values)
    assert chosen.host_bytes > 0
    assert found.stages[0].allocated_bytes == chosen.peak_bytes <= budget_bytes
    assert found.throughput.step_seconds == pytest.approx(chosen.step_seconds)
    assert (
        plimsoll.estimate("llama-tiny", 64, **asked, budget=budget_bytes, export=framework).switches == found.switches
    )


@pytest.mark.long
def test_a_device_without_a_link_to_a_host_says_that_nothing_was_sent():
    found = plimsoll.estimate("llama-tiny", 2, sequence=256, device="laptop-CPU", budget="1GiB", export="transformers")
    assert any("the catalogue does not know the link between laptop-CPU and its host" in note for note in found.notes)
    assert not any("offload" in each.values for each in found.switches)


def test_two_ways_to_say_what_is_sent_are_refused():
    with pytest.raises(InvalidOption, match="offload=activations") as caught:
        plimsoll.estimate("llama-tiny", 2, **TINY, export="megatron", techniques="offload=activations")
    assert "the framework's switches decide that" in caught.value.why


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_megatron_takes_every_setting(model):
    configs = pytest.importorskip(
        "megatron.core.transformer.transformer_config", reason="megatron-core is no test extra"
    )
    kind = configs.MLATransformerConfig if model.has_compressed_keys else configs.TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    for row in FRAMEWORKS["megatron"](model):
        for setting in row:
            if "activation_offload_fraction" in setting.values.keys() - known:
                continue  # 0.16 has no fraction
            config = kind(
                num_layers=model.layers,
                hidden_size=64,
                num_attention_heads=4,
                num_moe_experts=4 if model.has_experts else None,
                moe_grouped_gemm=model.has_experts,
                moe_shared_expert_intermediate_size=64 if model.has_shared_experts else None,
                add_bias_linear=False,
                **setting.values,
            )
            assert {name: getattr(config, name) for name in setting.values} == setting.values


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 2, 3])
def test_transformers_peaks_where_its_switch_is_predicted_to(every):
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    plan = plimsoll.plan(zoo.build("llama", **sizes), zoo.words(4, 32), strategy=f"nth:{every}")
    with LiveStorages() as meter:
        model, batch = zoo.build("llama", **sizes), zoo.words(4, 32)
        model.activation_checkpointing_enable(every_n_layers=every)
        meter.watch(model)
        model(**batch).loss.backward()
    assert meter.peaks[0] == pytest.approx(plan.predicted_peak_bytes, rel=0.1)


class _Host(saved_tensors_hooks):
    """Stands in for torch's ``save_on_cpu``, which pins memory that only a machine with an accelerator has.

    Arrays of numpy are memory that the meter does not see.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__(
            lambda tensor: tensor.detach().numpy().copy(),
            lambda array: torch.empty(array.shape).copy_(torch.from_numpy(array)),
        )


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 2, 3])
def test_transformers_peaks_where_offloading_is_predicted_to(every, monkeypatch):
    """Its own switch, with the host behind it in the place of another memory: what it takes off the peak, to the byte or so."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 16}
    device, shape = find_device("H100"), (16, 64)
    step = trace(zoo.build("llama", **sizes), zoo.words(*shape))
    index = StepIndex(step, roofline_costs(step, device), host_forms_of_switches(step, device))
    choices = strategy_choices(index, f"nth:{every}")
    predicted = [run_choices(index, choices).peak_bytes, Sending().run(index, choices).peak_bytes]
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", _Host)
    measured = []
    for offload in (False, True):
        with LiveStorages() as meter:
            model, batch = zoo.build("llama", **sizes), zoo.words(*shape)
            # Random states, which no setting sends, would move the peak.
            how = {"preserve_rng_state": False, "use_reentrant": False}
            model.activation_checkpointing_enable(how, every_n_layers=every, offload=offload)
            meter.watch(model)
            model(**batch).loss.backward()
        measured.append(meter.peaks[0])
    assert measured == pytest.approx(predicted, rel=0.05)
    assert measured[0] > measured[1]
    assert predicted[0] - predicted[1] == pytest.approx(measured[0] - measured[1], rel=0.01)


def test_unknown_frameworks_are_refused_with_those_that_are_known():
    with pytest.raises(InvalidOption, match="'jax'") as caught:
        plimsoll.estimate("llama-tiny", 2, **TINY, export="jax")
    assert "megatron, torchtitan, transformers" in caught.value.why
