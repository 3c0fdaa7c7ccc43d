"""A model and a batch in, one step as it runs by itself out: nothing is dropped, replaced or refused, only looked at.

So it serves models that checkpoint, offload or compress by themselves, and those that do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from plimsoll.artifacts.trace import Phase
from plimsoll.artifacts.watched import WatchedStep
from plimsoll.tracing.assemble import assemble
from plimsoll.tracing.capture import StepLog
from plimsoll.tracing.ddp import bucket_bytes, inner_module, unseen_by_reducer
from plimsoll.tracing.fake import fake_batch, faked
from plimsoll.tracing.fsdp2 import Gathered
from plimsoll.tracing.kernels import runs_gpu_kernels, target_kernels
from plimsoll.tracing.lives import storages_of
from plimsoll.tracing.meters.memory import release_free_memory
from plimsoll.tracing.meters.workspaces import WorkspaceMeter, meter_for
from plimsoll.tracing.optimizer import OptimizerLog, trace_optimizer
from plimsoll.tracing.recorder.calling import Loss, ModuleStack, check_devices, output_tensors, scalar_loss, split_batch
from plimsoll.tracing.recorder.fingerprint import fingerprint, signature
from plimsoll.tracing.recorder.untouched import private_copy, untouched
from plimsoll.tracing.refusals import explain_backward, explain_forward
from plimsoll.tracing.regions import find_regions
from plimsoll.tracing.slots import SlotBook
from plimsoll.tracing.statics import gradient_storages, listed_parameters, register_statics
from plimsoll.tracing.trace import check_traceable, home_of
from plimsoll.tracing.tracer import StepTracer

Context = Callable[[], contextlib.AbstractContextManager[object]]


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
    """Run one step of ``model`` on ``batch`` as it is, and note every op and the true life of every storage.

    Args:
        model: as it trains.
        batch: tensor (one argument), tuple (positional), mapping (keywords).
        loss: makes a scalar of the model's output; by default ``output.loss`` or the output itself.
        optimizer: over the model's parameters; its state and its step then belong to the step.
        regions: patterns of module paths, by which memory is summed up; by default the model's repeated blocks.
        device_name: for a device of this name that is not here (fake tensors).
        context: makes what is entered around forward and backward: an offloading context, or the removal of hooks.

    Returns:
        The step. Model, gradients, buffers, random state, batch and optimizer are as before, also after an error.

    Raises:
        InvalidModel, InvalidBatch, InvalidLoss, InvalidRegions, TracingFailed: as ``trace`` raises them.
    """
    wrapped, model = model, inner_module(model)
    check_traceable(model)
    args, kwargs = split_batch(batch)
    names = tuple(find_regions(model, regions))
    home = home_of(model)
    target = device_name or str(home or "cpu")
    watcher = _Watcher(model, loss, context)
    if device_name or home is None:
        with untouched(model), faked(model) as mode, target_kernels(target):
            log = watcher.run(fake_batch((args, kwargs), mode), WorkspaceMeter())
        workspaces: dict[str, int] = {}
    else:
        check_devices(model, args, kwargs)
        meter = meter_for(home)
        with untouched(model), unseen_by_reducer(wrapped), meter.watching():
            log = watcher.run(private_copy((args, kwargs)), meter)
        release_free_memory()
        workspaces = meter.bytes
    stepped = None
    if optimizer is not None:
        stepped = trace_optimizer(optimizer, model, log.without_gradient, on_gpu=runs_gpu_kernels(target))
    step = assemble(
        log,
        model=type(model).__name__,
        fingerprint=fingerprint(model),
        signature=signature(model, args, kwargs, loss=loss),
        device=target,
        is_fake=bool(device_name) or home is None,
        timings={},
        workspaces=workspaces,
        optimizer=stepped,
        bucket_bytes=bucket_bytes(wrapped),
    )
    return watcher.described(step, log, stepped, names)


class _Watcher:
    """One run under a tracer that holds nothing and changes nothing."""

    def __init__(self, model: nn.Module, loss: Loss | None, context: Context) -> None:
        self._model = model
        self._loss = loss
        self._context = context
        self._again: set[int] = set()
        self._outputs: frozenset[int] = frozenset()
        self._forward_end = 0
        self._tracer: StepTracer

    def run(self, call: tuple[tuple[Any, ...], dict[str, Any]], meter: WorkspaceMeter) -> StepLog:
        """Forward, loss, backward; the output is held until backward has ended."""
        args, kwargs = call
        stack = ModuleStack()
        tracer = self._tracer = StepTracer(
            lambda: stack.path, meter=meter, before_op=self._note, refilled=Gathered(self._model).tensors
        )
        register_statics(tracer, self._model, args, kwargs)
        with self._context(), stack.watch(self._model), tracer:
            with explain_forward(self._model):
                output = self._model(*args, **kwargs)
            loss = scalar_loss(output, self._loss)
            self._outputs = frozenset(map(tracer.table.find, output_tensors(output)))
            self._forward_end = tracer.tick
            tracer.phase = Phase.BACKWARD
            torch.clear_autocast_cache()
            with explain_backward(self._model), torch.autocast(loss.device.type, enabled=False):
                loss.backward()
            tracer.note_deaths()
            named = dict(self._model.named_parameters())
            gradients = gradient_storages(tracer, self._model)
            without = frozenset(name for name, p in named.items() if p.grad is None)
            parameters = listed_parameters(tracer, self._model)
            del loss, output
            tracer.note_deaths()
        book = SlotBook(tracer, lambda tensor: False)
        return StepLog(tracer, [], book, gradients, without, tracer.tick, parameters)

    def _note(self) -> None:
        """Forward that runs within backward makes a graph: that is how a recomputation is told from backward itself."""
        tracer = self._tracer
        node: object = torch._C._current_autograd_node()  # the stub forgets that outside of backward there is none
        is_again = tracer.phase is Phase.BACKWARD and torch.is_grad_enabled() and node is not None
        (self._again.add if is_again else self._again.discard)(tracer.tick)

    def described(
        self, step: Any, log: StepLog, optimizer: OptimizerLog | None, regions: tuple[str, ...]
    ) -> WatchedStep:
        """The step with what it takes to change it."""
        ids = storages_of(log, optimizer).ids
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
            trace=step,
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
