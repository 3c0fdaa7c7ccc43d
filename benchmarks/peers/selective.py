"""Selective activation checkpointing: `torch.utils.checkpoint` of every block with a list of ops whose outputs are saved.

Source: `create_selective_checkpoint_contexts` of PyTorch; the rule "every second matmul" is torchtitan's
(``torchtitan/distributed/activation_checkpoint.py``), with ``addmm`` counted as a matmul, because GPT-2 and ViT use it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.peers import checkpointing

_ATEN = torch.ops.aten
_MATMULS = (_ATEN.mm.default, _ATEN.addmm.default)
_SAVED = (
    *_MATMULS,
    _ATEN.bmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
)


def apply_save_list(model: nn.Module) -> AbstractContextManager[nn.Module]:
    """Save what matrix products, convolutions and attention return; recompute the rest."""
    return checkpointing.apply(model, context_fn=partial(create_selective_checkpoint_contexts, list(_SAVED)))


def apply_every_second_matmul(model: nn.Module) -> AbstractContextManager[nn.Module]:
    """Save attention and every second matrix product; recompute the rest."""
    return checkpointing.apply(model, context_fn=_every_second_matmul_contexts)


def _every_second_matmul_contexts() -> Any:
    counts: Counter[bool] = Counter()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _MATMULS:
            counts[ctx.is_recompute] += 1
            if counts[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
