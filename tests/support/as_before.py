"""Compares a model before and after, and its steps with the steps of an untouched twin, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Loss = Callable[[Any], torch.Tensor]
Step = tuple[dict[str, torch.Tensor], Counter[str]]
"""Gradients and buffers after a step, and how many tensors it returned, by name."""


def structure(model: nn.Module) -> dict[str, Any]:
    """What every module and every parameter is, by identity and in order: two of these are equal, or something was changed."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = type(module), [(key, id(value)) for key, value in vars(module).items() if key != "training"]
        found[f"{name}, training"] = module.training
        for key, table in vars(module).items():
            if isinstance(table, dict):
                found[f"{name}.{key}"] = [(entry, id(value)) for entry, value in table.items()]
    for name, parameter in model.named_parameters():
        tables = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        found[f"{name}, hooks"] = [table if table is None else list(table.items()) for table in tables]
        found[f"{name}, attributes"] = list(vars(parameter).items())
    return found


def outline(model: nn.Module) -> dict[Any, Any]:
    """What a model and a copy of it have in common: classes, names, numbers of hooks."""
    found: dict[Any, Any] = {
        (name, key): (type(module).__name__, len(value) if isinstance(value, dict) else 0)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }
    for name, parameter in model.named_parameters():
        tables = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        found[name, "hooks"] = [len(table or ()) for table in tables]
    return found


def returned(output: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a model returned: states, attentions, router logits, contents of caches."""
    if isinstance(output, torch.Tensor):
        yield name, output
    elif isinstance(output, dict):
        for key, each in output.items():
            yield from returned(each, f"{name}.{key}")
    elif isinstance(output, list | tuple):
        for each in output:
            yield from returned(each, name)
    elif type(output).__module__.startswith("transformers.cache_utils"):
        yield from returned(vars(output), name)


def read(output: Any) -> torch.Tensor:
    """A loss that reads all that a model returns."""
    found = [each for _, each in returned(output) if each.requires_grad]
    return torch.stack([each.square().mean() for each in found]).sum()


def stepped(model: nn.Module, call: Any, loss: Loss, *, rate: float = 0.0) -> Step:
    """One training step by the signs of gradients, which no loss makes explode."""
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**call) if isinstance(call, dict) else model(call)
    loss(output).backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    found |= {f"{name}, buffer": each.clone() for name, each in model.named_buffers()}
    with torch.no_grad():
        for parameter in model.parameters() if rate else ():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad.sign()
    model.zero_grad()
    return found, Counter(name for name, _ in returned(output))


def differing(found: Step, expected: Step) -> list[str]:
    """What differs between two steps, by name."""
    names = [name for name in {**found[0], **expected[0]} if not _is_same(found[0].get(name), expected[0].get(name))]
    counts = (found[1] - expected[1]) + (expected[1] - found[1])
    return [*names, *(f"number of {name}" for name in counts)]


def changed(before: dict[Any, Any], after: dict[Any, Any]) -> list[Any]:
    """The keys whose values differ."""
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
