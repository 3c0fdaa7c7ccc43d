"""torchtitan's activation checkpointing, by a budget: its debug model with fewer layers, in its own Trainer class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor, InvalidOption

trainers = pytest.importorskip(
    "torchtitan.trainer", reason="torchtitan is no test extra: it needs tensorboard and torchdata"
)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    heads = (each.transpose(1, 2) for each in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


class Small(trainers.Trainer):  # type: ignore[name-defined, misc]
    """A trainer that makes its model and steps as torchtitan does, without its devices and data."""

    def __init__(self, policy: Any, meter: LiveStorages) -> None:
        from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
        from torchtitan.models.llama3 import model_registry

        torch.manual_seed(0)
        config = model_registry("debugmodel", attn_backend="flex").model
        del config.layers[2:]
        for layer in config.layers:
            layer.attention.rope.max_seq_len = 128
        model = config.build()
        model.init_weights()
        for layer in model.layers.values():  # flexible attention has no backward on a CPU
            layer.attention.inner_attention.forward = causal
        if policy is not None:
            made = policy.build(dump_folder="")
            made.apply(model)
            meter.is_aside = lambda: made.handle is not None and made.handle.is_trying
        self.model_parts = [model.train()]
        self.optimizers = SimpleNamespace(optimizers=[torch.optim.AdamW(model.parameters(), lr=1e-3)])
        self.parallel_dims = SimpleNamespace(pp_enabled=False)
        self.meter = meter
        self.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=2048)).build()
        self.loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True

    def train_step(self, tokens: Any) -> Any:
        self.meter.begin()
        [optimizer], [model] = self.optimizers.optimizers, self.model_parts
        hidden = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
        loss, _ = self.loss(hidden, tokens, torch.tensor(tokens.numel()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def close(self) -> None:
        pass


def trained(policy: Any = None) -> tuple[list[float], list[torch.Tensor], list[int], Small]:
    with LiveStorages() as meter:
        trainer = Small(policy, meter)
        torch.manual_seed(1)
        losses = [trainer.train_step(torch.randint(0, 2048, (4, 128))) for _ in range(4)]
        trainer.close()
    return losses, [each.detach().clone() for each in trainer.model_parts[0].parameters()], meter.peaks, trainer


def budgeted(budget: int | str) -> Any:
    from plimsoll.integrations.torchtitan import BudgetAC

    return BudgetAC.Config(memory_budget=budget)


def test_a_budget_is_kept_in_every_step_to_every_bit():
    losses, weights, peaks, _ = trained()
    budget_bytes = int(0.85 * max(peaks))
    found, kept, within, trainer = trained(budgeted(budget_bytes))
    assert max(within) <= budget_bytes
    assert found == losses
    assert all(map(torch.equal, kept, weights))
    assert not {"train_step", "close"} & set(vars(trainer))


def test_a_budget_below_the_floor_stops_the_first_step():
    with pytest.raises(BudgetBelowFloor):
        trained(budgeted("1MiB"))


def test_a_policy_without_a_trainer_is_refused():
    with pytest.raises(InvalidOption, match="outside of a torchtitan Trainer"):
        budgeted("1GiB").build().apply(torch.nn.Linear(2, 2))


def test_a_pipeline_is_refused():
    with LiveStorages() as meter:
        trainer = Small(budgeted("1GiB"), meter)
    trainer.parallel_dims.pp_enabled = True
    with pytest.raises(InvalidOption, match="pipeline"):
        trainer.train_step(None)
