"""What ranks do in ``test_changing_shapes.py``: trainings whose batches change their shapes, unmanaged and under `attach`."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import plimsoll
from launching import refused
from plimsoll.session.rendezvous import conversation
from plimsoll.session.rendezvous.exchange import Meeting
from plimsoll.session.step_planner import StepPlanner
from plimsoll.tracing.local_tensors import local_of
from steps import Stack, mean_square

BLOCKS, WIDTH, MOST_ROWS = 3, 16, 512
Steps = list[list[int]]
"""Of every step the rows of its micro-batches."""


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def split(model: nn.Module) -> nn.Module:
    styles = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), styles)


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": sharded,
    "fsdp2, gathered until backward": lambda model: sharded(model, reshard_after_forward=False),
    "tensor parallel": split,
}


def lengths(draw: random.Random, steps: int, micro: int = 1) -> Steps:
    return [[draw.randrange(64, MOST_ROWS) for _ in range(micro)] for _ in range(steps)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training on two ranks: ``rows`` are those of a rank, which draws from randomness of its own, or of all."""

    layout: str
    rows: Callable[[int, random.Random], Steps]
    is_alike: bool = False
    waits: bool = False
    """Gradients wait for the last micro-batch of a step."""
    shares: tuple[float, float] = (0.4, 0.4)
    """Of the way from the floor to the unmanaged peak, on either rank."""
    room: Callable[[int, int, int], int] | None = None
    """Of the rank, the step and the budget."""


def constant(rows: int, steps: int) -> Steps:
    return [[rows]] * steps


CASES: dict[str, Case] = {
    "sharded, other budgets": Case(layout="fsdp2", rows=lambda rank, draw: lengths(draw, 12), shares=(0.2, 0.8)),
    "tensor parallel": Case(layout="tensor parallel", rows=lambda rank, draw: lengths(draw, 12), is_alike=True),
    "gradients wait": Case(
        layout="fsdp2, gathered until backward", rows=lambda rank, draw: lengths(draw, 7, 3), waits=True
    ),
    "ddp, other counts": Case(layout="ddp", rows=lambda rank, draw: lengths(draw, 6, 3 - rank), waits=True),
    "one rank varies": Case(
        layout="fsdp2", rows=lambda rank, draw: lengths(draw, 12) if rank else constant(MOST_ROWS, 12)
    ),
    "later": Case(  # one rank has another shape once, then both have
        layout="fsdp2",
        rows=lambda rank, draw: [*constant(256, 7), [384 if rank else 256], *lengths(draw, 8)],
    ),
    "ddp, room": Case(
        layout="ddp",
        rows=lambda rank, draw: constant(MOST_ROWS, 16),
        room=lambda rank, step, budget: budget * 8 // 10 if rank and 6 <= step < 9 else 2 * budget,
        shares=(0.8, 0.8),
    ),
}


@contextlib.contextmanager
def micro_batch(model: Any, *, is_last: bool) -> Iterator[None]:
    """Gradients are reduced in the last one."""
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)
    yield


class Training:
    """A model that is trained on the batches of one case, the same ones every time."""

    def __init__(self, case: Case, steps: Steps) -> None:
        torch.manual_seed(0)
        self.model = LAYOUTS[case.layout](Stack(BLOCKS, WIDTH))
        self.parameters = list(self.model.parameters())
        self._optimizer = torch.optim.SGD(self.parameters, lr=1e-2)
        self._case, self._steps, self.number = case, steps, 0
        self.told: list[dict[str, Any]] = []

    def run(self, handle: Any) -> list[list[torch.Tensor]]:
        """The gradients of every step."""
        made = []
        for number, rows in enumerate(self._steps):
            self.number = number
            torch.manual_seed(number)
            for place, count in enumerate(rows):
                random_numbers = torch.Generator().manual_seed(1000 * number + place)
                batch = torch.randn(count, WIDTH, generator=random_numbers)
                waits = micro_batch(self.model, is_last=place == len(rows) - 1)
                with waits if self._case.waits else contextlib.nullcontext(), counted() as exchanged:
                    mean_square(self.model(batch)).backward()
                self.told.append({"exchanges": exchanged.call_count, "plan": handle and handle.plan})
            made.append([local_of(parameter.grad).numpy().copy() for parameter in self.parameters])
            self._optimizer.step()
            self._optimizer.zero_grad()
        return made


def counted() -> Any:
    """Counts the exchanges of this rank."""
    return mock.patch.object(Meeting, "arrive", wraps=Meeting.arrive)


def trained(case: Case) -> dict[str, Any]:
    rank = dist.get_rank()
    of_both = [case.rows(each, random.Random(0 if case.is_alike else each)) for each in range(2)]
    steps, most_rows = of_both[rank], max(count for each in of_both for step in each for count in step)
    expected = Training(case, steps).run(None)
    training = Training(case, steps)
    known = plimsoll.plan(training.model, torch.zeros(most_rows, WIDTH), "1GiB", loss=mean_square)
    waiting = 2 * sum(each.numel() * each.element_size() for each in Stack(BLOCKS, WIDTH).parameters()) * case.waits
    budget = known.floor_bytes + waiting
    budget += int(case.shares[rank] * (known.baseline_peak_bytes - known.floor_bytes))
    room = case.room and (lambda: case.room(rank, training.number, budget))  # type: ignore[misc]
    with (
        mock.patch.object(StepPlanner, "traced", autospec=True, side_effect=StepPlanner.traced) as traced,
        mock.patch.object(conversation, "_GATHERING_SECONDS", 0.5),
        warnings.catch_warnings(record=True) as caught,
        plimsoll.attach(training.model, budget, room=room) as handle,
    ):
        warnings.simplefilter("always")
        found = training.run(handle)
    pairs = zip(expected, found, strict=True)
    plans = [each["plan"] for each in training.told]
    return {
        "is_equal": all((a == b).all() for one, other in pairs for a, b in zip(one, other, strict=True)),
        "budget": budget,
        "peak": handle.peak_bytes,
        "exchanges": [each["exchanges"] for each in training.told],
        "traces": sum(not call.kwargs["is_timed"] for call in traced.call_args_list),
        "rows": [count for step in steps for count in step],
        "dropped": [sum(len(region.dropped) for region in plan.regions) for plan in plans],
        "predicted": [plan.predicted_peak_bytes for plan in plans],
        "signatures": [plan.signature for plan in plans],
        "said": [str(entry.message) for entry in caught if "plimsoll" in str(entry.message)],
    }


def without_room() -> dict[str, Any]:
    """Ranks that have to have one plan are not asked for room."""
    model = sharded(Stack(2, WIDTH))
    return refused(lambda: plimsoll.attach(model, "1GiB", allow=("recompute", "collectives"), room=lambda: 5))._asdict()


def on_two_ranks() -> dict[str, Any]:
    return {name: trained(case) for name, case in CASES.items()} | {"without room": without_room()}
