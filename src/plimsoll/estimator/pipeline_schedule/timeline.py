"""The actions of every rank and seconds per stage in, when each action runs and where ranks idle out. No torch.

An event-driven simulation, linear in the number of actions. A rank runs its actions in their order, one at a time; an action
starts when the rank is free and what it needs has arrived:

    F(s, m) needs F(s-1, m);  B(s, m) and I(s, m) need F(s, m) and B or I of (s+1, m);  W(s, m) needs I(s, m)

Between stages the result travels ``transfer_seconds``, during which both ranks compute. The data, tensor and context
parallel ranks of one stage do the same at the same time, so that a pipeline of 16 stages stands for 16,384 ranks as well as
for 16.

Recomputation runs before the backward that needs it, either then (``ahead=0``) or, for up to ``ahead`` micro-batches, in
seconds in which the rank would idle. It may be cut into pieces: it is a sequence of ops.

Known weakness: the same seconds for every micro-batch; sends never wait for one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from plimsoll.errors import InvalidLayout
from plimsoll.estimator.pipeline_schedule.orders import Action, Orders, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """What one micro-batch takes in one stage.

    ``transfer_seconds`` is the way of its input from the stage before, and of that input's gradient back.
    ``recompute_seconds`` is what backward has to run again; a backward of halves does it before its first half.
    """

    forward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    recompute_seconds: float = 0.0
    transfer_seconds: float = 0.0

    def of(self, work: Work) -> float:
        """Seconds of one action, without recomputation."""
        match work:
            case Work.FORWARD:
                return self.forward_seconds
            case Work.INPUT_GRADIENT:
                return self.input_gradient_seconds
            case Work.WEIGHT_GRADIENT:
                return self.weight_gradient_seconds
            case Work.BACKWARD:
                return self.input_gradient_seconds + self.weight_gradient_seconds


@dataclass(frozen=True, slots=True)
class Event:
    """One action as it ran. The ``rebuild_seconds`` of recomputation that did not run ahead come right before ``start``."""

    rank: int
    action: Action
    start_seconds: float
    end_seconds: float
    rebuild_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of a pipeline.

    ``in_flight`` is by stage: micro-batches between the start of their forward and the end of their last backward action,
    when they are most. ``rebuilt_ahead`` is by rank: micro-batches whose values were rebuilt before their gradient came,
    when they are most (0 without running ahead). ``hidden_seconds``: recomputation that ran where the rank would idle.
    """

    events: tuple[Event, ...]
    step_seconds: float
    busy_seconds: tuple[float, ...]
    """By rank: computing, recomputation included."""
    in_flight: tuple[int, ...]
    hidden_seconds: tuple[float, ...]
    rebuilt_ahead: tuple[int, ...]

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """By rank: the rest of the step."""
        return tuple(self.step_seconds - busy for busy in self.busy_seconds)

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """By rank: idle seconds as a share of the step; (p - 1) / (m + p - 1) for 1F1B with equal stages."""
        return tuple(idle / self.step_seconds if self.step_seconds else 0.0 for idle in self.idle_seconds)

    @property
    def bubble_share(self) -> float:
        """The mean over ranks."""
        return sum(self.bubble_shares) / len(self.bubble_shares)


def simulate_pipeline(orders: Orders, stages: Sequence[StageSeconds], *, ahead: int = 0) -> Timeline:
    """Run one step of a pipeline on paper.

    Args:
        orders: by rank, from ``pipeline_orders`` or written by hand.
        stages: seconds of every stage.
        ahead: how many micro-batches a rank may rebuild before their gradient has come, in seconds in which it would idle.

    Returns:
        The timeline; events are sorted by start.

    Raises:
        InvalidLayout: actions missing, run twice or on two ranks, or an order in which ranks wait for each other for ever.

    Example:
        >>> from plimsoll.artifacts.layout import Layout
        >>> from plimsoll.estimator.pipeline_schedule.orders import pipeline_orders
        >>> each = StageSeconds(forward_seconds=1.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.0)
        >>> timeline = simulate_pipeline(pipeline_orders(Layout(pp=4, micro_batches=8)), [each] * 4)
        >>> timeline.step_seconds, timeline.in_flight, round(timeline.bubble_share, 4)
        (33.0, (4, 3, 2, 1), 0.2727)

    Source: Narayanan et al. 2021, section 2.2, for the analytic cases.
    """
    check_orders(orders, len(stages))
    machine = _Machine(orders, stages, ahead)
    machine.run()
    events = sorted(machine.events, key=lambda event: (event.start_seconds, event.rank))
    return Timeline(
        events=tuple(events),
        step_seconds=max((event.end_seconds for event in events), default=0.0),
        busy_seconds=tuple(rank.busy_seconds for rank in machine.ranks),
        in_flight=in_flight(orders, len(stages)),
        hidden_seconds=tuple(rank.hidden_seconds for rank in machine.ranks),
        rebuilt_ahead=tuple(rank.most_rebuilt for rank in machine.ranks),
    )


def in_flight(orders: Orders, stages: int) -> tuple[int, ...]:
    """By stage: between forward and last backward action at most so many micro-batches; it follows from the order alone."""
    now, most = [0] * stages, [0] * stages
    for actions in orders:
        for stage, change in _holding(actions):
            now[stage] += change
            most[stage] = max(most[stage], now[stage])
    return tuple(most)


def held_bytes(orders: Orders, bytes_by_stage: Sequence[int]) -> tuple[int, ...]:
    """By rank: the most that its stages hold together between forward and backward.

    Args:
        orders: by rank.
        bytes_by_stage: what one micro-batch holds in each stage.

    Example:
        >>> from plimsoll.artifacts.layout import Layout
        >>> from plimsoll.estimator.pipeline_schedule.orders import pipeline_orders
        >>> held_bytes(pipeline_orders(Layout(pp=2, micro_batches=8)), [100, 10])
        (200, 10)
    """
    most_by_rank = []
    for actions in orders:
        now = most = 0
        for stage, change in _holding(actions):
            now += change * bytes_by_stage[stage]
            most = max(most, now)
        most_by_rank.append(most)
    return tuple(most_by_rank)


def _holding(actions: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """One more micro-batch held (forward), or one less (the last action of its backward), stage by stage."""
    for stage, work, _ in actions:
        if work is Work.FORWARD:
            yield stage, 1
        elif work is not Work.INPUT_GRADIENT:
            yield stage, -1


def check_orders(orders: Orders, stages: int) -> None:
    """Refuse orders that are not one step of a pipeline.

    Raises:
        InvalidLayout: an action that is missing, doubled, of no stage, or on a rank other than its stage's.
    """
    seen: set[Action] = set()
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(orders):
        for action in actions:
            if not 0 <= action.stage < stages or action.micro_batch < 0:
                raise _invalid(f"{action} is no action of a pipeline of {stages} stages.", "stages count from 0")
            if action in seen:
                raise _invalid(f"{action} runs twice.", "every stage runs every micro-batch once")
            if rank_of.setdefault(action.stage, rank) != rank:
                raise _invalid(f"Stage {action.stage} runs on two ranks.", "a stage's weights lie on one rank")
            seen.add(action)
    micro_batches = {action.micro_batch for action in seen}
    for stage in range(stages):
        for micro_batch in micro_batches:
            forward = Action(stage, Work.FORWARD, micro_batch)
            whole = Action(stage, Work.BACKWARD, micro_batch) in seen
            halves = [Action(stage, work, micro_batch) in seen for work in (Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT)]
            if forward not in seen or not (whole or all(halves)) or (whole and any(halves)):
                raise _invalid(
                    f"Stage {stage} does not run micro-batch {micro_batch} forward and backward once.",
                    f"it needs {forward} and either B or both I and W",
                )


def _invalid(found: str, why: str) -> InvalidLayout:
    return InvalidLayout(
        found, why=why, next="take the orders from pipeline_orders, or correct the ones written by hand"
    )


@dataclass(slots=True)
class _Rank:
    actions: tuple[Action, ...]
    backwards: deque[Action]
    """Backwards that still need recomputation, in the order in which they will run."""
    at: int = 0
    free_seconds: float = 0.0
    busy_seconds: float = 0.0
    hidden_seconds: float = 0.0
    rebuilt: dict[Action, float] = field(default_factory=dict)
    """Seconds of recomputation done ahead, by the backward that they belong to."""
    most_rebuilt: int = 0


class _Machine:
    def __init__(self, orders: Orders, stages: Sequence[StageSeconds], ahead: int) -> None:
        self.stages = stages
        self.ahead = ahead
        self.events: list[Event] = []
        self.ends: dict[Action, float] = {}
        self.waiting: dict[Action, list[int]] = {}
        self.halves = {action.stage for actions in orders for action in actions if action.work is Work.INPUT_GRADIENT}
        self.ranks = [
            _Rank(
                actions,
                deque(
                    a
                    for a in actions
                    if a.work in (Work.BACKWARD, Work.INPUT_GRADIENT) and stages[a.stage].recompute_seconds
                ),
            )
            for actions in orders
        ]

    def run(self) -> None:
        """Run every rank as far as it gets; who waits is woken by what it waits for."""
        ready = deque(range(len(self.ranks)))
        while ready:
            rank = ready.popleft()
            state = self.ranks[rank]
            while state.at < len(state.actions):
                action = state.actions[state.at]
                missing = [need for need, _ in self._needs(action) if need not in self.ends]
                if missing:
                    self.waiting.setdefault(missing[0], []).append(rank)
                    break
                self._do(rank, state, action)
                ready.extend(self.waiting.pop(action, ()))
        stuck = [(rank, state) for rank, state in enumerate(self.ranks) if state.at < len(state.actions)]
        if stuck:
            rank, state = stuck[0]
            action = state.actions[state.at]
            need = next(need for need, _ in self._needs(action) if need not in self.ends)
            raise _invalid(
                f"The ranks wait for each other: rank {rank} cannot run {action} before {need}, which never runs.",
                f"{len(stuck)} of {len(self.ranks)} ranks are stuck",
            )

    def _needs(self, action: Action) -> list[tuple[Action, float]]:
        """What has to end first, and how long its result travels."""
        stage, work, micro_batch = action
        if work is Work.FORWARD:
            before = Action(stage - 1, work, micro_batch)
            return [(before, self.stages[stage].transfer_seconds)] if stage else []
        if work is Work.WEIGHT_GRADIENT:
            return [(Action(stage, Work.INPUT_GRADIENT, micro_batch), 0.0)]
        needs = [(Action(stage, Work.FORWARD, micro_batch), 0.0)]
        if stage + 1 < len(self.stages):
            after = Work.INPUT_GRADIENT if stage + 1 in self.halves else Work.BACKWARD
            needs.append((Action(stage + 1, after, micro_batch), self.stages[stage + 1].transfer_seconds))
        return needs

    def _do(self, rank: int, state: _Rank, action: Action) -> None:
        arrived = max((self.ends[need] + travel for need, travel in self._needs(action)), default=0.0)
        if self.ahead and arrived > state.free_seconds:
            self._rebuild_ahead(state, arrived)
        rebuild = 0.0
        if action.work in (Work.BACKWARD, Work.INPUT_GRADIENT) and self.stages[action.stage].recompute_seconds:
            rebuild = self.stages[action.stage].recompute_seconds - state.rebuilt.pop(action, 0.0)
            if state.backwards and state.backwards[0] == action:
                state.backwards.popleft()
        start = max(arrived, state.free_seconds) + rebuild
        seconds = self.stages[action.stage].of(action.work)
        self.ends[action] = state.free_seconds = start + seconds
        state.busy_seconds += rebuild + seconds
        state.at += 1
        self.events.append(Event(rank, action, start, start + seconds, rebuild))

    def _rebuild_ahead(self, state: _Rank, until: float) -> None:
        """Fill the seconds until then with recomputation for backwards to come, whose forwards are done."""
        while state.backwards and state.free_seconds < until:
            following = state.backwards[0]
            is_new = following not in state.rebuilt
            if Action(following.stage, Work.FORWARD, following.micro_batch) not in self.ends:
                return
            if is_new and len(state.rebuilt) >= self.ahead:
                return
            done = state.rebuilt.get(following, 0.0)
            left = self.stages[following.stage].recompute_seconds - done
            piece = min(left, until - state.free_seconds)
            state.rebuilt[following] = done + piece
            state.most_rebuilt = max(state.most_rebuilt, len(state.rebuilt))
            state.free_seconds += piece
            state.busy_seconds += piece
            state.hidden_seconds += piece
            if piece == left:
                state.backwards.popleft()
