"""A budget in Lightning's ``Trainer`` and ``Fabric``: kept in every step by a meter from outside, with the same bits."""

from __future__ import annotations

import functools

import lightning
import pytest
import torch
from benchmarks.stack_setups.lightning import LanguageModel, train, train_with_fabric
from benchmarks.stack_setups.set_up import Arm, Watch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import plimsoll
import zoo
from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor, InvalidModel, InvalidOption
from plimsoll.integrations.lightning import PlimsollCallback

pytestmark = pytest.mark.long

CLOSURES = functools.partial(torch.optim.LBFGS, max_iter=2, history_size=2)
SETTINGS = {
    "bf16, accumulation, clipping, validation": {
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "validates": True,
        "val_check_interval": 2,
    },
    "by hand": {"module": functools.partial(LanguageModel, by_hand=True)},
    "closures that run more than once": {"module": functools.partial(LanguageModel, optimizer=CLOSURES)},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_training_under_a_budget_keeps_to_it_and_to_every_bit(settings):
    """The model's own checkpointing is set, and taken over; what the training step sums up counts every batch once."""
    without, within = Watch(LiveStorages()), Watch(LiveStorages())
    plain, module = train(without, Arm(), 3, **settings)
    budget_bytes = int(0.85 * max(without.peaks))
    trainer, managed = train(within, Arm(own_switch=True, budget=budget_bytes), 3, **settings)
    assert max(within.peaks) <= budget_bytes
    assert within.losses == without.losses
    assert all(map(torch.equal, within.weights, without.weights))
    assert torch.equal(managed.summed, module.summed)
    logged = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("plimsoll/")}
    assert 0 < logged["plimsoll/measured_peak_bytes"] <= budget_bytes
    assert trainer.callback_metrics == {**plain.callback_metrics, **logged}
    assert "training_step" not in vars(trainer.strategy)
    assert sorted(vars(managed)) == sorted(vars(module))
    assert not any("forward" in vars(each) for each in managed.modules())
    assert managed.model.is_gradient_checkpointing


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed", "accumulation": 2}], ids=str)
def test_a_loop_with_fabric_keeps_to_its_budget_and_to_every_bit(settings):
    without, within = Watch(LiveStorages()), Watch(LiveStorages())
    train_with_fabric(without, Arm(), 4, **settings)
    budget_bytes = int(0.85 * max(without.peaks))
    train_with_fabric(within, Arm(own_switch=True, budget=budget_bytes), 4, **settings)
    assert max(within.peaks) <= budget_bytes
    assert within.losses == without.losses
    assert all(map(torch.equal, within.weights, without.weights))


def test_a_training_that_is_resumed_keeps_to_every_bit(tmp_path):
    saves = ModelCheckpoint(dirpath=str(tmp_path), every_n_train_steps=1, save_top_k=-1, filename="{step}")
    train(Watch(), Arm(budget=2**30), 2, enable_checkpointing=True, callbacks=(saves,))
    without, within = Watch(), Watch()
    for watch, arm in ((without, Arm()), (within, Arm(budget=2**30))):
        train(watch, arm, 3, checkpoint=str(tmp_path / "step=2.ckpt"))
    assert without.losses == within.losses != []
    assert all(map(torch.equal, within.weights, without.weights))


class _Compiled(LanguageModel):
    """Compiles its model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model.compile()


def test_a_model_that_is_compiled_takes_a_plan_for_compiled_code():
    watch = Watch()
    trainer, _ = train(watch, Arm(budget=1_040_000), 2, model=zoo.TinyLanguageModel, module=_Compiled)
    told = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert told["loss"] == pytest.approx(sum(watch.losses) / 2)
    assert 0 < told["plimsoll/planned_peak_bytes"] <= 1_040_000
    assert 0 < told["plimsoll/measured_peak_bytes"] <= 1_040_000


class Sized(LanguageModel):
    """Has a batch size, for a finder."""

    batch_size = 4

    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(1)
        rows = [zoo.words(1, 64)["input_ids"][0] for _ in range(64)]
        return DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> list[DataLoader]:
        return []


def fit(module: lightning.LightningModule, *callbacks: lightning.Callback, **changes: object) -> None:
    settings = {"max_steps": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(callbacks=list(callbacks), **{**settings, "enable_progress_bar": False, **changes})
    trainer.fit(module)


def sized(**changes: object) -> Sized:
    return Sized(zoo.build("llama", hidden_size=64, intermediate_size=256), **changes)


def test_a_finder_of_batch_sizes_finds_the_largest_that_fits_the_budget(tmp_path):
    module = sized()
    finder = BatchSizeFinder(steps_per_trial=1, init_val=4, max_trials=4)
    fit(module, finder, PlimsollCallback("6MiB"), default_root_dir=tmp_path)
    assert module.batch_size == 8


def test_a_budget_below_the_floor_stops_training_before_anything_changes():
    module = sized()
    before = [each.clone() for each in module.parameters()]
    with pytest.raises(BudgetBelowFloor, match="smallest reachable peak"):
        fit(module, PlimsollCallback("1MiB"))
    assert all(map(torch.equal, before, module.parameters()))
    assert "log" not in vars(module)


def test_optimizing_several_modules_by_hand_is_refused():
    module = sized(by_hand=True)
    module.judge = nn.Linear(3, 3)
    with pytest.raises(InvalidModel, match="optimizes manually") as caught:
        fit(module, PlimsollCallback("1GiB"))
    assert "it trains 2 modules" in caught.value.why


def test_a_module_that_has_a_budget_already_is_refused():
    module = sized()
    with plimsoll.attach(module.model, "1GiB"), pytest.raises(InvalidModel, match="Sized already has a budget: model"):
        fit(module, PlimsollCallback("1GiB"))


def test_two_callbacks_are_refused():
    with pytest.raises(InvalidOption, match="2 PlimsollCallbacks"):
        fit(sized(), PlimsollCallback("1GiB"), PlimsollCallback("2GiB"))
    fabric = lightning.Fabric(
        accelerator="cpu", devices=1, callbacks=[PlimsollCallback("1GiB"), PlimsollCallback("2GiB")]
    )
    with pytest.raises(InvalidOption, match="2 PlimsollCallbacks"):
        fabric.setup(sized().model)


def test_a_callback_of_fabric_is_for_one_module_at_a_time():
    fabric = lightning.Fabric(accelerator="cpu", devices=1, callbacks=[PlimsollCallback("1GiB")])
    first = fabric.setup(sized().model)
    with pytest.raises(InvalidOption, match="still used by another _FabricModule"):
        fabric.setup(sized().model)
    del first
    fabric.setup(sized().model)


class _Within(lightning.Callback):
    """Trains another module, with the same callback, while one is trained."""

    def __init__(self, shared: PlimsollCallback) -> None:
        self._shared = shared

    def on_train_batch_end(self, *_: object) -> None:
        fit(sized(), self._shared)


def test_a_callback_serves_trainers_in_turn_but_not_one_within_another():
    shared = PlimsollCallback("1GiB")
    for _ in range(2):
        fit(sized(), shared, max_steps=1)
    with pytest.raises(InvalidOption, match="still used by another Trainer"):
        fit(sized(), shared, _Within(shared))
