"""A model and the arguments of a call in, the log of one training step out. Run it inside ``untouched``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import Phase, TraceParameter
from plimsoll.errors import InvalidModel
from plimsoll.tracing.fsdp2 import Gathered
from plimsoll.tracing.local_tensors import settled
from plimsoll.tracing.meters.timing import Clock
from plimsoll.tracing.meters.workspaces import WorkspaceMeter
from plimsoll.tracing.recorder.calling import Loss, ModuleStack, call_tensors, output_tensors, scalar_loss
from plimsoll.tracing.refusals import explain_backward, explain_forward
from plimsoll.tracing.slots import SlotBook
from plimsoll.tracing.statics import gradient_storages, listed_parameters, register_statics
from plimsoll.tracing.tracer import StepTracer

_REENTRANT_CHECKPOINT = CheckpointFunction._backward_cls


@dataclass(slots=True)
class RegionLog:
    """What one call of one region did, in ids of the tracer's log."""

    name: str
    call: int
    start: int
    sequence_start: int
    book: SlotBook
    leaves: dict[int, tuple[Origin, str]]
    """Names of what the region found when it started: its inputs by position, its own parameters and buffers by name."""
    end: int = -1
    sequence_end: int = -1
    outputs: list[int] = field(default_factory=list)
    value_reads: int = 0
    latest: dict[int, int] = field(default_factory=dict)
    """Current value of every slot's storage when the region returned."""


@dataclass(slots=True)
class StepLog:
    """A captured step, before it is assembled into a ``Trace``."""

    tracer: StepTracer
    regions: list[RegionLog]
    outside: SlotBook
    gradients: set[int]
    without_gradient: frozenset[str]
    """Names of parameters that the step left without a gradient."""
    backward_end: int
    parameters: tuple[TraceParameter, ...]
    """Every parameter, with its storage in the tracer's table."""

    @property
    def saved_bytes(self) -> int:
        """Bytes of the distinct storages that autograd saved in forward."""
        books = [self.outside, *(region.book for region in self.regions)]
        storages = {record.storage for book in books for record in book.records if record.storage >= 0}
        return sum(self.tracer.first_value(storage).bytes for storage in storages)


class StepCapture:
    """Runs one step under the tracer, with saved tensors dropped as they are saved (or held, with ``holds_saved``)."""

    def __init__(
        self,
        model: nn.Module,
        regions: Mapping[str, nn.Module],
        *,
        loss: Loss | None = None,
        clock: Clock | None = None,
        meter: WorkspaceMeter | None = None,
        progress: Callable[[float], None] | None = None,
        holds_saved: bool = False,
    ) -> None:
        self._model = model
        self._holds_saved = holds_saved
        self._regions = regions
        self._loss = loss
        self._stack = ModuleStack()
        self._progress = progress or (lambda share: None)
        self.tracer = StepTracer(
            lambda: self._stack.path,
            clock=clock,
            meter=meter,
            before_op=self._refuse_hooks_inside,
            on_node=self._backward_at,
            refilled=Gathered(model).tensors,
        )
        self._parameter_storages: frozenset[int] = frozenset()
        self._outside = SlotBook(self.tracer, self._is_parameter, holds_all=holds_saved)
        self._logs: list[RegionLog] = []
        self._calls: dict[str, int] = {}
        self._running: RegionLog | None = None
        self._sequence = (0, 0)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepLog:
        """Forward, loss and backward; what the model returned and the loss are held until backward has ended.

        Raises:
            InvalidBatch: the model refuses the batch.
            InvalidModel: the model checkpoints its own layers.
            InvalidLoss: there is no scalar loss.
            TracingFailed: the step depends on values that a fake tensor does not have, or backward fails.
        """
        tracer = self.tracer
        self._parameter_storages = register_statics(tracer, self._model, args, kwargs)
        with contextlib.ExitStack() as stack:
            for name, module in self._regions.items():
                stack.enter_context(self._wrapped(name, module))
            stack.enter_context(self._stack.watch(self._model))
            stack.enter_context(self._outside.entered())
            stack.enter_context(tracer)
            first_node = torch._C._autograd._get_sequence_nr()
            with explain_forward(self._model):
                output = self._model(*args, **kwargs)
            loss = scalar_loss(output, self._loss)
            self._sequence = (first_node, torch._C._autograd._get_sequence_nr())
            tracer.phase = Phase.BACKWARD
            torch.clear_autocast_cache()
            with explain_backward(self._model), torch.autocast(loss.device.type, enabled=False):
                loss.backward()
            tracer.note_deaths()
            named = dict(self._model.named_parameters())
            gradients = gradient_storages(tracer, self._model)
            without = frozenset(name for name, p in named.items() if p.grad is None)
            del loss, output
            tracer.note_deaths()
        self._progress(1.0)
        return StepLog(
            tracer, self._logs, self._outside, gradients, without, tracer.tick, listed_parameters(tracer, self._model)
        )

    def _backward_at(self, node: int) -> None:
        first, last = self._sequence
        if first <= node < last:
            self._progress(0.5 + 0.5 * (last - node) / (last - first))

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        storage = self.tracer.table.find(tensor)
        return storage in self._parameter_storages or storage in self.tracer.fillings

    @contextlib.contextmanager
    def _wrapped(self, name: str, module: nn.Module) -> Iterator[None]:
        original = module.forward
        had_own = "forward" in module.__dict__

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            if self.tracer.phase is not Phase.FORWARD or not _is_on_top(self._outside):
                raise self._already_checkpointed(name)
            log = self._running = self._enter(name, module, args, kwargs)
            with log.book.entered():
                output = original(*args, **kwargs)
            self._running = None
            self._leave(log, output)
            return output

        module.forward = forward
        try:
            yield
        finally:
            if had_own:
                module.forward = original
            else:
                del module.forward

    def _refuse_hooks_inside(self) -> None:
        """Checkpointing inside of a region pushes hooks of its own, and ours do not see what its ops save."""
        log = self._running
        if log is not None and torch.is_grad_enabled() and not _is_on_top(log.book):
            raise self._already_checkpointed(log.name)

    def _already_checkpointed(self, name: str) -> InvalidModel:
        return InvalidModel(
            f"{type(self._model).__name__} already checkpoints {name}.",
            why="its saved tensors go through hooks of somebody else, so Plimsoll could not decide about them",
            next="switch that off first: model.gradient_checkpointing_disable() in transformers, "
            "or remove torch.utils.checkpoint / the offload context around the layer",
        )

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RegionLog:
        tracer = self.tracer
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        tracer.forget_names()
        # What a collective is still filling is waited for here, or the region would seem to write to its input.
        settled_inputs = map(settled, call_tensors(args, kwargs))
        inputs = [tracer.add_leaf(t, Origin.EXTERNAL, "external") for t in settled_inputs]
        leaves: dict[int, tuple[Origin, str]] = {}
        for buffer_name, buffer in module.named_buffers():
            leaves.setdefault(tracer.value_of(buffer), (Origin.BUFFER, f"buffer:{buffer_name}"))
        for parameter_name, parameter in module.named_parameters():
            leaves[tracer.value_of(parameter)] = (Origin.PARAMETER, f"parameter:{parameter_name}")
        for position, value in enumerate(inputs):
            leaves.setdefault(value, (Origin.INPUT, f"input:{position}"))
        leaves.pop(-1, None)
        return RegionLog(
            name=name,
            call=call,
            start=tracer.tick,
            sequence_start=torch._C._autograd._get_sequence_nr(),
            book=SlotBook(tracer, self._is_parameter, holds_all=self._holds_saved),
            leaves=leaves,
            value_reads=-tracer.value_reads,
        )

    def _leave(self, log: RegionLog, output: Any) -> None:
        tracer = self.tracer
        tensors = output_tensors(output)
        if any(isinstance(tensor.grad_fn, _REENTRANT_CHECKPOINT) for tensor in tensors):
            raise self._already_checkpointed(log.name)
        log.end = tracer.tick
        log.sequence_end = torch._C._autograd._get_sequence_nr()
        log.value_reads += tracer.value_reads
        log.outputs = [tracer.value_of(tensor) for tensor in tensors]
        log.latest = {record.storage: tracer.current.get(record.storage, -1) for record in log.book.records}
        tracer.forget_names()
        self._logs.append(log)
        self._progress(0.5 * min(1.0, len(self._logs) / len(self._regions)))


def _is_on_top(book: SlotBook) -> bool:
    """Whether what autograd saves now goes to ``book``."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and top[0] == book.pack
