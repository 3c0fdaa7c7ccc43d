"""Distinguishes calls of a model by the shapes of their tensors, and finds known calls that need at least as much memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from plimsoll.tracing.recorder.calling import call_tensors
from plimsoll.tracing.recorder.fingerprint import AUTOCAST, casts_in_force
from plimsoll.tracing.recorder.opkey import dtype_name
from plimsoll.tracing.recorder.storages import is_plain

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""What identifies a call, as a tuple: dtype and shape of each tensor of the call, in a fixed order, then the dtypes that
autocast casts to, each without a shape.
"""
_IN_LIST = " in list "


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Return the shapes that identify a call: dtype and shape of each tensor among its arguments, and the autocast settings in
    force.
    """
    shapes = ((dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in call_tensors(args, kwargs))
    return (*shapes, *((cast, ()) for cast in casts_in_force()))


def shapes_and_masks_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Return `shapes_of`, with more detail in the dtype keys.

    A mask's key also records whether the mask is all-true, because attention then uses another kernel: a padded batch after
    batches without padding needed 0.84 MB more than planned, under a budget of 10.8 MB. The key of a tensor in a list records
    which list argument it came from, because tensors of one list can replace each other. Reading a mask waits for the device;
    models that choose their kernel by the mask wait there anyway.
    """
    masks = {id(leaf) for name, value in kwargs.items() if "mask" in name for leaf in tree_leaves(value)}
    named = [*enumerate(args), *((name, kwargs[name]) for name in sorted(kwargs))]
    shapes = (
        (f"{dtype_name(tensor.dtype)}{_gaps(tensor) if id(tensor) in masks else ''}{place}", tuple(tensor.shape))
        for name, value in named
        for tensor, place in _placed(value, name)
    )
    return (*shapes, *((cast, ()) for cast in casts_in_force()))


def _placed(value: Any, name: object, place: str = "") -> Iterator[tuple[torch.Tensor, str]]:
    """Yield each tensor of an argument together with a text that names the list that contains it. The text is "" for a tensor
    outside of lists. The position within the list is not part of it.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _placed(each, f"{name}.{key}", place and f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _placed(each, name, f"{place or f'{_IN_LIST}{name}'}.*")
    else:
        yield from ((leaf, place) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _gaps(mask: torch.Tensor) -> str:
    if mask.is_floating_point() or mask.is_complex() or not is_plain(mask):
        return ""
    return " without gaps " if mask.all() else " with gaps "


def covers(known: Shapes, shapes: Shapes) -> bool:
    """True if no tensor of the call ``shapes`` is larger in any dimension than its counterpart in the call ``known``."""
    return len(known) == len(shapes) and all(
        one[0] == other[0]
        and len(one[1]) == len(other[1])
        and all(a >= b for a, b in zip(one[1], other[1], strict=True))
        for one, other in zip(known, shapes, strict=True)
    )


def standing_in(known: Iterable[Shapes], shapes: Shapes) -> list[Shapes]:
    """Return known calls whose peaks together bound the peak of the call ``shapes``, so that it need not be traced.

    A detector gets lists of images and boxes of any size, so one call is rarely at least as large as another in every position.
    So a list is compared as a whole: its number of tensors, their total elements, their longest sides, and their padded size.
    Without the padded size, a broad picture next to a high one ran under the plan of smaller pairs and exceeded the budget,
    because it is three times as large when padded. Tensors outside of lists are compared one by one.
    """
    alike = [each for each in known if covers(_single(each), _single(shapes))]
    reached = [_extents(each) for each in alike]
    goes_beyond = any(all(size > each.get(place, -1) for each in reached) for place, size in _extents(shapes).items())
    return [] if goes_beyond else alike


def shown(shapes: Shapes) -> str:
    """Return the shapes as text, such as ``i64[2x512], i64[2x512]``."""
    sizes = (
        kind if kind.startswith(AUTOCAST) else f"{kind.partition(_IN_LIST)[0]}[{'x'.join(map(str, sizes))}]"
        for kind, sizes in shapes
    )
    return ", ".join(sizes) or "without tensors"


def _single(shapes: Shapes) -> Shapes:
    return tuple(each for each in shapes if _IN_LIST not in each[0])


def _extents(shapes: Shapes) -> dict[tuple[str, int, str], int]:
    """Return a mapping that compares lists of tensors as a whole. Its values are the sizes of the lists; its keys name the
    list, the number of dimensions, and the kind of size.
    """
    lists: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for kind, sizes in shapes:
        if _IN_LIST in kind:
            lists.setdefault((kind, len(sizes)), []).append(sizes)
    found = {}
    for place, members in lists.items():
        longest = [max(sides) for sides in zip(*members, strict=True)]
        whole = {"tensors": len(members), "elements": sum(map(prod, members)), "padded": len(members) * prod(longest)}
        sides = {f"side {number}": side for number, side in enumerate(longest)}
        found.update({(*place, what): size for what, size in (whole | sides).items()})
    return found
