"""What ranks do in ``test_resuming.py``: small runs that are saved and taken up with torch's distributed checkpoint.

As a script under torchrun: a managed step that fails on rank 1, first in forward, and in backward when the job starts again.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

import plimsoll
from plimsoll.tracing.local_tensors import dense_parts
from steps import Block, mean_square

EXAMPLE = Path(__file__).parents[2] / "examples" / "04_resume_after_a_crash.py"
PLANS = ("same plan", "another plan", "no plan")


@dataclass
class Run:
    """A model as it is trained, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def train(self, steps: range) -> list[float]:
        """Losses of this rank. Batches come from the random stream, like dropout."""
        losses = []
        for _ in steps:
            loss = mean_square(self.model(torch.randn(8, 16)))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def bits(self) -> dict[str, Any]:
        """Every value of the state dicts that this rank holds, by name."""
        flat, shape = tree_flatten(get_state_dict(self.model, self.optimizer))
        values = [dense_parts(value)[0].tolist() if isinstance(value, torch.Tensor) else value for value in flat]
        return {"names": str(shape), "values": values}


def build(layout: str, seed: int) -> Run:
    """Two blocks in a layout; the seed makes the weights, and with the rank the random stream."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(Block(16), Block(16))
    if layout == "ddp":
        model = DistributedDataParallel(model)
    for block in model if layout in ("fsdp", "tp") else ():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if layout == "tp":
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            fully_shard(block, mesh=mesh)
    if layout == "fsdp":
        fully_shard(model)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    torch.manual_seed(1000 * seed + (dist.get_rank() if dist.is_initialized() else 0))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    return Run(model, torch.optim.AdamW(groups, lr=1e-2))


def plan_for(run: Run, regions: list[str] | None = None) -> Any:
    return plimsoll.plan(run.model, torch.randn(8, 16), strategy="full", loss=mean_square, regions=regions)


def resumed(layout: str, directory: Path) -> dict[str, Any]:
    """Eight steps at once, and four, a restart and four more: under the same plan, another one and none."""
    example = runpy.run_path(str(EXAMPLE))
    straight = build(layout, seed=0)
    plans = dict(zip(PLANS, (plan_for(straight, ["0"]), plan_for(straight), None), strict=True))
    with plimsoll.apply(straight.model, plans["same plan"]):
        straight.train(range(4))
        before = torch.get_rng_state()
        dcp.save(example["state_of"](straight.model, straight.optimizer, 4), checkpoint_id=directory)
        same_stream = torch.equal(torch.get_rng_state(), before)
        expected = straight.train(range(4, 8)), straight.bits()
    found: dict[str, Any] = {"losses": expected[0], "same stream": same_stream, "drops": []}
    for name, plan in plans.items():
        again = build(layout, seed=5)
        again.train(range(1))
        found["drops"].append(plan is not None and sum(not region.is_untouched for region in plan.regions))
        step = example["load"](directory, again.model, again.optimizer)
        with contextlib.nullcontext() if plan is None else plimsoll.apply(again.model, plan):
            found[name] = step, (again.train(range(step, 8)), again.bits()) == expected
    return found


def is_transparent(layout: str) -> bool:
    """Whether state dicts, copies and pickles of a managed model are those of the plain one."""
    run = build(layout, seed=0)
    run.train(range(1))
    before = run.bits()
    with plimsoll.apply(run.model, plan_for(run)):
        mean_square(run.model(torch.randn(8, 16))).backward()
        run.optimizer.zero_grad()
        managed = [run.model]
        if layout == "plain":
            managed += [copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))]
        weights = [
            {name: dense_parts(value)[0].tolist() for name, value in model.state_dict().items()} for model in managed
        ]
        return run.bits() == before and all(each == weights[0] for each in weights)


def everything(directory: str) -> dict[str, Any]:
    """All scenarios of one launch on two ranks."""
    return {
        "resumed": {layout: resumed(layout, Path(directory, layout)) for layout in ("ddp", "fsdp")},
        "transparent": {layout: is_transparent(layout) for layout in ("plain", "ddp", "fsdp", "tp")},
    }


def alone(directory: str) -> dict[str, Any]:
    """The same of a plain model on one rank."""
    return {"resumed": {"plain": resumed("plain", Path(directory))}}


@record
def fail_on_rank_1() -> None:
    """A managed step under FSDP2 in which rank 1 meets an error."""
    dist.init_process_group("gloo")
    run = build("fsdp", seed=0)
    plimsoll.apply(run.model, plan_for(run))
    run.train(range(1))
    if dist.get_rank() == 1:
        down = run.model.get_submodule("0.down")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            down.register_forward_pre_hook(lambda *_: refuse("forward"))
        else:
            down.register_forward_hook(
                lambda module, args, output: output.register_hook(lambda _: refuse("backward")) and None
            )
    run.train(range(1))


def refuse(where: str) -> None:
    raise ValueError(f"no such head in {where}")


if __name__ == "__main__":
    fail_on_rank_1()
