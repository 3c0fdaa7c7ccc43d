"""Finds the modules that are planned as regions: a model's repeated blocks, or those that the user names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from torch import nn

from plimsoll.errors import InvalidRegions
from plimsoll.tracing.ddp import inner_module

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_COVERED_SHARE = 0.6
"""Nested repeated blocks replace their parents when they hold at least this share of their parameters."""
_LEAST_MATRICES = 2
"""A nested block with fewer weight matrices is one layer (a convolution with its norm), part of the block around it."""


def find_regions(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The regions of a model, by module path (inside of ``DistributedDataParallel``), none inside another.

    By default: every member of the model's repeated blocks, at any depth (siblings of one class that hold parameters
    and have children of their own). A model without repeated blocks gets its children that have children; failing that,
    itself. In patterns ``*`` stands for one level (``model.layers.*``), ``**`` for any number.

    Raises:
        InvalidRegions: a pattern matches nothing.
    """
    model = inner_module(model)
    if patterns is not None:
        return _outermost(_matching(model, patterns))
    found = _repeated(model, "")
    if not found:
        found = _children(model, "")
    return _outermost(found or {"": model})


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _matrix_count(module: nn.Module) -> int:
    return sum(parameter.dim() > 1 for parameter in module.parameters())


def _repeated(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    by_class: dict[type[nn.Module], list[tuple[str, nn.Module]]] = {}
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        by_class.setdefault(type(child), []).append((path, child))
    found: dict[str, nn.Module] = {}
    for kind, members in by_class.items():
        is_block = (
            len(members) > 1
            and not issubclass(kind, _CONTAINERS)
            and all(_has_parameters(member) and any(member.children()) for _, member in members)
        )
        nested: dict[str, nn.Module] = {}
        for path, member in members:
            nested.update(_repeated(member, path))
        inner = sum(_parameter_count(block) for block in nested.values() if _matrix_count(block) >= _LEAST_MATRICES)
        outer = sum(_parameter_count(member) for _, member in members)
        found.update(members if is_block and inner < _COVERED_SHARE * outer else nested)
    return found


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
        parts = (re.escape(part) for part in pattern.split("**"))
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
