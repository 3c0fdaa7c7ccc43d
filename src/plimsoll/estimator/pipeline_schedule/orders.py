"""A schedule's name and sizes in, the actions of every rank in order out. No torch.

``F`` is the forward of one micro-batch in one stage, ``B`` its backward; the zero-bubble schedule runs backward in halves:
``I`` makes the gradient of the stage's input, ``W`` those of its weights. Stage ``s`` lies on rank ``s % ranks``.

Sources: GPipe: Huang et al. 2019, section 2.3. 1F1B: Narayanan et al. 2019 (PipeDream), in its flushing form: Narayanan et
al. 2021, section 2.2.1. Interleaved 1F1B: Narayanan et al. 2021, section 2.2.2. ZB-H1: Qi et al. 2023, section 2.1.
torch.distributed.pipelining has tables of all four, with which these orders agree.

Known weakness: PyTorch's interleaved 1F1B also takes numbers of micro-batches that the ranks do not divide; Megatron's and
this one do not.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from plimsoll.artifacts.layout import Layout, PipelineSchedule
from plimsoll.errors import InvalidLayout


class Work(enum.StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One piece of work of one stage on one micro-batch; ``str`` is PyTorch's notation: ``3F0`` is stage, work, micro-batch."""

    stage: int
    work: Work
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.micro_batch}"


Orders = tuple[tuple[Action, ...], ...]
"""The actions of every rank, in the order in which it runs them."""


def pipeline_orders(layout: Layout) -> Orders:
    """The actions of every rank of a layout's pipeline.

    Args:
        layout: its ``pp``, ``schedule``, ``virtual_stages`` and ``micro_batches`` are read; one stage is a pipeline, too.

    Returns:
        One tuple of actions per rank. Every stage runs F and B (or I and W) once for every micro-batch.

    Raises:
        InvalidLayout: interleaved, and the ranks do not divide the micro-batches; stages per rank without interleaving.

    Example:
        >>> orders = pipeline_orders(Layout(pp=2, micro_batches=3))
        >>> " ".join(map(str, orders[0]))
        '0F0 0F1 0B0 0F2 0B1 0B2'

    Source: see the module's docstring.
    """
    ranks, micro_batches, virtual = layout.pp, layout.micro_batches, layout.virtual_stages
    _check(layout)
    match layout.schedule:
        case PipelineSchedule.GPIPE:
            return tuple(tuple(_gpipe(rank, micro_batches)) for rank in range(ranks))
        case PipelineSchedule.ONE_F_ONE_B:
            return tuple(tuple(_one_f_one_b(rank, ranks, micro_batches)) for rank in range(ranks))
        case PipelineSchedule.INTERLEAVED:
            return tuple(tuple(_interleaved(rank, ranks, virtual, micro_batches)) for rank in range(ranks))
        case PipelineSchedule.ZERO_BUBBLE:
            return tuple(tuple(_zero_bubble(rank, ranks, micro_batches)) for rank in range(ranks))


def _check(layout: Layout) -> None:
    if layout.virtual_stages > 1 and layout.schedule is not PipelineSchedule.INTERLEAVED:
        raise InvalidLayout(
            f"{layout.virtual_stages} stages per rank, but the schedule is {layout.schedule}.",
            why="only the interleaved schedule gives a rank several stages",
            next="use schedule=interleaved, or leave virtual= out",
        )
    if layout.schedule is PipelineSchedule.INTERLEAVED and layout.micro_batches % layout.pp:
        raise InvalidLayout(
            f"{layout.micro_batches} micro-batches do not divide by {layout.pp} pipeline ranks.",
            why="an interleaved schedule goes through its stages in rounds of as many micro-batches as there are ranks",
            next=f"use a multiple of {layout.pp} micro-batches, or schedule=1f1b",
        )


def _gpipe(rank: int, micro_batches: int) -> Iterator[Action]:
    yield from (Action(rank, Work.FORWARD, m) for m in range(micro_batches))
    yield from (Action(rank, Work.BACKWARD, m) for m in range(micro_batches))


def _one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    ahead = min(ranks - 1 - rank, micro_batches)
    yield from (Action(rank, Work.FORWARD, m) for m in range(ahead))
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            yield Action(rank, Work.FORWARD, m + ahead)
        yield Action(rank, Work.BACKWARD, m)


def _interleaved(rank: int, ranks: int, virtual: int, micro_batches: int) -> Iterator[Action]:
    """Rounds of ``ranks`` micro-batches per stage; two more forwards ahead for every rank before the last one."""
    total = virtual * micro_batches
    ahead = min((virtual - 1) * ranks + 2 * (ranks - 1 - rank), total)
    forwards: dict[int, int] = defaultdict(int)
    backwards: dict[int, int] = defaultdict(int)

    def following(step: int, seen: dict[int, int], work: Work) -> Action:
        chunk = step // ranks % virtual
        stage = (chunk if work is Work.FORWARD else virtual - 1 - chunk) * ranks + rank
        seen[stage] += 1
        return Action(stage, work, seen[stage] - 1)

    yield from (following(step, forwards, Work.FORWARD) for step in range(ahead))
    for step in range(total):
        if step + ahead < total:
            yield following(step + ahead, forwards, Work.FORWARD)
        yield following(step, backwards, Work.BACKWARD)


def _zero_bubble(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """ZB-H1: as many micro-batches in flight as 1F1B has; weight gradients wait behind as many input gradients as ``rank``."""
    ahead = min(ranks - 1 - rank, micro_batches)
    yield from (Action(rank, Work.FORWARD, m) for m in range(ahead))
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            yield Action(rank, Work.FORWARD, m + ahead)
        yield Action(rank, Work.INPUT_GRADIENT, m)
        if m >= rank:
            yield Action(rank, Work.WEIGHT_GRADIENT, m - rank)
    yield from (Action(rank, Work.WEIGHT_GRADIENT, m) for m in range(max(0, micro_batches - rank), micro_batches))
