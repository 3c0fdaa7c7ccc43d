"""What ranks do in ``test_resuming.py``."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import plimsoll
from plimsoll.distributed import compress_gradients, latest_step, load_checkpoint, save_checkpoint
from plimsoll.errors import PlimsollError
from ranks.small_runs import Block, Run, batch_of, build, build_blocks


def everything(directory: str) -> dict[str, Any]:
    """All scenarios of one launch on two ranks, in the same order on both."""
    root = Path(directory)
    return {
        "resumed": _resumed(root / "run"),
        "names": {layout: _names(layout, root / f"names-{layout}") for layout in ("plain", "ddp", "fsdp", "tp")},
        "from_ddp": _from_ddp(root / "ddp"),
        "compressed": _compressed(root / "compressed"),
        "own": _own(root / "own"),
        "refused": _refused(root / "refused"),
    }


class Residuals:
    """What error feedback keeps on each rank."""

    def __init__(self) -> None:
        self.held = torch.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"].clone()


def _resumed(directory: Path) -> dict[str, Any]:
    """Eight steps at once, and four, a restart, and four more: under the same plan, another one and none."""
    straight = build("fsdp")
    full = plimsoll.plan(straight.model, batch_of(0), strategy="full")
    plan = plimsoll.plan(straight.model, batch_of(0), strategy="full", regions=["transformer.h.0"])
    torch.manual_seed(dist.get_rank())
    residuals = Residuals()
    with plimsoll.apply(straight.model, plan):
        first = straight.train(range(4))
        residuals.held += dist.get_rank() + 1
        random.seed(dist.get_rank())
        save_checkpoint(
            directory,
            step=4,
            model=straight.model,
            optimizer=straight.optimizer,
            plan=plan,
            compression=residuals,
            extra={"position": 100 + dist.get_rank()},
        )
        expected_random = random.random()
        expected = straight.train(range(4, 8)), straight.bits()
    drops = any(not region.is_untouched for region in plan.regions)
    found: dict[str, Any] = {"drops": drops, "first": first, "losses": expected[0], "latest": latest_step(directory)}
    for name in ("same plan", "another plan", "no plan"):
        again, held = build("fsdp", seed=5), Residuals()
        again.train(range(20, 21))
        checkpoint = load_checkpoint(directory, model=again.model, optimizer=again.optimizer, compression=held)
        found[name] = {
            "random": random.random() == expected_random,
            "held": held.held.tolist(),
            "extra": checkpoint.extra,
            "plan": checkpoint.plan == plan,
        }
        chosen = {"same plan": checkpoint.plan, "another plan": full, "no plan": None}[name]
        with contextlib.nullcontext() if chosen is None else plimsoll.apply(again.model, chosen):
            resumed = again.train(range(4, 8))
        found[name]["equal"] = (resumed, again.bits()) == expected
    return found


def _blocks(layout: str, seed: int) -> Run:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(Block(), Block())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if layout == "tp":
        for block in model:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif layout == "fsdp":
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "ddp":
        model = DistributedDataParallel(model)
    return Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch_of)


def _names(layout: str, directory: Path) -> dict[str, Any]:
    """State dicts with and without a plan, and torch's own checkpoint of the managed model in an unmanaged one."""
    run = _blocks(layout, 0)
    batch = torch.randn(4, 16)
    _squares(run.model(batch)).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    before = _states(run)
    with plimsoll.apply(run.model, plimsoll.plan(run.model, batch, strategy="full", loss=_squares)):
        _squares(run.model(batch)).backward()
        run.optimizer.zero_grad()
        managed = _states(run)
        dcp.save({"model": get_model_state_dict(run.model)}, checkpoint_id=directory)
        copies = [copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))] if layout == "plain" else []
        save_checkpoint(directory / "ours", step=1, model=run.model, optimizer=run.optimizer)
    other = _blocks(layout, 9)
    fresh = {"model": get_model_state_dict(other.model)}
    dcp.load(fresh, checkpoint_id=directory)
    set_model_state_dict(other.model, fresh["model"])
    return {
        "equal": _same(before, managed) and _same(before[:1], _states(other)[:1]),
        "copied": all(_same([dict(c.state_dict())], [dict(run.model.state_dict())]) for c in copies),
        "prefixed": [name for name in before[0] if name.startswith("module.")],
        "loaded": _loads_ours(directory / "ours", run, other),
    }


def _squares(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def _loads_ours(directory: Path, run: Run, other: Run) -> bool:
    load_checkpoint(directory, model=other.model, optimizer=other.optimizer)
    return other.bits() == run.bits()


def _states(run: Run) -> list[dict[str, Any]]:
    optimizer = get_optimizer_state_dict(run.model, run.optimizer)
    flat = {f"{name}/{key}": value for name, state in optimizer["state"].items() for key, value in state.items()}
    return [dict(get_model_state_dict(run.model)), flat]


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    def local(value: Any) -> torch.Tensor:
        return value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)

    return all(
        a.keys() == b.keys() and all(torch.equal(local(a[name]), local(b[name])) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def _from_ddp(directory: Path) -> bool:
    """What a run under DDP has saved goes on under FSDP2."""
    run = build("ddp")
    run.train(range(2))
    save_checkpoint(directory, step=2, model=run.model, optimizer=run.optimizer)
    sharded = build("fsdp", seed=4)
    load_checkpoint(directory, model=sharded.model, optimizer=sharded.optimizer)
    whole = {name: value.full_tensor() for name, value in sharded.model.state_dict().items()}
    return all(torch.equal(value, whole[name]) for name, value in run.model.module.state_dict().items())


def _compressed(directory: Path) -> dict[str, bool]:
    """Eight steps with compressed gradients at once, and four, a restart and four more; with residuals and without."""
    run = build_blocks("ddp", seed=0)
    handle = compress_gradients(run.model, "topk:10%", min_elements=1)
    run.train(range(4))
    save_checkpoint(directory, step=4, model=run.model, optimizer=run.optimizer, compression=handle)
    expected = run.train(range(4, 8)), run.bits()
    equal = {}
    for is_dropped in (False, True):
        again = build_blocks("ddp", seed=6)
        held = compress_gradients(again.model, "topk:10%", min_elements=1)
        load_checkpoint(
            directory, model=again.model, optimizer=again.optimizer, compression=held, drop_residuals=is_dropped
        )
        equal["dropped" if is_dropped else "kept"] = (again.train(range(4, 8)), again.bits()) == expected
    return equal


def _own(directory: Path) -> dict[str, Any]:
    """Running statistics differ between ranks, and come back to the rank that had them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.randn(8, 4) + dist.get_rank())
    mean = model[1].running_mean.clone()
    save_checkpoint(directory, step=1, model=model)
    model(torch.randn(8, 4))
    load_checkpoint(directory, model=model)
    return {"equal": torch.equal(model[1].running_mean, mean), "mean": mean.tolist()}


def _refused(directory: Path) -> dict[str, Any]:
    """What goes wrong is said, on all ranks, and nothing has changed."""
    run = build("fsdp")
    run.train(range(1))
    rank, other = dist.get_rank(), build("fsdp", hidden=16).model
    save_checkpoint(directory, step=1, model=run.model, optimizer=run.optimizer, keep=2)
    run.train(range(1, 2))
    arguments = {"model": run.model, "optimizer": run.optimizer}
    found = {
        "full disk": _told(run, directory, lambda: _on_a_full_disk(directory, arguments)),
        "steps": _told(run, directory, lambda: save_checkpoint(directory, step=rank, **arguments)),
        "extra": _told(
            run, directory, lambda: save_checkpoint(directory, step=2, extra=run if rank else 0, **arguments)
        ),
        "no such step": _told(run, directory, lambda: load_checkpoint(directory, step=7, **arguments)),
        "other model": _told(run, directory, lambda: load_checkpoint(directory, model=other)),
        "residuals": _told(run, directory, lambda: load_checkpoint(directory, compression=Residuals(), **arguments)),
        "while loading": _told(run, directory, lambda: _failing_residuals(directory.parent / "run", arguments)),
    }
    for kind in ("flipped", "cut short", "newer"):
        damaged = directory.parent / kind
        if rank == 0:
            shutil.copytree(directory, damaged)
            _damage(damaged / "step-00000001", kind)
        dist.barrier()
        found[kind] = _told(run, directory, lambda place=damaged: load_checkpoint(place, **arguments))
    for step in (2, 3):
        save_checkpoint(directory, step=step, keep=2, **arguments)
    found["kept"] = sorted(os.listdir(directory))
    return found


def _told(run: Run, directory: Path, act: Callable[[], object]) -> dict[str, Any]:
    """The error's words, and whether everything is as it was."""
    before, files, state = run.bits(), sorted(directory.rglob("*")), torch.get_rng_state()
    dist.barrier()
    try:
        act()
    except PlimsollError as error:
        dist.barrier()  # rank 0 tidies up after the others have raised
        unchanged = run.bits() == before and sorted(directory.rglob("*")) == files
        same_streams = torch.equal(state, torch.get_rng_state())
        return {"kind": type(error).__name__, "text": str(error), "unchanged": unchanged and same_streams}
    raise AssertionError("nothing was refused")


def _on_a_full_disk(directory: Path, arguments: dict[str, Any]) -> None:
    """Rank 1 may write no file of more than a few bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        save_checkpoint(directory, step=2, **arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _failing_residuals(directory: Path, arguments: dict[str, Any]) -> None:
    class Failing(Residuals):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if dist.get_rank() == 1 and state["held"].any():
                raise MemoryError("no room for residuals")
            super().load_state_dict(state)

    try:
        load_checkpoint(directory, compression=Failing(), **arguments)
    except MemoryError as error:
        raise PlimsollError(str(error), why="on rank 1", next="") from error


def _damage(place: Path, kind: str) -> None:
    if kind == "newer":
        path = place / "checkpoint.json"
        path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 99'))
        return
    path = place / "tensors" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    if kind == "flipped":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[:-1] if kind == "cut short" else content)


def on_more_ranks(directory: str) -> dict[str, Any]:
    """On four ranks: what two have saved."""
    place = Path(directory) / "run"
    run = build("fsdp", seed=8)
    told = _told(
        run, place, lambda: load_checkpoint(place, model=run.model, optimizer=run.optimizer, drop_residuals=True)
    )
    kept = _told(run, place, lambda: load_checkpoint(place, model=run.model, optimizer=run.optimizer, reseed_with=0))
    checkpoint = load_checkpoint(place, model=run.model, optimizer=run.optimizer, reseed_with=3, drop_residuals=True)
    draws = [None] * dist.get_world_size()
    dist.all_gather_object(draws, torch.rand(1).item())
    whole = {name: value.full_tensor().double().sum().item() for name, value in run.model.state_dict().items()}
    state = run.optimizer.state_dict()["state"]
    moments = {index: values["exp_avg_sq"].full_tensor().double().sum().item() for index, values in state.items()}
    return {
        "told": told,
        "kept": kept,
        "whole": whole,
        "moments": moments,
        "extras": checkpoint.extras,
        "draws": len(set(draws)),
        "losses": run.train(range(4, 5)),
    }
