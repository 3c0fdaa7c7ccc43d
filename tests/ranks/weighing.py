"""What ranks do in ``test_advise_compression.py``: ask what compression costs, and ask in ways that are refused."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from launching import Refusal, refused
from plimsoll.artifacts.base import to_json
from plimsoll.distributed import advise_compression, compress_gradients
from plimsoll.distributed.gradient_compression.shards import units_of
from plimsoll.tracing.fsdp2 import groups_of
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.ui.demo.story import VOCABULARY, read_corpus
from ranks.small_models import llama

BATCHES, BATCH, SEQUENCE = 8, 2, 32

Batches = list[dict[str, torch.Tensor]]


def everything() -> dict[str, Any]:
    """All scenarios of one launch, in the same order on every rank."""
    model, batches = llama_of_bytes(), make_batches()
    wrapped, sharded = replicate(model), shard(model)
    found = {
        "replicas": _weighed(wrapped, batches, methods=["none", "powersgd:2", "topk:10%"], measure_rounds=2),
        "views": _weighed(
            replicate(model, gradient_as_bucket_view=True), batches, methods=["topk:10%"], measure_rounds=1
        ),
        "as before": _gradients(wrapped, batches, replicate(copy.deepcopy(model))),
        "shards": _weighed(sharded, batches, measure_rounds=2, bytes_per_second=1e6),
        "comms": {type(groups_of(unit.module)[0]._reduce_scatter_comm).__name__ for unit in units_of(sharded)},
        "sparse": to_json(advise_compression(replicate(_Sparse()), batches, methods=["topk:1%"], measure_rounds=1)),
    }
    wrong: dict[str, Callable[[], object]] = {
        "no share": lambda: advise_compression(wrapped, batches, methods=["topk:0%"]),
        "seed": lambda: advise_compression(wrapped, batches, seed=-1),
        "unknown": lambda: advise_compression(wrapped, batches, methods=["int8"]),
        "rounds": lambda: advise_compression(wrapped, batches, measure_rounds=0),
        "rate": lambda: advise_compression(wrapped, batches, bytes_per_second=0.0),
        "bare": lambda: advise_compression(model, batches),
        "sharded powersgd": lambda: advise_compression(sharded, batches, methods=["topk:1%", "powersgd:2"]),
        "compressed": lambda: _compressed_already(wrapped, batches),
        "other methods": lambda: advise_compression(
            wrapped, batches, methods=["topk:1%", "topk:2%"][: 1 + dist.get_rank()]
        ),
        "other model": lambda: advise_compression(replicate(_Wide(32 + 32 * dist.get_rank())), batches),
        "one rank fails": lambda: advise_compression(
            wrapped, [{"no": batches[0]["labels"]}] if dist.get_rank() else batches
        ),
    }
    refusals: dict[str, Refusal] = {name: refused(call) for name, call in wrong.items()}
    # The last ones: they close the connections of the ranks.
    failures = {"later": _fails_later(sharded, batches, calls=9)}
    return found | {"refusals": refusals, "failures": failures}


def _weighed(model: nn.Module, batches: Batches, **how: Any) -> dict[str, Any]:
    """The answer, and whether everything that the model holds is as before, with gradients that wait."""
    model(**batches[0]).loss.backward()
    before, stages = _state(model), list[str]()
    with torch.no_grad():
        model(**batches[0])  # leaves parameters of a sharded root gathered, as an evaluation does
    traffic = advise_compression(model, batches, progress=lambda stage, share: stages.append(stage), **how)
    untouched = _is_as_before(model, before)
    model.zero_grad(set_to_none=True)
    return {"traffic": to_json(traffic), "untouched": untouched, "stages": stages}


def _gradients(model: nn.Module, batches: Batches, other: nn.Module) -> bool:
    """Whether a model that was weighed gets the gradients of one that was not."""
    for each in (model, other):
        each.zero_grad(set_to_none=True)
        each(**batches[dist.get_rank()]).loss.backward()
    return all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def _compressed_already(model: nn.Module, batches: Batches) -> object:
    with compress_gradients(model, "topk:1%"):
        return advise_compression(model, batches)


def _fails_later(model: nn.Module, batches: Batches, *, calls: int) -> dict[str, Any]:
    """One rank raises in the middle of the steps, where the other waits for it."""
    before, made = _state(model), itertools.count(1)

    def loss(output: Any) -> torch.Tensor:
        if next(made) == calls and dist.get_rank() == 1:
            raise ArithmeticError("these were enough")
        loss_: torch.Tensor = output.loss
        return loss_

    began_seconds = time.perf_counter()
    found = refused(lambda: advise_compression(model, batches, methods=["topk:1%"], loss=loss))
    seconds = time.perf_counter() - began_seconds
    return {"found": found, "seconds": seconds, "untouched": _is_as_before(model, before)}


class _Sparse(nn.Module):
    """An embedding with sparse gradients, which are sent as they are, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 64, sparse=True)
        self.layer = nn.Linear(64, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        del labels
        return self.layer(self.table(input_ids)).square().mean()


class _Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.Sequential(nn.Linear(32, 32), *(nn.ReLU() for _ in range(width // 32)))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        del labels
        return self.layers(self.table(input_ids)).square().mean()


def replicate(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=1 / 32, **options)


def shard(model: nn.Module) -> nn.Module:
    sharded = copy.deepcopy(model)
    for layer in sharded.model.layers:
        fully_shard(layer)
    return fully_shard(sharded)


def llama_of_bytes(width: int = 32) -> nn.Module:
    return llama(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=64, max_position_embeddings=SEQUENCE)


def make_batches() -> Batches:
    """Real text."""
    text = torch.frombuffer(bytearray(read_corpus()), dtype=torch.uint8).long()
    pieces = text[: BATCHES * BATCH * SEQUENCE].view(BATCHES, BATCH, SEQUENCE)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def _state(model: nn.Module) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Every gradient and the numbers of everything that is held."""
    held = [*model.parameters(), *model.buffers(), *(each.grad for each in model.parameters())]
    return [
        *(
            (each, None if each is None else torch.cat([part.flatten() for part in dense_parts(each.detach())]))
            for each in held
        ),
        (None, torch.get_rng_state()),
    ]


def _is_as_before(model: nn.Module, before: list[tuple[torch.Tensor | None, torch.Tensor | None]]) -> bool:
    """Whether the same tensors are there, with the same numbers."""
    pairs = zip(before, _state(model), strict=True)
    return all(old is new and (numbers is now or torch.equal(numbers, now)) for (old, numbers), (new, now) in pairs)
