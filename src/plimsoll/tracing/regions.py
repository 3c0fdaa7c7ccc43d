"""Finds the modules that are planned as regions: a model's repeated blocks, or those that the user names."""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from plimsoll.errors import InvalidRegions
from plimsoll.tracing.ddp import inner_module

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LEAST_MATRICES = 2
"""A nested block with fewer weight matrices is one layer (a convolution with its norm), part of the block around it."""
_OUTSIDE_SHARE = 0.5
"""A block is a stack of nested ones if what it has besides them (a downsampling) is at most that share of one of them."""


def find_regions(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The regions of a model, by module path (inside of ``DistributedDataParallel``), none inside another.

    By default: every member of the model's repeated blocks, the outermost ones: siblings of one class that hold parameters
    and have children of their own, all blocks of a list or a sequence that holds such siblings, and the single block of a
    list. A block that is a stack of others (a stage) gives way to them. A model without repeated blocks gets its children
    that have children; failing that, itself. In patterns ``*`` stands for one level (``model.layers.*``), ``**`` for any
    number.

    Raises:
        InvalidRegions: a pattern matches nothing.
    """
    model = inner_module(model)
    if patterns is not None:
        return _outermost(_matching(model, patterns))
    found = _blocks(model, "")
    if not found:
        found = _children(model, "")
    return _outermost(found or {"": model})


def around(module: nn.Module, path: str, inner: Collection[str]) -> dict[str, nn.Module]:
    """What a module consists of besides ``inner``, modules in it by their paths: the outermost ones with parameters."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        each = f"{path}.{name}" if path else name
        if each in inner:
            continue
        if isinstance(child, _CONTAINERS) or any(other.startswith(each + ".") for other in inner):
            found.update(around(child, each, inner))
        elif _has_parameters(child):
            found[each] = child
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_block(module: nn.Module) -> bool:
    return _has_parameters(module) and any(True for _ in module.children())  # a module may have a length, or refuse to


def _matrix_count(module: nn.Module) -> int:
    """Weights that something is multiplied with; looking up an embedding makes nothing that is worth a block."""
    inner = (each for each in module.modules() if not isinstance(each, nn.Embedding))
    weights = {id(weight): weight for each in inner for weight in each.parameters(recurse=False)}
    return sum(weight.dim() > 1 for weight in weights.values())


@dataclass(frozen=True, slots=True)
class _Member:
    """A child of a module, with the members of containers in the containers' places."""

    path: str
    module: nn.Module
    container: nn.Module | None
    """The outermost container that it was in."""


def _members(module: nn.Module, prefix: str, container: nn.Module | None = None) -> Iterator[_Member]:
    container = module if container is None and isinstance(module, _CONTAINERS) else container
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, _CONTAINERS):
            yield from _members(child, path, container or child)
        else:
            yield _Member(path, child, container)


def _blocks(module: nn.Module, prefix: str, *, only_in_lists: bool = False) -> dict[str, nn.Module]:
    """The outermost blocks below a module.

    Inside of a block only members of lists count as blocks: what an attention layer calls ``q`` and ``k`` may be siblings of
    one class with children (layers with adapters, say), but no chain of blocks.
    """
    members = [member for member in _members(module, prefix) if _is_block(member.module)]
    eligible = [member for member in members if member.container is not None or not only_in_lists]
    counts = Counter(type(member.module) for member in eligible)
    kinds: defaultdict[int, Counter[type[nn.Module]]] = defaultdict(Counter)
    for member in members:
        kinds[id(member.container)][type(member.module)] += 1
    found: dict[str, nn.Module] = {}
    for member in members:
        is_repeated = counts[type(member.module)] > 1 or _holds_blocks(member.container, kinds[id(member.container)])
        if member in eligible and is_repeated:
            nested = _blocks(member.module, member.path, only_in_lists=True)
            found.update(nested if _is_stack(member.module, nested) else {member.path: member.module})
        else:
            found.update(_blocks(member.module, member.path, only_in_lists=only_in_lists))
    return found


def _holds_blocks(container: nn.Module | None, kinds: Counter[type[nn.Module]]) -> bool:
    """Whether what a container holds are blocks, also those of a kind of their own: the first of a convolutional network."""
    is_repeating = max(kinds.values()) > 1 and isinstance(container, nn.ModuleList | nn.Sequential)
    return is_repeating or (kinds.total() == 1 and isinstance(container, nn.ModuleList))


def _is_stack(module: nn.Module, nested: Mapping[str, nn.Module]) -> bool:
    """Whether a block is little more than a chain of others: its activations are theirs.

    Not so where attention or a convolution of its own stands beside them (experts, parallel branches): then it is one block.
    """
    sizes = [size for block in nested.values() if (size := _matrix_count(block)) >= _LEAST_MATRICES]
    if not sizes:
        return False
    outside = _matrix_count(module) - sum(map(_matrix_count, nested.values()))
    return outside <= (_OUTSIDE_SHARE * sum(sizes) / len(sizes) if len(sizes) > 1 else 0)


def _children(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """Children that hold parameters and have children of their own; containers, which are never called, are looked into."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found.update(_children(child, path))
        elif _has_parameters(child) and any(child.children()):
            found[path] = child
    return found


def _outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    seen: set[int] = set()
    kept: dict[str, nn.Module] = {}
    for path, module in sorted(found.items(), key=lambda item: item[0].count(".")):
        parts = path.split(".")
        inside = any(".".join(parts[:depth]) in kept for depth in range(len(parts))) and path != ""
        if not inside and id(module) not in seen:
            kept[path] = module
            seen.add(id(module))
    return {path: module for path, module in found.items() if path in kept}


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    named = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        parts = map(re.escape, re.split(r"\*\*+", pattern))  # hundreds of stars are as many ways to match, all tried
        regex = re.compile(".*".join(part.replace(r"\*", r"[^.]*") for part in parts))
        matches = {path: module for path, module in named.items() if regex.fullmatch(path) and path}
        if not matches:
            close = difflib.get_close_matches(pattern, named, n=3, cutoff=0.3)
            raise InvalidRegions(
                f"The region pattern {pattern!r} matches no module of {type(model).__name__}.",
                why=f"the model has {len(named)} modules" + (f", the closest are {', '.join(close)}" if close else ""),
                next='use a module path in which * stands for one level, as in "model.layers.*"',
            )
        found.update(matches)
    return found
