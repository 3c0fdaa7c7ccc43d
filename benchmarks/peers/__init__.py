"""A name in, a peer out: another way to train the same model in less memory. One file per technique, one line here each.

A peer is a context manager: it takes a model, changes its repeated blocks, yields what is called in the model's place, and
puts everything back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from benchmarks.peers import checkpointing, compiled, int8_hook, none, selective

Apply = Callable[[nn.Module], AbstractContextManager[Callable[..., Any]]]


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    apply: Apply
    is_compiled: bool = False


NONE = Peer("none", none.apply)

EAGER = (
    Peer("checkpoint every block", partial(checkpointing.apply, every=1)),
    Peer("checkpoint every 2 blocks", partial(checkpointing.apply, every=2)),
    Peer("checkpoint every 4 blocks", partial(checkpointing.apply, every=4)),
    Peer("SAC, save matmul + sdpa", selective.apply_save_list),
    Peer("SAC, torchtitan's every second matmul", selective.apply_every_second_matmul),
)

LOSSY = (Peer("int8 hook on everything, a scale per row", int8_hook.apply),)

COMPILED_NONE = Peer("compile", partial(compiled.apply, memory_budget=1.0), is_compiled=True)

COMPILED = (
    *(
        Peer(f"compile, memory budget {budget}", partial(compiled.apply, memory_budget=budget), is_compiled=True)
        for budget in (0.7, 0.5, 0.3)
    ),
    Peer("compile + checkpoint every block", compiled.apply_checkpointed, is_compiled=True),
)
