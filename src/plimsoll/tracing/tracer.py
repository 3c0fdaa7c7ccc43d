"""Log a running training step: its ops, when its storages are allocated and freed (their lives), and the seconds of its ops.
Time is counted in ticks: one recorded op is one tick.

``register_statics`` registers what exists before the step: parameters, gradients, buffers, the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import OpSpec, Phase, TraceParameter
from plimsoll.tracing.fsdp2 import waiting_gradients
from plimsoll.tracing.local_tensors import beside_weights, dense_parts, gradient_of, local_bytes
from plimsoll.tracing.meters.timing import OpClock
from plimsoll.tracing.meters.workspaces import WorkspaceMeter
from plimsoll.tracing.recorder.calling import Call, call_tensors, flat_tensors
from plimsoll.tracing.recorder.collectives import WITHOUT_ALIASES
from plimsoll.tracing.recorder.opkey import cost_key, dtype_name, op_spec
from plimsoll.tracing.recorder.recorder import OpRecorder, RecordedOp, RecordedValue, Signature, reads_values
from plimsoll.tracing.recorder.storages import is_plain
from plimsoll.tracing.recorder.user_code import short_line_of_user
from plimsoll.tracing.refusals import refuse_nested
from plimsoll.tracing.torch_internals import current_autograd_node, is_storage_gone
from plimsoll.tracing.zero import shape_of

BUFFER = "buffer of "
"""The prefix of the names of storages that only carry data of other tensors to and from a collective."""
_NODES_PER_REPORT = 64


@dataclass(slots=True)
class OpContext:
    """Data about where an op ran: its phase, and the autograd node that ran it (its name and sequence number, ``""`` and ``-1``
    in forward).
    """

    phase: Phase
    node: int
    node_name: str


@dataclass(slots=True)
class Filling:
    """Data about one life of a storage that is emptied and filled again. It lasts from tick (position among the ops) ``born``
    to tick ``dies``.

    ``dies`` is -1 while the life lasts.
    """

    born: int
    bytes: int
    dies: int = -1


class StepTracer(OpRecorder):
    """Logs a whole step. One recorded op is one tick. Before each op the tracer notes which storages were freed.

    ``refilled`` is a function that lists, with names, memory whose storage persists while its size goes to zero and back (a
    sharded model's gathered parameters). Such a storage is alive while its size is not zero.
    """

    def __init__(
        self,
        current_module: Callable[[], str],
        *,
        clock: OpClock | None = None,
        meter: WorkspaceMeter | None = None,
        phase: Phase = Phase.FORWARD,
        before_op: Callable[[], None] = lambda: None,
        on_node: Callable[[int], None] = lambda sequence: None,
        refilled: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple,
    ) -> None:
        super().__init__(current_module)
        self.phase = phase
        self.contexts: list[OpContext] = []
        self.specs: dict[str, OpSpec] = {}
        self.value_reads: list[str] = []
        """The lines of the user's code that read values of tensors, in the order of running."""
        self.timings: dict[str, list[float]] = {}
        self.born: dict[int, int] = {}
        self.dies: dict[int, int] = {}
        self.fillings: dict[int, list[Filling]] = {}
        self.completions: dict[int, list[int]] = {}
        """The ticks at which backward has added to the gradient of each parameter (its ``id``)."""
        self._refilled = refilled
        self._guarded: dict[int, torch.Tensor] = {}
        self._before_writes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._written_storages: set[int] = set()
        self._alive: dict[int, int] = {}
        """A mapping from address to id, for the storages that may be freed."""
        self._first: dict[int, int] = {}
        self.most_bytes: dict[int, int] = {}
        """The most bytes that each storage had. An op with ``out=`` may resize a storage."""
        self._clock = clock
        self._before_op = before_op
        self._on_node = on_node
        self._seconds = 0.0
        self._meter = meter or WorkspaceMeter()

    @property
    def tick(self) -> int:
        """The tick (the position in the log) of the op that runs next."""
        return len(self.ops)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Return a context manager for Plimsoll's own ops, which do not belong to the step. Ops in its block are not logged."""
        before, self.suspended = self.suspended, True
        try:
            yield
        finally:
            self.suspended = before

    def add_static(self, tensor: torch.Tensor, origin: Origin, name: str) -> int:
        """Register a tensor that exists before the step and stays during the step. Return the id of its value."""
        value = self.add_leaf(tensor, origin, name)
        self.born.setdefault(self.values[value].storage, -1)
        return value

    def guard(self, parameter: torch.Tensor, storage: int) -> None:
        """Watch a parameter, and restore its contents when the tracer exits if the step has written to it.

        A step may write to it, for instance, because the parameter is an average of others.
        """
        self._guarded[storage] = parameter

    @contextlib.contextmanager
    def noting_gradients(self, model: nn.Module) -> Iterator[None]:
        """Return a context manager for backward. In its block, `completions` gets the ticks at which gradients are complete."""

        def note(parameter: torch.Tensor) -> None:
            self.completions.setdefault(id(parameter), []).append(self.tick)

        leaves = [each for each in model.parameters() if each.requires_grad and each.is_leaf]
        hooks = [each.register_post_accumulate_grad_hook(note) for each in leaves]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def written(self) -> frozenset[int]:
        """The ids of the storages of guarded parameters (see `guard`) that the step has written."""
        return frozenset(self._written_storages)

    def is_changed(self, storage: int) -> bool:
        """Return True if the step has written to a storage since the storage was registered."""
        return self.current.get(storage) != self._first.get(storage)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for parameter, copy in self._before_writes.values():
                # Through `.data`: a graph that waits for its backward must not take this for a write.
                parameter.data.copy_(copy)
        # The tracer is part of reference cycles, so these copies would be freed only when Python collects garbage.
        self._before_writes.clear()

    def _note_writes(self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature) -> None:
        """Copy each guarded parameter (see `guard`) before the op writes to it for the first time."""
        written = [args[at] for at in signature.written_positions if at < len(args)]
        for tensor in flat_tensors([written, [kwargs.get(name) for name in signature.written_names]]):
            storage = self.table.find(tensor) if is_plain(tensor) else -1
            if storage in self._guarded and storage not in self._written_storages:
                parameter = self._guarded[storage].detach()
                self._written_storages.add(storage)
                self._before_writes[storage] = (parameter, parameter.clone())

    def add_stand_in(self, tensor: torch.Tensor) -> None:
        """Register a tensor that backward reads in place of a saved tensor (zeros, or a copy). Its storage does not count as
        memory of the step.
        """
        self._new_value(self.table.add(tensor), tensor, Origin.PARAMETER, "stand-in", producer=-1)

    def execute(self, op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature) -> Any:
        self._before_op()
        if signature.written_positions:
            self._note_writes(args, kwargs, signature)
        if reads_values(op.func, args, signature):
            self.value_reads.append(short_line_of_user())
        self.note_deaths()
        key = op.cost_key
        if self._clock is None:
            return self._meter.run(key, lambda: op.func(*args, **kwargs))
        out, self._seconds = self._clock.time(lambda: self._meter.run(key, lambda: op.func(*args, **kwargs)))
        return out

    def first_value(self, storage: int) -> RecordedValue:
        """Return the first contents (`RecordedValue`) that a storage had when the tracer met it. Later writes make further
        values.
        """
        return self.values[self._first[storage]]

    def note_deaths(self) -> None:
        """Note the storages that were freed since the last op, and the storages that were emptied or filled since then."""
        for name, tensor in self._refilled():
            self._note_size(name, tensor)
        # Before every op, all live storages are checked, some hundreds. So no Python code runs for each of them.
        for address in list(filter(is_storage_gone, self._alive)):
            storage = self._alive.pop(address)
            self.table.let_go(storage)
            self.dies[storage] = self.tick

    def _note_size(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes()
        storage = self.table.find(tensor)
        lives = self.fillings.get(storage)
        if lives is None:
            if not size:  # nothing has used it yet
                return
            known = self.add_leaf(tensor, Origin.PARAMETER, "")
            storage = self.values[known].storage
            self.values[self._first[storage]].name = f"unsharded parameter:{name}"
            # An op made it if this is its first filling ever. Otherwise the coming op is the first to use it.
            made = self.born.pop(storage, -1)
            self._alive.pop(self.table.address(storage), None)
            self.fillings[storage] = [Filling(made if made >= 0 or not self.tick else self.tick, size)]
        elif size and lives[-1].dies >= 0:
            lives.append(Filling(self.tick, size))
        elif not size and lives[-1].dies < 0:
            lives[-1].dies = self.tick

    def _close(
        self, op: RecordedOp, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
    ) -> None:
        before = len(self.ops)
        refuse_nested(flat_tensors([args, out]))
        super()._close(op, out, args, kwargs, signature)
        if len(self.ops) == before:  # it only made a view
            return
        if op.obstacle and self.phase is Phase.FORWARD:
            op.line = short_line_of_user()
        if op.cost_key not in self.specs:
            self.specs[op.cost_key] = op_spec(op.func, args, kwargs, out)
        if self._clock is not None:
            self.timings.setdefault(op.cost_key, []).append(self._seconds)
        node: Any = current_autograd_node()  # the stub does not say that this is None in forward
        context = OpContext(
            self.phase, -1 if node is None else node._sequence_nr(), "" if node is None else node.name()
        )
        self.contexts.append(context)
        if node is not None and before % _NODES_PER_REPORT == 0:
            self._on_node(context.node)
        for storage in op.births:
            self.born[storage] = before
            self._alive[self.table.address(storage)] = storage

    def _new_value(self, storage: int, tensor: torch.Tensor, origin: Origin, name: str, producer: int) -> int:
        if origin is Origin.EXTERNAL and storage not in self.born and storage not in self.fillings:
            sender = self.ops[-1] if self.ops and self.ops[-1].func.namespace == WITHOUT_ALIASES else None
            if sender is None:
                self.born[storage] = -1
            else:  # the backend made it on its own thread, and copies from it once the message has arrived
                name = f"{BUFFER}{sender.name}"
                self.born[storage] = self.tick
                self._alive[self.table.address(storage)] = storage
        fresh = super()._new_value(storage, tensor, origin, name, producer)
        self._first[storage] = fresh
        return fresh

    def _append(self, value: RecordedValue) -> int:
        self.most_bytes[value.storage] = max(value.bytes, self.most_bytes.get(value.storage, 0))
        return super()._append(value)


class OpTimer(StepTracer):
    """Times the ops of a step whose structure has been traced before. Nothing else is recorded, so that little code runs
    between ops.
    """

    def known(self, tensor: torch.Tensor) -> int:
        return -1

    def record(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
    ) -> Any:
        key = cost_key(func, args, kwargs)
        if signature.written_positions:
            self._note_writes(args, kwargs, signature)
        assert self._clock is not None
        out, seconds = self._clock.time(lambda: func(*args, **kwargs))
        self.timings.setdefault(key, []).append(seconds)
        return out

    def note_deaths(self) -> None:
        pass


def register_statics(tracer: StepTracer, model: nn.Module, call: Call) -> frozenset[int]:
    """Register parameters, existing gradients, buffers and the batch. Return the ids of the parameters' storages."""
    parameters: set[int] = set()
    for name, parameter in model.named_parameters():
        for part in dense_parts(parameter):
            storages = _add(tracer, part, Origin.PARAMETER, f"parameter:{name}")
            parameters |= storages
            for storage in storages:
                tracer.guard(part, storage)
        gradient = gradient_of(parameter)
        if gradient is not None:
            _add(tracer, gradient, Origin.EXTERNAL, f"gradient:{name}")
    for name, gradient in waiting_gradients(model):
        _add(tracer, gradient, Origin.EXTERNAL, f"gradient:{name}")
    for name, holder, key in beside_weights(model):
        _add(tracer, holder[key], Origin.PARAMETER, f"parameter:{name}")
    for name, buffer in model.named_buffers():
        _add(tracer, buffer, Origin.BUFFER, f"buffer:{name}")
    for position, tensor in enumerate(call_tensors(*call)):
        _add(tracer, tensor, Origin.INPUT, f"batch:{position}")
    return frozenset(parameters)


def _add(tracer: StepTracer, tensor: torch.Tensor, origin: Origin, name: str) -> set[int]:
    """Register a tensor that exists before the step, and return the ids of its storages in this process. A DTensor or sparse
    tensor may have several.
    """
    refuse_nested([tensor])
    return {tracer.values[tracer.add_static(part, origin, name)].storage for part in dense_parts(tensor)}


def gradient_storages(tracer: StepTracer, model: nn.Module) -> set[int]:
    """Return the ids of this process's storages that hold the parameters' gradients now."""
    gradients = [gradient for gradient in map(gradient_of, model.parameters()) if gradient is not None]
    return {tracer.table.find(part) for gradient in gradients for part in dense_parts(gradient)}


def changed_buffers(tracer: StepTracer, model: nn.Module) -> tuple[str, ...]:
    """Return the names of the buffers that the step has written to."""
    parts = ((name, part) for name, buffer in model.named_buffers() for part in dense_parts(buffer))
    return tuple(dict.fromkeys(name for name, part in parts if tracer.is_changed(tracer.table.find(part))))


def listed_parameters(tracer: StepTracer, model: nn.Module) -> tuple[TraceParameter, ...]:
    """Return data about all parameters of the model, each once: name, shape, bytes, the id of its storage in the tracer's
    table, and its other names.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)

    def gradient_storage(parameter: nn.Parameter) -> int:
        gradient = gradient_of(parameter)
        return -1 if gradient is None or not is_plain(gradient) else tracer.table.find(gradient)

    def whole_at(parameter: nn.Parameter) -> int:
        ticks = tracer.completions.get(id(parameter), ())
        return ticks[0] if len(ticks) == 1 else -1

    return tuple(
        TraceParameter(
            name=name,
            shape=tuple(shape_of(parameter)),
            dtype=dtype_name(parameter.dtype),
            bytes=local_bytes(parameter),
            storage=tracer.table.find(dense_parts(parameter)[0]),
            is_trainable=parameter.requires_grad,
            is_written=any(tracer.table.find(part) in tracer.written for part in dense_parts(parameter)),
            aliases=tuple(names[parameter][1:]),
            gradient=gradient_storage(parameter),
            whole_at=whole_at(parameter),
        )
        for name, parameter in model.named_parameters()
    )
