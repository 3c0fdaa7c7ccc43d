"""What ranks do in ``test_retrying.py``: trainings in which one rank runs out of memory at an op of a step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import plimsoll
from launching import refused
from metering import Device
from plimsoll.tracing.local_tensors import local_of
from steps import Stack, mean_square

ROWS, WIDTH, STEPS, FAILING = 256, 16, 4, 2
Wrapper = Callable[[nn.Module], nn.Module]


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def replicated(model: nn.Module) -> nn.Module:
    return sharded(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


WRAPPERS: dict[str, Wrapper] = {
    "ddp": DistributedDataParallel,
    "ddp, views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.002),
    "fsdp2": sharded,
    "hsdp": replicated,
}


class Training:
    """Blocks with dropout, trained by ranks with AdamW."""

    def __init__(self, wrapper: str, verb: str = "attach") -> None:
        torch.manual_seed(0)
        self.model = WRAPPERS[wrapper](Stack(4, WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if verb == "attach":
            self.handle: Any = plimsoll.attach(self.model, "1GiB", optimizer=self.optimizer)
        else:
            batch = torch.randn(ROWS, WIDTH)
            made = plimsoll.plan(self.model, batch, "1GiB", loss=mean_square, optimizer=self.optimizer)
            self.handle = plimsoll.apply(self.model, made)
        torch.manual_seed(dist.get_rank())

    def step(self, batch: torch.Tensor) -> float:
        loss = mean_square(self.model(batch))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        return total.item()

    def run(self, fails_at: dict[int, int], failing: int = FAILING) -> dict[str, Any]:
        """Losses and weights; in one step each of these ranks fails at its n-th op (0: none)."""
        losses, device = [], Device(fails_at=fails_at.get(dist.get_rank(), 0))
        for number in range(STEPS):
            batch = torch.randn(
                ROWS - 16 * number, WIDTH
            )  # shapes that are traced, on ranks together, in the step that fails
            with device.standing_in() if number == failing else contextlib.nullcontext():
                losses.append(self.handle.step(self.step, batch))
        plan = self.handle.plan
        self.handle.remove()
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        tensors = [local_of(each.detach()).clone() for each in (*self.model.parameters(), *state)]
        return {"losses": losses, "tensors": tensors, "ops": device.ops, "failures": device.failures, "plan": plan}


@functools.cache
def unfailing(wrapper: str, verb: str, counted: int) -> dict[str, Any]:
    """A training that does not fail, and how many ops one step of it has, what plans it included."""
    return Training(wrapper, verb).run({}, counted)


def trained(wrapper: str, verb: str, shares: dict[int, float], failing: int = FAILING) -> dict[str, Any]:
    """A training in which ranks run out of memory after such a share of a step's ops, beside one that does not fail."""
    other = unfailing(wrapper, verb, failing)
    fails_at = {rank: max(1, round(share * other["ops"])) for rank, share in shares.items()}
    one = Training(wrapper, verb).run(fails_at, failing)
    pairs = zip(one["tensors"], other["tensors"], strict=True)
    return {
        "case": (wrapper, verb, shares, failing),
        "is_equal": one["losses"] == other["losses"] and all(torch.equal(a, b) for a, b in pairs),
        "failures": one["failures"],
        "dropped": sum(len(region.dropped) for region in one["plan"].regions),
    }


def failing(make_step: Callable[[Training], Callable[[], Any]], wrapper: str = "ddp") -> dict[str, Any]:
    """How the third step of a training fails on this rank, and whether the weights are those of before it."""
    training = Training(wrapper)
    batch = torch.randn(ROWS, WIDTH)
    for _ in range(2):
        training.handle.step(training.step, batch)
    before = [local_of(parameter.detach()).clone() for parameter in training.model.parameters()]
    found = refused(lambda: training.handle.step(make_step(training)))
    after = [local_of(parameter.detach()) for parameter in training.model.parameters()]
    training.handle.remove()
    return {**found._asdict(), "is_whole": all(map(torch.equal, before, after))}


def own_error(training: Training) -> Callable[[], None]:
    """A rank's own error, when its backward is over."""

    def step() -> None:
        mean_square(training.model(torch.randn(ROWS, WIDTH))).backward()
        if dist.get_rank() == 1:
            raise ZeroDivisionError

    return step


def never_enough(training: Training) -> Callable[[], None]:
    """One rank never has memory for backward."""

    def step() -> None:
        loss = mean_square(training.model(torch.randn(ROWS, WIDTH)))
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError
        loss.backward()

    return step


def written(training: Training) -> Callable[[], None]:
    """One rank runs out of memory, and what another one has done cannot be put back."""
    batch = torch.randn(ROWS, WIDTH)

    def step() -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError
        with torch.no_grad():
            next(training.model.parameters()).mul_(2)
        mean_square(training.model(batch)).backward()

    return step


PAIRED: list[tuple[Any, ...]] = [
    ("ddp", "apply", {0: 0.5}),
    ("ddp, views", "attach", {1: 0.6}),
    ("fsdp2", "attach", {1: 0.1}),
    ("fsdp2", "attach", {0: 0.3, 1: 0.9}),
    ("fsdp2", "attach", {1: 0.5}, 0),
]
FOURFOLD: list[tuple[Any, ...]] = [("hsdp", "attach", {2: 0.45})]


def on_a_pair() -> dict[str, Any]:
    return {
        "trained": [trained(*case) for case in PAIRED],
        "own error": failing(own_error),
        "floor": failing(never_enough, "fsdp2"),
        "written": failing(written),
    }


def on_four() -> dict[str, Any]:
    return {"trained": [trained(*case) for case in FOURFOLD]}
