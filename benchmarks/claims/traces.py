"""A GPT or Llama of given sizes in, the fake trace of one rank's step and what a layer of it holds out.

A layer is the difference between models of three and of two blocks, so embeddings, head and loss cancel out. Attention is
``eager`` where a paper's was: matrix product, softmax, dropout, matrix product, each a kernel of its own.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.trace import Category, Trace
from plimsoll.estimator.local_rank.local import localised
from plimsoll.planning.choice import Choice
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.step import RegionView, StepIndex
from plimsoll.planning.strategies import strategy_choices
from plimsoll.tracing.trace import trace

A100 = "A100-80GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A decoder and its micro-batch: ``intermediate`` makes it a Llama (RMS norm, gated MLP), else it is a GPT."""

    hidden: int
    heads: int
    layers: int
    sequence: int = 2048
    batch: int = 1
    vocabulary: int = 51200
    intermediate: int = 0
    attention: str = "eager"

    @property
    def sbh(self) -> int:
        """Elements of one hidden state."""
        return self.sequence * self.batch * self.hidden


KORTHIKANTI = {
    "22B": Sizes(hidden=6144, heads=64, layers=48, batch=4),
    "175B": Sizes(hidden=12288, heads=96, layers=96),
    "530B": Sizes(hidden=20480, heads=128, layers=105),
    "1T": Sizes(hidden=25600, heads=160, layers=128),
}
"""Korthikanti et al. 2022, table 3: sequence 2048, vocabulary 51200, one micro-batch (of 4 samples at 22B)."""


def build(sizes: Sizes) -> nn.Module:
    """The model on the meta device, in bfloat16, in training mode."""
    import transformers

    if sizes.intermediate:
        config = transformers.LlamaConfig(
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.heads,
            max_position_embeddings=sizes.sequence,
            vocab_size=sizes.vocabulary,
            attn_implementation=sizes.attention,
            use_cache=False,
        )
        kind = transformers.LlamaForCausalLM
    else:
        config = transformers.GPT2Config(
            n_embd=sizes.hidden,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            n_positions=sizes.sequence,
            vocab_size=sizes.vocabulary,
            activation_function="gelu_pytorch_tanh",
            attn_implementation=sizes.attention,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        kind = transformers.GPT2LMHeadModel
    with torch.device("meta"):
        model: nn.Module = kind._from_config(config, dtype=torch.bfloat16)
    return model.train()


@cache
def traced(sizes: Sizes, layout: Layout = Layout(), device: str = A100) -> Trace:  # noqa: B008 - frozen
    """One rank's step with the device's kernels and fake tensors."""
    model = build(sizes)
    tokens = torch.zeros(sizes.batch, sizes.sequence, dtype=torch.long)
    with contextlib.ExitStack() as stack:
        if layout.tp > 1:
            stack.enter_context(localised(model, tp=layout.tp, sequence_parallel=layout.sequence_parallel))
        return trace(model, {"input_ids": tokens, "labels": tokens}, device_name=device)


def costs_of(step: Trace, layout: Layout, device: str = A100) -> Costs:
    """Seconds of every op by the roofline, of collectives by the model of links."""
    return roofline_costs(step, find_device(device), layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one micro-batch holds between forward and backward, and the seconds of its step."""

    bytes: int
    seconds: float
    simulation: Simulation


_REGATHER = "regather+"
"""Before a strategy's name: the gathered inputs of column-parallel layers are let go as well, as Megatron-LM does."""


_ONE_OF = "one-of:"
"""``one-of:k``: every k-th region is recomputed from its input, the others keep everything."""


def choices(index: StepIndex, strategy: str) -> tuple[Choice, ...]:
    """The choice of every region under a strategy, under ``regather+`` and a strategy, or under ``one-of:k``."""
    if strategy.startswith(_ONE_OF):
        size = int(strategy.removeprefix(_ONE_OF))
        return tuple(
            Choice(view.everything if position % size else view.nothing) for position, view in enumerate(index.views)
        )
    chosen = strategy_choices(index, strategy.removeprefix(_REGATHER))
    if not strategy.startswith(_REGATHER):
        return chosen
    return tuple(
        Choice(choice.kept - _gathered(view), choice.packed, choice.is_boundary_dropped)
        for view, choice in zip(index.views, chosen, strict=True)
    )


def _gathered(view: RegionView) -> frozenset[int]:
    ops = view.graph.ops
    return frozenset(v for v in view.droppable if ops[view.graph.values[v].producer].name.endswith("all_gather"))


def held(sizes: Sizes, strategy: str = "none", layout: Layout = Layout(), device: str = A100) -> Held:  # noqa: B008
    """Bytes between forward and backward, without parameters and batch, and the seconds of the step under a strategy."""
    step = traced(sizes, layout, device)
    index = StepIndex(step, costs_of(step, layout, device))
    simulation = run_choices(index, choices(index, strategy))
    batch_bytes = sum(storage.bytes for storage in step.storages if storage.category is Category.INPUT)
    return Held(
        bytes=int(simulation.curve[index.handover]) - index.lasting_bytes - batch_bytes,
        seconds=simulation.seconds,
        simulation=simulation,
    )


def model(sizes: Sizes, strategy: str = "none", device: str = A100) -> Held:
    """All its layers at once."""
    return held(sizes, strategy, device=device)


def layer(sizes: Sizes, strategy: str = "none", layout: Layout = Layout(), device: str = A100) -> Held:  # noqa: B008
    """One block: the difference between a model of three and one of two."""
    more, fewer = (held(replace(sizes, layers=count), strategy, layout, device) for count in (3, 2))
    return Held(bytes=more.bytes - fewer.bytes, seconds=more.seconds - fewer.seconds, simulation=more.simulation)
