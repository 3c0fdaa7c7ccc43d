"""A pipeline whose stages recompute in; how its bubble grows by that, and what running ahead gives back, out. No torch.

Recomputation lengthens every backward, and with it the bubble at both ends of the step: (p - 1) more recomputations for
1F1B with equal stages, on top of the m that every rank runs. A rank that idles before its backward can use that time; the
price is that what it rebuilds is held from then on, for as many micro-batches as it ran ahead of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plimsoll.estimator.pipeline_schedule.orders import Orders
from plimsoll.estimator.pipeline_schedule.timeline import StageSeconds, Timeline, simulate_pipeline


@dataclass(frozen=True, slots=True)
class RankGrowth:
    """One rank: how long it idles without recomputation, with it, and with it run ahead.

    ``held_ahead`` is how many micro-batches' rebuilt values it holds early at most; ``hidden_seconds`` how much of its
    recomputation ran in idle time.
    """

    rank: int
    idle_seconds_without: float
    idle_seconds_inside: float
    idle_seconds_ahead: float
    hidden_seconds: float
    held_ahead: int


@dataclass(frozen=True, slots=True)
class BubbleGrowth:
    """The same pipeline three times: no recomputation, recomputation inside backward, recomputation run ahead."""

    without: Timeline
    inside: Timeline
    ahead: Timeline
    ranks: tuple[RankGrowth, ...]

    @property
    def added_seconds(self) -> float:
        """What recomputation inside backward adds to the step."""
        return self.inside.step_seconds - self.without.step_seconds

    @property
    def regained_seconds(self) -> float:
        """What running ahead takes off again."""
        return self.inside.step_seconds - self.ahead.step_seconds


def bubble_growth(orders: Orders, stages: Sequence[StageSeconds], *, ahead: int = 1) -> BubbleGrowth:
    """What the stages' recomputation does to a pipeline.

    Args:
        orders: the actions of every rank.
        stages: seconds of every stage, ``recompute_seconds`` among them.
        ahead: how many micro-batches a rank may rebuild before their gradient has come.

    Returns:
        Three timelines, and idle seconds rank by rank.

    Raises:
        InvalidLayout: the orders are not one step of a pipeline.

    Example:
        >>> from plimsoll.artifacts.layout import Layout
        >>> from plimsoll.estimator.pipeline_schedule.orders import pipeline_orders
        >>> each = StageSeconds(
        ...     forward_seconds=1.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.0, recompute_seconds=1.0
        ... )
        >>> growth = bubble_growth(pipeline_orders(Layout(pp=4, micro_batches=8)), [each] * 4)
        >>> growth.added_seconds, growth.regained_seconds, [rank.held_ahead for rank in growth.ranks]
        (11.0, 3.0, [1, 1, 1, 0])
    """
    without = simulate_pipeline(orders, [replace(stage, recompute_seconds=0.0) for stage in stages])
    inside = simulate_pipeline(orders, stages)
    earlier = simulate_pipeline(orders, stages, ahead=ahead)
    ranks = tuple(
        RankGrowth(
            rank=rank,
            idle_seconds_without=without.idle_seconds[rank],
            idle_seconds_inside=inside.idle_seconds[rank],
            idle_seconds_ahead=earlier.idle_seconds[rank],
            hidden_seconds=earlier.hidden_seconds[rank],
            held_ahead=earlier.rebuilt_ahead[rank],
        )
        for rank in range(len(orders))
    )
    return BubbleGrowth(without, inside, earlier, ranks)
