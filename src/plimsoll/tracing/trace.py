"""The two ways to observe one training step: ``trace`` for a plan, ``watch`` for an unchanged step.

``trace`` drops what autograd saves, so that the lives of storages (the times when they are allocated) do not include the times
that a plan decides about. ``watch`` does not drop, replace or refuse anything: it works for models that checkpoint, offload or
compress by themselves, and for models that do not. Both restore everything that they touch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.trace import Phase, Trace, WatchedStep
from plimsoll.tracing import ddp, fsdp2
from plimsoll.tracing.assemble import assemble
from plimsoll.tracing.capture import RefusesHooks, RefusesHooksOutside, StepCapture, StepLog, run_step
from plimsoll.tracing.ddp import bucket_bytes, inner_module, unseen_by_reducer
from plimsoll.tracing.fake import fake_batch, faked
from plimsoll.tracing.fsdp2 import Gathered
from plimsoll.tracing.kernels import runs_gpu_kernels, target_kernels
from plimsoll.tracing.meters.memory import free_bytes, release_free_memory
from plimsoll.tracing.meters.timing import OpClock, clock_for, one_thread
from plimsoll.tracing.meters.workspaces import WorkspaceMeter, meter_for, release_library_workspaces
from plimsoll.tracing.optimizer import trace_optimizer
from plimsoll.tracing.recorder.calling import (
    Call,
    Context,
    Loss,
    ModuleStack,
    check_devices,
    split_batch,
)
from plimsoll.tracing.recorder.contents import lent
from plimsoll.tracing.recorder.fingerprint import fingerprint, signature
from plimsoll.tracing.recorder.untouched import private_copy, returned_tensors, side_effects_kept, untouched
from plimsoll.tracing.refusals import (
    BackwardFailed,
    check_traceable,
    refuse_shards,
    refuse_unseen_reducer,
    uncompiled_regions,
    without_transforms,
)
from plimsoll.tracing.regions import find_regions
from plimsoll.tracing.torch_internals import current_autograd_node
from plimsoll.tracing.tracer import OpTimer, StepTracer, register_statics
from plimsoll.tracing.zero import bytes_beside

_LOG = logging.getLogger(__name__)
_Timings = Mapping[str, Sequence[float]]
_ROOM_TO_HOLD = 2
"""The factor that decides whether timed runs hold what autograd saves, as in training. They hold it if the free memory is more
than the saved bytes times this factor.

Without held tensors, memory would be returned and requested with each op, and the times of ops would include that. But holding
needs room.
"""


def trace(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    regions: Sequence[str] | Mapping[str, nn.Module] | None = None,
    device_name: str | None = None,
    repeats: int = 3,
    limit_bytes: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Trace one training step of ``model`` on ``batch``, and return the trace.

    The step is ``output = model(batch)``, the loss, ``backward()`` with ``output`` held until it ends, then the optimizer's
    step. On a real device it runs without holding saved activations. For a model on the meta device, or for another device, it
    runs with fake tensors and the target's kernels.

    Args:
        model: the model, in the same mode (training, autocast around the call) as in training. It may be under
            ``DistributedDataParallel``, whose buckets then count, or ``fully_shard``.
        batch: the arguments of the model: a tensor (one argument), a tuple (positional) or a mapping (keywords).
        loss: a function that makes a scalar from the model's output. The default is ``output.loss``, or else the output itself.
        optimizer: an optimizer of the model's parameters. Its state and its step then belong to the trace.
        regions: the modules to plan: patterns of module paths, or a mapping from path to module. The default are the model's
            repeated blocks.
        device_name: the name of a device that this machine lacks, to plan for that device. With ``None``, the plan is
            for the model's device.
        repeats: how often the step is run on a real device. The first run is for structure and hidden workspaces. With 0, only
            that run happens, and ops are not timed.
        limit_bytes: the most that a timed run may take. Timed runs hold saved activations only if the step then stays below it.
        progress: a function that receives the stage and the share of it that is done.

    Returns:
        The trace. Model, gradients, buffers, random state, batch and optimizer are restored, also after an error.

    Raises:
        InvalidModel: the model does not have parameters, has nothing to train, or is checkpointed already. Or the optimizer is
            for another model. Or the model is split over ranks and to be traced without its device. Or torch.compile compiles
            the model as a whole, or all its regions (planned modules).
        InvalidBatch: the model refuses the batch, or the batch is on another device.
        InvalidLoss, InvalidRegions: the loss is not a scalar; a pattern does not match any module.
        TracingFailed: gradients are off, or the step depends on values that a fake trace does not have.

    Example:
        >>> step = trace(torch.nn.Linear(4, 1), torch.ones(2, 4), loss=torch.sum)
        >>> step.regions[0].name
        ''
    """
    step = _Step(model, batch, loss, optimizer, device_name)
    if isinstance(regions, Mapping):
        found = dict(regions)
    else:
        found = uncompiled_regions(model, find_regions(step.model, regions))
    report = progress or silent
    if step.is_fake:
        refuse_shards(step.model)
    first = functools.partial(report, "tracing with fake tensors" if step.is_fake else "tracing")
    left_alone: dict[str, nn.Module] = {}
    keeps_values, watches_outside = False, True

    def capture(**how: Any) -> StepCapture:
        return StepCapture(
            step.model,
            found,
            left_alone=left_alone,
            loss=loss,
            keeps_values=keeps_values,
            watches_outside=watches_outside,
            **how,
        )

    while True:
        try:
            log, workspaces = step.run_once(lambda call, meter: capture(meter=meter, progress=first).run(call))
            break
        except RefusesHooks as refusal:
            found, left_alone = without_transforms(found, str(refusal), left_alone)
        except RefusesHooksOutside:
            watches_outside = False  # no plan decides about what is saved there, so it may stay in memory in this step
        except BackwardFailed as failure:
            if keeps_values or step.is_fake:
                raise
            # Hooks on gradients, and backward formulas of the user's, may check values, and zeros are not like training.
            keeps_values = True
            _LOG.warning(
                "plimsoll: the backward pass of %s fails if it reads zeros instead of the saved activations (%s), so this call "
                "is traced with all activations held, and may take more than the budget; later calls do not",
                type(step.model).__name__,
                failure.found,
            )
    traced = step.described(log, workspaces)[0]
    if step.home is None or step.is_fake or not repeats:
        return traced

    # By default two timed runs: plans made from one run cost up to 1% of a step more. Memory is fresh in the first timed run,
    # which makes cheap ops look expensive (docs/project/lab-notes.md).
    count = max(1, repeats - 1)
    clock = clock_for(step.home)
    has_room = limit_bytes is None or _most_alive_bytes(traced) + log.saved_bytes <= limit_bytes
    holds_saved = has_room and log.saved_bytes * _ROOM_TO_HOLD < free_bytes(step.home)

    def timings_of(run: int) -> _Timings:
        told = functools.partial(report, f"timing {run} of {count}")
        with step.on_its_device() as call:
            if holds_saved:
                timings = step.timed(call, clock, told)
                # other keys are of ops that only made views
                return {key: timings[key] for key in log.tracer.specs if key in timings}
            return capture(clock=clock, progress=told).run(call).tracer.timings

    with one_thread() if step.home.type == "cpu" else contextlib.nullcontext():
        runs = [timings_of(run) for run in range(1, count + 1)]
    release_free_memory()
    return msgspec.structs.replace(traced, timings=merged_timings(runs))


def watch(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    regions: Sequence[str] | None = None,
    device_name: str | None = None,
    context: Context = contextlib.nullcontext,
) -> WatchedStep:
    """Run one unchanged step of ``model`` on ``batch``, and return each op and the true life of each storage.

    Arguments, errors and restored state are as for `trace`. Memory is summed by regions (modules that ``regions`` names, or the
    model's repeated blocks). ``context`` is a function that returns a context manager for forward and backward, such as an
    offloading context, or a context that removes hooks.
    """
    step = _Step(model, batch, loss, optimizer, device_name)
    names = tuple(find_regions(step.model, regions))
    watcher = _Watcher(step, context)
    log, workspaces = step.run_once(watcher.run)
    found, ids = step.described(log, workspaces)
    return watcher.described(log, found, ids, names)


class _Step:
    """One training step to observe: the model (with its wrapper, if it has one), the arguments of its call, and the device that
    the step is for.
    """

    def __init__(
        self, model: nn.Module, batch: Any, loss: Loss | None, optimizer: Optimizer | None, device_name: str | None
    ) -> None:
        self._wrapped, self.model = model, inner_module(model)
        check_traceable(self.model)
        refuse_unseen_reducer(model)
        self._call = split_batch(batch)
        self.loss = loss
        self._optimizer = optimizer
        self.home = _home_of(self.model)
        self._target = device_name or str(self.home or "cpu")
        self.is_fake = bool(device_name) or self.home is None
        self._library_bytes = 0

    def run_once(self, run: Callable[[Call, WorkspaceMeter], StepLog]) -> tuple[StepLog, dict[str, int]]:
        """Run the step for its structure, and on a real device also for its hidden workspaces.

        Return the log of the step, and the workspaces as a mapping from cost key (an op with its shapes) to bytes.
        """
        if self.home is None or self.is_fake:
            with (
                untouched(self.model),
                side_effects_kept(self._call, self.loss),
                faked(self.model) as mode,
                target_kernels(self._target),
            ):
                return run(fake_batch(lent(self._call), mode), WorkspaceMeter()), {}
        check_devices(self.model, *self._call)
        fsdp2.gather_once(self.model)
        meter = meter_for(self.home)
        # with all threads: some kernels have a workspace per thread
        with self.on_its_device() as call, meter.watching():
            log = run(call, meter)
        self._library_bytes = release_library_workspaces(self.home)
        release_free_memory()
        return log, meter.bytes

    def timed(self, call: Call, clock: OpClock, progress: Callable[[float], None]) -> _Timings:
        """Run the step with a timer, and return the seconds of its ops, as a mapping from cost key to samples.

        The step runs as in training: autograd holds what it saves.
        """
        timer = OpTimer(lambda: "", clock=clock)
        register_statics(timer, self.model, call)
        with timer:
            run_step(timer, self.model, call, self.loss, lambda output: progress(0.5), ModuleStack())
        progress(1.0)
        return timer.timings

    @contextlib.contextmanager
    def on_its_device(self) -> Iterator[Call]:
        """Return a context manager that yields a copy of the batch to run a step on. At its end, model and reducer are
        restored.
        """
        kept = side_effects_kept(self._call, self.loss)
        with untouched(self.model), kept, unseen_by_reducer(self._wrapped):
            yield private_copy(self._call)

    def described(self, log: StepLog, workspaces: Mapping[str, int]) -> tuple[Trace, dict[int, int]]:
        """Return the trace of a run that was logged, including the optimizer's step. Return also a mapping from storage ids of
        the log to storage ids of the trace.
        """
        stepped = None
        if self._optimizer is not None:
            on_gpu = runs_gpu_kernels(self._target)
            stepped = trace_optimizer(self._optimizer, self.model, log.without_gradient, on_gpu=on_gpu)
        beside = {
            "buckets of DistributedDataParallel": bucket_bytes(self._wrapped),
            "weights that DeepSpeed updates": bytes_beside(self.model),
            "workspaces of cuBLAS": self._library_bytes,
        }
        parts = assemble(log, stepped, beside=beside)
        found = Trace(
            model=type(self.model).__name__,
            fingerprint=fingerprint(self.model),
            signature=signature(self.model, *self._call, loss=self.loss),
            device=self._target,
            is_fake=self.is_fake,
            ops=parts.ops,
            specs=parts.specs,
            storages=parts.storages,
            regions=parts.regions,
            timings={},
            workspaces={key: size for key, size in workspaces.items() if size > 0},
            parameters=parts.parameters,
            written_buffers=log.written_buffers,
            notes=tuple(
                f"trial steps run without {name}, which reduces gradients here: memory that it allocates is not counted; "
                "only plimsoll.attach measures it"
                for name in (*ddp.own_reductions(self._wrapped), *fsdp2.own_reductions(self.model))
            ),
        )
        return found, parts.ids


class _Watcher:
    """Runs a step once under a tracer that changes nothing: autograd holds what it saves, as in training."""

    def __init__(self, step: _Step, context: Context) -> None:
        self._step = step
        self._context = context
        self._again: set[int] = set()
        self._outputs: frozenset[int] = frozenset()
        self._forward_end = 0
        self._tracer: StepTracer

    def run(self, call: Call, meter: WorkspaceMeter) -> StepLog:
        """Run forward, loss and backward, and return the log. The output is held until backward has ended."""
        model = self._step.model
        stack = ModuleStack(set())
        tracer = self._tracer = StepTracer(
            lambda: stack.path, meter=meter, before_op=self._note, refilled=Gathered(model).tensors
        )
        register_statics(tracer, model, call)
        with self._context(), stack.watch(model), tracer:
            return run_step(tracer, model, call, self._step.loss, self._forward_ended, stack)

    def _forward_ended(self, output: Any) -> None:
        self._outputs = frozenset(map(self._tracer.table.find, returned_tensors(output)))
        self._forward_end = self._tracer.tick

    def _note(self) -> None:
        """Note whether the op that runs next recomputes.

        Forward code that runs within backward makes a graph. Backward itself does not make one.
        """
        tracer = self._tracer
        node: object = current_autograd_node()  # the stub does not say that this is None outside of backward
        is_again = tracer.phase is Phase.BACKWARD and torch.is_grad_enabled() and node is not None
        (self._again.add if is_again else self._again.discard)(tracer.tick)

    def described(self, log: StepLog, trace: Trace, ids: Mapping[int, int], regions: tuple[str, ...]) -> WatchedStep:
        """Return the watched step, with the data that is needed to predict how changes to the model would change the step."""
        tracer = log.tracer
        last_reads: dict[int, int] = {}
        first_writes: dict[int, int] = {}
        before = {s for s, born in tracer.born.items() if born < 0 and s in log.gradients}
        for tick, op in enumerate(tracer.ops):
            for value in op.reads:
                last_reads[tracer.values[value].storage] = tick
            for value in op.writes:
                storage = tracer.values[value].storage
                if storage in before:
                    first_writes.setdefault(ids[storage], tick)
        return WatchedStep(
            trace=trace,
            regions=regions,
            forward_end=self._forward_end,
            backward_end=log.backward_end,
            recomputed=tuple(sorted(tick for tick in self._again if tick < log.backward_end)),
            output_ends={
                ids[s]: max(last_reads.get(s, 0) + 1, self._forward_end)
                for s in sorted(self._outputs & ids.keys())
                if tracer.born[s] >= 0
            },
            first_writes=first_writes,
            without_gradient=tuple(sorted(log.without_gradient)),
        )


def _most_alive_bytes(trace: Trace) -> int:
    """Return the largest number of bytes that are alive at any tick (position in the trace), with the workspace of the op that
    runs there. Tensors that only regions hold for backward do not count.
    """
    change = [0] * (len(trace.ops) + 2)
    for storage in trace.storages:
        change[storage.born + 1] += storage.bytes
        change[storage.dies + 1] -= storage.bytes
    for tick, op in enumerate(trace.ops):
        # Convolutions under autocast take as much again inside of the op: a timed step exceeded its limit by a fifth.
        workspace_bytes = trace.workspaces.get(op.cost_key, 0)
        change[tick + 1] += workspace_bytes
        change[tick + 2] -= workspace_bytes
    return max(itertools.accumulate(change))


def merged_timings(runs: Sequence[_Timings]) -> dict[str, tuple[float, ...]]:
    """Return the samples (seconds) of all timed runs together, as a mapping from cost key to samples.

    None of the samples is cold, because a run that is not timed came first.
    """
    keys = dict.fromkeys(key for run in runs for key in run)
    return {key: tuple(sample for run in runs for sample in run.get(key, ())) for key in keys}


def _home_of(model: nn.Module) -> torch.device | None:
    """Return the device that the model can run on, or ``None`` if some parameters are meta or fake tensors."""
    if any(parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        return None
    return next(model.parameters()).device
