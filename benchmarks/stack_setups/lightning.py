"""Lightning's ``Trainer`` and ``Fabric`` on small models with random weights."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import zoo
from benchmarks.stack_setups.hugging_face import llama
from benchmarks.stack_setups.set_up import Arm, SetUp, Watch
from plimsoll.integrations.lightning import PlimsollCallback

_QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class LanguageModel(lightning.LightningModule):
    """A model whose training step calls a part of it; it is optimized by Lightning or by hand."""

    def __init__(self, model: nn.Module, *, optimizer: Any = torch.optim.AdamW, by_hand: bool = False) -> None:
        super().__init__()
        self.model = model
        self.losses: list[torch.Tensor] = []
        self.summed = torch.zeros(())
        self.automatic_optimization = not by_hand
        self._optimizer = optimizer

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.model(**batch)

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch).loss
        self.losses.append(loss.detach())
        self.summed += loss.detach()
        self.log("loss", loss, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        self.log("val_loss", self(batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self._optimizer(self.parameters(), lr=1e-3)
        return made


class ShardedModel(LanguageModel):
    """Shards its parameters by FSDP2, where Lightning asks for that."""

    def configure_model(self) -> None:
        model: Any = self.model
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class _Report(lightning.Callback):
    """Tells the watch."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_train_start(self, *_: Any) -> None:
        self._watch.attached(None)

    def on_train_batch_start(self, *_: Any) -> None:
        self._watch.begins()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if (index + 1) % trainer.accumulate_grad_batches == 0:
            self._watch.stepped()


def train(
    watch: Watch,
    arm: Arm,
    steps: int,
    *,
    model: Callable[[], nn.Module] = llama,
    module: Callable[[nn.Module], LanguageModel] = LanguageModel,
    of: dict[str, Any] | None = None,
    validates: bool = False,
    checkpoint: str | None = None,
    callbacks: tuple[Any, ...] = (),
    **changes: Any,
) -> tuple[Any, LanguageModel]:
    """Train with ``Trainer``; returns it and its module."""
    own = [] if arm.budget is None else [PlimsollCallback(arm.budget)]
    made = watch.batches(**(of or {})), watch.batches(4, count=2)
    with _quiet(watch) as meter:
        if meter is not None and own:
            meter.is_aside = lambda: own[0].handle is not None and own[0].handle.is_trying
        torch.manual_seed(0)
        trained = module(model())
        if arm.own_switch:
            trained.model.gradient_checkpointing_enable()
        trainer = lightning.Trainer(
            max_steps=steps, callbacks=[*callbacks, *own, _Report(watch)], **{"devices": 1, **_QUIET, **changes}
        )
        data = [DataLoader(each, batch_size=None) for each in made]  # type: ignore[arg-type]
        trainer.fit(trained, data[0], data[1] if validates else None, ckpt_path=checkpoint)
    watch.ended(trained, [float(loss) for loss in trained.losses])
    return trainer, trained


def train_with_fabric(
    watch: Watch,
    arm: Arm,
    steps: int,
    *,
    model: Callable[[], nn.Module] = llama,
    of: dict[str, Any] | None = None,
    accumulation: int = 1,
    **changes: Any,
) -> Any:
    """Train with a loop of one's own and ``Fabric``; returns the module that is called."""
    own = [] if arm.budget is None else [PlimsollCallback(arm.budget)]
    given = watch.batches(**(of or {}))[: steps * accumulation]
    with _quiet(watch):
        fabric = lightning.Fabric(accelerator="cpu", callbacks=own, **{"devices": 1, **changes})
        if fabric.world_size > 1:
            fabric.launch()
        torch.manual_seed(0)
        made: Any = model()
        if arm.own_switch:
            made.gradient_checkpointing_enable()
        called, optimizer = fabric.setup(made, torch.optim.AdamW(made.parameters(), lr=1e-3))
        watch.attached(called._forward_module)
        losses = []
        for number, batch in enumerate(given, 1):
            with fabric.no_backward_sync(called, enabled=number % accumulation != 0):
                loss = called(**batch)["loss"]
                fabric.backward(loss / accumulation)
            losses.append(float(loss.detach()))
            if number % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
                watch.stepped()
    watch.ended(made, losses)
    return called


def train_sharded(watch: Watch, arm: Arm, steps: int, **changes: Any) -> tuple[Any, LanguageModel]:
    """Train on two ranks under FSDP2."""
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return train(watch, arm, steps, devices=2, module=ShardedModel, strategy=strategy, **changes)


@contextlib.contextmanager
def _quiet(watch: Watch) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.nullcontext() if watch.meter is None else watch.meter as meter:
        warnings.simplefilter("ignore")
        yield meter


def _set_up(stack: str, of_model: str, shapes: str, run: Callable[..., Any], ranks: int = 1, **changes: Any) -> SetUp:
    accumulation = changes.get("accumulate_grad_batches", changes.get("accumulation", 1))
    precision = changes.get("precision", "32-true")
    return SetUp(
        stack=stack,
        model=of_model,
        precision="fp32" if precision == "32-true" else precision,
        accumulation=accumulation,
        shapes=shapes,
        ranks=ranks,
        train=functools.partial(run, **changes),
    )


GPT2: Callable[[], nn.Module] = functools.partial(zoo.build, "gpt2", n_layer=4, n_embd=64)
VIT: Callable[[], nn.Module] = functools.partial(zoo.build, "vit", num_hidden_layers=6, hidden_size=64)
_PICTURES = {"of": {"rows": 32, "name": "vit"}}
_LENGTHS = {"of": {"lengths": (24, 40, 64)}}
_MIXED = {"precision": "bf16-mixed"}

SET_UPS = (
    _set_up("Lightning", "Llama", "8 x 64", train),
    _set_up("Lightning", "GPT-2", "8 x 64", train, model=GPT2, **_MIXED),
    _set_up("Fabric", "Llama", "8 x 64", train_with_fabric),
    _set_up("Lightning", "Llama", "8 x 64", train, accumulate_grad_batches=2, gradient_clip_val=1.0),
    _set_up("Fabric", "ViT", "32 pictures", train_with_fabric, model=VIT, **_PICTURES),
    _set_up("Lightning", "Llama", "8 x 64", train, precision="bf16-true"),
    _set_up("Fabric", "GPT-2", "8 x 64", train_with_fabric, model=GPT2, accumulation=2, **_MIXED),
    _set_up("Lightning", "Llama, by hand", "8 x 64", train, module=functools.partial(LanguageModel, by_hand=True)),
    _set_up("Lightning", "Llama", "8 x 24 to 64", train, **_LENGTHS),
    _set_up("Lightning DDP", "Llama", "8 x 64", train, 2, devices=2, strategy="ddp"),
    _set_up("Lightning FSDP2", "Llama", "8 x 64", train_sharded, 2),
    _set_up("Lightning FSDP2", "Llama", "8 x 64", train_sharded, 2, accumulate_grad_batches=2),
    _set_up("Lightning FSDP2", "Llama", "8 x 64", train_sharded, 2, **_MIXED),
    _set_up("Lightning DDP", "GPT-2", "8 x 64", train, 2, model=GPT2, devices=2, strategy="ddp", **_MIXED),
    _set_up("Fabric DDP", "Llama", "8 x 64", train_with_fabric, 2, devices=2, strategy="ddp"),
    _set_up(
        "Fabric DDP", "GPT-2", "8 x 64", train_with_fabric, 2, model=GPT2, devices=2, strategy="ddp", accumulation=2
    ),
)
