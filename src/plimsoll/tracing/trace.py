"""A model, a batch, perhaps a loss and an optimizer in; the ``Trace`` of one training step out; nothing else changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidModel, TracingFailed
from plimsoll.measuring.timing import one_thread
from plimsoll.recording.calling import Loss, check_devices, split_batch
from plimsoll.recording.fingerprint import fingerprint, signature
from plimsoll.recording.untouched import private_copy, untouched
from plimsoll.tracing.assemble import assemble
from plimsoll.tracing.capture import StepCapture, StepLog
from plimsoll.tracing.clocks import clock_for
from plimsoll.tracing.fake import fake_batch, faked
from plimsoll.tracing.kernels import runs_gpu_kernels, target_kernels
from plimsoll.tracing.optimizer import OptimizerLog, trace_optimizer
from plimsoll.tracing.regions import find_regions
from plimsoll.tracing.workspaces import WorkspaceMeter, meter_for

Progress = Callable[[str, float], None]


def trace(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    regions: Sequence[str] | None = None,
    device_name: str | None = None,
    repeats: int = 3,
    progress: Progress | None = None,
) -> Trace:
    """Trace one training step of ``model`` on ``batch``.

    The step is ``output = model(batch)``, the loss, ``backward()`` with ``output`` held until it ends, then the
    optimizer's step. A model with real parameters runs for real on its device, holding no saved activations; one on the
    meta device, or one planned for another device, runs with fake tensors and the target's kernels.

    Args:
        model: in the mode (training, autocast around the call) in which it will be trained.
        batch: tensor (one argument), tuple (positional), mapping (keywords).
        loss: makes a scalar of the model's output; by default ``output.loss`` or the output itself.
        optimizer: over the model's parameters; its state and its step then belong to the trace.
        regions: patterns of module paths; by default the model's repeated blocks.
        device_name: plan for a device of this name, which is not here. ``None``: for the device that the model is on.
        repeats: how often the step is run on a real device; the first time is for structure and hidden workspaces.
        progress: is told the stage and the share of it that is done.

    Returns:
        The trace. Model, gradients, buffers, random state, batch and optimizer are as before, also after an error.

    Raises:
        InvalidModel: no parameters, nothing to train, already checkpointed, an optimizer of another model.
        InvalidBatch: the model refuses the batch, or it lies on another device.
        InvalidLoss: there is no scalar loss.
        InvalidRegions: a pattern matches nothing.
        TracingFailed: gradients are off, or the step depends on values that a fake trace does not have.

    Example:
        >>> step = trace(torch.nn.Linear(4, 1), torch.ones(2, 4), loss=torch.sum)
        >>> step.regions[0].name
        ''
    """
    _check_model(model)
    args, kwargs = split_batch(batch)
    found = find_regions(model, regions)
    on_meta = any(parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in model.parameters())
    is_fake = on_meta or device_name is not None
    if not is_fake:
        check_devices(model, args, kwargs)
    home = next(model.parameters()).device
    target = device_name or ("cpu" if on_meta else str(home))
    job = _Job(model, args, kwargs, found, loss, progress or (lambda stage, share: None))
    if is_fake:
        log, meter = job.run_fake(target), WorkspaceMeter()
        timings: dict[str, tuple[float, ...]] = {}
    else:
        log, meter, timings = job.run_real(home, max(1, repeats))
    return assemble(
        log,
        model=type(model).__name__,
        fingerprint=fingerprint(model),
        signature=signature(model, args, kwargs, loss=loss),
        device=target,
        is_fake=is_fake,
        timings=timings,
        workspaces=meter.bytes,
        optimizer=_optimizer_log(optimizer, model, log, target),
    )


class _Job:
    """One model, one call, and how to run it."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        regions: Mapping[str, nn.Module],
        loss: Loss | None,
        progress: Progress,
    ) -> None:
        self._model = model
        self._call = (args, kwargs)
        self._regions = regions
        self._loss = loss
        self._progress = progress

    def run_fake(self, target: str) -> StepLog:
        """Run the step once with fake tensors and the target's kernels."""
        with untouched(self._model), faked(self._model) as mode, target_kernels(target):
            args, kwargs = fake_batch(self._call, mode)
            return self._capture("tracing with fake tensors").run(args, kwargs)

    def run_real(
        self, device: torch.device, repeats: int
    ) -> tuple[StepLog, WorkspaceMeter, dict[str, tuple[float, ...]]]:
        """Run the step ``repeats`` times: first for structure and workspaces, then for seconds."""
        with one_thread() if device.type == "cpu" else contextlib.nullcontext():
            return self._run_real(device, repeats)

    def _run_real(
        self, device: torch.device, repeats: int
    ) -> tuple[StepLog, WorkspaceMeter, dict[str, tuple[float, ...]]]:
        meter = meter_for(device)
        with untouched(self._model):
            args, kwargs = private_copy(self._call)
            with meter.watching():
                log = self._capture("tracing", device=device, meter=meter).run(args, kwargs)
        runs = [log.tracer.timings]
        for count in range(2, repeats + 1):
            with untouched(self._model):
                args, kwargs = private_copy(self._call)
                timed = self._capture(f"timing {count - 1} of {repeats - 1}", device=device).run(args, kwargs)
            runs.append(timed.tracer.timings)
        return log, meter, merged_timings(runs)

    def _capture(
        self, stage: str, *, device: torch.device | None = None, meter: WorkspaceMeter | None = None
    ) -> StepCapture:
        return StepCapture(
            self._model,
            self._regions,
            loss=self._loss,
            clock=None if device is None else clock_for(device),
            meter=meter,
            progress=lambda share: self._progress(stage, share),
        )


def merged_timings(runs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, tuple[float, ...]]:
    """The samples of every key. Cold ones are dropped: the first run's where later runs have some, else the first."""
    merged: dict[str, tuple[float, ...]] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        warm = tuple(sample for run in runs[1:] for sample in run.get(key, ()))
        cold = tuple(runs[0].get(key, ()))
        merged[key] = warm or cold[1:] or cold
    return merged


def _check_model(model: nn.Module) -> None:
    parameters = list(model.parameters())
    name = type(model).__name__
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise InvalidModel(
            f"{name} has parameters without a shape.",
            why="lazy modules get their parameters in their first forward pass",
            next="run the model once on a batch",
        )
    if not parameters:
        raise InvalidModel(
            f"{name} has no parameters.",
            why="a training step without parameters has no gradients to make",
            next="pass the module that is trained",
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise InvalidModel(
            f"No parameter of {name} is trainable.",
            why=f"requires_grad is False on all {len(parameters)} of them",
            next="unfreeze what is to be trained: parameter.requires_grad_(True)",
        )
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise TracingFailed(
            "Gradients are switched off here.",
            why="the call is inside torch.no_grad() or torch.inference_mode(): nothing would be saved for backward",
            next="call Plimsoll outside of it",
        )


def _optimizer_log(optimizer: Optimizer | None, model: nn.Module, log: StepLog, target: str) -> OptimizerLog | None:
    if optimizer is None:
        return None
    return trace_optimizer(optimizer, model, log.without_gradient, on_gpu=runs_gpu_kernels(target))
