"""Finds the activations that every plan of a model keeps, and the regions (module calls) whose calls depend on data, for
messages.
"""

from __future__ import annotations

from plimsoll.artifacts.naming import compress_names
from plimsoll.artifacts.plan import FixedPart, limits_of
from plimsoll.artifacts.trace import Category, Storage
from plimsoll.planning.explain import why_kept
from plimsoll.planning.simulate import Simulation, StepReplays
from plimsoll.planning.step import StepIndex, boundary_values


def held_for_backward(baseline: Simulation) -> tuple[Storage, ...]:
    """Return the activations that a step without a plan holds at the end of forward, with the model's output."""
    index = baseline.index
    replays = StepReplays(index, baseline.choices, index.handover)
    return tuple(
        storage
        for storage in index.trace.storages
        if storage.category is Category.ACTIVATION and replays.is_alive(storage.id, index.handover)
    )


def fixed_parts(index: StepIndex, held: tuple[Storage, ...]) -> tuple[FixedPart, ...]:
    """Return the parts of ``held`` that no plan can drop, compress or offload, the largest first.

    One part has all values that are kept for the same reason. ``held`` is the result of `held_for_backward`.
    """
    sizes = {storage.id: storage.bytes for storage in held}
    bytes_of: dict[str, int] = {}
    regions_of: dict[str, dict[str, None]] = {}
    for view in index.views:
        boundary = boundary_values(index, view)
        for value in view.saved:
            size = sizes.pop(view.graph.values[value].storage, 0)  # a storage that several regions save counts once
            if size and value not in view.decided and value not in boundary:
                why = why_kept(view, value)
                bytes_of[why] = bytes_of.get(why, 0) + size
                regions_of.setdefault(why, {})[view.call.name] = None
    parts = [
        FixedPart(where=compress_names(list(regions_of[why])), bytes=size, why=why) for why, size in bytes_of.items()
    ]
    rest = [storage for storage in held if storage.id in sizes]
    if rest:
        largest = max(rest, key=lambda storage: storage.bytes)
        parts.append(
            FixedPart(
                where=largest.label or "the model",
                bytes=sum(storage.bytes for storage in rest),
                why="no block that a plan manages saves it",
            )
        )
    return tuple(sorted(parts, key=lambda part: -part.bytes))


def notes_about_plans(baseline: Simulation) -> tuple[str, ...]:
    """Return sentences that say what every plan of a model keeps, if that is much, and which regions read values of tensors."""
    held = held_for_backward(baseline)
    regions_of: dict[str, dict[str, None]] = {}
    for view in baseline.index.views:
        if view.call.value_read:
            regions_of.setdefault(view.call.value_read, {})[view.call.name] = None
    return (
        *limits_of(sum(storage.bytes for storage in held), fixed_parts(baseline.index, held)),
        *(
            f"{compress_names(list(names))} read values of tensors ({line}), so calls with other data may run other ops. Under "
            "a plan, recipes serve the calls whose ops are known, and backward runs the forward of other calls again."
            for line, names in regions_of.items()
        ),
    )
