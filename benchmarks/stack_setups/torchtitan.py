"""torchtitan's ``Trainer`` on its debug model with fewer layers, less its devices and data: it trains on accelerators only.

torchtitan is imported where a trainer is made: without it these rows are left out.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.stack_setups.set_up import Arm, SetUp, Watch

_VOCABULARY = 2048


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """In the place of flexible attention, which has no backward on a CPU."""
    heads = (each.transpose(1, 2) for each in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


class _Small:
    """Makes its model and steps as torchtitan's trainer does."""

    def __init__(self, policy: Any, layers: int = 2) -> None:
        from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
        from torchtitan.models.llama3 import model_registry

        torch.manual_seed(0)
        config = model_registry("debugmodel", attn_backend="flex").model
        del config.layers[layers:]
        for layer in config.layers:
            layer.attention.rope.max_seq_len = 128
        model = config.build()
        model.init_weights()
        for layer in model.layers.values():
            layer.attention.inner_attention.forward = _causal
        self.policy = None if policy is None else policy.build(dump_folder="")
        if self.policy is not None:
            self.policy.apply(model)
        self.model_parts = [model.train()]
        self.optimizers = SimpleNamespace(optimizers=[torch.optim.AdamW(model.parameters(), lr=1e-3)])
        self.parallel_dims = SimpleNamespace(pp_enabled=False)
        self.watch = Watch()
        self.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=_VOCABULARY)).build()
        self.loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True

    def train_step(self, micro_batches: Any) -> list[float]:
        """Losses of the micro-batches of one step."""
        [optimizer], [model] = self.optimizers.optimizers, self.model_parts
        losses = []
        for tokens in micro_batches:
            self.watch.begins()
            hidden = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
            loss, _ = self.loss(hidden, tokens, torch.tensor(tokens.numel() * len(micro_batches)))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    def close(self) -> None:
        """Nothing is open."""


@functools.cache
def small_trainer() -> Any:
    """The class, which derives from torchtitan's."""
    from torchtitan.trainer import Trainer

    return type("SmallTrainer", (_Small, Trainer), {})


def train(
    watch: Watch, arm: Arm, steps: int, *, own: str = "FullAC", layers: int = 2, accumulation: int = 1, rows: int = 4
) -> Any:
    """Train under a policy: none, torchtitan's ``own``, or one in bytes; returns the trainer."""
    from torchtitan.distributed import activation_checkpoint

    from plimsoll.integrations.torchtitan import BudgetAC

    policy = getattr(activation_checkpoint, own).Config() if arm.own_switch else None
    policy = policy if arm.budget is None else BudgetAC.Config(memory_budget=arm.budget)
    with contextlib.nullcontext() if watch.meter is None else watch.meter:
        trainer = small_trainer()(policy, layers)
        if watch.meter is not None and arm.budget is not None:
            made = trainer.policy
            watch.meter.is_aside = lambda: made.handle is not None and made.handle.is_trying
        trainer.watch = watch
        watch.attached(None)
        torch.manual_seed(1)
        losses: list[float] = []
        for _ in range(steps):
            losses += trainer.train_step([torch.randint(0, _VOCABULARY, (rows, 128)) for _ in range(accumulation)])
            watch.stepped()
        trainer.close()
    watch.ended(trainer.model_parts[0], losses)
    return trainer


def _set_up(own: str, **changes: Any) -> SetUp:
    return SetUp(
        stack=f"torchtitan {own}",
        model="Llama 3, debug",
        accumulation=changes.get("accumulation", 1),
        shapes="4 x 128",
        requires="torchtitan",
        train=functools.partial(train, own=own, **changes),
    )


SET_UPS = (
    _set_up("FullAC", layers=4),
    _set_up("SelectiveAC", layers=4),
    _set_up("FullAC", layers=4, accumulation=2),
)
