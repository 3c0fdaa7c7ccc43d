"""What four ranks do in ``test_compressed_shards.py``: FSDP2, with and without replicas of its shards."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from plimsoll.distributed import CompressionHandle, compress_gradients
from ranks import compressing
from ranks.compressing import EVERYTHING, are_same, llama, mean_of, refused

METHODS = ("topk:10%", "randomk:10%", "sign:16", "int8:16")
SHAPES = ((12, 10), (8, 6), (7,), (5, 3))
"""The last two do not divide by four: their shards are padded."""


class Given(nn.Module):
    """A unit and its root, whose gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.forward = self._products
        for number, shape in enumerate(SHAPES):
            self.inner.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))

    def _products(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        parameters = self.inner.parameters()
        used = [(p * g.to(p.dtype)).sum() for p, g in zip(parameters, gradients, strict=True) if g is not None]
        return torch.stack(used).sum()

    def forward(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        return self.inner(gradients)


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = Given()
    fully_shard(model.inner, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole_numbers(rank: int) -> Callable[[], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return lambda: [torch.randint(-64, 65, shape, generator=generator).float() for shape in SHAPES]


def step(model: nn.Module, gradients: list[torch.Tensor | None]) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    model(gradients).backward()
    return torch.cat([p.grad.full_tensor().reshape(-1) for p in model.parameters() if p.grad is not None])


def on_four_ranks() -> dict[str, Any]:
    mesh, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return {
        "fidelity": fidelity(mesh, None),
        "replicas": fidelity(grid["shards"], grid["replicas"].get_group()),
        "sums": {method: sums(mesh, method) for method in METHODS},
        "nonfinite": {method: nonfinite(mesh, method) for method in METHODS},
        "unused": unused(mesh),
        "replicated": {method: four_replicas(method) for method in compressing.METHODS},
        "resumed": {method: resumed(mesh, method) for method in (*METHODS, "momentum")},
        "replicas_resumed": resumed(grid["shards"], "powersgd:2", grid["replicas"].get_group()),
        "narrow": narrow(mesh),
        "momentum": momentum(mesh),
        "removed": removed(mesh),
        "refusals": refusals(mesh, grid),
    }


def train_llama(mesh: DeviceMesh, method: str | None, group: dist.ProcessGroup | None, **options: Any) -> Any:
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    handle = compress_gradients(model, method, replicate_group=group, **options) if method else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        ids = torch.randint(128, (2, 16), generator=generator)
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
    return gradients, handle


def fidelity(mesh: DeviceMesh, group: dist.ProcessGroup | None) -> dict[str, Any]:
    # Without a method, the mean over replicas is taken here, in the order in which the hook takes it.
    expected, _ = train_llama(mesh, "none" if group else None, group)
    found: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {
        "none": {},
        "topk:100%": EVERYTHING,
        "randomk:100%": EVERYTHING,
        "sign": {"min_elements": 64},
    }
    if group is not None:
        cases["powersgd:1000"] = EVERYTHING
        whole, _ = train_llama(init_device_mesh("cpu", (4,)), None, None)
        found["as_whole"] = _error(expected, whole)
    for method, options in cases.items():
        gradients, handle = train_llama(mesh, method, group, **options)
        row = torch.cat([each.reshape(-1) for each in gradients.values()])
        found[method] = {
            "same": are_same(row),
            "equal": [name for name, each in gradients.items() if torch.equal(each, expected[name])],
            "names": list(gradients),
            "error": _error(gradients, expected),
            "ratio": handle.counters.ratio,
        }
    return found


def _error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    rows = [torch.cat([each.reshape(-1) for each in gradients.values()]) for gradients in (found, expected)]
    return float((rows[0] - rows[1]).norm() / rows[1].norm())


def residuals(handle: CompressionHandle) -> torch.Tensor:
    """What this rank has not sent, unsharded and without the padding of shards."""
    kept = []
    for shape, residual in zip(SHAPES, handle.state_dict()["residual"].values(), strict=True):
        kept.append(residual.reshape(-1)[: torch.Size(shape).numel()])
    return torch.cat(kept)


def sums(mesh: DeviceMesh, method: str) -> dict[str, Any]:
    model, draw = sharded(mesh), whole_numbers(dist.get_rank())
    sent = expected = torch.zeros((), dtype=torch.float64)
    same = []
    with compress_gradients(model, method, **EVERYTHING) as handle:
        for _ in range(6):
            gradients = draw()
            averaged = step(model, gradients)
            same.append(are_same(averaged))
            sent = sent + averaged
            expected = expected + mean_of(torch.cat([each.reshape(-1) for each in gradients]))
        kept = mean_of(residuals(handle))
    return {"same": all(same), "off": float((sent + kept - expected).abs().max()), "moved": float(sent.abs().max())}


def nonfinite(mesh: DeviceMesh, method: str) -> dict[str, Any]:
    model, draw = sharded(mesh), whole_numbers(dist.get_rank())
    with compress_gradients(model, method, **EVERYTHING) as handle:
        step(model, draw())
        before = handle.state_dict()["residual"]
        gradients = draw()
        if dist.get_rank() == 3:
            gradients[0][0, 0] = torch.nan
        step(model, gradients)
        after = handle.state_dict()["residual"]
        shards = [p.grad.to_local() for p in model.parameters()]
        return {
            "void": bool(shards[0].isnan().all()),
            "others": all(bool(each.isfinite().all()) for each in shards[1:]),
            "kept": torch.equal(before["inner.p0"], after["inner.p0"]),
            "next_is_finite": bool(step(model, draw()).isfinite().all()),
            "counted": handle.counters.nonfinite_steps,
        }


def four_replicas(method: str) -> bool:
    """DDP with gradients whose sums depend on the order of ranks."""
    model, generator = compressing.replicated(), torch.Generator().manual_seed(dist.get_rank())
    with compress_gradients(model, method, **EVERYTHING):
        drawn = [[torch.randn(shape, generator=generator) for shape in compressing.SHAPES] for _ in range(3)]
        return all(are_same(compressing.step(model, each)) for each in drawn)


def unused(mesh: DeviceMesh) -> dict[str, bool]:
    """A parameter without a gradient: the unit is reduced as torch does, and nothing that waits is touched."""
    model, plain, draw = sharded(mesh), sharded(mesh), whole_numbers(dist.get_rank())
    with compress_gradients(model, "sign:16", **EVERYTHING) as handle:
        step(model, draw())
        before = residuals(handle)
        gradients: list[torch.Tensor | None] = list(draw())
        gradients[1] = None
        equal = torch.equal(step(model, gradients), step(plain, gradients))
        return {"equal": equal, "kept": torch.equal(before, residuals(handle))}


def resumed(mesh: DeviceMesh, method: str, group: dist.ProcessGroup | None = None) -> dict[str, bool]:
    options = {**EVERYTHING, "replicate_group": group}
    if method == "momentum":
        method, options["momentum"] = "randomk:10%", 0.9
    draw, model = whole_numbers(dist.get_rank()), sharded(mesh)
    given = [draw() for _ in range(4)]
    with compress_gradients(model, method, **options) as handle:
        first = [step(model, each) for each in given]
        counters = handle.counters
    with compress_gradients(model, method, **options) as handle:
        for each in given[:2]:
            step(model, each)
        saved = io.BytesIO()
        torch.save(handle.state_dict(), saved)
    model = sharded(mesh)
    with compress_gradients(model, method, **options) as handle:
        saved.seek(0)
        handle.load_state_dict(torch.load(saved))
        rest = [step(model, each) for each in given[2:]]
        continued = all(torch.equal(a, b) for a, b in zip(first[2:], rest, strict=True))
        return {"continues": continued, "counts": handle.counters == counters, "same": are_same(rest[-1])}


def narrow(mesh: DeviceMesh) -> dict[str, Any]:
    """Reduced in bfloat16: what is sent has its bytes, and small whole numbers come through."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model, plain = sharded(mesh, mp_policy=policy), sharded(mesh, mp_policy=policy)
    gradients = [each / 8 for each in whole_numbers(dist.get_rank())()]
    with compress_gradients(model, "randomk:100%", **EVERYTHING) as handle:
        compressed, expected = step(model, gradients), step(plain, gradients)
        return {"error": float((compressed - expected).norm() / expected.norm()), "bytes": handle.counters.sent_bytes}


def momentum(mesh: DeviceMesh) -> list[bool]:
    """Two steps of warm-up and two compressed ones; whether each gave what SGD's momentum gives."""
    model, plain, draw = sharded(mesh), sharded(mesh), whole_numbers(dist.get_rank())
    velocity, equal = torch.zeros(()), []
    with compress_gradients(model, "topk:100%", warmup_steps=2, momentum=0.5, **EVERYTHING):
        for _ in range(4):
            gradients = draw()
            velocity = 0.5 * velocity + step(plain, gradients)
            equal.append(torch.equal(step(model, gradients), velocity))
    return equal


def removed(mesh: DeviceMesh) -> dict[str, bool]:
    model, plain, draw = sharded(mesh), sharded(mesh), whole_numbers(dist.get_rank())
    before = _hooks_of(model)
    handle = compress_gradients(model, "sign:16", **EVERYTHING)
    gradients = draw()
    differs = not torch.equal(step(model, gradients), step(plain, gradients))
    handle.remove()
    handle.remove()
    return {
        "differs": differs,
        "put_back": all(a is b for a, b in zip(before, _hooks_of(model), strict=True)),
        "equal": torch.equal(step(model, gradients), step(plain, gradients)),
    }


def _hooks_of(model: Any) -> list[object]:
    groups = [module._get_fsdp_state()._fsdp_param_groups for module in (model.inner,)]
    return [each for [group] in groups for each in (group._reduce_scatter_comm, group._all_reduce_hook)]


def refusals(mesh: DeviceMesh, grid: DeviceMesh) -> dict[str, tuple[str, str, str]]:
    model, hooked = sharded(mesh), sharded(mesh)
    hooked.inner.set_all_reduce_hook(lambda reduced: None)
    own = sharded(mesh)
    own.inner.set_allocate_memory_from_process_group_for_comm(True)
    with compress_gradients(model, "topk:10%", **EVERYTHING) as handle:
        found = {"twice": refused(lambda: compress_gradients(model, "int8", **EVERYTHING))}
        state = handle.state_dict()
    with compress_gradients(model, "topk:10%", **EVERYTHING) as handle:
        found["layout"] = refused(lambda: handle.load_state_dict({**state, "layout": "replicas"}))
    return found | {
        "powersgd": refused(lambda: compress_gradients(model, "powersgd:4")),
        "hsdp": refused(lambda: compress_gradients(sharded(grid), "topk:10%")),
        "hooked": refused(lambda: compress_gradients(hooked, "topk:10%", **EVERYTHING)),
        "own": refused(lambda: compress_gradients(own, "topk:10%", **EVERYTHING)),
    }
