"""Finds out whether an optimizer steps each parameter by itself, so that its step may run in chunks of parameters.

The optimizer's code decides, not its name: a copy of the optimizer steps small stand-ins of its parameters as a whole, and
another copy steps equal stand-ins one by one, in the opposite order, with its state on a link (to host memory or disk) between.
Parameters, state and the entries of the groups must be equal bit for bit after each of three steps.

Known weakness: a coupling between parameters that appears only at large sizes, or after more steps, is not seen.
"""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from plimsoll.engine.offload.protocol import Link
from plimsoll.engine.optimizer_state.narrowed import in_groups, narrowed, step_without_hooks
from plimsoll.engine.optimizer_state.offload import StateOffload
from plimsoll.errors import InvalidOption

_STEPS = 3
_TIMED_CALLS = 5
_MOST_SIZE = 6
_MOST_OF_A_KIND = 2


def check_steps_by_parameter(optimizer: Optimizer, word: str = "offload-state") -> None:
    """Check that an optimizer's step may run in chunks of parameters. ``word`` is what the user has allowed that needs this.

    Raises:
        InvalidOption: it may not; the error says how the steps of the stand-ins differ.

    Example:
        >>> check_steps_by_parameter(torch.optim.Adam([torch.nn.Parameter(torch.ones(8, 8))]))
    """
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            why = _difference(optimizer)
        except Exception as error:  # noqa: BLE001 - the optimizer's code may raise anything
            text = str(error).splitlines()[0] if str(error) else ""
            why = f"a step without a closure on small stand-ins of its parameters failed: {type(error).__name__}: {text:.200}"
    if why:
        raise InvalidOption(
            f"allow= has {word!r}, but the step of {type(optimizer).__name__} cannot run in chunks of parameters.",
            why=why,
            next=f"leave {word!r} out of allow=, or use an optimizer that steps each parameter by itself, such as AdamW",
        )


def seconds_of_a_call(optimizer: Optimizer) -> float:
    """Return the host's seconds for one call of the optimizer's step for one small parameter, as the least of some calls.

    Example:
        >>> 0 < seconds_of_a_call(torch.optim.Adam([torch.nn.Parameter(torch.ones(8, 8))])) < 1
        True
    """
    small = _copy(optimizer)
    parameters = _parameters(small)[:1]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    least = math.inf
    for _ in range(_TIMED_CALLS):
        begin = time.perf_counter()
        with narrowed(small, in_groups(small, parameters)):
            step_without_hooks(small)(small)
        least = min(least, time.perf_counter() - begin)
    return least


def _difference(optimizer: Optimizer) -> str:
    """Return, as text, how parameters or state differ when a copy of the optimizer steps its stand-ins (small replacement
    parameters) one by one instead of together. Return an empty text if they are equal.
    """
    whole, single = _copy(optimizer), _copy(optimizer)
    ours, theirs = _parameters(single), _parameters(whole)
    StateOffload(single, [[each] for each in reversed(ours)], _Shelf(), least_bytes=0)
    generator = torch.Generator().manual_seed(1)
    for number in range(1, _STEPS + 1):
        for mine, other in zip(ours, theirs, strict=True):
            gradient = torch.randn(other.shape, generator=generator, dtype=torch.float32).to(other.device, other.dtype)
            mine.grad, other.grad = gradient.clone(), gradient
        torch.manual_seed(number)
        whole.step()
        torch.manual_seed(number)
        single.step()
        for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if not _is_same(mine.detach(), other.detach()):
                return f"after {number} of {_STEPS} steps, stand-in {at} differs from its twin in a whole step"
            found, expected = single.state[mine], whole.state[other]
            if not _is_same(found, expected):
                return f"after {number} of {_STEPS} steps, the state of stand-in {at} differs from that of a whole step"
        if not _is_same(_entries(single), _entries(whole)):
            return f"after {number} of {_STEPS} steps, entries of its parameter groups differ: each call of step() changes them"
        if single.state.keys() - set(ours) or whole.state.keys() - set(theirs):
            return "it has state that belongs to no parameter"
    return ""


def _copy(optimizer: Optimizer) -> Optimizer:
    """Return a copy of an optimizer without state, for a few small stand-ins of its parameters of each kind."""
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    groups = []
    for group in optimizer.param_groups:
        kinds: defaultdict[Any, int] = defaultdict(int)
        chosen = []
        for parameter in group["params"]:
            kind = (parameter.dtype, parameter.dim(), parameter.requires_grad)
            values = torch.randn([min(size, _MOST_SIZE) for size in parameter.shape], generator=generator)
            device = "cpu" if parameter.is_meta else parameter.device  # a step without numbers shows nothing
            values = values.to(device, parameter.dtype)
            memo[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            kinds[kind] += 1
            if kinds[kind] <= _MOST_OF_A_KIND and parameter.requires_grad:
                chosen.append(parameter)
        groups.append({**group, "params": chosen})
    left_out = ("step", "profile_hook_step")
    own = {name: value for name, value in vars(optimizer).items() if name not in left_out and "hook" not in name}
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__setstate__(copy.deepcopy(own | {"state": defaultdict(dict), "param_groups": groups}, memo))
    return twin


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _entries(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _is_same(one: Any, other: Any) -> bool:
    """Return True if two values are equal; tensors bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return one.numel() == 0 or torch.equal(_bits(one), _bits(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


class _Shelf(Link):
    """A link (storage for tensors) that keeps copies in memory. It is used for the few bytes of the stand-in parameters."""

    def __init__(self) -> None:
        self.name = "memory"

    def store(self, tensor: torch.Tensor) -> _ShelfTicket:
        return _ShelfTicket(tensor)

    def close(self) -> None:
        pass


class _ShelfTicket:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.clone()

    def settle(self) -> None:
        pass

    def prefetch(self) -> None:
        pass

    def read(self) -> torch.Tensor:
        return self._copy.clone()
