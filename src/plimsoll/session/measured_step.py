"""Measures one training step of the user's loop: its peaks before and after the optimizer begins, and the bytes that it leaves.

The peak is measured from the model's forward to the next call of the model. On a CPU, measuring needs torch's profiler, and
only one can run at a time. A user's own profiler always has precedence, and a step during which it ran counts as not measured.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.session.account import planned_state_bytes, predicted_before_optimizer
from plimsoll.session.carried import Carried
from plimsoll.session.messages import warn
from plimsoll.session.optimizer_watch import OptimizerWatch, _state_bytes, displaced_bytes, optimizer_in_view
from plimsoll.tracing.ddp import bucket_bytes, has_rebuilt_buckets
from plimsoll.tracing.fsdp2 import Gathered, every_gradient, every_parameter
from plimsoll.tracing.local_tensors import beside_weights, gradient_of
from plimsoll.tracing.meters.memory import (
    MeasurementLost,
    PeakMeter,
    is_meter_running,
    storage_bytes,
)
from plimsoll.tracing.meters.workspaces import release_library_workspaces
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.torch_internals import is_profiled, is_profiler_on
from plimsoll.tracing.zero import held_by_deepspeed

FORWARD, LOSS, BACKWARD, AFTER_BACKWARD, OPTIMIZER = "forward", "loss", "backward", "after backward", "optimizer"
"""The names of the parts of a measured step. LOSS lasts from the end of a forward until gradients reach the forward's output.
OPTIMIZER is the step of the model's own optimizer. AFTER_BACKWARD is everything else between a backward and the next forward.
"""


class MeasuredStep:
    """Measures the memory of one training step, beginning with the forward that is about to run. ``end`` ends the measurement
    and returns whether it succeeded.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], carried: Carried | None = None
    ) -> None:
        parameters = every_parameter(model)
        self._device = parameters[0].device
        # Fast weights, which are not parameters, would be kept alive until the step after this one begins.
        self._versions = [(each, each._version) for each in parameters if isinstance(each, nn.Parameter)]
        held = held_tensors(model, args, kwargs)
        held += [] if carried is None else carried.found(self._device, (args, kwargs))
        self._model = model
        self._bucket_bytes, self._has_rebuilt_before = bucket_bytes(model), has_rebuilt_buckets(model)
        self._replaced_bytes = 0
        self.static_bytes = storage_bytes(held, self._device) + self._bucket_bytes + displaced_bytes(model)
        self.has_failed = False
        self.has_trained = False
        """Set by the owner if a backward has run. Otherwise `end` looks for gradients or for parameters that were written."""
        self.trains_another = False
        """Set by the owner if the optimizer of another model has stepped since. AFTER_BACKWARD then contains the training of
        that model, which does not belong to this step.
        """
        self._meter: PeakMeter | None = None
        self._thread = threading.get_ident()
        self.is_blocked = self._device.type == "cpu" and is_meter_running()
        """True if another measurement ran when this one should have begun: another managed model is measured."""
        # On a CPU the meter is torch's profiler, and only one can run. The user's profiler has precedence.
        if not (self._device.type == "cpu" and (is_profiled() or is_profiler_on())):
            release_library_workspaces(self._device)  # the step allocates cuBLAS's workspaces anew, so that they count
            self._meter = PeakMeter(self._device, held=held)
            self._meter.__enter__()

    def note(self, part: str) -> None:
        """Attribute all memory from now on to ``part`` of the step (such as ``LOSS``), until the next call of this method."""
        if self._meter is not None:
            # A meter sees the allocations of one thread.
            self.has_failed |= threading.get_ident() != self._thread
            self._meter.mark(part)

    def end(self) -> bool:
        """Stop measuring. Return True if a whole step, forward and backward, was measured."""
        meter = self._meter
        if meter is None:
            return False
        if self._device.type == "cpu" and (is_profiled() or not is_profiler_on()):
            self._meter = None  # the user's profiler has taken over; stopping ours would stop theirs
            return False
        try:
            meter.__exit__(None, None, None)
        except MeasurementLost:
            self._meter = None
            return False
        # DDP has rebuilt its buckets, as it does once. The meter sees the new buckets allocated, but not the old ones freed.
        if self._device.type == "cpu" and has_rebuilt_buckets(self._model) and not self._has_rebuilt_before:
            self._replaced_bytes = self._bucket_bytes
            self.static_bytes -= self._bucket_bytes
        return not self.has_failed and (self.has_trained or self._has_trained())

    @property
    def step_peak_bytes(self) -> int:
        """The peak of the step until the last backward ended, in bytes. It includes bytes that existed before the step, but not
        optimizer state.
        """
        assert self._meter is not None
        before = self._meter.windows[: self._last_backward_end]
        return self.static_bytes + max(window.peak_bytes for window in before)

    @property
    def loss_peak_bytes(self) -> int:
        """The peak between forward and backward in bytes, without optimizer state."""
        assert self._meter is not None
        peaks = [window.peak_bytes for window in self._meter.windows if window.name == LOSS]
        return self.static_bytes + max(peaks, default=0)

    @property
    def optimizer_peak_bytes(self) -> int:
        """The peak after the last backward in bytes, without optimizer state that existed before. It is 0 if this part was not
        measured.
        """
        assert self._meter is not None
        after = self._meter.windows[self._last_backward_end :]
        peaks = [window.peak_bytes for window in after if window.name == OPTIMIZER or not self.trains_another]
        return self.static_bytes + max(peaks) if peaks else 0

    @property
    def left_bytes(self) -> int:
        """The bytes that the step left behind, including optimizer state."""
        assert self._meter is not None
        return self._meter.resident_bytes - self._replaced_bytes

    @property
    def _last_backward_end(self) -> int:
        """The index of the first part after the last backward, in the list of parts that the meter has recorded."""
        assert self._meter is not None
        end = len(self._meter.windows)
        while end > 1 and self._meter.windows[end - 1].name in (AFTER_BACKWARD, OPTIMIZER):
            end -= 1
        return end

    def _has_trained(self) -> bool:
        """True if gradients exist, or if parameters were written since the step began (an optimizer has stepped)."""
        return any(gradient_of(each) is not None or each._version != version for each, version in self._versions)


def held_tensors(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that exist before a step and count as its memory: parameters (or fast weights, which replace them in a
    call), buffers, existing gradients, and the batch.
    """
    gathered = (tensor for _, tensor in Gathered(model).tensors())
    beside = (holder[key] for _, holder, key in beside_weights(model))
    held = (
        *every_parameter(model),
        *held_by_deepspeed(model),
        *beside,
        *gathered,
        *model.buffers(),
        *every_gradient(model),
    )
    return [*held, *output_tensors((args, kwargs))]


@dataclass(frozen=True, slots=True)
class Taken:
    """Data: the memory in bytes that a measured step needed. ``lasting_bytes`` are left after the step, without optimizer
    state; they are mostly gradients.
    """

    bytes: int = 0
    """A lower bound of the peak of later steps. It includes the optimizer state that this step made."""
    most_bytes: int = 0
    """An upper bound of the peak of later steps. It includes the bytes that this step left, and the bytes that the step needed
    to record its operations for the plan.
    """
    optimizer_bytes: int = 0
    """The peak during the optimizer's step."""
    lasting_bytes: int = 0


def taken_bytes(step: MeasuredStep, watch: OptimizerWatch, plan: Plan, recording_bytes: int = 0) -> Taken:
    """Return the memory that a measured step needed under a plan. If the plan counts optimizer state that does not exist yet,
    that state is added.

    If the step recorded the plan, up to ``recording_bytes`` of its peak do not recur in later steps.
    """
    state_bytes = max(watch.bytes_after, planned_state_bytes(plan))
    optimizer_bytes = step.optimizer_peak_bytes + watch.bytes_before
    lasting_bytes = max(0, step.left_bytes - (watch.bytes_after - watch.bytes_before))
    return Taken(
        max(step.step_peak_bytes + max(watch.bytes_before, state_bytes - recording_bytes), optimizer_bytes),
        max(step.step_peak_bytes + state_bytes, optimizer_bytes) + lasting_bytes,
        optimizer_bytes,
        lasting_bytes,
    )


def unseen_bytes(step: MeasuredStep, watch: OptimizerWatch, plan: Plan) -> int:
    """Return the peak that later steps will have, minus the peak that the plan predicts, in bytes. The difference has two
    parts: bytes that the trace does not contain, and bytes that a step leaves behind.

    The step was measured under this plan. If the plan was made with an optimizer, the prediction includes its state.
    """
    step_bytes = step.step_peak_bytes + max(watch.bytes_after, planned_state_bytes(plan))
    return max(0, step_bytes - predicted_before_optimizer(plan) + taken_bytes(step, watch, plan).lasting_bytes)


def beside_bytes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], allocated_bytes: int) -> int:
    """Return how many of the ``allocated_bytes`` on a GPU belong to other things than the training step that begins now."""
    optimizer = optimizer_in_view(model)
    state_bytes = 0 if optimizer is None else _state_bytes(optimizer)
    device = next(model.parameters()).device
    return (
        allocated_bytes
        - storage_bytes(held_tensors(model, args, kwargs), device)
        - bucket_bytes(model)
        - state_bytes
        - release_library_workspaces(device)
    )


def taken_beside(
    measured: MeasuredStep | None, watch: OptimizerWatch, plan: Plan, recording_bytes: int, *, was_blocked: bool
) -> tuple[Taken, int]:
    """Return two results for a measured step under a plan: the memory that it needed, and how many bytes more than predicted
    later steps will need.

    ``was_blocked``: the step was not measured, because another managed model was being measured. A warning then says that the
    plan relies on its trace alone.
    """
    if measured is not None:
        return taken_bytes(measured, watch, plan, recording_bytes), unseen_bytes(measured, watch, plan)
    why = "failed, ran under a profiler, or ran backward in another thread"
    if was_blocked:
        why = "ran while another managed model was measured (on a CPU only one can be)"
    warn(f"the first steps {why}, so they were not measured; the plan relies on its trace alone")
    return Taken(), max(0, watch.bytes_after - planned_state_bytes(plan))
