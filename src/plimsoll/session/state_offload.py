"""Chooses the parameters whose optimizer state is on a link (to host memory or disk) between steps, and keeps it there while a
plan is applied.

One number decides: the share of the state that is offloaded. The parameters with the least state come first, so a large
embedding, whose state alone would fill the device while it is stepped, is last. The chosen parameters are stepped in chunks. A
chunk has at most a thirty-second of the offloaded state, or one parameter. Two chunks may be on the device at the same time.

The planner replaces the optimizer's step in the trace by the step in chunks, with the waits for the link as ops. So all other
decisions are made for that step as for any step. The smallest share that fits the budget comes first, and larger shares are
tried as long as they give a faster plan: they wait longer for the link, but leave more memory to keep activations.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from plimsoll.artifacts.forms import LinkCost
from plimsoll.artifacts.offloaded_state import LEAST_STATE_BYTES, OffloadedState
from plimsoll.engine.copies import ModelHook
from plimsoll.engine.offload.measure import link_speed
from plimsoll.engine.offload.open import default_link_name, open_link
from plimsoll.engine.optimizer_state.by_parameter import check_steps_by_parameter
from plimsoll.engine.optimizer_state.offload import StateOffload
from plimsoll.errors import InvalidOption, PlanMismatch
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.host import host_link
from plimsoll.session.options import OFFLOAD_STATE, PlanOptions
from plimsoll.session.step_planner import StepPlanner, fastest_planner
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.optimizer import parameter_names, state_bytes
from plimsoll.tracing.zero import optimizer_inside

_SHARES = 8
_PARTS = 32
"""A chunk (the parameters that are stepped together) has at most this part of the offloaded state, unless one parameter has
more.
"""


def with_offloaded_state(whole: StepPlanner, task: TrainingTask) -> StepPlanner:
    """Return the planner of the step with the share of optimizer state offloaded that gives the fastest plan within the budget.

    It is ``whole``, the planner of the step with all state on the device, if that is the fastest, if everything fits without a
    plan, or if there is no budget or no state to offload. Shares are tried from the smallest one that fits until a larger one
    is not faster. If no share fits, the planner with all of the state offloaded is returned, or ``whole`` if its lowest peak is
    lower.

    Raises:
        InvalidOption: the task has no optimizer, or its step cannot run in chunks.
    """
    optimizer = checked_optimizer(task)
    if whole.budget_bytes is None or whole.fits_unmanaged():
        return whole
    check_steps_by_parameter(optimizer)
    choices = _choices(whole, task, optimizer)
    if not choices:
        return whole

    @functools.cache
    def offloading(at: int) -> StepPlanner:
        return whole.with_state(task, choices[at])

    return fastest_planner(whole, len(choices), offloading, floor_bytes_at=lambda at: offloading(at).floor_bytes)


def most_offloaded(planner: StepPlanner, task: TrainingTask) -> OffloadedState | None:
    """Return the decision that offloads as much state as possible; ``None`` if there is no state to offload."""
    choices = _choices(planner, task, checked_optimizer(task))
    return choices[-1] if choices else None


def checked_optimizer(task: TrainingTask, word: str = OFFLOAD_STATE) -> Optimizer:
    """Return the optimizer of a task whose step a plan may divide. ``word`` is what the user has allowed.

    Raises:
        InvalidOption: there is none, or DeepSpeed moves its state itself.
    """
    if task.optimizer is None:
        raise InvalidOption(
            f"allow= has {word!r}, but no optimizer is known.",
            why="a plan would run its step for some parameters at a time",
            next="pass optimizer=, or create the optimizer before the first training call of an attached model",
        )
    if optimizer_inside(inner_module(task.model)) is not None:
        raise InvalidOption(
            f"allow= has {word!r}, but DeepSpeed steps this model.",
            why="DeepSpeed's engine decides itself where optimizer state is, and when parameters are stepped",
            next=f'use DeepSpeed\'s "offload_optimizer", or leave {word!r} out of allow=',
        )
    return task.optimizer


def _choices(planner: StepPlanner, task: TrainingTask, optimizer: Optimizer) -> list[OffloadedState]:
    """Return the possible decisions about the parameters whose optimizer state is offloaded. The decision that offloads least
    comes first.
    """
    sizes = {
        name: sum(size for size in each if size >= LEAST_STATE_BYTES)
        for name, each in state_bytes(planner.trace).items()
    }
    named = named_parameters(optimizer, inner_module(task.model))
    movable = {name: sizes[name] for name in named if sizes.get(name)}
    if not movable:
        return []
    link = _link_cost(planner.options, next(iter(named.values())).device, max(movable.values()))
    total, known = sum(movable.values()), sum(map(sum, state_bytes(planner.trace).values()))
    found: dict[tuple[str, ...], OffloadedState] = {}
    for share in range(1, _SHARES + 1):
        chosen: set[str] = set()
        taken = 0
        for name in sorted(movable, key=lambda name: movable[name]):
            if taken * _SHARES >= share * total:
                break
            chosen.add(name)
            taken += movable[name]
        names = tuple(name for name in movable if name in chosen)
        undo = {name: named[name].nbytes for name in names}
        made = _decision(names, movable, undo, type(optimizer).__name__, known, link)
        host_bytes = planner.options.host_budget_bytes
        if host_bytes is None or made.link_bytes <= host_bytes:
            found[names] = made
    return list(found.values())


def _decision(
    names: tuple[str, ...],
    sizes: dict[str, int],
    undo: dict[str, int],
    optimizer: str,
    state_bytes_: int,
    link: LinkCost,
) -> OffloadedState:
    offloaded = sum(sizes[name] for name in names)
    chunks: list[list[str]] = []
    room = 0
    for name in names:
        if not chunks or sizes[name] > room:
            chunks.append([])
            room = max(offloaded // _PARTS, sizes[name])
        chunks[-1].append(name)
        room -= sizes[name]
    bytes_of = [sum(sizes[name] for name in chunk) for chunk in chunks]
    saved = [sum(undo[name] for name in chunk) for chunk in chunks]
    # Before a chunk, its state arrives, the chunk before it leaves, and the old values of its parameters leave too.
    waits = [
        (arriving, leaving + beside)
        for arriving, leaving, beside in zip([*bytes_of, 0], [0, *bytes_of], [*saved, 0], strict=True)
    ]
    together = sum if link.name == "disk" else max  # a disk's copies share the host's threads and memory
    seconds = sum(
        together((into / link.in_bytes_per_second, out / link.out_bytes_per_second)) + link.latency_seconds
        for into, out in waits
    )
    return OffloadedState(
        optimizer=optimizer,
        link=link.name,
        chunks=tuple(map(tuple, chunks)),
        state_bytes=state_bytes_,
        offloaded_bytes=offloaded,
        link_bytes=2 * offloaded + sum(saved),
        seconds=seconds,
    )


def _link_cost(options: PlanOptions, device: torch.device, most_bytes: int) -> LinkCost:
    """Return the speed of the link. ``most_bytes`` is the most state of one parameter."""
    if options.device_profile is not None or device.type == "meta":
        return host_link(find_device(options.device_profile or "CPU"))
    name = options.link or default_link_name(device)
    return link_speed(name, device, host_budget=options.host_budget_bytes, largest_bytes=most_bytes).cost(name)


class StateAtWork:
    """Keeps the optimizer state that a plan names in host memory or on disk, until `remove`.

    If other code reads the state, it comes back to the device. Before the next forward of the model, it is offloaded again.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, state: OffloadedState, host_budget_bytes: int | None = None
    ) -> None:
        """Offload the optimizer state that the plan names.

        Raises:
            PlanMismatch: the optimizer is unknown, of another class, or does not hold the parameters of the plan.
            InvalidOption: its step cannot run in chunks, or other code has replaced it.
        """
        self.state = state
        model = inner_module(model)
        parameters = [name for chunk in state.chunks for name in chunk]
        action = f"offloads the state of {state.optimizer}"
        optimizer = refuse_other_optimizer(model, optimizer, state.optimizer, parameters, action)
        check_steps_by_parameter(optimizer)
        named = named_parameters(optimizer, model)
        chunks = [[named[name] for name in chunk] for chunk in state.chunks]
        device = chunks[0][0].device
        link = open_link(state.link or default_link_name(device), device, host_budget=host_budget_bytes, directory=None)
        try:
            self.offload = StateOffload(optimizer, chunks, link)
        except BaseException:
            link.close()
            raise
        # Before hooks that look at what the loop holds: a loop that logs norms of its state reads it between steps.
        self._hook = model.register_forward_pre_hook(ModelHook(model, self._before), prepend=True)

    def _before(self, *_: Any) -> None:
        self.offload.leave()

    def remove(self) -> None:
        """Bring all state back. Calling it twice does no harm."""
        self._hook.remove()
        self.offload.remove()


def named_parameters(optimizer: Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that an optimizer holds, by name, in the order of its groups."""
    names = parameter_names(optimizer, model)
    held = (each for group in optimizer.param_groups for each in group["params"])
    return {names[id(each)]: each for each in held if id(each) in names}


def refuse_other_optimizer(
    model: nn.Module, optimizer: Optimizer | None, planned: str, parameters: Collection[str], action: str
) -> Optimizer:
    """Return the optimizer if it fits the plan. ``planned`` is the class of the plan's optimizer, ``parameters`` are the names
    of the parameters that it must hold, and ``action`` says what the plan does.

    Raises:
        PlanMismatch: the optimizer is unknown, of another class, or does not hold the parameters.
    """
    if optimizer is None:
        found = f"the optimizer of {type(model).__name__} is not known"
    elif type(optimizer).__name__ != planned:
        found = f"the optimizer is {type(optimizer).__name__}"
    elif missing := sorted(set(parameters) - named_parameters(optimizer, model).keys()):
        found = f"the optimizer does not hold {missing[0]}"
    else:
        return optimizer
    raise PlanMismatch(
        f"This plan {action}, but {found}.",
        why="the plan counts on what it does with the planned parameters, and the step would exceed the budget",
        next=f"create the {planned} of the planned parameters before you apply the plan, and only one",
    )
