"""Compares tensors of two runs: gradients and buffers by name, and what named modules make inside the step."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.receipt import Intermediate, Mismatch, finite
from plimsoll.errors import InvalidRegions
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.recorder.storages import same_contents

Key = tuple[str, int, bool]
"""Module, which of its calls, and whether it is the gradient."""
Found = dict[Key, torch.Tensor | None]
"""Copies; ``None`` stands for a gradient that cannot be seen, since the module ran without autograd."""


def mismatches(
    expected: Mapping[str, torch.Tensor | None],
    found: Mapping[str, torch.Tensor | None],
    spread: Mapping[str, float | None],
) -> tuple[Mismatch, ...]:
    """Tensors of ``found`` that are not ``expected``'s bits, with how far they are and how far the model is from itself."""
    differing: list[Mismatch] = []
    for name, reference in expected.items():
        other = found.get(name)
        if reference is None and other is None:
            continue
        if reference is None or other is None:
            absolute: float | None = None
            relative: float | None = None
        elif same_contents(reference, other):
            continue
        else:
            absolute, relative = difference(reference, other)
        differing.append(
            Mismatch(
                name=name,
                max_absolute_difference=absolute,
                max_relative_difference=relative,
                baseline_max_absolute_difference=spread.get(name, 0.0),
            )
        )
    return tuple(differing)


def difference(first: torch.Tensor, second: torch.Tensor) -> tuple[float | None, float | None]:
    """Largest absolute difference, and that as a share of the largest magnitude; ``None`` where it is no number."""
    if first.shape != second.shape:
        return None, None
    apart = (first.double() - second.double()).abs().max() if first.numel() else torch.tensor(0.0)
    size = first.double().abs().max() if first.numel() else torch.tensor(0.0)
    absolute = float(apart)
    return finite(absolute), finite(absolute / float(size)) if float(size) else None


class Intermediates:
    """Copies of what named modules make in a step.

    Args:
        model: the model.
        patterns: of module names, as in ``model.layers.*.mlp``.

    Raises:
        InvalidRegions: a pattern that matches no module.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        names = [name for name, _ in model.named_modules() if name]
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                raise InvalidRegions(
                    f"No module is called {pattern!r}.",
                    why=f"{type(model).__name__} has {', '.join(names[:4])} and {max(0, len(names) - 4)} more",
                    next="name modules as in model.named_modules(); * stands for anything",
                )
        self._model = model
        self._names = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}

    @contextlib.contextmanager
    def collect(self) -> Iterator[Found]:
        """What one run makes, filled in while the block runs. A recomputation in backward is no further call."""
        found: Found = {}
        calls = dict.fromkeys(self._names, 0)
        handles = [
            module.register_forward_hook(self._hook(name, found, calls))
            for name, module in self._model.named_modules()
            if name in self._names
        ]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, found: Found, calls: dict[str, int]) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            tensors = output_tensors(output)
            if torch._C._current_graph_task_id() != -1 or not tensors:
                return
            call, tensor = calls[name], tensors[0]
            calls[name] += 1
            found[name, call, False] = tensor.detach().clone()
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: found.__setitem__((name, call, True), gradient.detach().clone()))
            elif not torch.is_grad_enabled():  # re-entrant checkpointing
                found[name, call, True] = None

        return look


def compare_intermediates(expected: Found, found: Found) -> tuple[Intermediate, ...]:
    """Both runs, tensor by tensor, in the order of the first; one that is missing in either differs.

    A gradient that cannot be seen in one of the runs is left out.
    """
    hidden = {key for seen in (expected, found) for key, tensor in seen.items() if tensor is None}
    rows = []
    for key in dict.fromkeys((*expected, *found)):
        if key in hidden:
            continue
        one, other = expected.get(key), found.get(key)
        name, call, is_gradient = key
        is_equal = one is not None and other is not None and same_contents(one, other)
        apart: tuple[float | None, float | None] = (0.0, 0.0) if is_equal else (None, None)
        if one is not None and other is not None and not is_equal:
            apart = difference(one, other)
        rows.append(
            Intermediate(
                module=name,
                call=call,
                is_gradient=is_gradient,
                is_bit_equal=is_equal,
                max_absolute_difference=apart[0],
                max_relative_difference=apart[1],
            )
        )
    return tuple(rows)
