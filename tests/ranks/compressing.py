"""What ranks do in ``test_gradient_compression.py``: the same scenarios under DDP and FSDP2, in one order on every rank."""

from __future__ import annotations

import contextlib
import io
import itertools
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from launching import Refusal, refused
from plimsoll.distributed import CompressionHandle, compress_gradients
from plimsoll.distributed.gradient_compression import averaging
from ranks.small_models import llama

EVERYTHING: dict[str, Any] = {"exclude": (), "min_elements": 0, "min_ratio": 0}
"""Compress every parameter, whether it pays or not."""
SHARD_METHODS = ("topk:10%", "randomk:10%", "sign:16", "int8:16")
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
        [group] = model[0]._get_fsdp_state()._fsdp_param_groups
        return [group._reduce_scatter_comm, group._all_reduce_hook]


def on_two_ranks() -> dict[str, Any]:
    ddp = Replicas()
    return {
        **scenarios(ddp, METHODS),
        "fidelity": fidelity(
            ddp,
            {"none": {}, **dict.fromkeys(("topk:100%", "randomk:100%", "powersgd:1000"), EVERYTHING), "topk:5%": {}},
        ),
        "zeros": {method: zeros(ddp, method) for method in METHODS},
        "scaler": scaler(ddp),
        "unused": {method: unused(ddp, method) for method in METHODS},
        "as without": {
            "micro-batches that are summed": accumulates(ddp),
            "sparse gradients": sparse(),
            "a beginning when training is under way": late(ddp),
            "static_graph": variant(ddp, static_graph=True),
            "bucket_view": variant(ddp, gradient_as_bucket_view=True),
            "both": variant(ddp, static_graph=True, gradient_as_bucket_view=True),
            "find_unused": variant(ddp, find_unused_parameters=True),
        },
        "dtypes": dtypes(),
        "mismatches": mismatches(ddp),
        "refusals": refusals(ddp),
        "broken": broken(ddp),
        "warmup": equals(ddp, "sign:16", momentum=0.0),
    }


def on_four_ranks() -> dict[str, Any]:
    mesh, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fsdp = Shards(SHARD_SHAPES, spoilt=0, bad=torch.nan, mesh=mesh)
    within = EVERYTHING | {"replicate_group": grid["replicas"].get_group()}
    hybrid = Shards(SHARD_SHAPES, within, mesh=grid["shards"])
    cases = {"topk:100%": EVERYTHING, "randomk:100%": EVERYTHING, "sign": {"min_elements": 64}}
    whole, _ = train_llama(fsdp, None)
    # Without a method, the mean over replicas is taken here, in the order in which the hook takes it.
    summed, _ = train_llama(hybrid, "none", **within)
    group = {"replicate_group": within["replicate_group"]}
    spread = {method: options | group for method, options in cases.items()}
    return {
        **scenarios(fsdp, SHARD_METHODS),
        "fidelity": fidelity(fsdp, {"none": {}, **cases}),
        "replicas": fidelity(hybrid, {**spread, "powersgd:1000": within}, summed),
        "replicas as whole": error_of(summed, whole),
        "replicas resumed": resumed(hybrid, "powersgd:2"),
        "replicated": {method: four_replicas(method) for method in METHODS},
        "unused": unused_in_unit(fsdp),
        "narrow": narrow(fsdp),
        "refusals": shard_refusals(fsdp, grid),
    }


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


def residuals(setting: Replicas, handle: CompressionHandle) -> torch.Tensor:
    """What this rank has not sent, and its part of what the second pass has not; zeros where nothing was kept yet."""
    state = handle.state_dict()
    rows = []
    for name, shape in zip(state["shapes"], setting.shapes, strict=True):
        elements = torch.Size(shape).numel()  # shards are padded
        row = state["residual"].get(name, torch.zeros(elements)).reshape(-1)[:elements].clone()
        if name in state["owned"]:
            chunk, ranks = state["owned"][name], state["ranks"]
            padded = torch.zeros(ranks, len(chunk))
            padded[state["rank"]] = chunk * ranks  # one rank keeps of the mean `ranks` times that of one gradient
            row += padded.view(-1)[:elements]
        rows.append(row)
    return torch.cat(rows)


def train_llama(setting: Replicas, method: str | None, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    model = setting.llama()
    handle = compress_gradients(model, method, **options) if method else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        ids = torch.randint(128, (2, 16), generator=generator)
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


def zeros(setting: Replicas, method: str) -> dict[str, Any]:
    model, given = setting.made(), whole_numbers(setting)
    with compress_gradients(model, method, **setting.options):
        first = step(model, [torch.zeros(shape) for shape in setting.shapes])
        return {"zero": not first.any(), "moves": [float(step(model, next(given)).abs().sum()) for _ in range(3)]}


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
        kinds = [kind for kind in ("residual", "owned", "factor") if name in before[kind]]
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


def scaler(setting: Replicas) -> dict[str, Any]:
    model, given = setting.made(), whole_numbers(setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler_ = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    with compress_gradients(model, "topk:10%", **EVERYTHING) as handle:
        moved, scales = [], []
        for number in range(3):
            gradients = next(given)
            if number == 1 and dist.get_rank() == 0:
                gradients[0][0, 0] = torch.inf
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad(set_to_none=True)
            scaler_.scale(model(gradients)).backward()
            scaler_.step(optimizer)
            old = scaler_.get_scale()
            scaler_.update()
            unsent = residuals(setting, handle)
            factor = scaler_.get_scale() / old
            handle.rescale(factor)
            scales.append((scaler_.get_scale(), torch.equal(residuals(setting, handle), unsent * factor)))
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        return {"moved": moved, "scales": scales, "counted": handle.counters.nonfinite_steps}


def unused(setting: Replicas, method: str) -> dict[str, Any]:
    model, given = setting.made(find_unused_parameters=True), whole_numbers(setting)
    with compress_gradients(model, method, **EVERYTHING) as handle:
        step(model, next(given))
        before = handle.state_dict()
        gradients: Row = list(next(given))
        gradients[0] = None  # on no rank
        if dist.get_rank() == 0:
            gradients[1] = None  # on rank 1 only
        step(model, gradients)
        after = handle.state_dict()
        grads = [p.grad for p in model.parameters()]
        kept = all(torch.equal(before[kind]["p0"], after[kind]["p0"]) for kind in ("residual", "owned") if before[kind])
        return {
            "none": grads[0] is None,
            "kept": kept,
            "same": are_same(row_of(grads[1:])),
            "moved": bool(grads[1].any()),
        }


def unused_in_unit(setting: Replicas) -> dict[str, bool]:
    """A parameter without a gradient: the unit is reduced as torch does, and nothing that waits is touched."""
    model, plain, given = setting.made(), setting.made(), whole_numbers(setting)
    with compress_gradients(model, "sign:16", **EVERYTHING) as handle:
        step(model, next(given))
        before = residuals(setting, handle)
        gradients: Row = list(next(given))
        gradients[1] = None
        equal = torch.equal(step(model, gradients), step(plain, gradients))
        return {"equal": equal, "kept": torch.equal(before, residuals(setting, handle))}


def is_as_without(make: Callable[[], nn.Module], train: Callable[[nn.Module], list[torch.Tensor]]) -> bool:
    """Whether a training in which everything is sent ends as one that is not compressed."""
    model = make()
    with compress_gradients(model, "topk:100%", **EVERYTHING):
        compressed = train(model)
    return all_equal(compressed, train(make()))


def variant(setting: Replicas, **options: bool) -> bool:
    """Four steps under a form of DDP."""

    def train(model: nn.Module) -> list[torch.Tensor]:
        return [step(model, gradients) for gradients in itertools.islice(whole_numbers(setting), 4)]

    return is_as_without(lambda: setting.made(**options), train)


def accumulates(setting: Replicas) -> bool:
    """Two micro-batches without synchronisation and one with: a single step."""

    def train(model: Any) -> list[torch.Tensor]:
        given = whole_numbers(setting)
        model.zero_grad(set_to_none=True)
        with model.no_sync():
            model(next(given)).backward()
            model(next(given)).backward()
        model(next(given)).backward()
        return [flat(model)]

    model = setting.made()
    with compress_gradients(model, "topk:100%", **EVERYTHING) as handle:
        compressed = train(model)
        steps = handle.counters.steps
    return all_equal(compressed, train(setting.made())) and steps == 1


def sparse() -> bool:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return DistributedDataParallel(nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Linear(4, 3)))

    def train(model: nn.Module) -> list[torch.Tensor]:
        for number in range(3):
            model.zero_grad(set_to_none=True)
            model(torch.tensor([dist.get_rank() + number, 7])).sum().backward()
        return [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]

    return is_as_without(make, train)


def late(setting: Replicas) -> bool:
    """Compression that begins when training is under way and DDP has rebuilt its buckets."""
    model, plain, given = setting.made(), setting.made(), whole_numbers(setting)
    for _ in range(3):
        step(model, next(given))
    with compress_gradients(model, "topk:100%", **EVERYTHING):
        step(plain, next(given))
        return all(torch.equal(step(model, each), step(plain, each)) for each in itertools.islice(given, 2))


def dtypes() -> dict[str, Any]:
    kinds = (torch.bfloat16, torch.float32, torch.float64)
    rows, described = [], ""
    for method in ("topk:100%", None):
        model = DistributedDataParallel(Given(dtypes=kinds), bucket_cap_mb=0.0005)
        given = whole_numbers(Replicas())
        with compress_gradients(model, method, **EVERYTHING) if method else contextlib.nullcontext() as handle:
            rows.append([step(model, next(given)) for _ in range(3)])
            described = handle.describe() if handle else described
    return {"equal": all_equal(*rows), "described": described}


def resumed(setting: Replicas, method: str) -> dict[str, bool]:
    options = setting.options
    if method == "momentum":
        method, options = ("randomk:10%" if isinstance(setting, Shards) else "topk:10%"), options | {"momentum": 0.9}

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


def mismatches(setting: Replicas) -> dict[str, Refusal]:
    model = setting.made()
    with compress_gradients(model, "topk:10%", **EVERYTHING) as handle:
        step(model, next(whole_numbers(setting)))
        state = handle.state_dict()
        wrong = {
            "ranks": {"ranks": 4},
            "rank": {"rank": 1 - state["rank"]},
            "model": {"shapes": {**state["shapes"], "p1": [3, 3]}},
            "newer": {"schema_version": 99},
        }
        found = {
            what: refused(lambda c=change: handle.load_state_dict({**state, **c})) for what, change in wrong.items()
        }
        unchanged = torch.equal(residuals(setting, handle), row_of(state["residual"].values()))
        assert unchanged, "a refused state changed something"
    with compress_gradients(model, "topk:20%", **EVERYTHING) as handle:
        found["method"] = refused(lambda: handle.load_state_dict(state))
    return found


def removed(setting: Replicas) -> dict[str, Any]:
    model, plain, given = setting.made(), setting.made(), whole_numbers(setting)

    def traces() -> list[object]:
        threads = sum(thread.name.startswith("gradient-compression") for thread in threading.enumerate())
        return [threads, len(dist.distributed_c10d._world.pg_map), *map(id, setting.hooks(model))]

    def is_plain(gradients: Row) -> bool:
        return torch.equal(step(model, gradients), step(plain, gradients))

    before = traces()
    handle = compress_gradients(model, "sign:16", **EVERYTHING)
    differs = not is_plain(next(given))
    kept = bool(residuals(setting, handle).any())
    handle.remove()
    handle.remove()
    after = traces()
    gradients = next(given)
    restored = is_plain(gradients)
    with compress_gradients(model, "sign:16", **EVERYTHING):
        again = not is_plain(gradients)
    return {
        "differs": differs,
        "restored": restored,
        "again": again,
        "leaves_nothing": before == after,
        "lets_go": kept and not handle.state_dict()["residual"],
        "inactive": not handle.is_active,
    }


def refusals(setting: Replicas) -> dict[str, Refusal]:
    model, foreign, one_sided = setting.made(), setting.made(), setting.made()
    foreign.register_comm_hook(None, _somebody_elses)
    if dist.get_rank() == 1:
        one_sided.register_comm_hook(None, _somebody_elses)
    other = "topk:10%" if dist.get_rank() else "topk:20%"
    with compress_gradients(model, "topk:10%", **EVERYTHING):
        found = {"twice": refused(lambda: compress_gradients(model, "int8", **EVERYTHING))}
    return found | {
        "foreign": refused(lambda: compress_gradients(foreign, "topk:10%", **EVERYTHING)),
        "one-sided": refused(lambda: compress_gradients(one_sided, "topk:10%", **EVERYTHING)),
        "differ": refused(lambda: compress_gradients(model, other, **EVERYTHING)),
        "bare": refused(lambda: compress_gradients(nn.Linear(2, 2), "topk:10%")),
        "pattern": refused(lambda: compress_gradients(model, "topk:10%", exclude=("*attn*",))),
        "group": refused(lambda: compress_gradients(model, "topk:10%", replicate_group=dist.group.WORLD)),
    }


def _somebody_elses(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def shard_refusals(setting: Shards, grid: DeviceMesh) -> dict[str, Refusal]:
    model, hooked, own, hybrid = setting.made(), setting.made(), setting.made(), Shards(SHARD_SHAPES, mesh=grid).made()
    hooked[0].set_all_reduce_hook(lambda reduced: None)
    own[0].set_allocate_memory_from_process_group_for_comm(True)
    with compress_gradients(model, "topk:10%", **EVERYTHING) as handle:
        found = {"twice": refused(lambda: compress_gradients(model, "int8", **EVERYTHING))}
        state = handle.state_dict()
    with compress_gradients(model, "topk:10%", **EVERYTHING) as handle:
        found["layout"] = refused(lambda: handle.load_state_dict({**state, "layout": "replicas"}))
    return found | {
        "powersgd": refused(lambda: compress_gradients(model, "powersgd:4")),
        "hsdp": refused(lambda: compress_gradients(hybrid, "topk:10%")),
        "hooked": refused(lambda: compress_gradients(hooked, "topk:10%", **EVERYTHING)),
        "own": refused(lambda: compress_gradients(own, "topk:10%", **EVERYTHING)),
    }


def broken(setting: Replicas) -> dict[str, str]:
    """What backward says of an error that was met beside it, on the thread that exchanges gradients; and the step after it.

    With several buckets, of which one rank fails at one and the other at two: neither may go on to exchange the others.
    """
    model, given = setting.made(), whole_numbers(setting)
    with compress_gradients(model, "sign:16", **EVERYTHING):
        for _ in range(2):  # DDP has one bucket at first
            step(model, next(given))
        calls, offer = itertools.count(), averaging.offer

        def fail_at_first(*arguments: Any) -> Any:
            if next(calls) <= dist.get_rank():
                raise ValueError("the cause")
            return offer(*arguments)

        with unittest.mock.patch.object(averaging, "offer", fail_at_first):
            first = refused(lambda: step(model, next(given))).found
        return {"first": first, "next": refused(lambda: step(model, next(given))).found}


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


def four_replicas(method: str) -> bool:
    """DDP with gradients whose sums depend on the order of ranks."""
    model, generator = Replicas().made(), torch.Generator().manual_seed(dist.get_rank())
    with compress_gradients(model, method, **EVERYTHING):
        drawn = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(3)]
        return all(are_same(step(model, each)) for each in drawn)


def narrow(setting: Replicas) -> dict[str, Any]:
    """Reduced in bfloat16: what is sent has its bytes, and small whole numbers come through."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model, plain = setting.made(mp_policy=policy), setting.made(mp_policy=policy)
    gradients: Row = [each / 8 for each in next(whole_numbers(setting))]
    with compress_gradients(model, "randomk:100%", **EVERYTHING) as handle:
        compressed, expected = step(model, gradients), step(plain, gradients)
        return {"error": float((compressed - expected).norm() / expected.norm()), "bytes": handle.counters.sent_bytes}
