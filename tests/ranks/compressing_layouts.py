"""All that ranks do in ``test_gradient_compression.py``, in the same order on every rank."""

from __future__ import annotations

import itertools
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from launching import Refusal, refused
from plimsoll.distributed import compress_gradients
from plimsoll.distributed.gradient_compression import averaging
from ranks.compressing import (
    EVERYTHING,
    METHODS,
    SHAPES,
    SHARD_METHODS,
    SHARD_SHAPES,
    Given,
    Replicas,
    Row,
    Shards,
    all_equal,
    are_same,
    equals,
    error_of,
    fidelity,
    flat,
    residuals,
    resumed,
    row_of,
    scenarios,
    step,
    train_llama,
    whole_numbers,
)  # fmt: skip


def on_two_ranks() -> dict[str, Any]:
    ddp, whole = Replicas(), dict.fromkeys(("topk:100%", "powersgd:1000"), EVERYTHING)
    return {
        **scenarios(ddp, METHODS),
        "fidelity": fidelity(ddp, whole | {"none": {}, "topk:5%": {}}),
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
        "warmup": equals(ddp, "topk:10%", momentum=0.0),
    }


def on_four_ranks() -> dict[str, Any]:
    mesh, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fsdp = Shards(SHARD_SHAPES, spoilt=0, bad=torch.nan, mesh=mesh)
    within = EVERYTHING | {"replicate_group": grid["replicas"].get_group()}
    hybrid = Shards(SHARD_SHAPES, within, mesh=grid["shards"])
    cases = {"topk:100%": EVERYTHING, "topk:5%": {"min_elements": 64}}
    whole, _ = train_llama(fsdp, None)
    # Without a method, the mean over replicas is taken here, in the order in which the hook takes it.
    summed, _ = train_llama(hybrid, "none", **within)
    group = {"replicate_group": within["replicate_group"]}
    spread = {method: options | group for method, options in cases.items()}
    return {
        **scenarios(fsdp, SHARD_METHODS),
        "fidelity": fidelity(fsdp, {"none": {}, **cases}),
        "replicas": fidelity(hybrid, {**spread, "powersgd:1000": within}, summed),
        "planned": {
            name: error_of(
                train_llama(each, "topk:5%", is_planned=True, **options)[0], train_llama(each, "topk:5%", **options)[0]
            )
            for name, each, options in (("fidelity", fsdp, EVERYTHING), ("replicas", hybrid, within))
        },
        "replicas as whole": error_of(summed, whole),
        "replicas resumed": resumed(hybrid, "powersgd:2"),
        "replicated": {method: four_replicas(method) for method in METHODS},
        "unused": unused_in_unit(fsdp),
        "narrow": narrow(fsdp),
        "refusals": shard_refusals(fsdp, grid),
    }


def zeros(setting: Replicas, method: str) -> dict[str, Any]:
    model, given = setting.made(), whole_numbers(setting)
    with compress_gradients(model, method, **setting.options):
        first = step(model, [torch.zeros(shape) for shape in setting.shapes])
        return {"zero": not first.any(), "moves": [float(step(model, next(given)).abs().sum()) for _ in range(3)]}


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
        kept = torch.equal(before["residual"]["p0"], after["residual"]["p0"])
        return {
            "none": grads[0] is None,
            "kept": kept,
            "same": are_same(row_of(grads[1:])),
            "moved": bool(grads[1].any()),
        }


def unused_in_unit(setting: Replicas) -> dict[str, bool]:
    """A parameter without a gradient: the unit is reduced as torch does, and nothing that waits is touched."""
    model, plain, given = setting.made(), setting.made(), whole_numbers(setting)
    with compress_gradients(model, "topk:10%", **EVERYTHING) as handle:
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
    model, plain = (DistributedDataParallel(Given(dtypes=kinds), bucket_cap_mb=0.0005) for _ in range(2))
    with compress_gradients(model, "topk:100%", **EVERYTHING) as handle:
        given = itertools.islice(whole_numbers(Replicas()), 3)
        return {
            "equal": all(torch.equal(step(model, each), step(plain, each)) for each in given),
            "described": handle.describe(),
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


def refusals(setting: Replicas) -> dict[str, Refusal]:
    model, foreign, one_sided = setting.made(), setting.made(), setting.made()
    foreign.register_comm_hook(None, _somebody_elses)
    if dist.get_rank() == 1:
        one_sided.register_comm_hook(None, _somebody_elses)
    other = "topk:10%" if dist.get_rank() else "topk:20%"
    with compress_gradients(model, "topk:10%", **EVERYTHING):
        found = {"twice": refused(lambda: compress_gradients(model, "topk:20%", **EVERYTHING))}
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
        found = {"twice": refused(lambda: compress_gradients(model, "topk:20%", **EVERYTHING))}
        state = handle.state_dict()
    with compress_gradients(model, "topk:10%", **EVERYTHING) as handle:
        found["layout"] = refused(lambda: handle.load_state_dict({**state, "layout": "replicas"}))
    return found | {
        "powersgd": refused(lambda: compress_gradients(model, "powersgd:4")),
        "hsdp": refused(lambda: compress_gradients(hybrid, "topk:10%")),
        "hooked": refused(lambda: compress_gradients(hooked, "topk:10%", **EVERYTHING)),
        "own": refused(lambda: compress_gradients(own, "topk:10%", **EVERYTHING)),
    }


def broken(setting: Replicas) -> dict[str, Refusal]:
    """What backward says of an error in the exchange of gradients; and the step after it.

    With several buckets, of which one rank fails at one and the other at two: neither may go on to exchange the others.
    """
    model, given = setting.made(), whole_numbers(setting)
    with compress_gradients(model, "topk:10%", **EVERYTHING):
        for _ in range(2):  # DDP has one bucket at first
            step(model, next(given))
        calls, offer = itertools.count(), averaging.offer

        def fail_at_first(*arguments: Any) -> Any:
            if next(calls) <= dist.get_rank():
                raise ValueError("the cause")
            return offer(*arguments)

        with unittest.mock.patch.object(averaging, "offer", fail_at_first):
            first = refused(lambda: step(model, next(given)))
        return {"first": first, "next": refused(lambda: step(model, next(given)))}


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
    with compress_gradients(model, "topk:100%", **EVERYTHING) as handle:
        compressed, expected = step(model, gradients), step(plain, gradients)
        return {"error": float((compressed - expected).norm() / expected.norm()), "bytes": handle.counters.sent_bytes}
