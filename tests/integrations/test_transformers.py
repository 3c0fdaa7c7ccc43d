"""A budget in a ``Trainer``: kept in every step by a meter from outside, with the same bits, and gone when training is over."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from unittest import mock

import pytest
import torch
import transformers
from benchmarks.stack_setups.hugging_face import (
    dpo_trainer,
    grpo_trainer,
    plain_trainer,
    quantized_llama,
    sft_trainer,
    train,
)
from benchmarks.stack_setups.set_up import Arm, Watch
from torch import nn

import plimsoll
import zoo
from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor, InvalidModel, InvalidOption, RankFailed, UnsupportedFramework
from plimsoll.integrations import transformers as transformers_integration
from plimsoll.integrations.budgeted import Framework
from plimsoll.integrations.transformers import PlimsollCallback
from unchanged import snapshot

pytestmark = pytest.mark.long

SETTINGS = {
    "bf16, accumulation, evaluation": (
        plain_trainer,
        {"bf16": True, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    ),
    "lengths grouped, cache, smooth labels": (
        plain_trainer,
        {
            "lengths": (24, 40, 64),
            "train_sampling_strategy": "group_by_length",
            "use_cache": True,
            "label_smoothing_factor": 0.1,
        },
    ),
    "SFT, packed, LoRA": (sft_trainer, {"packing": True, "peft": {}}),
    "SFT, 4 bit": (sft_trainer, {"model": functools.partial(quantized_llama, 4)}),
    "DPO with a reference": (dpo_trainer, {}),
    "GRPO": (grpo_trainer, {}),
}


@pytest.mark.parametrize(("make", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_a_training_under_a_budget_keeps_to_it_and_to_every_bit(make, settings, tmp_path):
    """The framework's own checkpointing is set, and taken over."""
    make = functools.partial(make, str(tmp_path), **settings)
    without, within = Watch(LiveStorages()), Watch(LiveStorages())
    train(make, without, Arm())
    budget_bytes = int(0.75 * max(without.peaks))
    trainer = train(make, within, Arm(own_switch=True, budget=budget_bytes))
    assert max(within.peaks) <= budget_bytes
    assert within.losses == without.losses
    assert all(map(torch.equal, within.weights, without.weights))
    told = [row for row in trainer.state.log_history if "plimsoll/measured_peak_bytes" in row]
    assert 0 < told[-1]["plimsoll/measured_peak_bytes"] <= budget_bytes
    assert sorted(name for name in told[-1] if name.startswith("plimsoll/")) == [
        "plimsoll/budget_bytes",
        "plimsoll/measured_peak_bytes",
        "plimsoll/planned_overhead_percent",
        "plimsoll/planned_peak_bytes",
        "plimsoll/unmanaged_peak_bytes",
    ]


@pytest.mark.parametrize("peft", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_an_adapter_takes_no_more_than_under_the_switch_of_the_stack(peft, tmp_path):
    """With a random state for each dropout, and DoRA's weight-sized temporaries, it was refused at that switch's peak."""
    make = functools.partial(sft_trainer, str(tmp_path), peft=peft)
    own, within = Watch(LiveStorages()), Watch(LiveStorages())
    train(make, own, Arm(own_switch=True))
    train(make, within, Arm(budget=max(own.peaks)))
    assert 0 < max(within.peaks) <= max(own.peaks)
    assert within.losses == own.losses
    assert all(map(torch.equal, within.weights, own.weights))


def test_offloading_of_activations_is_taken_over(tmp_path):
    """TRL's own needs an accelerator: here something else stands in its place."""
    trainer = sft_trainer(str(tmp_path), [PlimsollCallback("1GiB")], max_steps=1)
    offloading = torch.autograd.graph.save_on_cpu()
    trainer.maybe_activation_offload_context = offloading
    with mock.patch.object(type(offloading), "__enter__", side_effect=AssertionError):
        trainer.train()
    assert trainer.maybe_activation_offload_context is offloading


def test_trainer_and_model_are_left_as_they_were(tmp_path):
    trainers = [plain_trainer(str(tmp_path), callbacks, max_steps=2) for callbacks in ([], [PlimsollCallback("1GiB")])]
    for trainer in trainers:
        trainer.model.activation_checkpointing_enable()
        trainer.train()
    without, within = trainers
    assert structure(within.model) == structure(without.model)
    assert sorted(vars(within)) == sorted(vars(without))
    assert within.model.is_activation_checkpointing


def structure(model: nn.Module) -> dict[str, object]:
    """What a callback could have changed of a model beside its weights; hooks have numbers, which are never the same."""
    found = snapshot(model)
    return {
        what: [len(each) for each in it] if what.endswith(" hooks") and isinstance(it, list) else it
        for what, it in found.items()
        if "object" not in what and not isinstance(it, torch.Tensor)
    }


def test_a_budget_below_the_floor_stops_training_before_anything_changes(tmp_path, caplog):
    trainer = plain_trainer(str(tmp_path), [PlimsollCallback("2MiB")])
    before = [each.clone() for each in trainer.model.parameters()]
    with pytest.raises(BudgetBelowFloor, match="smallest reachable peak"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert not {"log", "training_step"} & set(vars(trainer))
    assert "smallest reachable peak" in caplog.text


def test_a_base_of_8_bits_takes_what_its_own_checkpointing_takes(tmp_path):
    """Its products put inputs on ``ctx`` that nothing reads, and its scales are in no parameter."""
    from bitsandbytes.autograd._functions import MatMul8bitFp, MatMul8bitLt

    before = [MatMul8bitFp.forward, MatMul8bitLt.forward]
    make = functools.partial(sft_trainer, str(tmp_path), model=functools.partial(quantized_llama, 8))
    without, own, within = (Watch(LiveStorages()) for _ in range(3))
    train(make, without, Arm())
    train(make, own, Arm(own_switch=True))
    budget_bytes = int(1.01 * max(own.peaks))
    train(make, within, Arm(budget=budget_bytes))
    assert 0 < max(within.peaks) <= budget_bytes < 0.7 * max(without.peaks)
    assert within.losses == without.losses
    assert all(map(torch.equal, within.weights, without.weights))
    assert before == [MatMul8bitFp.forward, MatMul8bitLt.forward]


@pytest.mark.parametrize("budget", ["256KiB", "2MiB"])
def test_a_floor_names_what_other_models_hold_on_top(budget, tmp_path):
    trainer = plain_trainer(str(tmp_path), [PlimsollCallback(budget)])
    trainer.teacher = zoo.build("llama")
    held_bytes = sum(each.nbytes for each in (*trainer.teacher.parameters(), *trainer.teacher.buffers()))
    with pytest.raises(BudgetBelowFloor, match="other models") as refused:
        trainer.train()
    assert str(held_bytes) in refused.value.next


def test_half_the_batch_is_taken_where_the_whole_does_not_fit(tmp_path):
    trainer = plain_trainer(str(tmp_path), [PlimsollCallback("4.5MiB")], auto_find_batch_size=True, max_steps=2)
    trainer.train()
    assert trainer.state.train_batch_size < 8
    assert trainer.state.global_step == 2


def test_a_training_that_is_resumed_keeps_to_every_bit(tmp_path):
    saved = functools.partial(plain_trainer, str(tmp_path), save_strategy="steps", save_steps=1, max_steps=3)
    whole, resumed = Watch(), Watch(LiveStorages())
    train(saved, whole, Arm())
    train(saved, resumed, Arm(budget=10 * 2**20), resume=str(tmp_path / "checkpoint-1"))
    assert resumed.losses == whole.losses
    assert all(map(torch.equal, resumed.weights, whole.weights))
    assert max(resumed.peaks) <= 10 * 2**20


def test_two_callbacks_are_refused_when_training_begins(tmp_path):
    trainer = plain_trainer(str(tmp_path), [PlimsollCallback("1GiB"), PlimsollCallback("1GiB")])
    with pytest.raises(InvalidOption, match="2 PlimsollCallbacks"):
        trainer.train()


def test_a_model_that_the_trainer_compiles_takes_a_plan_for_compiled_code(tmp_path):
    make = functools.partial(plain_trainer, str(tmp_path), model=zoo.TinyLanguageModel, torch_compile=True, max_steps=1)
    watch = Watch()
    told = train(make, watch, Arm(budget=1_040_000)).state.log_history[0]
    assert watch.losses
    assert 0 < told["plimsoll/planned_peak_bytes"] <= 1_040_000


def test_a_model_that_has_a_budget_already_is_refused(tmp_path):
    trainer = plain_trainer(str(tmp_path), [PlimsollCallback("1GiB")])
    with (
        plimsoll.attach(trainer.model, "1GiB"),
        pytest.raises(InvalidModel, match="LlamaForCausalLM already has a budget"),
    ):
        trainer.train()


VERSIONS = {
    "5.23.0": True,
    "5.30.0.dev0": True,
    "4.55.4": False,
    "6.0.0rc1": False,
    "0.20.0": False,
    "5": True,
    "0.19.0rc1": True,
    "0.3rc1": False,
    "0.dev": False,
}


@pytest.mark.parametrize(("found", "is_accepted"), VERSIONS.items(), ids=VERSIONS)
def test_a_version_that_was_not_tried_is_refused_with_those_that_were(found, is_accepted):
    tried = Framework("transformers", "4.56", "5.23") if found[0] != "0" else Framework("axolotl", "0.19", "0.19")
    with (
        mock.patch("importlib.metadata.version", return_value=found),
        contextlib.nullcontext() if is_accepted else pytest.raises(UnsupportedFramework, match=found) as caught,
    ):
        tried.check()
    assert is_accepted or f"tried with {tried.name} {tried.oldest} to {tried.newest}" in caught.value.why


def test_a_version_that_nothing_tells_is_refused_unless_the_module_does(monkeypatch):
    module = types.ModuleType("from_sources")
    monkeypatch.setitem(sys.modules, "from_sources", module)
    with pytest.raises(UnsupportedFramework, match="The version of from-sources cannot be determined"):
        Framework("from-sources", "1.0", "1.2").check()
    module.__version__ = "1.1"
    Framework("from-sources", "1.0", "1.2").check()


class _Within(transformers.TrainerCallback):
    """Trains another model, with the same callback, while one is trained."""

    def __init__(self, folder: str, shared: PlimsollCallback) -> None:
        self._make = functools.partial(plain_trainer, folder, [shared], max_steps=1)

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self._make().train()


def test_a_callback_serves_trainers_in_turn_but_not_one_within_another(tmp_path):
    shared = PlimsollCallback("1GiB")
    for _ in range(2):
        plain_trainer(str(tmp_path), [shared], max_steps=1).train()
    with pytest.raises(InvalidOption, match="still used by another Trainer"):
        plain_trainer(str(tmp_path), [shared, _Within(str(tmp_path), shared)], max_steps=1).train()


def test_an_option_that_attach_does_not_know_is_refused_at_once():
    with pytest.raises(TypeError, match="colour"):
        PlimsollCallback("1GiB", colour="blue")
    with pytest.raises(TypeError, match="optimizer"):
        PlimsollCallback("1GiB", optimizer=torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1))


class _Sample(dict):
    """Counts how often its values are looked at."""

    looks = 0

    def __iter__(self):
        _Sample.looks += 1
        return super().__iter__()

    def values(self):
        _Sample.looks += 1
        return super().values()


def test_samples_of_a_data_set_are_not_searched_for_modules(tmp_path):
    trainer = plain_trainer(str(tmp_path), [])
    trainer.reward_funcs, trainer.ref_model, trainer.samples = (
        [zoo.build("llama")],
        zoo.build("llama"),
        [_Sample(a=[1])],
    )
    found = list(transformers_integration._modules_of(trainer))
    assert {id(trainer.reward_funcs[0]), id(trainer.ref_model), id(trainer.model)} <= set(map(id, found))
    assert _Sample.looks == 0


class _Interrupt(transformers.TrainerCallback):
    """Raises between two training steps, where only the trainer sees it."""

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt


def test_remove_restores_what_an_interrupt_between_steps_leaves(tmp_path):
    callback = PlimsollCallback("1GiB")
    trainer = plain_trainer(str(tmp_path), [callback, _Interrupt()], max_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    callback.remove()
    callback.remove()
    assert not {"log", "training_step"} & set(vars(trainer))
    plimsoll.attach(trainer.model, "1GiB").remove()


def test_a_budget_that_is_too_small_on_another_rank_is_out_of_memory_too(tmp_path):
    """With ``auto_find_batch_size``, all ranks have to take a smaller batch."""
    callback = PlimsollCallback("1GiB")
    floor = BudgetBelowFloor("budget 1 MiB is too small.", why="of the peak", next="2 MiB")
    arguments = plain_trainer(str(tmp_path), [], auto_find_batch_size=True).args

    def step() -> torch.Tensor:
        raise RankFailed("Rank 1 failed.", why="of its budget", next="2 MiB", ranks=(1,)) from floor

    with pytest.raises(torch.OutOfMemoryError, match=r" out of memory\."):
        callback._step(step, arguments)
