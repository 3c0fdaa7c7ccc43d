"""What ranks do in ``test_agreement.py``: all scenarios of one launch, in the same order on every rank."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import plimsoll
from launching import refused
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import RankMissing
from plimsoll.session.rendezvous import conversation
from plimsoll.session.rendezvous.exchange import Meeting
from plimsoll.session.rendezvous.world import find_participants
from plimsoll.session.task import is_managed
from plimsoll.ui.cli.app import app
from plimsoll.ui.cli.ranks import Crew
from ranks.small_models import blocks
from steps import Block, mean_square

ROWS, WIDTH = 64, 16
ONE_PLAN = ("recompute", "collectives")
"""With this allowed all ranks run the identical plan."""

Outcome = dict[str, Any]


def rows(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, **options)
    return fully_shard(model, **options)


def has_managed(model: nn.Module) -> bool:
    return any(is_managed(module) for module in model.modules())


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    mean_square(model(batch)).backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def failing(call: Callable[[], object]) -> Outcome:
    """How a call failed: it has to."""
    return refused(call)._asdict()


def exchanges() -> Any:
    """Counts the exchanges of this rank."""
    return mock.patch.object(Meeting, "arrive", wraps=Meeting.arrive)


def mine(first: Any, second: Any) -> Any:
    """Another thing on rank 1."""
    return second if dist.get_rank() == 1 else first


def on_two_ranks() -> dict[str, Any]:
    model, batch = blocks(), rows()
    free = plimsoll.plan(model, batch, loss=mean_square, strategy="none")
    tight_bytes = (free.baseline_peak_bytes + free.floor_bytes) // 2
    uneven_bytes = mine(free.baseline_peak_bytes, tight_bytes)  # rank 1 has less memory
    made = plimsoll.plan(model, batch, uneven_bytes, loss=mean_square)
    receipt = plimsoll.verify(model, batch, made, loss=mean_square, steps=1)
    table = plimsoll.compare(model, batch, ["full", "auto"], budget=uneven_bytes, loss=mean_square, steps=1)
    floor_bytes = mine(free.baseline_peak_bytes, free.floor_bytes // 2)
    return {
        "uneven": to_json(made),
        "verified": to_json(receipt),
        "compared": to_json(table),
        "applied": applied(model, batch, made),
        "facts": differing_facts(model, batch),
        "plans": failing(lambda: plimsoll.apply(model, mine(free, made))) | {"is_left": has_managed(model)},
        "below_floor": failing(lambda: plimsoll.plan(model, batch, floor_bytes, loss=mean_square)),
        "missing": missing(model, batch),
        "alone": alone(model, batch),
        "loss": failing_loss(),
        "own": failing(lambda: plimsoll.verify(model, batch, loss=mean_square)),
        "one process": of_one_process(free),
        "explained alone": explained_alone(model, batch),
        "left out": left_out(),
        "attached": attached(free),
        "accumulated": accumulated(free),
        "redirected": redirected(),
        "attach_floor": attach_floor(),
        "attached alone": attached_alone(),
        "commands": commands(free),
    }


def applied(model: nn.Module, batch: torch.Tensor, plan: Plan) -> Outcome:
    expected = gradients(model, batch)
    with plimsoll.apply(model, plan):
        managed = has_managed(model)
        equal = all(map(torch.equal, expected, gradients(model, batch)))
    return {"is_managed": managed, "is_equal": equal, "is_left": has_managed(model)}


def differing_facts(model: nn.Module, batch: torch.Tensor) -> dict[str, Outcome]:
    """Something else on rank 1, one at a time."""

    def plan(model: nn.Module = model, batch: torch.Tensor = batch, **options: Any) -> Callable[[], Plan]:
        return lambda: plimsoll.plan(model, batch, loss=mean_square, **{"strategy": "none", **options})

    found = {
        "model": failing(plan(model=mine(model, blocks(count=2)))),
        "batch": failing(plan(batch=rows(mine(ROWS, ROWS // 2)))),
        "strategy": failing(plan(strategy=mine("none", "full"))),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", mine(torch.__version__, "1.0"))
        found["torch"] = failing(plan())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plimsoll, "__version__", mine("1.0", "2.0"))
        found["plimsoll"] = failing(plan())
    return found


def missing(model: nn.Module, batch: torch.Tensor) -> Outcome:
    time.sleep(mine(0.0, 1.0))
    outcome = failing(lambda: plimsoll.plan(model, batch, loss=mean_square, strategy="none", timeout_seconds=0.3))
    # What was missed leaves nothing behind: the next call gets as far as the next difference.
    again = failing(lambda: plimsoll.plan(model, rows(mine(8, 4)), loss=mean_square, strategy="none"))
    return {**outcome, "is_fine_after": again["kind"]}


def alone(model: nn.Module, batch: torch.Tensor) -> tuple[int, int]:
    """Rank 0 plans for itself: nobody has to come, and nothing is exchanged; then for all."""
    with exchanges() as by_itself:
        if dist.get_rank() == 0:
            plimsoll.plan(model, batch, loss=mean_square, strategy="none", ranks=(0,))
    with exchanges() as for_all:
        plimsoll.plan(model, batch, loss=mean_square, strategy="none")
    return by_itself.call_count, for_all.call_count


def failing_loss() -> Outcome:
    """The loss of rank 1 fails under FSDP2: the others' collectives find their partner, and the group stays whole."""
    model = sharded(blocks())

    def loss(output: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("no target for this batch")
        return mean_square(output)

    outcome = failing(lambda: plimsoll.plan(model, rows(), loss=loss, strategy="full"))
    whole = torch.ones(1)
    dist.all_reduce(whole)
    return {**outcome, "sum": whole.item(), "gradients": len(gradients(model, rows()))}


def of_one_process(plan: Plan) -> dict[str, Outcome]:
    """What one process does by itself, asked of models that ranks train together: nothing is exchanged."""
    sharded_model, replicated, batch = sharded(blocks()), DistributedDataParallel(blocks()), rows()
    with exchanges() as made:
        found = {
            "fit": failing(lambda: plimsoll.fit(replicated, batch, "1GiB", loss=mean_square)),
            "advise": failing(lambda: plimsoll.advise(replicated, batch, loss=mean_square)),
            "explain": failing(lambda: plimsoll.explain(sharded_model, batch, loss=mean_square)),
            "probe": failing(lambda: plimsoll.probe(sharded_model, batch, plan, steps=1, loss=mean_square)),
            "diagnose": failing(lambda: plimsoll.diagnose(replicated, batch, plan, loss=mean_square)),
        }
    return {name: {**outcome, "exchanges": made.call_count} for name, outcome in found.items()}


def left_out() -> Outcome:
    """A rank by itself cannot run a step of a model of which it has a shard."""
    model = sharded(blocks())
    return failing(lambda: plimsoll.plan(model, rows(), loss=mean_square, strategy="none", ranks=(dist.get_rank(),)))


def explained_alone(model: nn.Module, batch: torch.Tensor) -> bool:
    """A model that is not wrapped is this process's own: one rank may ask about it, and no other has to come."""
    return dist.get_rank() == 1 or plimsoll.explain(model, batch, loss=mean_square).peak.bytes > 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    mean_square(model(batch)).backward()
    optimizer.step()


def attached(free: Plan) -> Outcome:
    """Replicated training under one plan for both ranks: they calibrate, grow together, and one of them alone does not."""
    model, twin = DistributedDataParallel(blocks()), DistributedDataParallel(blocks())
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin))
    roomy_bytes = 2 * free.baseline_peak_bytes
    tight_bytes = roomy_bytes - free.baseline_peak_bytes // 4
    handle = plimsoll.attach(model, mine(roomy_bytes, tight_bytes), allow=ONE_PLAN)
    plans: list[str] = []
    told: list[int] = []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(conversation, "_GATHERING_SECONDS", 0.5)
        for count in (ROWS, ROWS, ROWS, ROWS, ROWS + 32, ROWS + 32, ROWS + 32, mine(ROWS, ROWS + 64), ROWS):
            with exchanges() as made:
                train(model, optimizer, rows(count))
            told.append(made.call_count)
            assert handle.plan is not None
            plans.append(to_json(handle.plan))
            train(twin, other, rows(count))
        said = [str(entry.message) for entry in caught if "larger" in str(entry.message)]
    handle.remove()
    weights = all(map(torch.equal, model.parameters(), twin.parameters()))
    return {"plans": plans, "exchanges": told, "warnings": said, "is_equal": weights}


def accumulated(free: Plan) -> Outcome:
    """The optimizer steps after the plan is there: its state is taken off the budget on all ranks, in one more exchange."""
    model = blocks()
    # Of two optimizers neither is traced, so their state is not counted before it is there.
    optimizers = [torch.optim.AdamW(part) for part in ([*model.parameters()][:2], [*model.parameters()][2:])]
    handle = plimsoll.attach(model, 2 * free.baseline_peak_bytes, allow=ONE_PLAN)
    plans: list[str] = []
    for step in range(4):
        mean_square(model(rows())).backward()
        for optimizer in optimizers if step == 2 else ():
            optimizer.step()
        assert handle.plan is not None
        plans.append(to_json(handle.plan))
    counted_bytes = handle._known.counted.bytes
    handle.remove()
    return {"plans": plans, "counted_bytes": counted_bytes}


def attach_floor() -> Outcome:
    """Rank 1's budget cannot be met: both stop once the loop's own step was measured, and leave the models unmanaged."""
    model = blocks()
    handle = plimsoll.attach(model, mine("1GiB", "20KiB"))

    def train() -> None:
        for _ in range(4):
            mean_square(model(rows())).backward()

    outcome = failing(train)
    is_left = has_managed(model) or bool(model._forward_pre_hooks)
    return {**outcome, "is_left": is_left, "plan": handle.plan is None}


def attached_alone() -> Outcome:
    """Rank 1 never calls attach: rank 0 misses it there, and both train on, unmanaged."""
    model = DistributedDataParallel(blocks())
    outcome: Outcome = {}
    if dist.get_rank() == 0:
        outcome = failing(lambda: plimsoll.attach(model, "1GiB", timeout_seconds=0.3))
    is_left = bool(model._forward_pre_hooks) or has_managed(model)
    return {**outcome, "is_left": is_left, "gradients": len(gradients(model, rows()))}


class _Trained(nn.Module):
    """As Lightning trains a module under DDP: each call of the wrapper is redirected to another method, for that one call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, named: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.blocks(named["predict"])

    def training_step(self, named: dict[str, torch.Tensor]) -> torch.Tensor:
        return mean_square(self.blocks(named["train"]))

    def redirect(self) -> None:
        original = self.forward

        def forward(*args: Any) -> torch.Tensor:
            self.forward = original
            return self.training_step(*args)

        self.forward = forward


def redirected() -> Outcome:
    """Calls that are redirected are calibrated on; one that is not takes another batch, and says where it failed."""
    models = _Trained(), _Trained()
    wrapped, twin = map(DistributedDataParallel, models)
    with plimsoll.attach(wrapped, "1GiB") as handle:
        for _ in range(3):
            for model, inner in zip((wrapped, twin), models, strict=True):
                inner.redirect()
                model({"train": rows()}).backward()
    equal = all(torch.equal(one.grad, other.grad) for one, other in zip(*(m.parameters() for m in models), strict=True))
    outcome = failing(lambda: plimsoll.plan(wrapped, ({"train": rows()},), loss=mean_square, strategy="none"))
    return {**outcome, "is_equal": equal, "is_planned": handle.plan is not None and not handle.is_calibrating}


def lose_a_rank(rank: int, port: int, told: Connection) -> None:
    """A process of two that torchrun does not watch: rank 1 dies in the middle of a step, and rank 0 tells what it met."""
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
    model = sharded(blocks())
    if rank == 1:
        model[1].register_forward_pre_hook(lambda *_: os._exit(1))
    told.send(failing(lambda: plimsoll.plan(model, rows(), loss=mean_square, strategy="full")))


def step() -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A target that wraps its model in the process group that is there."""
    return DistributedDataParallel(blocks()), rows(), mean_square


def broken_step() -> tuple[nn.Module, torch.Tensor]:
    """A target that does not load on rank 1."""
    if dist.get_rank() == 1:
        raise FileNotFoundError("no data on this rank")
    return blocks(), rows()


def commands(free: Plan) -> dict[str, Outcome]:
    """The command line, on every rank at once, in a process group that it has not made."""
    here = Path(tempfile.mkdtemp())
    budget = f"{2 * free.baseline_peak_bytes}B"
    plan = ("plan", "ranks.agreeing:step", "--budget")
    return {
        "plan": command(here, *plan, budget, "--output", str(here / "plan.json")),
        "below floor": command(here, *plan, "1KiB", "--json"),
        "does not load": command(here, "plan", "ranks.agreeing:broken_step", "--budget", budget),
        "no such plan": command(here, "verify", "ranks.agreeing:step", "--plan", str(here / "none.json")),
        "its own": command(here, "verify", "ranks.agreeing:step"),
        "nothing sent": command(here, "compress-gradients", "ranks.agreeing:step", "--methods", "topk:0"),
        "fit": command(here, "fit", "ranks.agreeing:step", "--budget", budget, "--output", str(here / "fit.json")),
        "show": command(here, "show", str(here / "plan.json")),
    }


def command(here: Path, *arguments: str) -> Outcome:
    result = CliRunner().invoke(app, arguments)
    files = sorted(path.name for path in here.iterdir())
    said = {"stdout": result.stdout, "stderr": result.stderr}
    return {"code": result.exit_code, **said, "files": files, "has_group": dist.is_initialized()}


def on_four_ranks() -> dict[str, Any]:
    rank = dist.get_rank()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {"participants": participants(), "pairs": pairs(rank), "parting": parting(rank)}
    # A token that does not exist fails inside of the first module.
    model = sharded(nn.Sequential(nn.Embedding(8, WIDTH), *blocks(count=2)), mesh=grid)
    tokens = torch.full((4, 8), 9 if rank == 2 else 1)
    found["forward"] = failing(lambda: plimsoll.plan(model, tokens, loss=mean_square, strategy="full"))
    return found


def participants() -> dict[str, tuple[int, ...]]:
    """Who takes part, by how the model is spread."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pair = dist.new_subgroups(2)[0]
    models = {
        "plain": blocks(),
        "replicated in pairs": DistributedDataParallel(blocks(), process_group=pair),
        "hybrid": fully_shard(blocks(), mesh=grid),
        "one row": fully_shard(blocks(), mesh=grid["shard"]),
        "a row and a column": nn.Sequential(
            fully_shard(blocks(), mesh=grid["shard"]), fully_shard(blocks(), mesh=grid["replicate"])
        ),
    }
    found = {name: find_participants(model).world for name, model in models.items()}
    return {name: () if world is None else world.ranks for name, world in found.items()}


def pairs(rank: int) -> str:
    """Two pairs of ranks plan two models at the same time."""
    pair = dist.new_subgroups(2)[0]
    model = DistributedDataParallel(blocks(WIDTH if rank < 2 else WIDTH // 2), process_group=pair)
    batch = torch.ones(ROWS, WIDTH if rank < 2 else WIDTH // 2)
    return to_json(plimsoll.plan(model, batch, loss=mean_square, strategy="full"))


def parting(rank: int) -> Outcome:
    """A command ends because rank 2 was missed: who prints that? Rank 2 itself comes later, or never."""
    start = time.perf_counter()
    error = RankMissing("rank 2 did not come", why="it is late", next="look", ranks=(2,))
    speaks = rank != 2 and Crew(is_several=True).part(error)
    seconds = time.perf_counter() - start
    dist.barrier()
    return {"speaks": speaks or (rank == 2 and Crew(is_several=True).part(error)), "seconds": seconds}
