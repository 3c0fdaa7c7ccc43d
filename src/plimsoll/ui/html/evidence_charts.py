"""Draws charts of evidence: curves of two runs, norms of gradients, the parts of an overhead, the bytes of an estimate, and the
longest sequences that fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plimsoll.artifacts.finding import OverheadPart
from plimsoll.artifacts.verdict import NormComparison, NormSummary
from plimsoll.ui.document import BytesChart, CurvesChart, LengthsChart, NormsChart, PartsChart
from plimsoll.ui.html.drawing import (
    GREEN,
    LINE,
    ORANGE,
    SKY,
    VERMILION,
    Axis,
    Bars,
    Boxes,
    Drawing,
    Note,
    Points,
    Polyline,
    RuleLine,
    byte_scale,
    drawable,
)
from plimsoll.units import format_bytes, format_seconds

_FEW = 20
"""If a chart shows at most this many training steps, each step is marked with a point."""
_NAMED_BLOCKS = 60
_DECADES_IN_STEPS = 5
_BAR_PIXELS = 34
_MOST_ROOM = 2.0
"""A factor. If the limit (such as the device's memory) is more than this many times the longest bar, its line is not drawn."""


def draw_curves(chart: CurvesChart) -> Drawing:
    """Draw the curves of two runs over the steps.

    The run with the plan is a thin line on top of the broad line of the run without a plan.
    """
    layers: list[Polyline | Points] = []
    for numbers, name, colour, width in (
        (chart.baseline, "unmanaged", SKY, 6.0),
        (chart.plan, "with the plan", VERMILION, 1.8),
    ):
        xs, ys = range(1, len(numbers) + 1), [drawable(number) for number in numbers]
        layers.append(Polyline(name=name, xs=xs, ys=ys, colour=colour, width=width))
        if len(numbers) <= _FEW:
            layers.append(Points(xs=xs, ys=ys, colour=colour, radius=width / 2 + 1.5))
    steps = max(len(chart.baseline), len(chart.plan))
    return Drawing(
        layers=layers,
        x=Axis(title="step", is_whole=steps <= _FEW),
        y=Axis(title=chart.title),
        height=320,
        description=f"{chart.title} over {steps} steps, unmanaged and with the plan.",
    )


def draw_norms(chart: NormsChart) -> Drawing:
    """Draw two boxes per block, for the runs without and with the plan: quartiles and median, with whiskers from 5% to 95%."""
    comparisons = chart.comparisons
    blocks = Axis(title="block", has_grid=False)
    if len(comparisons) <= _NAMED_BLOCKS:
        ticks = [(place, entry.block) for place, entry in enumerate(comparisons)]
        blocks = Axis(ticks=ticks, turned_degrees=40, has_grid=False)
    return Drawing(
        layers=[
            Boxes(name="unmanaged", boxes=[_box(entry.baseline) for entry in comparisons], colour=LINE),
            Boxes(name="with the plan", boxes=[_box(entry.plan) for entry in comparisons], colour=VERMILION),
        ],
        x=blocks,
        y=Axis(title="gradient norm", is_log=True, ticks=_log_ticks(comparisons)),
        height=480,
        description=f"Distributions of the gradient norm in {len(comparisons)} blocks, unmanaged and with the plan.",
        caption="A box spans the middle half of the steps. Its line is the median. The whiskers reach from 5% to 95%.",
    )


def _box(summary: NormSummary) -> list[float | None]:
    return [drawable(number) for number in summary.quantiles[1:6]]


def _log_ticks(comparisons: Sequence[NormComparison]) -> list[tuple[float, str]] | None:
    """Return ticks at 1, 2 and 5 of each decade. If there are more than five decades, the ticks are only at the decades."""
    norms = [norm for entry in comparisons for side in (entry.baseline, entry.plan) for norm in side.quantiles[1:6]]
    positive = [norm for norm in norms if norm > 0 and math.isfinite(norm)]
    if not positive:
        return None
    decades = range(math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive))) + 1)
    steps = (1, 2, 5) if len(decades) <= _DECADES_IN_STEPS else (1,)
    ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
    return [(tick, f"{tick:g}") for tick in ticks]


def draw_parts(chart: PartsChart) -> Drawing:
    """Draw one bar for each cause of a plan's extra time. The bar of a cause that saves time points to the left."""
    parts = chart.parts
    is_spread = any(part.spread_seconds is not None for part in parts)
    return Drawing(
        layers=[
            Bars(
                lengths=[round(part.seconds * 1e3, 6) for part in parts],
                colours=[ORANGE if part.seconds >= 0 else GREEN for part in parts],
                hints=[_hint(part) for part in parts],
                spreads=[(part.spread_seconds or 0.0) * 1e3 for part in parts] if is_spread else (),
            )
        ],
        x=Axis(title="extra time per step, ms"),
        y=Axis(ticks=[(row, part.cause) for row, part in enumerate(parts)], is_downward=True, has_grid=False),
        height=100 + _BAR_PIXELS * len(parts),
        description="The extra time of a step, by cause.",
    )


def _hint(part: OverheadPart) -> str:
    return "\n".join([f"{part.cause} {format_seconds(part.seconds)}", part.cause.meaning, *part.details])


def draw_bytes(chart: BytesChart) -> Drawing:
    """Draw one bar with an error bar for each item of memory, and a line at the device's memory."""
    rows, limit = chart.rows, chart.limit_bytes
    most = max((size + error for _, size, error in rows), default=0)
    if limit is not None and limit > _MOST_ROOM * most:
        limit = None
    scale = byte_scale([most, limit or 0])
    return Drawing(
        layers=[
            Bars(
                lengths=[scale.of(size) for _, size, _ in rows],
                colours=[SKY] * len(rows),
                hints=[f"{name}\n{format_bytes(size)} ± {format_bytes(error)}" for name, size, error in rows],
                spreads=[scale.of(error) for *_, error in rows],
            )
        ],
        x=Axis(title=f"{chart.title}, {scale.unit}", span=(0.0, 1.08 * scale.of(max(most, limit or 0, 1)))),
        y=Axis(ticks=[(row, name) for row, (name, *_) in enumerate(rows)], is_downward=True, has_grid=False),
        height=100 + _BAR_PIXELS * len(rows),
        rules=[RuleLine(x=scale.of(limit))] if limit else (),
        notes=[Note([f"device memory {format_bytes(limit)}"], x=scale.of(limit), anchor="end")] if limit else (),
        description=f"{chart.title} of {len(rows)} parts, with error bars.",
    )


def draw_lengths(chart: LengthsChart) -> Drawing:
    """Draw the longest sequence that fits, as one bar with an error bar for each set of memory-saving decisions."""
    rows = chart.rows
    most = max((tokens + error for _, tokens, error in rows), default=0)
    return Drawing(
        layers=[
            Bars(
                lengths=[tokens for _, tokens, _ in rows],
                colours=[SKY] * len(rows),
                hints=[f"{name}\n{tokens:,} ± {error:,} tokens" for name, tokens, error in rows],
                spreads=[error for *_, error in rows],
            )
        ],
        x=Axis(title="longest sequence, tokens", span=(0.0, 1.08 * max(most, 1))),
        y=Axis(ticks=[(row, name) for row, (name, *_) in enumerate(rows)], is_downward=True, has_grid=False),
        height=100 + _BAR_PIXELS * len(rows),
        description=f"The longest sequence under {len(rows)} sets of decisions, with error bars.",
    )
