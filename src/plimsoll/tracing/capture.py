"""Run one training step under the tracer. Tensors that autograd saves are noted and dropped, and backward reads placeholders
instead.

So a traced step never holds more than the temporaries of one region (planned module), regardless of how much the model saves.
The life of a storage that the tracer sees is its life *without* what autograd saves. Floating-point placeholders are zeros: the
gradients of a traced step are not used. Integers and booleans (indices, masks) are copied, because backward formulas index with
them. The tracer does not see the copies.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import Phase, TraceParameter
from plimsoll.errors import InvalidModel, PlimsollError
from plimsoll.tracing.fsdp2 import Gathered
from plimsoll.tracing.local_tensors import Shell, beside_weights, dense_parts, gradient_of, settled, unwrapped
from plimsoll.tracing.meters.timing import OpClock
from plimsoll.tracing.meters.workspaces import WorkspaceMeter
from plimsoll.tracing.recorder.calling import (
    Call,
    Loss,
    ModuleStack,
    after_autocast,
    call_tensors,
    output_tensors,
    refuse_foreign_graph,
    scalar_loss,
)
from plimsoll.tracing.recorder.foreign_leaves import foreign_leaves_kept
from plimsoll.tracing.recorder.graph import SlotRecord
from plimsoll.tracing.recorder.storages import Geometry, is_plain
from plimsoll.tracing.recorder.untouched import forwards_kept
from plimsoll.tracing.refusals import explain_backward, explain_forward, refuses_hooks
from plimsoll.tracing.torch_internals import (
    internal,
    pop_saved_hooks,
    push_saved_hooks,
    sequence_number,
    top_saved_hooks,
)
from plimsoll.tracing.tracer import StepTracer, changed_buffers, gradient_storages, listed_parameters, register_statics
from plimsoll.tracing.zero import is_gathered_by_zero

# The class of the backward nodes of reentrant checkpointing; seen in torch 2.9 to 2.15.
_REENTRANT_CHECKPOINT = internal("torch.utils.checkpoint.CheckpointFunction._backward_cls")


class SlotBook:
    """Notes each tensor that autograd saves in one region call (call of a planned module), or outside of all regions. A saved
    tensor is called a slot.

    The methods `pack` and `unpack` are saved-tensor hooks.
    """

    def __init__(
        self, tracer: StepTracer, is_parameter: Callable[[torch.Tensor], bool], *, keeps_values: bool = False
    ) -> None:
        """``is_parameter`` says whether a tensor is a parameter. ``keeps_values``: backward reads copies of saved tensors, not
        zeros.
        """
        self._keeps_values = keeps_values
        self.records: list[SlotRecord] = []
        self.order: list[int] = []
        self.is_parameter_slot: list[bool] = []
        self._tracer = tracer
        self._is_parameter = is_parameter

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context manager. Inside its block, what autograd saves is noted here.

        The hooks are pushed without ``saved_tensors_hooks``, because the model's own code may disable that function.
        """
        push_saved_hooks(self.pack, self.unpack)
        try:
            yield
        finally:
            pop_saved_hooks()

    def pack(self, tensor: torch.Tensor) -> _Placeholder:
        """The pack hook: note the saved tensor, and return a placeholder for it. For a DTensor, note the local shard.

        The placeholder holds the tensor only if zeros cannot replace it.
        """
        tracer = self._tracer
        tensor, shell = unwrapped(tensor)
        if shell is not None:
            shell.let_go()
        is_parameter = self._is_parameter(tensor)
        is_gathered = is_gathered_by_zero(tensor)
        value = -1 if is_parameter else tracer.value_of(tensor)
        storage = tracer.table.find(tensor) if is_plain(tensor) and not is_gathered else -1
        self.records.append(SlotRecord(value=value, storage=storage, packed=tracer.tick))
        self.is_parameter_slot.append(is_parameter)
        with tracer.unseen():
            # Zeros cannot replace integers and booleans: backward formulas index with them. Backward resolves a lazy
            # conjugation with an op of its own, which zeros would not need.
            has_numbers = tensor.dtype.is_floating_point or (tensor.is_complex() and not tensor.is_conj())
            can_stand_in = has_numbers and is_plain(tensor) and not is_parameter and not self._keeps_values
            held = None if can_stand_in else tensor if is_gathered else tensor.detach()
            if held is not None and value >= 0 and is_plain(tensor):
                copy = held.clone()  # strides differ if elements share memory
                held = copy if copy.stride() == held.stride() else held
        geometry = Geometry.of(tensor) if held is None else None
        return _Placeholder(self, len(self.records) - 1, geometry, tensor.device, held, shell)

    def unpack(self, placeholder: Any) -> torch.Tensor:
        """The unpack hook: note that backward reads the slot (saved tensor) now, and return a tensor for backward to read
        (zeros, or what is held).
        """
        record = self.records[placeholder.index]
        if record.unpacked < 0:
            record.unpacked = self._tracer.tick
            self.order.append(placeholder.index)
        stand_in: torch.Tensor = placeholder.stand_in(self._tracer)
        if placeholder.shell is None:
            return stand_in
        with self._tracer.unseen():
            shown: torch.Tensor = placeholder.shell.around(stand_in)
        return shown

    def released(self, index: int) -> None:
        self.records[index].released = self._tracer.tick


@dataclass(slots=True, eq=False)
class _Placeholder:
    """The object that autograd holds instead of a saved tensor in a traced step. When autograd deletes it, the time is noted in
    the book.
    """

    book: SlotBook
    index: int
    geometry: Geometry | None
    """The sizes, strides and offset of the zeros that replace the tensor, or ``None`` if the tensor itself is ``held``."""
    device: torch.device
    held: torch.Tensor | None
    shell: Shell | None

    def stand_in(self, tracer: StepTracer) -> torch.Tensor:
        """Return a tensor for backward to read (the held tensor or zeros), and register it with the tracer."""
        if self.held is not None:
            if is_plain(self.held) and tracer.table.find(self.held) < 0:
                tracer.add_stand_in(self.held)
            return self.held
        assert self.geometry is not None, "what is not held has zeros in its place"
        with tracer.unseen():
            tensor = _zeros(self.geometry, self.device)
        tracer.add_stand_in(tensor)
        return tensor

    def __del__(self) -> None:
        self.book.released(self.index)


@dataclass(slots=True)
class RegionLog:
    """Data: what was logged of one region call (call of a planned module) in a traced step. Ids are ids of the tracer's log.

    ``start`` and ``end`` are positions in the log. ``sequence_start`` and ``sequence_end`` are autograd's sequence numbers.
    """

    name: str
    call: int
    start: int
    sequence_start: int
    book: SlotBook
    leaves: dict[int, tuple[Origin, str]]
    """A mapping from value id to origin and name, for tensors that existed when the region began.

    Inputs are named by their position, the region's parameters and buffers by their name.
    """
    end: int = -1
    sequence_end: int = -1
    outputs: list[int] = field(default_factory=list)
    latest: dict[int, int] = field(default_factory=dict)
    """A mapping from the storage of each saved tensor to the value that it had when the region returned."""
    value_read: str = ""
    """The first line of the user's code in the region that reads values of tensors, or ""."""
    steady: frozenset[int] = frozenset()
    """The ids of the inputs of this call that forward made and did not write to any more until forward ended."""


@dataclass(slots=True)
class StepLog:
    """Data: what was logged of a step that has run. `assemble` makes a ``Trace`` from it."""

    tracer: StepTracer
    gradients: set[int]
    without_gradient: frozenset[str]
    """The names of parameters that the step left without a gradient."""
    backward_end: int
    parameters: tuple[TraceParameter, ...]
    """All parameters, each with its storage in the tracer's table."""
    written_buffers: tuple[str, ...]
    """The names of the buffers that the step wrote to."""
    regions: list[RegionLog] = field(default_factory=list)
    outside: list[SlotRecord] = field(default_factory=list)
    """The tensors that autograd saved outside of regions."""

    @property
    def saved_bytes(self) -> int:
        """The total size in bytes of the storages that autograd saved in forward. Each storage counts once."""
        records = [*self.outside, *(record for region in self.regions for record in region.book.records)]
        storages = {record.storage for record in records if record.storage >= 0}
        return sum(self.tracer.most_bytes[storage] for storage in storages)


def run_step(
    tracer: StepTracer,
    model: nn.Module,
    call: Call,
    loss: Loss | None,
    at_loss: Callable[[Any], None],
    stack: ModuleStack,
) -> StepLog:
    """Run forward, loss and backward in a tracer that is entered already, and return the log. The model's output and the loss
    are held until backward ends.

    ``at_loss`` is a function that is called with the model's output, between forward and backward.

    Raises:
        InvalidBatch: the model refuses the batch, or continues the graph of an earlier call.
        InvalidLoss: the step does not have a scalar loss.
        TracingFailed: the step depends on values that a fake tensor does not have, or backward fails.
    """
    args, kwargs = call
    first_node = sequence_number()
    with explain_forward(model), forwards_kept(model):
        output = model(*args, **kwargs)
    value = scalar_loss(output, loss)
    refuse_foreign_graph(value, first_node, has_met_threads=stack.has_met_threads)
    at_loss(output)
    tracer.phase = Phase.BACKWARD
    with (
        explain_backward(model),
        after_autocast(value.device.type),
        foreign_leaves_kept(model, value),
        tracer.noting_gradients(model),
    ):
        value.backward()
    tracer.note_deaths()
    log = StepLog(
        tracer,
        gradients=gradient_storages(tracer, model),
        without_gradient=frozenset(
            name for name, parameter in model.named_parameters() if gradient_of(parameter) is None
        ),
        backward_end=tracer.tick,
        parameters=listed_parameters(tracer, model),
        written_buffers=changed_buffers(tracer, model),
    )
    del value, output
    tracer.note_deaths()
    return log


@contextlib.contextmanager
def saved_as_zeros(model: nn.Module) -> Iterator[None]:
    """Return a context manager for a step that does not hold activations. In its block, autograd does not hold the
    floating-point values that it saves, and backward reads zeros instead.

    Parameters and integers are saved as usual. The gradients of such a step are wrong, but everything else in the step is
    right.
    """
    parameters = {part.untyped_storage().data_ptr() for each in model.parameters() for part in dense_parts(each)}

    def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[Geometry, torch.device]:
        is_activation = tensor.dtype.is_floating_point and is_plain(tensor)
        if is_activation and tensor.untyped_storage().data_ptr() not in parameters:
            return Geometry.of(tensor), tensor.device
        return tensor.detach()

    def unpack(packed: torch.Tensor | tuple[Geometry, torch.device]) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else _zeros(*packed)

    push_saved_hooks(pack, unpack)
    try:
        yield
    finally:
        pop_saved_hooks()


def _zeros(geometry: Geometry, device: torch.device) -> torch.Tensor:
    zeros = torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype, device=device)
    return zeros if isinstance(zeros, FakeTensor) else zeros.zero_()  # a fake tensor has nothing to set to zero


class RefusesHooks(Exception):
    """Raised when a region runs a transform of ``torch.func``, which cannot run while saved tensors have hooks.

    Its argument is the region's name.
    """


class RefusesHooksOutside(Exception):
    """Raised when the model or the loss runs a transform of ``torch.func`` outside of all regions."""


class StepCapture:
    """Runs one step under the tracer, and drops each tensor that autograd saves.

    What the modules in ``left_alone`` save is held by autograd as in training. Without ``watches_outside``, the same holds for
    what is saved outside of regions. With ``keeps_values``, backward reads copies of all that autograd saves, and not zeros.
    """

    def __init__(
        self,
        model: nn.Module,
        regions: Mapping[str, nn.Module],
        *,
        loss: Loss | None,
        clock: OpClock | None = None,
        meter: WorkspaceMeter | None = None,
        progress: Callable[[float], None],
        left_alone: Mapping[str, nn.Module] = MappingProxyType({}),
        keeps_values: bool = False,
        watches_outside: bool = True,
    ) -> None:
        self._model = model
        self._watches_outside = watches_outside
        self._keeps_values = keeps_values
        self._left_alone = left_alone
        self._regions = regions
        self._loss = loss
        self._stack = ModuleStack(set())
        self._progress = progress
        self.tracer = StepTracer(
            lambda: self._stack.path,
            clock=clock,
            meter=meter,
            before_op=self._refuse_hooks_inside,
            on_node=self._backward_at,
            refilled=Gathered(model).tensors,
        )
        self._parameter_storages: frozenset[int] = frozenset()
        self._outside = self._book()
        self._logs: list[RegionLog] = []
        self._calls: dict[str, int] = {}
        self._running: RegionLog | None = None
        self._sequence = (0, 0)

    def run(self, call: Call) -> StepLog:
        """Run one step like `run_step`, inside of `untouched`, and return its log.

        Raises:
            InvalidModel: the model checkpoints its own layers.
            RefusesHooks, RefusesHooksOutside: a transform of ``torch.func`` runs under the hooks of this step.
        """
        self._parameter_storages = register_statics(self.tracer, self._model, call)
        with contextlib.ExitStack() as stack:
            for name, module in self._regions.items():
                stack.enter_context(_calling(module, functools.partial(self._region, name, module, module.forward)))
            for module in self._left_alone.values():
                stack.enter_context(_calling(module, functools.partial(self._without_hooks, module.forward)))
            stack.enter_context(self._stack.watch(self._model))
            if self._watches_outside:
                stack.enter_context(self._outside.entered())
            stack.enter_context(self.tracer)
            first = sequence_number()
            try:
                log = run_step(
                    self.tracer, self._model, call, self._loss, lambda output: self._forward_ended(first), self._stack
                )
            except PlimsollError as error:
                if isinstance(error.__cause__, RuntimeError) and refuses_hooks(error.__cause__):
                    raise RefusesHooksOutside from error
                raise
        self._progress(1.0)
        log.regions, log.outside = self._logs, self._outside.records
        return log

    def _forward_ended(self, first_node: int) -> None:
        self._sequence = (first_node, sequence_number())
        made, current, values = self.tracer.born, self.tracer.current, self.tracer.values
        for log in self._logs:
            inputs = (value for value, (origin, _) in log.leaves.items() if origin is Origin.INPUT)
            log.steady = frozenset(
                value
                for value in inputs
                if made.get(values[value].storage, -1) >= 0 and current.get(values[value].storage) == value
            )

    def _backward_at(self, node: int) -> None:
        first, last = self._sequence
        if first <= node < last:
            self._progress(0.5 + 0.5 * (last - node) / (last - first))

    def _book(self) -> SlotBook:
        return SlotBook(self.tracer, self._is_parameter, keeps_values=self._keeps_values)

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        storage = self.tracer.table.find(tensor)
        return storage in self._parameter_storages or storage in self.tracer.fillings or is_gathered_by_zero(tensor)

    def _region(self, name: str, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the forward of a region in a traced step: run the forward, log the call, and return the output."""
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        outer = self._running
        if outer is not None and outer.name == name and _is_on_top(outer.book):  # a block that calls itself
            return original(*args, **kwargs)
        is_inner = outer is not None and _is_on_top(outer.book) and name.startswith(outer.name and f"{outer.name}.")
        if self.tracer.phase is not Phase.FORWARD or not (is_inner or self._is_outside()):
            raise self._already_checkpointed(name)
        place = len(self._logs)  # insert this region's log before the logs of the regions inside it
        log = self._running = self._enter(name, module, args, kwargs)
        reads = len(self.tracer.value_reads)
        try:
            with log.book.entered():
                output = original(*args, **kwargs)
        except BaseException as error:
            # The model may catch the error and call the region again. The plan then decides about that call alone.
            self._calls[name] -= 1
            self.tracer.forget_names()
            if isinstance(error, RuntimeError) and refuses_hooks(error):
                raise RefusesHooks(name) from error
            raise
        finally:
            self._running = outer
        log.value_read = next(iter(self.tracer.value_reads[reads:]), "")
        self._leave(log, output)
        self._logs.insert(place, log)
        self._progress(0.5 * min(1.0, len(self._logs) / len(self._regions)))
        return output

    def _is_outside(self) -> bool:
        """Return True if no region runs and no other code has put hooks on saved tensors."""
        return _is_on_top(self._outside) if self._watches_outside else top_saved_hooks(True) is None

    def _without_hooks(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self._watches_outside and torch.is_grad_enabled() and self._is_outside()):
            return original(*args, **kwargs)
        pop_saved_hooks()
        try:
            return original(*args, **kwargs)
        finally:
            push_saved_hooks(self._outside.pack, self._outside.unpack)

    def _refuse_hooks_inside(self) -> None:
        """Raise ``InvalidModel`` if other saved-tensor hooks are active inside a region, such as those of checkpointing.
        Plimsoll's hooks then do not see what the region's ops save.
        """
        log = self._running
        if log is not None and torch.is_grad_enabled() and not _is_on_top(log.book):
            raise self._already_checkpointed(log.name)

    def _already_checkpointed(self, name: str) -> InvalidModel:
        others = (
            "switch checkpointing off first: model.gradient_checkpointing_disable() in transformers, "
            "or remove torch.utils.checkpoint / the offload context around the layer"
        )
        if self.tracer.phase is Phase.BACKWARD:
            return InvalidModel(
                f"{type(self._model).__name__} already checkpoints {name}, or calls it in backward for another reason.",
                why="code that runs within backward (torch.utils.checkpoint, the adjoint method of an ODE solver) calls this "
                "module, so backward reads other tensors than forward has saved",
                next=f"{others}; if the call belongs to the model, pass regions= without this module",
            )
        return InvalidModel(
            f"{type(self._model).__name__} already checkpoints {name}.",
            why="other code's saved-tensor hooks process its saved tensors, so Plimsoll cannot decide about them",
            next=others,
        )

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RegionLog:
        tracer = self.tracer
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        tracer.forget_names()
        # What a collective is still filling is waited for here, or the region would seem to write to its input.
        inputs = [tracer.known(settled(tensor)) for tensor in call_tensors(args, kwargs)]
        leaves: dict[int, tuple[Origin, str]] = {}
        for part, buffer in module.named_buffers():
            leaves.setdefault(tracer.value_of(buffer), (Origin.BUFFER, f"buffer:{part}"))
        for part, parameter in module.named_parameters():
            leaves[tracer.value_of(parameter)] = (Origin.PARAMETER, f"parameter:{part}")
        for part, holder, key in beside_weights(module):
            leaves.setdefault(tracer.value_of(holder[key]), (Origin.PARAMETER, f"parameter:{part}"))
        for position, value in enumerate(inputs):
            leaves.setdefault(value, (Origin.INPUT, f"input:{position}"))
        leaves.pop(-1, None)
        return RegionLog(
            name=name,
            call=call,
            start=tracer.tick,
            sequence_start=sequence_number(),
            book=self._book(),
            leaves=leaves,
        )

    def _leave(self, log: RegionLog, output: Any) -> None:
        tracer = self.tracer
        tensors = output_tensors(output)
        if any(isinstance(tensor.grad_fn, _REENTRANT_CHECKPOINT) for tensor in tensors):
            raise self._already_checkpointed(log.name)
        log.end = tracer.tick
        log.sequence_end = sequence_number()
        log.outputs = [tracer.value_of(tensor) for tensor in tensors]
        log.latest = {record.storage: tracer.current.get(record.storage, -1) for record in log.book.records}
        tracer.forget_names()


@contextlib.contextmanager
def _calling(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Return a context manager that replaces a module's forward by ``forward`` inside its block."""
    original, had_own = module.forward, "forward" in module.__dict__
    module.forward = forward
    try:
        yield
    finally:
        if had_own:
            module.forward = original
        else:
            del module.forward


def _is_on_top(book: SlotBook) -> bool:
    """Return True if the tensors that autograd saves now go to ``book``: its hooks are the innermost."""
    top = top_saved_hooks(True)
    return top is not None and top[0] == book.pack
