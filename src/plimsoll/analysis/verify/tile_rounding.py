"""Measures how far running modules in tiles (a few rows at a time) moves the gradient, compared with the rounding error of the
plain step.

Tiles compute the same numbers in another order, so gradients are not equal bit for bit. To decide whether the difference is
only rounding, both are compared with the same step in float64: the tiled step's error may be a little larger than the plain
step's, by chance, but not much larger. This is measured for each gradient, so an error in one small tensor does not hide behind
large ones.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping

import torch
from torch.utils._pytree import tree_map_only

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import MOST_ROUNDING, TileRounding
from plimsoll.engine.sensing import squared_distance, squared_norm
from plimsoll.engine.tiles import in_tiles
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import TrainingStep, copies, relative_error
from plimsoll.tracing.constant_random import ConstantRandomNumbers

_Gradients = Mapping[str, torch.Tensor | None]


def measure_tile_rounding(task: TrainingTask, step: TrainingStep, plan: Plan) -> TileRounding | None:
    """Run the step plainly, in tiles, and in float64, and compare their gradients. ``None`` if the plan has no tiles.

    A float64 copy of the model exists meanwhile. If the model cannot run in float64, the tiled and the plain gradient are
    compared with each other. Dropout is off: the order of tiles changes which numbers are dropped.
    """
    if not plan.tiles:
        return None
    is_random = any(tile.is_random for tile in plan.tiles)
    with ConstantRandomNumbers() if is_random else contextlib.nullcontext():
        plain = _gradients(step)
        with in_tiles(step.model, plan.tiles):
            tiled = _gradients(step)
        try:
            exact = _gradients(_in_float64(task))
        except Exception as error:  # noqa: BLE001 - the model's own code may refuse float64 in any way
            return TileRounding(
                compared=sum(gradient is not None for gradient in plain.values()),
                difference=relative_error(plain, tiled),
                obstacle=f"{type(error).__name__}: {error}".splitlines()[0],
                is_without_dropout=is_random,
            )
        finally:
            step.clear_gradients()
    return _compared(plain, tiled, exact, is_without_dropout=is_random)


def _compared(plain: _Gradients, tiled: _Gradients, exact: _Gradients, *, is_without_dropout: bool) -> TileRounding:
    ratios: dict[str, float] = {}
    exceeding = []
    for name, reference in exact.items():
        before, after = plain.get(name), tiled.get(name)
        if reference is None or before is None or after is None:
            if (before is None) is not (after is None):
                exceeding.append(name)
            continue
        norm = math.sqrt(squared_norm(reference))
        before_error = math.sqrt(squared_distance(reference, before))
        after_error = math.sqrt(squared_distance(reference, after))
        # A gradient cannot be nearer than its own dtype allows, so that much does not count.
        unavoidable = torch.finfo(before.dtype).eps * norm
        ratios[name] = after_error / max(before_error, unavoidable, math.ulp(0.0))
        if not ratios[name] <= MOST_ROUNDING:
            exceeding.append(name)
    worst = max(ratios, key=lambda name: ratios[name], default="")
    return TileRounding(
        compared=len(ratios),
        difference=relative_error(plain, tiled),
        plain_error=relative_error(exact, plain),
        tiled_error=relative_error(exact, tiled),
        worst_tensor=worst,
        worst_ratio=ratios.get(worst, 0.0),
        exceeding=tuple(exceeding),
        is_without_dropout=is_without_dropout,
    )


def _gradients(step: TrainingStep) -> _Gradients:
    step.run()
    return copies(step.gradients())


def _in_float64(task: TrainingTask) -> TrainingStep:
    args, kwargs = tree_map_only(
        torch.Tensor, lambda tensor: _widened(tensor).requires_grad_(tensor.requires_grad), task.call()
    )
    return TrainingStep(copy.deepcopy(task.model)._apply(_widened), args, kwargs, loss=task.loss)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float64, or in complex128 if it is complex."""
    if tensor.is_complex():
        return tensor.detach().to(torch.complex128)
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach()
