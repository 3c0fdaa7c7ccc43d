"""A model and a batch in, the log of one training step out; the model, its gradients, its buffers and the RNG unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import Phase
from plimsoll.errors import InvalidBatch, InvalidModel, PlimsollError
from plimsoll.recording.calling import Loss, call_tensors, output_tensors, scalar_loss
from plimsoll.recording.modules import ModuleStack
from plimsoll.tracing.slots import SlotBook
from plimsoll.tracing.tracer import Clock, StepTracer


@dataclass(slots=True)
class RegionLog:
    """What one call of one region did, in ids of the tracer's log."""

    name: str
    call: int
    module: nn.Module
    start: int
    sequence_start: int
    book: SlotBook
    inputs: list[int]
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
    statics: dict[int, str]
    backward_end: int


class StepCapture:
    """Runs one step under the tracer, with every region's saved tensors dropped as they are saved."""

    def __init__(
        self, model: nn.Module, regions: Mapping[str, nn.Module], *, clock: Clock | None, loss: Loss | None
    ) -> None:
        self._model = model
        self._regions = regions
        self._loss = loss
        self._stack = ModuleStack()
        self.tracer = StepTracer(lambda: self._stack.path, clock)
        self._parameter_storages: set[int] = set()
        self._outside = SlotBook(self.tracer, self._is_parameter)
        self._logs: list[RegionLog] = []
        self._calls: dict[str, int] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepLog:
        """Forward, loss and backward.

        Raises:
            InvalidBatch: the model refuses the batch.
            InvalidModel: the model checkpoints its own layers.
            InvalidLoss: there is no scalar loss.
        """
        tracer = self.tracer
        self._register_statics(args, kwargs)
        with contextlib.ExitStack() as stack:
            for name, module in self._regions.items():
                stack.enter_context(self._wrapped(name, module))
            stack.enter_context(self._stack.watch(self._model))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._outside.pack, self._outside.unpack))
            stack.enter_context(tracer)
            try:
                output = self._model(*args, **kwargs)
            except PlimsollError:
                raise
            except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
                raise InvalidBatch(
                    f"{type(self._model).__name__} refused the batch: {type(error).__name__}: {_first_line(error)}",
                    why="the forward pass failed before anything was planned",
                    next="check that model(*batch) (tuple), model(**batch) (dict) or model(batch) (tensor) works",
                ) from error
            loss = scalar_loss(output, self._loss)
            tracer.phase = Phase.BACKWARD
            torch.clear_autocast_cache()
            with torch.autocast(loss.device.type, enabled=False):
                loss.backward()
            tracer.note_deaths()
            gradients = {
                tracer.table.find(parameter.grad) for parameter in self._model.parameters() if parameter.grad is not None
            }
            end = tracer.tick
        del loss, output
        return StepLog(tracer, self._logs, self._outside, gradients, self._statics, end)

    def _register_statics(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tracer = self.tracer
        self._statics: dict[int, str] = {}
        for name, parameter in self._model.named_parameters():
            value = tracer.add_static(parameter, Origin.PARAMETER, f"parameter:{name}")
            self._parameter_storages.add(tracer.values[value].storage)
            if parameter.grad is not None:
                tracer.add_static(parameter.grad, Origin.EXTERNAL, f"gradient:{name}")
        for name, buffer in self._model.named_buffers():
            tracer.add_static(buffer, Origin.BUFFER, f"buffer:{name}")
        for position, tensor in enumerate(call_tensors(args, kwargs)):
            tracer.add_static(tensor, Origin.INPUT, f"batch:{position}")

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        return self.tracer.table.find(tensor) in self._parameter_storages

    @contextlib.contextmanager
    def _wrapped(self, name: str, module: nn.Module) -> Iterator[None]:
        original = module.forward
        had_own = "forward" in module.__dict__

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            self._refuse_other_checkpointing(name)
            log = self._enter(name, module, args, kwargs)
            with torch.autograd.graph.saved_tensors_hooks(log.book.pack, log.book.unpack):
                output = original(*args, **kwargs)
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

    def _refuse_other_checkpointing(self, name: str) -> None:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        is_ours = top is not None and top[0] == self._outside.pack
        if is_ours and self.tracer.phase is Phase.FORWARD:
            return
        raise InvalidModel(
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
        inputs = [tracer.add_leaf(t, Origin.EXTERNAL, "external") for t in call_tensors(args, kwargs)]
        return RegionLog(
            name=name,
            call=call,
            module=module,
            start=tracer.tick,
            sequence_start=torch._C._autograd._get_sequence_nr(),
            book=SlotBook(tracer, self._is_parameter),
            inputs=inputs,
            value_reads=-tracer.value_reads,
        )

    def _leave(self, log: RegionLog, output: Any) -> None:
        tracer = self.tracer
        log.end = tracer.tick
        log.sequence_end = torch._C._autograd._get_sequence_nr()
        log.value_reads += tracer.value_reads
        log.outputs = [tracer.value_of(tensor) for tensor in output_tensors(output)]
        log.latest = {record.storage: tracer.current.get(record.storage, -1) for record in log.book.records}
        tracer.forget_names()
        self._logs.append(log)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Leave the model as it was: gradients, buffers and the random state are put back when the block ends.

    Gradients that exist are replaced by zeros of their shape while the block runs (so that accumulating into them costs
    what it will cost), and are never written.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    versions = [buffer._version for buffer, _ in buffers]
    devices = sorted({parameter.device.index or 0 for parameter in parameters if parameter.is_cuda})
    with torch.random.fork_rng(devices=devices):
        for parameter in parameters:
            parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for (buffer, copy), version in zip(buffers, versions, strict=True):
                    if buffer._version != version or not torch.equal(buffer, copy):
                        buffer.copy_(copy)
