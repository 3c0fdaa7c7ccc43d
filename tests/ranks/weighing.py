"""What ranks do in ``test_advise_compression.py``: ask whether compression pays, and ask in ways that are refused."""

from __future__ import annotations

import copy
import gc
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from launching import refused
from plimsoll.analysis.probe.keeping import trainable_copy
from plimsoll.analysis.probe.stream import Call
from plimsoll.artifacts.base import to_json
from plimsoll.distributed import advise_compression
from plimsoll.distributed.comm_cost.findings import TrafficFindings, validate_methods
from plimsoll.distributed.comm_cost.metering import Metering, meter_traffic
from plimsoll.distributed.comm_cost.training import Parallel
from plimsoll.distributed.gradient_compression.shards import units_of
from plimsoll.session.rendezvous.world import current_world
from plimsoll.tracing.fsdp2 import groups_of
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.ui.demo.story import VOCABULARY, read_corpus
from ranks.small_models import llama

BATCHES, BATCH, SEQUENCE = 24, 2, 32
VALIDATE_STEPS = 6


def everything() -> dict[str, Any]:
    """All scenarios of one launch, in the same order on every rank."""
    model, batches = llama_of_bytes(), make_batches()
    before = _state(model)
    losses, stages = _Counted(), list[str]()
    traffic = advise_compression(
        model,
        batches,
        methods=["none", "powersgd:2", "topk:10%"],
        loss=losses,
        measure_rounds=1,
        bucket_bytes=32 * 1024,
        progress=lambda stage, share: stages.append(stage),
    )
    trained = _validated(model, batches)
    sharded = make_sharded(model)
    return {
        "traffic": to_json(traffic),
        "stages": stages,
        "steps": losses.count,
        "trained": trained,
        "untouched": _is_as_before(model, before),
        "hooks_left": _hooks_left(model),
        "wrappers_left": _wrappers_left(model),
        "sharded": _weigh_sharded(sharded, batches),
        "twice": refused(lambda: advise_compression(model, batches, methods=["topk:0%"])),
        "no_list": refused(lambda: advise_compression(model, batches, methods=5)),
        "seed": refused(lambda: advise_compression(model, batches, seed=-1)),
        "unknown": refused(lambda: advise_compression(model, batches, methods=["zip"])),
        "nothing": refused(lambda: advise_compression(model, batches, methods=["none"])),
        "no_held_out": refused(lambda: advise_compression(model, batches[0], validate_steps=5)),
        "wrapped": refused(lambda: advise_compression(DistributedDataParallel(llama_of_bytes()), batches)),
        "unused": refused(lambda: advise_compression(_Unused(), batches)),
        "sparse": refused(lambda: advise_compression(_Unused(is_sparse=True), batches)),
        "sharded_powersgd": refused(lambda: advise_compression(sharded, batches, methods=["sign", "powersgd:2"])),
        "sharded_few_rounds": refused(lambda: advise_compression(sharded, batches, measure_rounds=2)),
        "sharded_buckets": refused(lambda: advise_compression(sharded, batches, bucket_bytes=1024)),
        "other_methods": refused(
            lambda: advise_compression(model, batches, methods=["int8", "sign"][: 1 + dist.get_rank()])
        ),
        "other_model": refused(lambda: advise_compression(llama_of_bytes(width=32 + 32 * dist.get_rank()), batches)),
        "one_rank_fails": refused(lambda: _one_rank_fails(model, batches)),
        "fails_in_exchange": _fails_later(model, batches, calls=60),
        "fails_later": _fails_later(sharded, batches, calls=12),  # the last: it closes the connections of the ranks
    }


class _Counted:
    """The model's own loss, which counts the steps that are taken."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, output: Any) -> torch.Tensor:
        self.count += 1
        loss: torch.Tensor = output.loss
        return loss


def make_sharded(model: nn.Module) -> nn.Module:
    """Another one of the same weights, under FSDP2."""
    sharded = copy.deepcopy(model)
    for layer in sharded.model.layers:
        fully_shard(layer)
    return fully_shard(sharded)


def _weigh_sharded(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """As the caller would, and then its training, which no method may be worth on this link."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = _state(model)
    with torch.no_grad():
        model(**batches[0])  # leaves parameters of the root gathered, as an evaluation does
    traffic = advise_compression(model, batches[:21], methods=["topk:1%", "int8"], measure_rounds=3)
    is_untouched = _is_as_before(model, before)
    comms = {type(groups_of(unit.module)[0]._reduce_scatter_comm) for unit in units_of(model)}
    for parameter in model.parameters():
        parameter.grad = None
    return {
        "traffic": to_json(traffic),
        "untouched": is_untouched,
        "comms": {each.__name__ for each in comms},
        "orders": _trained_sharded(model, batches),
    }


def _trained_sharded(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> list[list[float | None]]:
    """Held-out losses after training with everything sent in four ways: by FSDP2, again, compressed, with one bit each."""
    metering = _metering(model, batches[:21], ("none",), validate_steps=VALIDATE_STEPS // 2)
    with trainable_copy(model):
        parallel = Parallel(metering)
        return [parallel.held_out_losses(method, 0) for method in ("none", "none", "topk:100%", "sign:1024")]


def _metering(
    model: nn.Module, batches: list[dict[str, torch.Tensor]], methods: tuple[str, ...], **how: int
) -> Metering:
    """Training on the first sixteen batches, in turns, held against the others."""
    calls = [Call((), batch) for batch in batches]
    return Metering(
        world=current_world(),
        model=model,
        methods=methods,
        calls=calls[dist.get_rank() : 16 : dist.get_world_size()],
        held_out=calls[16:],
        loss=None,
        make_optimizer=torch.optim.AdamW,
        **how,
    )


class _Unused(nn.Module):
    """One parameter without a gradient, or one with a sparse one."""

    def __init__(self, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8, sparse=is_sparse)
        if not is_sparse:
            self.other = nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        del labels
        return self.embed(input_ids).square().mean()


def _fails_later(model: nn.Module, batches: list[dict[str, torch.Tensor]], *, calls: int) -> dict[str, Any]:
    """One rank raises in the middle of the steps, where the other waits for it: in 60 calls within a compressed exchange."""
    before = _state(model)
    made = 0

    def loss(output: Any) -> torch.Tensor:
        nonlocal made
        made += 1
        if made == calls and dist.get_rank() == 1:
            raise ArithmeticError("these were enough")
        return output.loss

    began_seconds = time.perf_counter()
    found = refused(lambda: advise_compression(model, batches, methods=["int8"], loss=loss))
    return {
        "found": found,
        "seconds": time.perf_counter() - began_seconds,
        "untouched": _is_as_before(model, before),
    }


def llama_of_bytes(width: int = 32) -> nn.Module:
    return llama(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=64, max_position_embeddings=SEQUENCE)


def make_batches() -> list[dict[str, torch.Tensor]]:
    """Real text."""
    text = torch.frombuffer(bytearray(read_corpus()), dtype=torch.uint8).long()
    pieces = text[: BATCHES * BATCH * SEQUENCE].view(BATCHES, BATCH, SEQUENCE)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def _validated(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Training with methods that are said to save half of the step: here no link is slow enough for that to be measured."""
    methods = ("none", "topk:100%", "sign:1024")
    metering = _metering(model, batches, methods, validate_steps=VALIDATE_STEPS, orders=2)
    rounds = {"none": [1.0, 1.1, 0.9], "topk:100%": [0.5, 0.4, 0.6], "sign:1024": [0.5, 0.4, 0.6]}
    with trainable_copy(model):
        figures = meter_traffic(metering)
        parallel = Parallel(metering)
        found = TrafficFindings(metering=metering, figures=figures, errors={}, rounds=rounds)
        found = replace(found, validations=validate_methods(found, parallel))
        orders = [parallel.held_out_losses("none", order) for order in (0, 1, 0)]
    return {"orders": orders, "traffic": to_json(found.traffic(optimizer="AdamW", data="text"))}


def _one_rank_fails(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> object:
    broken = [{"input_ids": batch["input_ids"][0, 0], "labels": batch["labels"]} for batch in batches]
    return advise_compression(model, broken if dist.get_rank() == 1 else batches, measure_rounds=0)


def _state(model: nn.Module) -> list[torch.Tensor | None]:
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [
        part.clone() for tensor in (*model.parameters(), *model.buffers()) for part in dense_parts(tensor.detach())
    ]
    return [*values, *gradients, torch.get_rng_state()]


def _is_as_before(model: nn.Module, before: list[torch.Tensor | None]) -> bool:
    pairs = zip(before, _state(model), strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _wrappers_left(model: nn.Module) -> int:
    gc.collect()
    return sum(isinstance(each, DistributedDataParallel) and each.module is model for each in gc.get_objects())


def _hooks_left(model: nn.Module) -> int:
    """A backward of the bare model after it was looked at: the gradients are this rank's own."""
    batch = make_batches()[dist.get_rank()]
    model(**batch).loss.backward()
    twin = llama_of_bytes()
    twin(**batch).loss.backward()
    differing = sum(
        not torch.equal(mine.grad, theirs.grad)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True)
    )
    for parameter in model.parameters():
        parameter.grad = None
    return differing
