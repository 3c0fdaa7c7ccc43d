"""What ranks do in ``test_advise_compression.py``: ask whether compression pays, and ask in ways that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plimsoll.artifacts.store import to_json
from plimsoll.demo.corpus import VOCABULARY, read_corpus
from plimsoll.distributed import advise_compression
from plimsoll.errors import PlimsollError
from plimsoll.pipeline.compressing import Found, make_metering, validate_methods
from plimsoll.pipeline.traffic_metering import meter_traffic
from plimsoll.pipeline.traffic_training import Parallel, Training
from plimsoll.probing.keeping import trainable_copy
from plimsoll.probing.stream import Call
from plimsoll.ranks.world import current_world

BATCHES, BATCH, SEQUENCE = 24, 2, 32
VALIDATE_STEPS = 6


def everything() -> dict[str, Any]:
    """All scenarios of one launch, in the same order on every rank."""
    model, batches = make_model(), make_batches()
    before = _state(model)
    traffic = advise_compression(
        model,
        batches,
        methods=["none", "powersgd:2", "topk:10%"],
        measure_rounds=1,
        bucket_bytes=32 * 1024,
    )
    trained = _validated(model, batches)
    return {
        "traffic": to_json(traffic),
        "trained": trained,
        "untouched": all(_same(*pair) for pair in zip(before, _state(model), strict=True)),
        "hooks_left": _hooks_left(model),
        "twice": _found(lambda: advise_compression(model, batches, methods=["topk:0%"])),
        "unknown": _found(lambda: advise_compression(model, batches, methods=["zip"])),
        "nothing": _found(lambda: advise_compression(model, batches, methods=["none"])),
        "no_held_out": _found(lambda: advise_compression(model, batches[0], validate_steps=5)),
        "one_rank_fails": _found(lambda: _one_rank_fails(model, batches)),
    }


def make_model() -> nn.Module:
    """A small transformers Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def make_batches() -> list[dict[str, torch.Tensor]]:
    """Real text."""
    text = torch.frombuffer(bytearray(read_corpus()), dtype=torch.uint8).long()
    pieces = text[: BATCHES * BATCH * SEQUENCE].view(BATCHES, BATCH, SEQUENCE)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def _validated(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Training with methods that are said to save half of the step: here no link is slow enough for that to be measured."""
    world = current_world()
    assert world is not None
    calls = [Call((), batch) for batch in batches]
    training = Training(
        calls=calls[dist.get_rank() : 16 : dist.get_world_size()],
        held_out=calls[16:],
        loss=None,
        make_optimizer=torch.optim.AdamW,
        steps=VALIDATE_STEPS,
        orders=2,
    )
    methods = ("none", "topk:100%", "sign:1024")
    rounds = {"none": [1.0, 1.1, 0.9], "topk:100%": [0.5, 0.4, 0.6], "sign:1024": [0.5, 0.4, 0.6]}
    with trainable_copy(model):
        metering = make_metering(world, model, training, methods)
        measured = meter_traffic(metering)
        parallel = Parallel(metering)
        found = Found(metering=metering, training=training, measured=measured, errors={}, rounds=rounds, validations={})
        found = replace(found, validations=validate_methods(found, parallel))
        orders = [parallel.held_out_losses(training, "none", order) for order in (0, 1, 0)]
    return {
        "orders": orders,
        "traffic": to_json(found.traffic(optimizer="AdamW", data="text", bucket_bytes=None)),
    }


def _one_rank_fails(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> object:
    broken = [{"input_ids": batch["input_ids"][0, 0], "labels": batch["labels"]} for batch in batches]
    return advise_compression(model, broken if dist.get_rank() == 1 else batches, measure_rounds=0)


def _state(model: nn.Module) -> list[torch.Tensor | None]:
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    return [*values, *gradients, torch.get_rng_state()]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _hooks_left(model: nn.Module) -> int:
    """A backward of the bare model after it was looked at: the gradients are this rank's own."""
    batch = make_batches()[dist.get_rank()]
    model(**batch).loss.backward()
    twin = make_model()
    twin(**batch).loss.backward()
    differing = sum(
        not torch.equal(mine.grad, theirs.grad)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True)
    )
    for parameter in model.parameters():
        parameter.grad = None
    return differing


def _found(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except PlimsollError as error:
        return type(error).__name__, error.found
    except Exception as error:  # noqa: BLE001 - a rank tells what it met
        return type(error).__name__, str(error)
    return "", ""
