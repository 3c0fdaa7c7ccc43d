"""Compares tensors of two runs: gradients and buffers by name, and the outputs of named modules with the gradients of these
outputs.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.receipt import Intermediate, Mismatch, finite
from plimsoll.errors import InvalidRegions
from plimsoll.tracing.local_tensors import as_reals
from plimsoll.tracing.recorder.storages import same_contents
from plimsoll.tracing.recorder.untouched import returned_tensors
from plimsoll.tracing.torch_internals import current_graph_task, without_torch_function

Key = tuple[str, int, int, bool]
"""Names one compared tensor: the module's name, the number of the module's call, the position of the tensor among those that
the call returned, and whether it is the gradient of this output. If it is not, it is the output itself."""
Found = dict[Key, torch.Tensor | None]
"""A mapping from the key (name) of a module's output or its gradient to a copy of the tensor. It is ``None`` for a gradient
that cannot be observed because the module ran without autograd."""


def mismatches(
    expected: Mapping[str, torch.Tensor | None],
    found: Mapping[str, torch.Tensor | None],
    spread: Mapping[str, float | None],
) -> tuple[Mismatch, ...]:
    """List the tensors whose bits in ``found`` differ from ``expected``.

    Each entry holds the difference. For comparison it also holds the difference of the same tensor between two unmanaged runs
    (``spread``).
    """
    differing: list[Mismatch] = []
    for name, reference in expected.items():
        other = found.get(name)
        if reference is None and other is None:
            continue
        if reference is not None and other is not None and same_contents(reference, other):
            continue
        absolute, relative = _difference(reference, other)
        differing.append(
            Mismatch(
                name=name,
                max_absolute_difference=absolute,
                max_relative_difference=relative,
                baseline_max_absolute_difference=spread.get(name, 0.0),
            )
        )
    return tuple(differing)


def _difference(first: torch.Tensor | None, second: torch.Tensor | None) -> tuple[float | None, float | None]:
    """Return the largest absolute difference of two tensors, and its ratio to the largest magnitude in ``first``.

    Either is ``None`` if it is not a finite number. Real and imaginary parts count as two numbers. The difference is 0 only if
    all numbers are equal.
    """
    if first is None or second is None or first.shape != second.shape or first.is_complex() != second.is_complex():
        return None, None
    one, other = as_reals(first), as_reals(second)
    if not one.numel():
        return 0.0, None
    if one.is_floating_point() or other.is_floating_point():
        apart = one.double() - other.double()
    else:  # a double cannot hold all 64 bits of an integer, but it can hold 32
        halves = [(each.long() >> 32, each.long() & 0xFFFFFFFF) for each in (one, other)]
        high, low = (mine.double() - others.double() for mine, others in zip(*halves, strict=True))
        apart = high * 2.0**32 + low
    absolute, size = float(apart.abs().max()), float(one.double().abs().max())
    return finite(absolute), finite(absolute / size) if size else None


@contextlib.contextmanager
def collect_intermediates(model: nn.Module, patterns: Sequence[str]) -> Iterator[Found]:
    """A context that collects the tensors that each call of the named modules returns, and their gradients.

    A recomputation in backward does not count as another call of the module.

    Args:
        model: the model.
        patterns: patterns of module names, such as ``model.layers.*.mlp``.

    Raises:
        InvalidRegions: a pattern does not match any module, or none of its modules returned a tensor.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not fnmatch.filter(modules, pattern):
            raise InvalidRegions(
                f"No module has the name {pattern!r}.",
                why=f"{type(model).__name__} has {', '.join(list(modules)[:4])} and {max(0, len(modules) - 4)} more",
                next="use names from model.named_modules(); * matches any text",
            )
    names = {name for pattern in patterns for name in fnmatch.filter(modules, pattern)}
    found: Found = {}
    handles = [modules[name].register_forward_hook(_copying_hook(name, found)) for name in modules if name in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    seen = {name for name, *_ in found}
    for pattern in patterns:
        if not fnmatch.filter(seen, pattern):
            raise InvalidRegions(
                f"The modules with the name {pattern!r} returned no tensors in this step.",
                why="they were not called through their own __call__, or they return objects without tensors",
                next="name modules that run in this step, such as the blocks of the model",
            )


def _copying_hook(name: str, found: Found) -> Callable[[nn.Module, Any, Any], None]:
    calls = itertools.count()

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if current_graph_task() != -1:
            return
        call = next(calls)
        for position, tensor in enumerate(returned_tensors(output)):
            collect((name, call, position), tensor)

    def collect(place: tuple[str, int, int], tensor: torch.Tensor) -> None:
        with without_torch_function():  # else a region under a plan would record this as a call of its own
            found[*place, False] = tensor.detach().clone()
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: found.__setitem__((*place, True), gradient.detach().clone()))
        elif not torch.is_grad_enabled():  # re-entrant checkpointing runs forward without autograd
            found[*place, True] = None

    return look


def compare_intermediates(expected: Found, found: Found) -> tuple[Intermediate, ...]:
    """Compare the module outputs and gradients of two runs tensor by tensor, in the order of the first run.

    A tensor that is missing in one run counts as different. A gradient that one of the runs cannot observe is skipped.
    """
    hidden = {key for seen in (expected, found) for key, tensor in seen.items() if tensor is None}
    rows = []
    for key in dict.fromkeys((*expected, *found)):
        if key in hidden:
            continue
        one, other = expected.get(key), found.get(key)
        name, call, output, is_gradient = key
        is_equal = one is not None and other is not None and same_contents(one, other)
        absolute, relative = (0.0, 0.0) if is_equal else _difference(one, other)
        rows.append(
            Intermediate(
                module=name,
                call=call,
                output=output,
                is_gradient=is_gradient,
                is_bit_equal=is_equal,
                max_absolute_difference=absolute,
                max_relative_difference=relative,
            )
        )
    return tuple(rows)
