"""A framework's own switches within a budget: the best of all settings is found, and the framework takes it."""

from __future__ import annotations

from typing import Any

import pytest

import plimsoll
import zoo
from metering import LiveStorages
from plimsoll.errors import InvalidOption
from plimsoll.estimator.lowering import FRAMEWORKS, SwitchedModel, lower

LLAMA = SwitchedModel(layers=16, has_experts=False)
MIXTURE = SwitchedModel(layers=5, has_experts=True)


def simulated(strategy: str) -> tuple[int, float]:
    """Layers of 10 bytes and a second, a fifth of which are attention's, another the norms'."""
    name, _, argument = strategy.partition(":")
    layers = 16
    if name == "selective":
        parts = {"core": (2, 0.1), "norm": (2, 0.3), "mlp": (5, 0.5)}
        saved = [parts.get(part, (6, 0.8)) for part in argument.split("+")]
        return layers * (10 - sum(size for size, _ in saved)), layers * (3 + sum(cost for _, cost in saved))
    count = {"none": 0, "full": layers}.get(name) if not argument else int(argument)
    if name == "nth":
        count = -(-layers // int(argument))
    if name == "every":
        return 10 * int(argument) + layers // int(argument), layers * 4.0
    return layers * 10 - 9 * count, layers * 3.0 + count


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("model", [LLAMA, MIXTURE])
@pytest.mark.parametrize("budget_bytes", [1000, 120, 90, 60, 25, 10])
def test_the_setting_with_the_least_time_within_the_budget_is_chosen(framework, model, budget_bytes):
    settings = [setting for row in FRAMEWORKS[framework](model) for setting in row]
    figures = [simulated(setting.strategy) for setting in settings]
    chosen, *neighbours = lower(framework, model, budget_bytes, simulated)
    within = [seconds for peak, seconds in figures if peak <= budget_bytes]
    if within:
        assert chosen.step_seconds == min(within)
        assert chosen.peak_bytes <= budget_bytes
    else:
        assert chosen.peak_bytes == min(peak for peak, _ in figures)
    assert neighbours
    assert chosen not in neighbours


TINY: dict[str, Any] = {"sequence": 256, "device": "H100", "optimizer": "none"}


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
    with pytest.raises(InvalidOption, match="does not go with"):
        plimsoll.estimate("llama-tiny", 2, **TINY, strategy="full", export="megatron")


@pytest.mark.parametrize("model", [LLAMA, MIXTURE])
def test_megatron_takes_every_setting(model):
    configs = pytest.importorskip(
        "megatron.core.transformer.transformer_config", reason="megatron-core is no test extra"
    )
    for row in FRAMEWORKS["megatron"](model):
        for setting in row:
            config = configs.TransformerConfig(
                num_layers=model.layers,
                hidden_size=64,
                num_attention_heads=4,
                num_moe_experts=4 if model.has_experts else None,
                add_bias_linear=False,
                **setting.values,
            )
            assert {name: getattr(config, name) for name in setting.values} == setting.values


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


def test_unknown_frameworks_are_refused_with_those_that_are_known():
    with pytest.raises(InvalidOption, match="'jax'") as caught:
        plimsoll.estimate("llama-tiny", 2, **TINY, export="jax")
    assert "megatron, torchtitan, transformers" in caught.value.why
