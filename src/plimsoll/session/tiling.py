"""Chooses the module calls that run in tiles (parts of a few rows), and the number of tiles of each.

One number decides about all calls: the *tile bytes*. Each row-wise call gets as many tiles as it needs so that one tile makes
about that many bytes, so calls that make less are not cut at all. The candidates are the largest call's bytes divided by 2, 4,
…, 64, but at least half a MiB. The step is traced anew with each candidate's tiles. So the tiled step itself shows its memory,
its recomputation and the speed of short tiles. The other decisions (keep, recompute, compress, offload) are made for it as for
any step.

The smallest number of tiles that fits the budget comes first. More tiles are tried as long as they give a faster plan: they
take longer themselves, but leave more memory to keep other values.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping

from plimsoll.artifacts.tile import Tile
from plimsoll.errors import BudgetBelowFloor, PlimsollError
from plimsoll.session.options import PlanOptions
from plimsoll.session.step_planner import StepPlanner, fastest_planner
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.rows import MOST_TILES, RowwiseCall, find_rowwise_calls
from plimsoll.units import format_bytes_up

_LOG = logging.getLogger(__name__)
_MOST_SETS = 6
_LEAST_TILE_BYTES = 2**19
"""A tile (a part of a few rows) makes at least about this many bytes. Smaller tiles would save little more memory, and many
small ops are slow.
"""
_WORTH_NAMING = 0.05
_LEAST_GAIN = 2.0
"""A call may be cut only if it makes more bytes than its arguments and outputs have, times this factor. One linear layer makes
nothing but its output, so tiles would not save memory.
"""


def find_tileable(task: TrainingTask, whole: StepPlanner) -> tuple[RowwiseCall, ...]:
    """Run the model's forward once, and return the row-wise calls that need less memory in tiles. ``whole`` is the planner of
    the step without tiles.
    """
    return worth_tiling(
        find_rowwise_calls(
            task.model,
            task.batch,
            regions=whole.options.regions,
            device_name=whole.options.device_profile,
            written=whole.trace.written,
        )
    )


def worth_tiling(found: Mapping[str, RowwiseCall]) -> tuple[RowwiseCall, ...]:
    """Return the row-wise calls that need less memory in tiles. ``found`` has all row-wise calls by module path."""
    return tuple(call for call in found.values() if call.inner_bytes > _LEAST_GAIN * call.outer_bytes)


def most_tiles(calls: Iterable[RowwiseCall]) -> tuple[Tile, ...]:
    """Return the tiles of all calls if the largest call gets as many tiles as possible.

    This is the last of the ``candidates``, but without a least size of tiles. So the numbers of tiles do not depend on the
    number of rows.

    Example:
        >>> size = {"inner_bytes": 2**25, "outer_bytes": 2**20}
        >>> call = RowwiseCall(path="mlp", dim=1, rows=4096, inputs={"0": 1}, outputs=(1,), is_random=False, **size)
        >>> [tile.count for tile in most_tiles([call])]
        [64]
    """
    calls = list(calls)
    tile_bytes = max((call.inner_bytes for call in calls), default=0) // MOST_TILES
    return _tiles(calls, tile_bytes) if tile_bytes else ()


def candidates(calls: Iterable[RowwiseCall]) -> list[tuple[Tile, ...]]:
    """Return the sets of tiles to choose from, those with the fewest tiles first.

    Example:
        >>> size = {"inner_bytes": 2**25, "outer_bytes": 2**20}
        >>> call = RowwiseCall(path="mlp", dim=1, rows=4096, inputs={"0": 1}, outputs=(1,), is_random=False, **size)
        >>> [tiles[0].count for tiles in candidates([call])]
        [2, 4, 8, 16, 32, 64]
    """
    calls = list(calls)
    tile_bytes = max((call.inner_bytes for call in calls), default=0) // 2
    sets: list[tuple[Tile, ...]] = []
    while len(sets) < _MOST_SETS and tile_bytes >= _LEAST_TILE_BYTES:
        sets.append(_tiles(calls, tile_bytes))
        tile_bytes //= 2
    return sets


def _tiles(calls: Iterable[RowwiseCall], tile_bytes: int) -> tuple[Tile, ...]:
    """Return the tiles of the calls that make more than ``tile_bytes``."""
    return tuple(tile for call in calls for tile in _tiles_of(call, tile_bytes))


def _tiles_of(call: RowwiseCall, tile_bytes: int) -> Iterable[Tile]:
    count = 1
    while count * tile_bytes < call.inner_bytes:
        count *= 2
    count = min(count, MOST_TILES, call.rows)
    if count > 1:
        yield Tile(
            path=call.path,
            count=count,
            rows=call.rows,
            inputs=call.inputs,
            outputs=call.outputs,
            is_random=call.is_random,
        )


def with_best_tiles(
    whole: StepPlanner, task: TrainingTask, planner_of: Callable[[PlanOptions], StepPlanner]
) -> StepPlanner:
    """Return the planner of the tiled step that has the fastest plan within the budget. It is ``whole``, the planner of the
    step without tiles, if tiles do not give a faster plan, or if no tiles are needed or possible.

    If no plan fits, the planner with the lowest peak is returned.

    Args:
        whole: the planner without tiles.
        task: the step.
        planner_of: makes a planner for the step with other options. It traces the step.
    """
    if whole.budget_bytes is None or whole.fits_unmanaged():
        return whole
    try:
        return _fastest(whole, task, planner_of)
    except (RuntimeError, PlimsollError):  # the model's own code may refuse to run a part of its rows
        _LOG.warning("plimsoll: tiles are not used, because a step in tiles fails", exc_info=True)
        return whole


def with_more_tiles(
    refused: StepPlanner, whole: StepPlanner, task: TrainingTask, planner_of: Callable[[PlanOptions], StepPlanner]
) -> StepPlanner | None:
    """Return the planner of the step with the most tiles that are possible. ``refused`` is the planner whose plans were found
    too large. Return ``None`` if it has the most tiles already, or none.

    Sets of tiles are chosen by predicted peaks. If the chosen set was measured to need more than the budget, the step in more
    tiles may fit: a budget that an error had named was refused by 0.1%.
    """
    if not refused.options.tiles:
        return None
    most = candidates(find_tileable(task, whole))[-1]
    if most == refused.options.tiles:
        return None
    planner = planner_of(dataclasses.replace(whole.options, tiles=most))
    planner.compare_with(whole)
    return planner


def _fastest(whole: StepPlanner, task: TrainingTask, planner_of: Callable[[PlanOptions], StepPlanner]) -> StepPlanner:
    """Search for the set of tiles with the fastest plan, as `with_best_tiles` describes."""
    sets = candidates(find_tileable(task, whole))
    if not sets:
        _LOG.info(
            "plimsoll: tiles are allowed, but no module call works row by row and makes enough bytes to save memory"
        )
        return whole

    def tiled(at: int) -> StepPlanner:
        planner = planner_of(dataclasses.replace(whole.options, tiles=sets[at]))
        planner.compare_with(whole)
        return planner

    return fastest_planner(
        whole, len(sets), tiled, floor_bytes_at=lambda at: whole.traced_in_tiles(task, sets[at]).floor_bytes
    )


def name_tiles(refusal: BudgetBelowFloor, whole: StepPlanner, task: TrainingTask) -> None:
    """Add to the error for a budget that is too small how far tiles would lower the lowest peak, if it is more than 5%. This
    traces the step once more.
    """
    try:
        sets = candidates(find_tileable(task, whole)) if whole.options.may_recompute else []
        lowest_bytes = whole.traced_in_tiles(task, sets[-1]).floor_bytes if sets else whole.floor_bytes
    except Exception:  # noqa: BLE001 - whatever the search meets in the model, the user must see the refusal
        _LOG.debug("plimsoll: the step could not be traced in tiles", exc_info=True)
        return
    if lowest_bytes < (1 - _WORTH_NAMING) * whole.floor_bytes:
        allowed = ", ".join(map(repr, (*whole.options.allow, "tile")))
        refusal.next += f", or allow=({allowed}): with tiles the smallest peak is about {format_bytes_up(lowest_bytes)}"
