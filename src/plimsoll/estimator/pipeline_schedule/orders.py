"""The actions of every rank of a pipeline, in the order of its schedule, without torch.

``F`` is the forward of one micro-batch in one stage, ``B`` its backward. The zero-bubble schedule splits backward in two:
``I`` makes the gradient of the stage's input, ``W`` the gradients of its weights. Stage ``s`` runs on rank ``s % ranks``.

Sources: GPipe: Huang et al. 2019, section 2.3. 1F1B: Narayanan et al. 2019 (PipeDream), in its flushing form: Narayanan et
al. 2021, section 2.2.1. Interleaved 1F1B: Narayanan et al. 2021, section 2.2.2. ZB-H1: Qi et al. 2023, section 2.1.
torch.distributed.pipelining has tables of all four, which agree with these orders.

Known weakness: PyTorch's interleaved 1F1B also accepts numbers of micro-batches that the ranks do not divide; Megatron's and
this one do not.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from plimsoll.artifacts.job import Layout, PipelineSchedule
from plimsoll.errors import InvalidLayout


class ActionKind(enum.StrEnum):
    """The kind of an action: a forward, a whole backward, or one of the two halves of a split backward."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One stage's work on one micro-batch. ``str`` gives PyTorch's notation: ``3F0`` is stage, work, micro-batch."""

    stage: int
    work: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.micro_batch}"


Orders = tuple[tuple[Action, ...], ...]
"""For each rank, its actions in order of execution."""


def pipeline_orders(layout: Layout) -> Orders:
    """Return, for each rank of a layout's pipeline, its actions in order of execution.

    Every stage runs F and B (or I and W) once for every micro-batch; a single stage counts as a pipeline too.

    Raises:
        InvalidLayout: interleaved while ranks do not divide the micro-batches, or several stages per rank without interleaving.

    Example:
        >>> orders = pipeline_orders(Layout(pp=2, micro_batches=3))
        >>> " ".join(map(str, orders[0]))
        '0F0 0F1 0B0 0F2 0B1 0B2'

    Source: see the module's docstring.
    """
    ranks, micro_batches, virtual = layout.pp, layout.micro_batches, layout.virtual_stages
    check_rounds(layout)
    match layout.schedule:
        case PipelineSchedule.GPIPE:
            return tuple(tuple(_gpipe(rank, micro_batches)) for rank in range(ranks))
        case PipelineSchedule.ONE_F_ONE_B:
            return tuple(tuple(_one_f_one_b(rank, ranks, micro_batches)) for rank in range(ranks))
        case PipelineSchedule.INTERLEAVED:
            return tuple(tuple(_interleaved(rank, ranks, virtual, micro_batches)) for rank in range(ranks))
        case PipelineSchedule.ZERO_BUBBLE:
            return tuple(tuple(_one_f_one_b(rank, ranks, micro_batches, is_halved=True)) for rank in range(ranks))


def check_rounds(layout: Layout) -> None:
    """Raise an error if a rank has several stages without an interleaved schedule, or if the ranks of an interleaved schedule
    do not divide the number of micro-batches.
    """
    is_interleaved = layout.schedule is PipelineSchedule.INTERLEAVED
    if layout.virtual_stages > 1 and not is_interleaved:
        raise InvalidLayout(
            f"virtual={layout.virtual_stages} cannot be combined with schedule={layout.schedule}.",
            why="only the interleaved schedule supports several stages per rank",
            next="write schedule=interleaved, or leave virtual= out",
        )
    if is_interleaved and layout.micro_batches % layout.pp:
        below = layout.micro_batches // layout.pp * layout.pp
        choices = [str(below)] if below else []
        raise InvalidLayout(
            f"micro-batches={layout.micro_batches} is not a multiple of pp={layout.pp}.",
            why="an interleaved schedule runs its stages in rounds of pp micro-batches",
            next=f"write micro-batches={' or '.join([*choices, str(below + layout.pp)])}, or schedule=1f1b",
        )


def _gpipe(rank: int, micro_batches: int) -> Iterator[Action]:
    yield from (Action(rank, ActionKind.FORWARD, m) for m in range(micro_batches))
    yield from (Action(rank, ActionKind.BACKWARD, m) for m in range(micro_batches))


def _one_f_one_b(rank: int, ranks: int, micro_batches: int, *, is_halved: bool = False) -> Iterator[Action]:
    """Yield one rank's actions under 1F1B, or under ZB-H1 if backward is split in two.

    In ZB-H1 rank ``rank`` runs ``rank`` more input gradients before it runs a micro-batch's weight gradient.
    """
    ahead = min(ranks - 1 - rank, micro_batches)
    yield from (Action(rank, ActionKind.FORWARD, m) for m in range(ahead))
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            yield Action(rank, ActionKind.FORWARD, m + ahead)
        yield Action(rank, ActionKind.INPUT_GRADIENT if is_halved else ActionKind.BACKWARD, m)
        if is_halved and m >= rank:
            yield Action(rank, ActionKind.WEIGHT_GRADIENT, m - rank)
    waiting = range(max(0, micro_batches - rank), micro_batches) if is_halved else ()
    yield from (Action(rank, ActionKind.WEIGHT_GRADIENT, m) for m in waiting)


def _interleaved(rank: int, ranks: int, virtual: int, micro_batches: int) -> Iterator[Action]:
    """Yield one rank's actions under interleaved 1F1B: rounds of ``ranks`` micro-batches per stage.

    Before its first backward each rank runs two more forwards than the next rank.
    """
    total = virtual * micro_batches
    ahead = min((virtual - 1) * ranks + 2 * (ranks - 1 - rank), total)
    forwards: dict[int, int] = defaultdict(int)
    backwards: dict[int, int] = defaultdict(int)

    def following(step: int, seen: dict[int, int], work: ActionKind) -> Action:
        chunk = step // ranks % virtual
        stage = (chunk if work is ActionKind.FORWARD else virtual - 1 - chunk) * ranks + rank
        seen[stage] += 1
        return Action(stage, work, seen[stage] - 1)

    yield from (following(step, forwards, ActionKind.FORWARD) for step in range(ahead))
    for step in range(total):
        if step + ahead < total:
            yield following(step + ahead, forwards, ActionKind.FORWARD)
        yield following(step, backwards, ActionKind.BACKWARD)


# Properties of orders -----------------------------------------------------------------------------------------------


def in_flight(orders: Orders, stages: int) -> tuple[int, ...]:
    """Return, for each stage, the most micro-batches that are between their forward and their last backward action at one time.

    The order alone determines this.
    """
    most = {stage: count for actions in orders for stage, count in most_in_flight(actions).items()}
    return tuple(most.get(stage, 0) for stage in range(stages))


def most_in_flight(actions: Sequence[Action]) -> dict[int, int]:
    """Return, for each stage of one rank, the most micro-batches that are between their forward and their last backward action
    at one time.

    The result is a mapping from the stage's number to the number of micro-batches.

    Example:
        >>> most_in_flight(pipeline_orders(Layout(pp=4, micro_batches=8))[1])
        {1: 3}
    """
    now: Counter[int] = Counter()
    most: dict[int, int] = {}
    for stage, change in _holding(actions):
        now[stage] += change
        most[stage] = max(most.get(stage, 0), now[stage])
    return most


def held_bytes(orders: Orders, bytes_by_stage: Sequence[int]) -> tuple[int, ...]:
    """Return, for each rank, the most bytes that its stages hold together for micro-batches between forward and backward.

    ``bytes_by_stage`` is what one micro-batch holds in each stage.

    Example:
        >>> held_bytes(pipeline_orders(Layout(pp=2, micro_batches=8)), [100, 10])
        (200, 10)
    """
    changes = ([change * bytes_by_stage[stage] for stage, change in _holding(actions)] for actions in orders)
    return tuple(max(itertools.accumulate(each, initial=0)) for each in changes)


def _holding(actions: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """Yield the stage and +1 or -1 for each action that changes the number of micro-batches that a rank holds.

    +1 means that forward starts to hold a micro-batch, -1 that the last action of its backward frees it.
    """
    for stage, work, _ in actions:
        if work is ActionKind.FORWARD:
            yield stage, 1
        elif work is not ActionKind.INPUT_GRADIENT:
            yield stage, -1


def check_orders(orders: Orders, stages: int) -> None:
    """Refuse orders that are not one step of a pipeline.

    Raises:
        InvalidLayout: an action is missing, runs twice, has an invalid stage, or runs on another rank than its stage.
    """
    seen: set[Action] = set()
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(orders):
        for action in actions:
            if not 0 <= action.stage < stages or action.micro_batch < 0:
                raise invalid_orders(f"{action} is not valid in a pipeline of {stages} stages.", "stages count from 0")
            if action in seen:
                raise invalid_orders(f"{action} runs twice.", "every stage runs every micro-batch once")
            if rank_of.setdefault(action.stage, rank) != rank:
                raise invalid_orders(
                    f"Stage {action.stage} runs on two ranks.", "only one rank holds a stage's weights"
                )
            seen.add(action)
    micro_batches = {action.micro_batch for action in seen}
    for stage in range(stages):
        for micro_batch in micro_batches:
            forward = Action(stage, ActionKind.FORWARD, micro_batch)
            whole = Action(stage, ActionKind.BACKWARD, micro_batch) in seen
            halves = [
                Action(stage, work, micro_batch) in seen
                for work in (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
            ]
            if forward not in seen or not (whole or all(halves)) or (whole and any(halves)):
                raise invalid_orders(
                    f"Stage {stage} does not run micro-batch {micro_batch} forward and backward once.",
                    f"it needs {forward} and either B or both I and W",
                )


def invalid_orders(found: str, why: str) -> InvalidLayout:
    return InvalidLayout(found, why=why, next="use orders from pipeline_orders, or correct the orders that you wrote")
