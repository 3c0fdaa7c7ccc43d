"""What ranks of DDP and of FSDP2 both do in ``test_gradient_compression.py``."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import plimsoll
from plimsoll.distributed import CompressionHandle, compress_gradients
from plimsoll.tracing.fsdp2 import groups_of
from ranks.small_models import llama

EVERYTHING: dict[str, Any] = {"exclude": (), "min_elements": 0, "min_ratio": 0}
"""Compress every parameter, whether it pays or not."""
SHARD_METHODS = ("topk:10%", "topk:40%")
METHODS = (*SHARD_METHODS, "powersgd:1", "powersgd:3")
SHAPES = ((12, 10), (10, 12), (12, 10), (7,), (3, 2, 5))
SHARD_SHAPES = ((12, 10), (8, 6), (7,), (5, 3))
"""The last two do not divide by four: their shards are padded."""

Row = list[torch.Tensor | None]


class Given(nn.Module):
    """A model whose gradients are what it is called with; a parameter that is given ``None`` is not used."""

    def __init__(
        self, shapes: tuple[tuple[int, ...], ...] = SHAPES, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    ) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape, dtype=dtypes[number % len(dtypes)])))

    def forward(self, gradients: Row) -> torch.Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(p * g.to(p.dtype)).sum().float() for p, g in pairs if g is not None]).sum()


@dataclass(frozen=True)
class Replicas:
    """Models under DDP."""

    shapes: tuple[tuple[int, ...], ...] = SHAPES
    options: dict[str, Any] = field(default_factory=lambda: EVERYTHING)
    spoilt: int = 2
    """The parameter in whose gradient the last rank has a number that is none."""
    bad: float = torch.inf

    def made(self, **options: Any) -> nn.Module:
        return DistributedDataParallel(Given(), bucket_cap_mb=0.0005, **options)

    def llama(self) -> nn.Module:
        return DistributedDataParallel(llama(), bucket_cap_mb=0.02)

    def hooks(self, model: nn.Module) -> list[object]:
        return []


@dataclass(frozen=True)
class Shards(Replicas):
    """Models under FSDP2 on a mesh."""

    mesh: DeviceMesh | None = None

    def made(self, **options: Any) -> nn.Module:
        model = nn.Sequential(Given(self.shapes))
        fully_shard(model[0], mesh=self.mesh, **options)
        return fully_shard(model, mesh=self.mesh, **options)

    def llama(self) -> nn.Module:
        model = llama()
        for layer in model.model.layers:
            fully_shard(layer, mesh=self.mesh)
        return fully_shard(model, mesh=self.mesh)

    def hooks(self, model: Any) -> list[object]:
        [group] = groups_of(model[0])
        return [group._reduce_scatter_comm, group._all_reduce_hook]


def scenarios(setting: Replicas, methods: tuple[str, ...]) -> dict[str, Any]:
    """What is asked of both layouts."""
    return {
        "sums": {method: sums(setting, method) for method in methods},
        "nonfinite": {method: nonfinite(setting, method) for method in methods},
        "resumed": {method: resumed(setting, method) for method in (*methods, "momentum")},
        "removed": removed(setting),
        "momentum": equals(setting, "topk:100%", momentum=0.5),
    }


def whole_numbers(setting: Replicas) -> Iterator[list[torch.Tensor]]:
    """Gradients of one rank for ever: small whole numbers, whose sums and halves are exact."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        yield [torch.randint(-64, 65, shape, generator=generator).float() for shape in setting.shapes]


def step(model: nn.Module, gradients: Row) -> torch.Tensor:
    """One backward; all averaged gradients in one row."""
    model.zero_grad(set_to_none=True)
    model(gradients).backward()
    return flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    return row_of([whole_of(p.grad).float() for p in model.parameters() if p.grad is not None])


def whole_of(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.detach()


def row_of(parts: Any) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def all_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def are_same(row: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row.contiguous())
    return all(torch.equal(each.view(torch.int32), rows[0].view(torch.int32)) for each in rows)


def mean_of(row: torch.Tensor) -> torch.Tensor:
    total = row.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def error_of(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    row, reference = row_of(found.values()), row_of(expected.values())
    return float((row - reference).norm() / reference.norm())


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= 1e-6 * other.norm())


def residuals(setting: Replicas, handle: CompressionHandle) -> torch.Tensor:
    """What this rank has not sent; zeros where nothing was kept yet."""
    state = handle.state_dict()
    rows = []
    for name, shape in zip(state["shapes"], setting.shapes, strict=True):
        elements = torch.Size(shape).numel()  # shards are padded
        rows.append(state["residual"].get(name, torch.zeros(elements)).reshape(-1)[:elements].clone())
    return torch.cat(rows)


def train_llama(
    setting: Replicas, method: str | None, *, is_planned: bool = False, **options: Any
) -> tuple[dict[str, torch.Tensor], Any]:
    model = setting.llama()
    handle = compress_gradients(model, method, **options) if method else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        ids = torch.randint(128, (2, 16), generator=generator)
        if is_planned:
            plimsoll.plan(model, {"input_ids": ids, "labels": ids}, "1GiB", strategy="full")
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
    gradients = {name.removeprefix("module."): whole_of(p.grad).clone() for name, p in model.named_parameters()}
    told = {"described": handle.describe(), "ratio": handle.counters.ratio} if handle else {}
    if handle:
        handle.remove()
    return gradients, told


def fidelity(setting: Replicas, cases: dict[str, Any], expected: dict[str, torch.Tensor] | None = None) -> Any:
    expected = train_llama(setting, None)[0] if expected is None else expected
    found: dict[str, Any] = {}
    for method, options in cases.items():
        gradients, told = train_llama(setting, method, **options)
        found[method] = told | {
            "same": are_same(row_of(gradients.values())),
            "equal": [name for name, each in gradients.items() if torch.equal(each, expected[name])],
            "close": [name for name, each in gradients.items() if _is_close(each, expected[name])],
            "names": list(gradients),
            "error": error_of(gradients, expected),
        }
    return found


def sums(setting: Replicas, method: str) -> dict[str, Any]:
    model, given = setting.made(), whole_numbers(setting)
    sent = expected = torch.zeros((), dtype=torch.float64)
    same = []
    with compress_gradients(model, method, **setting.options) as handle:
        for _ in range(20):
            gradients = next(given)
            averaged = step(model, gradients)
            same.append(are_same(averaged))
            sent = sent + averaged
            expected = expected + mean_of(row_of(gradients))
        kept = mean_of(residuals(setting, handle))
    return {"same": all(same), "off": float((sent + kept - expected).abs().max()), "moved": float(sent.abs().max())}


def nonfinite(setting: Replicas, method: str) -> dict[str, Any]:
    """On every rank: of which gradients all is void, and of which nothing."""
    model, given = setting.made(), whole_numbers(setting)
    with compress_gradients(model, method, **setting.options) as handle:
        step(model, next(given))
        before = handle.state_dict()
        gradients = next(given)
        if dist.get_rank() == dist.get_world_size() - 1:
            gradients[setting.spoilt].view(-1)[-1] = setting.bad
        step(model, gradients)
        after = handle.state_dict()
        name = list(before["shapes"])[setting.spoilt]
        kinds = [kind for kind in ("residual", "factor") if name in before[kind]]
        local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        void = [number for number, each in enumerate(local) if each.isnan().any()]
        return {
            "void": void,
            "is_whole": all(bool(local[number].isnan().all()) for number in void),
            "others": all(bool(each.isfinite().all()) for number, each in enumerate(local) if number not in void),
            "kept": bool(kinds) and all(torch.equal(before[kind][name], after[kind][name]) for kind in kinds),
            "next_is_finite": bool(step(model, next(given)).isfinite().all()),
            "counted": handle.counters.nonfinite_steps,
        }


def resumed(setting: Replicas, method: str) -> dict[str, bool]:
    options = setting.options
    if method == "momentum":
        method, options = "topk:10%", options | {"momentum": 0.9}

    def run(model: nn.Module, given: Iterator[list[torch.Tensor]], steps: int) -> list[torch.Tensor]:
        return [step(model, next(given)) for _ in range(steps)]

    model = setting.made()
    with compress_gradients(model, method, **options) as handle:
        first, counters = run(model, whole_numbers(setting), 6), handle.counters
    model, given = setting.made(), whole_numbers(setting)
    with compress_gradients(model, method, **options) as handle:
        again = run(model, given, 3)
        saved = io.BytesIO()
        torch.save(handle.state_dict(), saved)
    model = setting.made()
    with compress_gradients(model, method, **options) as handle:
        saved.seek(0)
        handle.load_state_dict(torch.load(saved))
        rest = run(model, given, 3)
        return {
            "repeats": all_equal(first[:3], again),
            "continues": all_equal(first[3:], rest),
            "counts": handle.counters == counters,
            "same": are_same(rest[-1]),
        }


def removed(setting: Replicas) -> dict[str, Any]:
    model, plain, given = setting.made(), setting.made(), whole_numbers(setting)

    def traces() -> list[object]:
        threads = sum(thread.name.startswith("gradient-compression") for thread in threading.enumerate())
        return [threads, len(dist.distributed_c10d._world.pg_map), *map(id, setting.hooks(model))]

    def is_plain(gradients: Row) -> bool:
        return torch.equal(step(model, gradients), step(plain, gradients))

    before = traces()
    handle = compress_gradients(model, "topk:10%", **EVERYTHING)
    differs = not is_plain(next(given))
    kept = bool(residuals(setting, handle).any())
    handle.remove()
    handle.remove()
    after = traces()
    gradients = next(given)
    restored = is_plain(gradients)
    with compress_gradients(model, "topk:10%", **EVERYTHING):
        again = not is_plain(gradients)
    return {
        "differs": differs,
        "restored": restored,
        "again": again,
        "leaves_nothing": before == after,
        "lets_go": kept and not handle.state_dict()["residual"],
        "inactive": not handle.is_active,
    }


def equals(setting: Replicas, method: str, momentum: float) -> list[bool]:
    """Two steps of warm-up and two compressed ones; whether each gave what SGD's momentum gives without compression."""
    model, plain, given = setting.made(), setting.made(), whole_numbers(setting)
    velocity, equal = torch.zeros(()), []
    with compress_gradients(model, method, warmup_steps=2, momentum=momentum, **EVERYTHING):
        for _ in range(4):
            gradients = next(given)
            velocity = momentum * velocity + step(plain, gradients)
            equal.append(torch.equal(step(model, gradients), velocity))
    return equal
