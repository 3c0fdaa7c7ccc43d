"""A training step that can be repeated from the same state, to measure its peak and compare its gradients.

The step runs as in a usual loop: ``output = model(...)``, ``loss = ...``, ``loss.backward()``. ``output`` is held until
backward has ended. The optimizer does not step, so every run starts from the same parameters.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.backward_steps import BackwardSteps
from plimsoll.artifacts.offloaded_state import OffloadedState
from plimsoll.engine.sensing import squared_distance, squared_norm
from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.tracing.ddp import Twins, bucket_bytes, inner_module
from plimsoll.tracing.fsdp2 import (
    every_gradient,
    every_parameter,
    holding_gradients_back,
    holds_gradients_back,
    release_gathered,
    waiting_gradients,
)
from plimsoll.tracing.local_tensors import beside_weights, densified, gradient_of, local_of
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes
from plimsoll.tracing.meters.workspaces import release_library_workspaces
from plimsoll.tracing.optimizer import present_states
from plimsoll.tracing.recorder.calling import (
    Context,
    Loss,
    after_autocast,
    output_tensors,
    refuse_foreign_graph,
    scalar_loss,
)
from plimsoll.tracing.recorder.foreign_leaves import foreign_leaves_kept
from plimsoll.tracing.recorder.untouched import (
    KeptState,
    RandomState,
    forwards_kept,
    private_copy,
    side_effects_kept,
)
from plimsoll.tracing.torch_internals import sequence_number
from plimsoll.tracing.zero import held_by_deepspeed, is_gathered_by_zero


@contextlib.contextmanager
def gradients_as_if(model: nn.Module, *, are_there: bool) -> Iterator[None]:
    """Inside the ``with`` block, all trainable parameters have a gradient (``are_there``, as after a first micro-batch), or
    none of them has.

    The gradients from before are put back after the block.
    """
    changed = {
        parameter: gradient_of(parameter)
        for parameter in (model.parameters() if are_there else every_parameter(model))
        if parameter.requires_grad
        and parameter.is_leaf
        and (parameter.grad is not None) is not are_there
        and not is_gathered_by_zero(parameter)  # ZeRO-3 never leaves gradients on the parameters
    }
    try:
        for parameter in changed:
            parameter.grad = torch.zeros_like(parameter) if are_there else None
        yield
    finally:
        for parameter, gradient in changed.items():
            parameter.grad = gradient


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """The device's memory in one step, as data: the bytes that existed before the step, and the most bytes that existed at
    once, including the former.

    If gradients wait for a later reduction, each peak is the peak of one micro-batch, and ``first_peak_bytes`` is the peak of
    the first micro-batch.
    """

    static_bytes: int
    peak_bytes: int
    first_peak_bytes: int


class TrainingStep:
    """One training step that can be repeated. Each ``run`` starts from the random states, buffers and attributes that existed
    when this object was made.

    Under ``DistributedDataParallel`` this is the step of the inner model. The reducer does not see it, so gradients are those
    of this process alone. ``context`` returns a new context that is entered around every forward and backward (such as an
    offloading context of the training loop). Parameters that the step writes (``written``, by name) are restored as well.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        context: Context = contextlib.nullcontext,
        written: Collection[str] = (),
    ) -> None:
        self.model = inner_module(model)
        self._wrapped = model
        # Aliases of the parameters, so that hooks of DDP and ZeRO do not see trial steps. These move gradients into buckets and
        # count which were reduced.
        self._twins = Twins(model)
        self.device = next(model.parameters()).device
        self._args = args
        self._kwargs = kwargs
        self._loss = loss
        self._optimizer = optimizer
        self._context = context
        self._accumulating = frozenset(each for each in model.parameters() if gradient_of(each) is not None)
        self._random = RandomState()
        self._state = KeptState(model)
        self._state.lend_iterators()
        self.written = frozenset(written)
        parts = [local_of(parameter.detach()) for name, parameter in self.model.named_parameters() if name in written]
        self._written = [(part, part.clone()) for part in parts]

    def run(self) -> float:
        """Run forward, loss and backward from the starting state. Return the loss's value."""
        self.rewind()
        return self.go_on()

    def go_on(self) -> float:
        """Run forward, loss and backward from the current random states, buffers and attributes."""
        self.clear_gradients()
        with self._given() as (args, kwargs):
            return self._forward_and_backward(args, kwargs)

    @contextlib.contextmanager
    def _given(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield a copy of the arguments for one call. Afterwards, restore what the loss and objects among the arguments hold,
        and undo the steps of optimizers.
        """
        args, kwargs = private_copy((self._args, self._kwargs))
        with forwards_kept(self.model), side_effects_kept((args, kwargs), self._loss):
            yield args, kwargs

    def _forward_and_backward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_checked: bool = False
    ) -> float:
        with self._twins.in_place(), self._entered():
            first_node = sequence_number()
            output = self.model(*args, **kwargs)
            loss = scalar_loss(output, self._loss)
            if is_checked:
                refuse_foreign_graph(loss, first_node)
            # As in a training loop, run backward outside of the caller's autocast. Inside it, the cache of cast weights stayed
            # during the whole trial: half of the parameters' bytes, which were then counted into every peak.
            with after_autocast(self.device.type), foreign_leaves_kept(self.model, loss):
                loss.backward()
            value = float(loss.detach())
            del output, loss
        return value

    def _entered(self) -> contextlib.AbstractContextManager[object]:
        made: object = self._context()
        if not isinstance(made, contextlib.AbstractContextManager):
            raise InvalidOption(
                f"context= returned a {type(made).__name__}, not a context manager.",
                why="it is called before every step, and must return a new context manager to run the step in",
                next="pass context=lambda: torch.autograd.graph.save_on_cpu(), or any function that returns a context manager",
            )
        return made

    def forward_loss(self) -> float:
        """Return the loss from the starting state, without backward. Autograd is on, as in a training step."""
        self.rewind()
        try:
            with self._given() as (args, kwargs), self._twins.in_place(), self._entered():
                return float(scalar_loss(self.model(*args, **kwargs), self._loss).detach())
        finally:
            release_gathered(self.model)

    def draws_random_numbers(self) -> bool:
        """True if forward advances a random generator."""
        self.forward_loss()
        return not self._random.is_current()

    def rewind(self) -> None:
        """Restore random states, buffers and attributes. Clear autocast's cache, so that weights are cast again as in every
        step.
        """
        self._random.put_back()
        self._state.put_back()
        self._state.lend_iterators()
        for part, before in self._written:
            part.copy_(before)
        torch.clear_autocast_cache()

    def clear_gradients(self) -> None:
        """Remove the gradients of a run. Gradients that existed when this object was made are set to zero instead, because the
        step adds to them.
        """
        for parameter in self.model.parameters():
            gradient = gradient_of(parameter)
            if gradient is None:
                continue
            if parameter in self._accumulating:
                gradient.zero_()
            else:
                parameter.grad = None

    def accumulating(self) -> TrainingStep:
        """Return the same step for a loop that accumulates gradients: each trainable parameter has a gradient when the step
        begins, except in the first run.
        """
        other = copy.copy(self)
        other._accumulating = frozenset(
            each for each in self.model.parameters() if each.requires_grad and not is_gathered_by_zero(each)
        )
        return other

    def measure_peak(self, steps: BackwardSteps | None = None) -> StepPeaks:
        """Measure the step's peak exactly, from allocator events on a CPU, and from the allocator's statistics on CUDA.

        If ``steps`` is given, the gradients of these parameters are freed when they are complete, as if the optimizer had
        stepped them. The optimizer does not run; what it would allocate for a parameter is allocated instead.

        If gradients wait for a later reduction, one micro-batch of each kind is run: the first, one that begins with waiting
        gradients, and the last, which reduces them.

        Raises:
            InvalidBatch: backward would continue into the graph of an earlier call, and free it.
        """
        self.clear_gradients()
        kinds: tuple[bool, ...] = (True,)
        if holds_gradients_back(self.model):
            kinds = (True, False) if any(True for _ in waiting_gradients(self.model)) else (True, True, False)
        with self._freeing({} if steps is None else dict(zip(steps.parameters, steps.temporary_bytes, strict=True))):
            first, *others = [self._measured(holds_back=holds_back) for holds_back in kinds]
        peak_bytes = max(each[1] for each in (first, *others))
        return StepPeaks(first[0], peak_bytes, first_peak_bytes=first[1])

    @contextlib.contextmanager
    def _freeing(self, temporary_bytes: Mapping[str, int]) -> Iterator[None]:
        """Return a context manager. In its block, gradients of these parameters (names) are freed when they are complete, and
        as many bytes are allocated and freed as the steps of the parameters would need.
        """
        named = {name: each for name, each in self.model.named_parameters() if name in temporary_bytes}
        hooks = [
            each.register_post_accumulate_grad_hook(functools.partial(_free, temporary_bytes[name]))
            for name, each in named.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _measured(self, *, holds_back: bool) -> tuple[int, int]:
        """Run one forward and backward. Return two numbers: the bytes that existed before, and the peak."""
        self.rewind()
        static_bytes = self.static_bytes()
        release_library_workspaces(self.device)  # the step allocates cuBLAS's workspaces anew, so that they count
        with (
            self._given() as (args, kwargs),
            holding_gradients_back(self.model, holds=holds_back),
            self._twins.moving_gradients(keeps=True),
            PeakMeter(self.device) as meter,
        ):
            # Check that backward stays in this step's graph. A step may read fast weights, or a state that an earlier call left
            # on a module: then the trial's backward freed the user's graph, and the user's own backward raised.
            self._forward_and_backward(args, kwargs, is_checked=True)
        return static_bytes, static_bytes + meter.peak_bytes

    def static_bytes(self) -> int:
        """Return the bytes that exist before the step: parameters, buffers, batch, gradients, a reducer's buckets, optimizer
        state.
        """
        batch = output_tensors((self._args, self._kwargs))
        beside = [holder[key] for _, holder, key in beside_weights(self.model)]
        held = [*every_parameter(self.model), *beside, *self.model.buffers(), *every_gradient(self.model), *batch]
        held += held_by_deepspeed(self.model)
        return storage_bytes(held, self.device) + bucket_bytes(self._wrapped) + self.optimizer_bytes()

    def gradient_bytes(self) -> int:
        """Return the bytes of existing gradients."""
        return storage_bytes(every_gradient(self.model), self.device)

    def optimizer_bytes(self) -> int:
        """Return the bytes of existing optimizer state."""
        state = [] if self._optimizer is None else list(present_states(self._optimizer).values())
        return storage_bytes(output_tensors(state), self.device)

    def absent_state_bytes(self, expected_bytes: int, state: OffloadedState | None = None) -> int:
        """Return how many of the ``expected_bytes`` of optimizer state do not exist yet. State of an unknown optimizer counts
        as absent.

        If ``state`` is given, the result is negative if state is on the device now that a plan would offload.
        """
        absent_bytes = expected_bytes - self.optimizer_bytes()
        return absent_bytes if state is not None else max(0, absent_bytes)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of the last run by parameter name. They are aliases, not copies, except sparse ones.

        Raises:
            InvalidModel: the gradients are in shards, as in DeepSpeed's ZeRO-3.
        """
        if any(map(is_gathered_by_zero, self.model.parameters())):
            raise InvalidModel(
                f"The gradients of {type(self.model).__name__} cannot be compared under DeepSpeed's ZeRO stage 3.",
                why="each gradient is split into shards once it is complete, so ranks never have a whole gradient",
                next='compare the same model with "stage": 2, or before deepspeed.initialize',
            )
        gradients = ((name, parameter.grad) for name, parameter in self.model.named_parameters())
        return {name: None if gradient is None else densified(gradient) for name, gradient in gradients}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the current buffers by name (aliases, not copies)."""
        return dict(self.model.named_buffers())


def _free(temporary_bytes: int, parameter: torch.Tensor) -> None:
    torch.empty(temporary_bytes, dtype=torch.uint8, device=parameter.device)
    parameter.grad = None


def copies(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Return a copy of each tensor, to compare with later."""
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in tensors.items()}


def relative_error(expected: Mapping[str, torch.Tensor | None], found: Mapping[str, torch.Tensor | None]) -> float:
    """Return ‖found - expected‖ / ‖expected‖ over all tensors together; infinite if a tensor is missing or not finite."""
    squared_errors = squared_norms = 0.0
    for name, reference in expected.items():
        other = found.get(name)
        if reference is None and other is None:
            continue
        if reference is None or other is None:
            return math.inf
        squared_errors += squared_distance(reference, other.to(reference.device))
        squared_norms += squared_norm(reference)
    if not math.isfinite(squared_errors):
        return math.inf
    return math.sqrt(squared_errors / squared_norms) if squared_norms else (math.inf if squared_errors else 0.0)
