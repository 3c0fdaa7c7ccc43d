"""A model, a batch, perhaps a loss and an optimizer in; the ``Trace`` of one training step out; nothing else changed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidModel, TracingFailed
from plimsoll.tracing.assemble import assemble
from plimsoll.tracing.capture import StepCapture, StepLog
from plimsoll.tracing.ddp import bucket_bytes, inner_module, unseen_by_reducer
from plimsoll.tracing.fake import fake_batch, faked
from plimsoll.tracing.fsdp2 import has_flat_parameters, sharded_parameters
from plimsoll.tracing.kernels import runs_gpu_kernels, target_kernels
from plimsoll.tracing.local_tensors import is_wrapper
from plimsoll.tracing.meters.memory import free_bytes, release_free_memory
from plimsoll.tracing.meters.timing import Clock, clock_for, one_thread
from plimsoll.tracing.meters.workspaces import WorkspaceMeter, meter_for
from plimsoll.tracing.optimizer import OptimizerLog, trace_optimizer
from plimsoll.tracing.recorder.calling import Loss, check_devices, split_batch
from plimsoll.tracing.recorder.fingerprint import fingerprint, signature
from plimsoll.tracing.recorder.untouched import private_copy, untouched
from plimsoll.tracing.regions import find_regions

_ROOM_TO_HOLD = 2
"""Timed runs hold what autograd saves, as training does, where that many times its bytes are free; memory that is given
back and asked for again with every op would be counted as the ops' time."""


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

    It is ``output = model(batch)``, the loss, ``backward()`` with ``output`` held until it ends, then the optimizer's
    step. On a real device it runs without holding saved activations; for a model on the meta device, or for another
    device, it runs with fake tensors and the target's kernels.

    Args:
        model: in the mode (training, autocast around the call) in which it will be trained; also under
            ``DistributedDataParallel``, whose buckets then count, or ``fully_shard``.
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
        InvalidModel: no parameters, nothing to train, already checkpointed, optimizer of another model; split over ranks,
            and to be traced without its device.
        InvalidBatch: the model refuses the batch, or it lies on another device.
        InvalidLoss, InvalidRegions: there is no scalar loss; a pattern matches nothing.
        TracingFailed: gradients are off, or the step depends on values that a fake trace does not have.

    Example:
        >>> step = trace(torch.nn.Linear(4, 1), torch.ones(2, 4), loss=torch.sum)
        >>> step.regions[0].name
        ''
    """
    wrapped, model = model, inner_module(model)
    check_traceable(model)
    args, kwargs = split_batch(batch)
    found = find_regions(model, regions)
    home = home_of(model)
    target = device_name or str(home or "cpu")
    job = _Job(wrapped, args, kwargs, found, loss, progress or silent)
    run = job.run_fake(target) if device_name or home is None else job.run_real(home, repeats)
    return assemble(
        run.log,
        model=type(model).__name__,
        fingerprint=fingerprint(model),
        signature=signature(model, args, kwargs, loss=loss),
        device=target,
        is_fake=run.is_fake,
        timings=run.timings,
        workspaces=run.workspaces,
        optimizer=_optimizer_log(optimizer, model, run.log, target),
        bucket_bytes=bucket_bytes(wrapped),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """What running the step gave."""

    log: StepLog
    timings: Mapping[str, tuple[float, ...]]
    workspaces: Mapping[str, int]
    is_fake: bool


class _Job:
    """One model (under its wrapper, if it has one), one call, and how to run it."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        regions: Mapping[str, nn.Module],
        loss: Loss | None,
        progress: Progress,
    ) -> None:
        self._wrapped = model
        self._model = inner_module(model)
        self._call = (args, kwargs)
        self._regions = regions
        self._loss = loss
        self._progress = progress

    def run_fake(self, target: str) -> _Run:
        """Run the step once with fake tensors and the target's kernels.

        Raises:
            InvalidModel: its parameters are split over ranks.
        """
        _refuse_shards(self._model)
        with untouched(self._model), faked(self._model) as mode, target_kernels(target):
            args, kwargs = fake_batch(self._call, mode)
            return _Run(
                self._capture("tracing with fake tensors").run(args, kwargs), timings={}, workspaces={}, is_fake=True
            )

    def run_real(self, device: torch.device, repeats: int) -> _Run:
        """Run the step once for structure and workspaces, then for seconds until ``repeats`` runs are made (at least one)."""
        check_devices(self._model, *self._call)
        meter = meter_for(device)
        with untouched(self._model), unseen_by_reducer(self._wrapped):
            args, kwargs = private_copy(self._call)
            with meter.watching():  # with all threads: some kernels have a workspace for each
                log = self._capture("tracing", meter=meter).run(args, kwargs)
        release_free_memory()
        count = max(1, repeats - 1)
        holds_saved = log.saved_bytes * _ROOM_TO_HOLD < free_bytes(device)
        with one_thread() if device.type == "cpu" else contextlib.nullcontext():
            runs = [
                self._timings(f"timing {run} of {count}", device, holds_saved=holds_saved)
                for run in range(1, count + 1)
            ]
        release_free_memory()
        return _Run(log, merged_timings(runs), meter.bytes, is_fake=False)

    def _timings(self, stage: str, device: torch.device, *, holds_saved: bool) -> dict[str, list[float]]:
        with untouched(self._model), unseen_by_reducer(self._wrapped):
            args, kwargs = private_copy(self._call)
            capture = self._capture(stage, clock=clock_for(device), holds_saved=holds_saved)
            return capture.run(args, kwargs).tracer.timings

    def _capture(
        self,
        stage: str,
        *,
        clock: Clock | None = None,
        meter: WorkspaceMeter | None = None,
        holds_saved: bool = False,
    ) -> StepCapture:
        return StepCapture(
            self._model,
            self._regions,
            loss=self._loss,
            clock=clock,
            meter=meter,
            progress=lambda share: self._progress(stage, share),
            holds_saved=holds_saved,
        )


def merged_timings(runs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, tuple[float, ...]]:
    """The samples of every key. None is cold: the untimed run for structure came first."""
    keys = dict.fromkeys(key for run in runs for key in run)
    return {key: tuple(sample for run in runs for sample in run.get(key, ())) for key in keys}


def home_of(model: nn.Module) -> torch.device | None:
    """The device that the model can run on, ``None`` if some of its parameters have no memory."""
    if any(parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        return None
    return next(model.parameters()).device


def check_traceable(model: nn.Module) -> None:
    """Refuse a model that has no training step.

    Raises:
        InvalidModel: no parameters, parameters without a shape, nothing to train, sharded by FSDP1.
        TracingFailed: gradients are switched off.
    """
    parameters = list(model.parameters())
    name = type(model).__name__
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise InvalidModel(
            f"{name} has parameters without a shape.",
            why="lazy modules get their parameters in their first forward pass",
            next="run the model once on a batch",
        )
    if has_flat_parameters(model):
        raise InvalidModel(
            "This model is sharded by FullyShardedDataParallel (FSDP1).",
            why="its parameters are views of flat ones and change from call to call, so what they hold cannot be followed",
            next="shard it with torch.distributed.fsdp.fully_shard (FSDP2)",
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


def _refuse_shards(model: nn.Module) -> None:
    """Before anything runs: FSDP2 sets itself up in its first forward, and what it finds there it keeps.

    Raises:
        InvalidModel: parameters are split over ranks.
    """
    split = [parameter for parameter in (*sharded_parameters(model), *model.parameters()) if is_wrapper(parameter)]
    if not split:
        return
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in split):
        raise InvalidModel(
            f"{type(model).__name__} is split over ranks, and its step is to be traced without its device.",
            why="its parameters would be stand-ins without values: FSDP2 could not gather them, nor DTensors compute with them",
            next="plan on the device itself, without device_profile=; or before it is split: "
            'plimsoll.estimate(model, batch, layout="dp=8,zero=3")',
        )


def _optimizer_log(optimizer: Optimizer | None, model: nn.Module, log: StepLog, target: str) -> OptimizerLog | None:
    if optimizer is None:
        return None
    return trace_optimizer(optimizer, model, log.without_gradient, on_gpu=runs_gpu_kernels(target))
