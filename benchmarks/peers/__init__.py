"""A name in, a peer out: another way to train the same model in less memory. One file per technique, one line here each.

A peer is a context manager: it takes a model, changes its repeated blocks, yields what is called in the model's place, and
puts everything back.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.peers import checkpointing, int8_hook, none, offloading, remat, selective

Apply = Callable[[nn.Module], AbstractContextManager[Callable[..., Any]]]


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    apply: Apply
    needs: tuple[str, ...] = ()
    """Packages that it needs beyond torch; ``cuda`` stands for a GPU."""

    def missing(self, device: torch.device) -> str:
        """What it lacks here, or nothing."""
        lacks_gpu = "cuda" in self.needs and device.type != "cuda"
        packages = [need for need in self.needs if need != "cuda" and importlib.util.find_spec(need) is None]
        return ", ".join([*packages, *(["a GPU"] if lacks_gpu else [])])


NONE = Peer("none", none.apply)
CHECKPOINT = Peer("checkpoint every block", checkpointing.apply)
SAC = Peer("SAC, save matmul + sdpa", selective.apply_save_list)
REMAT = Peer("torch_remat, recompute every block", remat.apply, needs=("torch_remat",))
REMAT_ATTENTION = Peer(
    "torch_remat, save attention",
    partial(remat.apply, saved=("self_attn", "attn", "attention")),
    needs=("torch_remat",),
)

EAGER = (
    CHECKPOINT,
    Peer("checkpoint every 2 blocks", partial(checkpointing.apply, every=2)),
    Peer("checkpoint every 4 blocks", partial(checkpointing.apply, every=4)),
    SAC,
    Peer("SAC, torchtitan's every second matmul", selective.apply_every_second_matmul),
    REMAT,
    REMAT_ATTENTION,
)

LOSSY = (Peer("int8 hook on everything, a scale per row", int8_hook.apply),)

OFFLOADING = Peer("TRL's activation offloading", offloading.apply, needs=("trl", "accelerate", "cuda"))
CHECKPOINT_AND_OFFLOAD = Peer("checkpoint every block, offload its input", offloading.apply_checkpointed)
