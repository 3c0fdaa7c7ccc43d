"""Find the modules that are planned as regions: a model's repeated blocks, or the modules that the user names."""

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
"""The fewest weight matrices that a block inside another block must have to count as a block of its own.

With fewer, it is one layer (a convolution with its norm) and belongs to the enclosing block.
"""
_OUTSIDE_SHARE = 0.5
"""A limit for a block that is a stack of other blocks: how many weight matrices it may have outside of these blocks, as a share
of the matrices of one of them.

Such other matrices belong to a downsampling, for example.
"""


def find_regions(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return the regions of a model as a mapping from module path (inside of ``DistributedDataParallel``) to module. A region
    is never inside another region.

    By default these are the outermost repeated blocks of the model. Repeated blocks are: siblings of one class that have
    parameters and children; all blocks of a list or a sequence that holds such siblings; and the single block of a list. If a
    block is a stack of other blocks (a stage), the other blocks are taken instead. If a model has no repeated blocks, its
    regions are its children that have children, or else the model itself. In ``patterns``, ``*`` matches within one level of
    module paths (``model.layers.*``), and ``**`` matches any number of levels.

    Raises:
        InvalidRegions: a pattern does not match any module.
    """
    model = inner_module(model)
    if patterns is not None:
        return _outermost(_matching(model, patterns))
    found = _blocks(model, "")
    if not found:
        found = _children(model, "")
    return _outermost(found or {"": model})


def around(module: nn.Module, path: str, inner: Collection[str]) -> dict[str, nn.Module]:
    """Return the outermost parts of a module that have parameters and are outside of the modules ``inner``, as a mapping from
    path to module.

    ``inner`` has the paths of modules inside of the module, and ``path`` is the path of the module itself.
    """
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
    # not bool() or len(): a module may define a length, or refuse it
    return _has_parameters(module) and any(True for _ in module.children())


def _matrix_count(module: nn.Module) -> int:
    """Return the number of weights in a module that are matrices (parameters with two dimensions or more), without embeddings.

    The number decides whether a module counts as a block. A look-up in an embedding does not justify a block.
    """
    inner = (each for each in module.modules() if not isinstance(each, nn.Embedding))
    weights = {id(weight): weight for each in inner for weight in each.parameters(recurse=False)}
    return sum(weight.dim() > 1 for weight in weights.values())


@dataclass(frozen=True, slots=True)
class _Member:
    """Data about a module that may be a block: a child of a module, or the child of a list, sequence or dictionary in it."""

    path: str
    module: nn.Module
    container: nn.Module | None
    """The outermost container that the child was in; ``None`` if it was not in a container."""


def _members(module: nn.Module, prefix: str, container: nn.Module | None = None) -> Iterator[_Member]:
    container = module if container is None and isinstance(module, _CONTAINERS) else container
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, _CONTAINERS):
            yield from _members(child, path, container or child)
        else:
            yield _Member(path, child, container)


def _blocks(module: nn.Module, prefix: str, *, only_in_lists: bool = False) -> dict[str, nn.Module]:
    """Return the outermost blocks below a module, as a mapping from path to module.

    With ``only_in_lists``, which is used inside of a block, only members of lists count as blocks. The ``q`` and ``k`` of an
    attention layer may be siblings of one class with children (layers with adapters, say), but they are not a chain of blocks.
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
    """Return True if the members of a container are blocks, even if some of them are the only one of their class.

    An example is the first block of a convolutional net. ``kinds`` counts the members by class.
    """
    is_repeating = max(kinds.values()) > 1 and isinstance(container, nn.ModuleList | nn.Sequential)
    return is_repeating or (kinds.total() == 1 and isinstance(container, nn.ModuleList))


def _is_stack(module: nn.Module, nested: Mapping[str, nn.Module]) -> bool:
    """Return True if a block consists of other blocks (``nested``) and little else, so that the others are the blocks to plan.

    Return False if the block has attention or a convolution of its own next to the other blocks (experts, parallel branches).
    Then it is one block itself.
    """
    sizes = [size for block in nested.values() if (size := _matrix_count(block)) >= _LEAST_MATRICES]
    if not sizes:
        return False
    outside = _matrix_count(module) - sum(map(_matrix_count, nested.values()))
    return outside <= (_OUTSIDE_SHARE * sum(sizes) / len(sizes) if len(sizes) > 1 else 0)


def _children(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """Return the children that have parameters and children of their own, as a mapping from path to module.

    Lists and dictionaries of modules are searched, because they are never called themselves.
    """
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
        # several stars in a row would make the regex backtrack exponentially
        parts = map(re.escape, re.split(r"\*\*+", pattern))
        regex = re.compile(".*".join(part.replace(r"\*", r"[^.]*") for part in parts))
        matches = {path: module for path, module in named.items() if regex.fullmatch(path) and path}
        if not matches:
            close = difflib.get_close_matches(pattern, named, n=3, cutoff=0.3)
            raise InvalidRegions(
                f"The region pattern {pattern!r} does not match any module of {type(model).__name__}.",
                why=f"the model has {len(named)} modules"
                + (f"; the closest names are {', '.join(close)}" if close else ""),
                next='use a module path, with * for one level, such as "model.layers.*"',
            )
        found.update(matches)
    return found
