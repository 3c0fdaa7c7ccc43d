"""Simulates one step of a pipeline: when each action (forward or backward of a micro-batch in a stage) runs, and where ranks
idle, without torch.

The simulation is event-driven, linear in the number of actions. A rank runs its actions in order, one at a time; an action
starts when the rank is free and its inputs have arrived:

    F(s, m) needs F(s-1, m);  B(s, m) and I(s, m) need F(s, m) and B or I of (s+1, m);  W(s, m) needs I(s, m)

Between stages the result travels for ``transfer_seconds``, during which both ranks compute. The data, tensor and context
parallel ranks of one stage do the same at the same time, so a simulated pipeline of 16 stages represents 16,384 ranks as well
as 16.

Recomputation runs before the backward that needs it: right before it (``ahead=0``), or earlier, for up to ``ahead``
micro-batches, while the rank would idle. It may be cut into pieces, because it is a sequence of ops.

Recomputation lengthens every backward, and with it the bubble at both ends of the step: (p - 1) more recomputations for
1F1B with equal stages, in addition to the m that every rank runs. A rank that idles before its backward can use that time. In
return it holds what it rebuilds from then on, for as many micro-batches as it ran ahead.

Known weakness: every micro-batch takes the same seconds; sends never wait for one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from plimsoll.estimator.pipeline_schedule.orders import (
    Action,
    ActionKind,
    Orders,
    check_orders,
    in_flight,
    invalid_orders,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSeconds:
    """The seconds of one micro-batch in one stage, as data.

    ``transfer_seconds`` is the transfer of its input from the previous stage, and of that input's gradient back.
    ``recompute_seconds`` is recomputation for backward; if backward is split, it runs before the first half.
    """

    forward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    recompute_seconds: float = 0.0
    transfer_seconds: float = 0.0

    def of(self, work: ActionKind) -> float:
        """Return the seconds of one kind of action (forward, backward or a half of backward), without recomputation."""
        match work:
            case ActionKind.FORWARD:
                return self.forward_seconds
            case ActionKind.INPUT_GRADIENT:
                return self.input_gradient_seconds
            case ActionKind.WEIGHT_GRADIENT:
                return self.weight_gradient_seconds
            case ActionKind.BACKWARD:
                return self.input_gradient_seconds + self.weight_gradient_seconds


@dataclass(frozen=True, slots=True)
class Event:
    """One action as it ran: its rank, its start and its end.

    Recomputation that did not run ahead takes the ``rebuild_seconds`` right before ``start_seconds``.
    """

    rank: int
    action: Action
    start_seconds: float
    end_seconds: float
    rebuild_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """One simulated step of a pipeline, as data.

    ``in_flight`` has, for each stage, the most micro-batches between the start of their forward and the end of their last
    backward action. ``rebuilt_ahead`` has, for each rank, the most micro-batches whose values were rebuilt before their
    gradient arrived (0 without running ahead). ``hidden_seconds`` has, for each rank, the recomputation that ran while the rank
    would idle.
    """

    events: tuple[Event, ...]
    step_seconds: float
    busy_seconds: tuple[float, ...]
    """For each rank, the seconds that it computes, including recomputation."""
    in_flight: tuple[int, ...]
    hidden_seconds: tuple[float, ...]
    rebuilt_ahead: tuple[int, ...]

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """For each rank, the seconds of the step when it does not compute."""
        return tuple(self.step_seconds - busy for busy in self.busy_seconds)

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """For each rank, its idle seconds as a share of the step. For 1F1B with equal stages it is (p - 1) / (m + p - 1)."""
        return tuple(idle / self.step_seconds if self.step_seconds else 0.0 for idle in self.idle_seconds)

    @property
    def bubble_share(self) -> float:
        """The mean of ``bubble_shares`` over the ranks."""
        return sum(self.bubble_shares) / len(self.bubble_shares)


def simulate_pipeline(orders: Orders, stages: Sequence[ActionSeconds], *, ahead: int = 0) -> PipelineTimeline:
    """Simulate one step of a pipeline, and return when each action ran and where ranks idle.

    ``orders`` are the actions of each rank, ``stages`` the seconds of each stage. ``ahead`` is how many micro-batches a rank
    may rebuild before their gradient arrives, while it would idle. Events are sorted by start.

    Raises:
        InvalidLayout: actions are missing, run twice or on two ranks, or ranks wait for each other forever.

    Example:
        >>> from plimsoll.artifacts.job import Layout
        >>> from plimsoll.estimator.pipeline_schedule.orders import pipeline_orders
        >>> each = ActionSeconds(forward_seconds=1.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.0)
        >>> timeline = simulate_pipeline(pipeline_orders(Layout(pp=4, micro_batches=8)), [each] * 4)
        >>> timeline.step_seconds, timeline.in_flight, round(timeline.bubble_share, 4)
        (33.0, (4, 3, 2, 1), 0.2727)

    Source: Narayanan et al. 2021, section 2.2, for the analytic cases.
    """
    check_orders(orders, len(stages))
    machine = _Machine(orders, stages, ahead)
    machine.run()
    events = sorted(machine.events, key=lambda event: (event.start_seconds, event.rank))
    return PipelineTimeline(
        events=tuple(events),
        step_seconds=max((event.end_seconds for event in events), default=0.0),
        busy_seconds=tuple(rank.busy_seconds for rank in machine.ranks),
        in_flight=in_flight(orders, len(stages)),
        hidden_seconds=tuple(rank.hidden_seconds for rank in machine.ranks),
        rebuilt_ahead=tuple(rank.most_rebuilt for rank in machine.ranks),
    )


@dataclass(slots=True)
class _Rank:
    actions: tuple[Action, ...]
    backwards: deque[Action]
    """The backward actions that still need recomputation, in order of execution."""
    at: int = 0
    free_seconds: float = 0.0
    busy_seconds: float = 0.0
    hidden_seconds: float = 0.0
    rebuilt: dict[Action, float] = field(default_factory=dict)
    """A mapping from a backward action to the seconds of its recomputation that were done ahead."""
    most_rebuilt: int = 0


class _Machine:
    def __init__(self, orders: Orders, stages: Sequence[ActionSeconds], ahead: int) -> None:
        self.stages = stages
        self.ahead = ahead
        self.events: list[Event] = []
        self.ends: dict[Action, float] = {}
        self.waiting: dict[Action, list[int]] = {}
        # DualPipeV halves the backward of some micro-batches of a stage, and not of others.
        self.halves = {action for actions in orders for action in actions if action.work is ActionKind.INPUT_GRADIENT}
        self.ranks = [_Rank(actions, deque(filter(self._rebuilds, actions))) for actions in orders]

    def run(self) -> None:
        """Run the actions of all ranks, each as soon as possible.

        A rank that waits is resumed when the action that it waits for ends.
        """
        ready = deque(range(len(self.ranks)))
        while ready:
            rank = ready.popleft()
            state = self.ranks[rank]
            while state.at < len(state.actions):
                action = state.actions[state.at]
                missing = self._missing(action)
                if missing is not None:
                    self.waiting.setdefault(missing, []).append(rank)
                    break
                self._do(rank, state, action)
                ready.extend(self.waiting.pop(action, ()))
        stuck = [(rank, state) for rank, state in enumerate(self.ranks) if state.at < len(state.actions)]
        if stuck:
            rank, state = stuck[0]
            action = state.actions[state.at]
            need = self._missing(action)
            raise invalid_orders(
                f"The pipeline would deadlock: rank {rank} cannot run {action} before {need}, which never runs.",
                f"{len(stuck)} of {len(self.ranks)} ranks are stuck",
            )

    def _rebuilds(self, action: Action) -> bool:
        """Whether recomputation runs before an action.

        It runs before a whole backward, or before the first half of a split backward.
        """
        is_first = action.work in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
        return is_first and self.stages[action.stage].recompute_seconds != 0

    def _missing(self, action: Action) -> Action | None:
        """Return the first action that this action has to wait for: it must end before this action and has not ended. Return
        ``None`` if this action can run.
        """
        return next((need for need, _ in self._needs(action) if need not in self.ends), None)

    def _needs(self, action: Action) -> list[tuple[Action, float]]:
        """Return the actions that must end before this action, each with the seconds that the transfer of its result takes."""
        stage, work, micro_batch = action
        if work is ActionKind.FORWARD:
            before = Action(stage - 1, work, micro_batch)
            return [(before, self.stages[stage].transfer_seconds)] if stage else []
        if work is ActionKind.WEIGHT_GRADIENT:
            return [(Action(stage, ActionKind.INPUT_GRADIENT, micro_batch), 0.0)]
        needs = [(Action(stage, ActionKind.FORWARD, micro_batch), 0.0)]
        if stage + 1 < len(self.stages):
            half = Action(stage + 1, ActionKind.INPUT_GRADIENT, micro_batch)
            after = half if half in self.halves else half._replace(work=ActionKind.BACKWARD)
            needs.append((after, self.stages[stage + 1].transfer_seconds))
        return needs

    def _do(self, rank: int, state: _Rank, action: Action) -> None:
        arrived = max((self.ends[need] + travel for need, travel in self._needs(action)), default=0.0)
        if self.ahead and arrived > state.free_seconds:
            self._rebuild_ahead(state, arrived)
        rebuild = 0.0
        if self._rebuilds(action):
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
        """Let an idle rank recompute for its later backward actions until the time ``until``. Only backward actions whose
        forwards are done count.
        """
        while state.backwards and state.free_seconds < until:
            following = state.backwards[0]
            is_new = following not in state.rebuilt
            if Action(following.stage, ActionKind.FORWARD, following.micro_batch) not in self.ends:
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


@dataclass(frozen=True, slots=True)
class BubbleGrowth:
    """Three simulated timelines of one pipeline, as data: without recomputation, with recomputation right before its backward,
    and with recomputation ahead of time in idle seconds.
    """

    without: PipelineTimeline
    inside: PipelineTimeline
    ahead: PipelineTimeline

    @property
    def added_seconds(self) -> float:
        """The seconds that recomputation inside backward adds to the step."""
        return self.inside.step_seconds - self.without.step_seconds

    @property
    def regained_seconds(self) -> float:
        """How much shorter the step becomes, in seconds, if recomputation runs ahead of time in idle seconds instead of inside
        backward.
        """
        return self.inside.step_seconds - self.ahead.step_seconds


def bubble_growth(orders: Orders, stages: Sequence[ActionSeconds], *, ahead: int = 1) -> BubbleGrowth:
    """Simulate how the stages' recomputation lengthens a pipeline's step.

    The three timelines say for every rank how long it idles and how much it rebuilds ahead: at most ``ahead`` micro-batches
    before their gradient arrives.

    Raises:
        InvalidLayout: the orders are not one step of a pipeline.

    Example:
        >>> from plimsoll.artifacts.job import Layout
        >>> from plimsoll.estimator.pipeline_schedule.orders import pipeline_orders
        >>> each = ActionSeconds(
        ...     forward_seconds=1.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.0, recompute_seconds=1.0
        ... )
        >>> growth = bubble_growth(pipeline_orders(Layout(pp=4, micro_batches=8)), [each] * 4)
        >>> growth.added_seconds, growth.regained_seconds, growth.ahead.rebuilt_ahead
        (11.0, 3.0, (1, 1, 1, 0))
    """
    without = [replace(stage, recompute_seconds=0.0) for stage in stages]
    return BubbleGrowth(
        without=simulate_pipeline(orders, without),
        inside=simulate_pipeline(orders, stages),
        ahead=simulate_pipeline(orders, stages, ahead=ahead),
    )
