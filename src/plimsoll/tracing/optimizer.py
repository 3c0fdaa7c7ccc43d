"""Trace an optimizer's step on a copy of the optimizer, whose parameters and state do not use memory.

A tick is a position among the ops.

The traced step is the second one, so the optimizer's state exists, as in all of training except the first step. The real
optimizer is only read.

Copies on the meta device cost a tenth of the time that fake tensors cost. If a step fails on that device, fake tensors are
used.

Known weakness: if a step reads a number from such a copy (Adafactor: the norm of a parameter), the number is 1.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import LBFGS, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.artifacts.offloaded_state import LEAST_STATE_BYTES
from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import Category, OpSpec, Phase, Storage, Trace, TraceOp
from plimsoll.errors import InvalidModel, TracingFailed
from plimsoll.tracing.fake import KnownValues, fake_like
from plimsoll.tracing.fsdp2 import every_parameter
from plimsoll.tracing.kernels import runs_gpu_kernels
from plimsoll.tracing.local_tensors import dense_parts, local_of
from plimsoll.tracing.refusals import first_line
from plimsoll.tracing.tracer import StepTracer
from plimsoll.tracing.zero import partitions

_PATCHED = ("step", "profile_hook_step")
"""Names of attributes that schedulers and profilers set on an optimizer in order to wrap its methods."""


_STATE = "optimizer state:"
TRANSFER_OF_STATE = "transfer of optimizer state"
"""The name of the ops that represent transfers of optimizer state between two chunks of a step."""


@dataclass(frozen=True, slots=True)
class OptimizerLog:
    """Data: the log of one traced optimizer step. It has the tracer, and the ids of the storages that are optimizer state."""

    name: str
    tracer: StepTracer
    states: frozenset[int]
    starts: tuple[int, ...] = ()
    """The ticks (positions among the ops) of the tracer at which the chunks of a step in chunks begin, and the tick at which
    the last one ends; empty for a step that runs as a whole. At each of them, the log has one more op: the transfer of state.
    """
    chunk_of: Mapping[int, int] = field(default_factory=dict)
    """The chunk of each storage of state that is on the device only while its chunk is stepped."""

    @property
    def ticks(self) -> int:
        """The number of ops of the optimizer's step. Each transfer of state between host and device counts as an op."""
        return self.tracer.tick + len(self.starts)

    def _moved(self, tick: int) -> int:
        """Return the tick of an op of the optimizer's step in the complete log, where transfers of state are ops too.

        ``tick`` is its position among the recorded ops, without transfers.
        """
        return tick + bisect.bisect_right(self.starts, tick)

    def _transfer(self, number: int) -> int:
        """Return the tick of the transfer of state before a chunk of parameters, in the complete log of its step."""
        return self.starts[number] + number

    def ops(self) -> list[TraceOp]:
        """Return the ops of the optimizer's step as ops of a trace, with the transfers of state."""
        found = [
            TraceOp(name=op.name, module=self.name, phase=Phase.OPTIMIZER, cost_key=op.cost_key)
            for op in self.tracer.ops
        ]
        for number in range(len(self.starts)):
            key = f"{TRANSFER_OF_STATE}#{number}"
            transfer = TraceOp(name=TRANSFER_OF_STATE, module=self.name, phase=Phase.OPTIMIZER, cost_key=key)
            found.insert(self._transfer(number), transfer)
        return found

    def specs(self) -> dict[str, OpSpec]:
        """Return the FLOPs and bytes of each distinct op, to estimate its seconds by a roofline. Transfers get 0: their time
        depends on the link to host memory or disk.
        """
        keys = (f"{TRANSFER_OF_STATE}#{number}" for number in range(len(self.starts)))
        transfers = {key: OpSpec(name=TRANSFER_OF_STATE, flops=0, moved_bytes=0, dtype="") for key in keys}
        return dict(self.tracer.specs) | transfers

    def storages(self, first_id: int, first_tick: int) -> list[Storage]:
        """Return the storages of the optimizer's state and of the temporaries of the step, in the form of a trace's storages.

        Their ids begin with ``first_id``. The tick (position in the trace) of the step's first op is ``first_tick``.
        """
        tracer = self.tracer
        known = [
            (storage, born) for storage, born in sorted(tracer.born.items()) if born >= 0 or storage in self.states
        ]

        def life(storage: int, born: int) -> tuple[int, int]:
            chunk = self.chunk_of.get(storage)
            if chunk is not None:  # it arrives while the chunk before it leaves, and leaves while the next one arrives
                return first_tick + self._transfer(chunk), first_tick + self._transfer(chunk + 1) + 1
            dies = tracer.dies.get(storage)
            # What a chunk's last op frees is free before the transfer that follows.
            ends = self.ticks if dies is None else dies + bisect.bisect_left(self.starts, dies)
            return -1 if born < 0 else first_tick + self._moved(born), first_tick + ends

        return [
            Storage(
                id=first_id + position,
                bytes=tracer.most_bytes[storage],
                category=Category.OPTIMIZER_STATE if storage in self.states else Category.TEMPORARY,
                label=tracer.first_value(storage).name,
                born=life(storage, born)[0],
                dies=life(storage, born)[1],
            )
            for position, (storage, born) in enumerate(known)
        ]


def trace_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    without_gradient: frozenset[str],
    *,
    on_gpu: bool,
    chunks: Sequence[Collection[str]] = (),
) -> OptimizerLog:
    """Trace one step of a copy of ``optimizer``, and return its log. The optimizer and its parameters do not change.

    The step skips the parameters in ``without_gradient``. With ``chunks`` (names of parameters), it runs in chunks, and the
    large tensors of their state are on the device only meanwhile.

    The step uses loops or multi-tensor (foreach) ops, depending on what torch
    chooses on a GPU or a CPU.

    Raises:
        InvalidModel: the optimizer does not hold a parameter of the model.
        TracingFailed: the optimizer cannot be copied, or its step needs real numbers or a closure.
    """
    names = parameter_names(optimizer, model)
    for mode in (None, FakeTensorMode(allow_non_fake_inputs=True)):
        try:
            with torch.random.fork_rng(devices=[]):
                return _traced(optimizer, names, without_gradient, mode, on_gpu=on_gpu, chunks=chunks)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError) as error:
            refusal = error
    raise TracingFailed(
        f"{type(optimizer).__name__} cannot be traced: {type(refusal).__name__}: {first_line(refusal)}",
        why="tracing runs step() on a copy with fake tensors, without a closure; this optimizer cannot be copied, or its step "
        "needs real numbers or a closure",
        next="plan without optimizer=, with a budget that leaves room for its state and its step",
    ) from refusal


def _traced(
    optimizer: Optimizer,
    names: Mapping[int, str],
    without_gradient: frozenset[str],
    mode: FakeTensorMode | None,
    *,
    on_gpu: bool,
    chunks: Sequence[Collection[str]],
) -> OptimizerLog:
    """Run two steps of a copy of the optimizer, and return the log of the second.

    The copy has fake tensors of ``mode``, or tensors on the meta device if ``mode`` is None. ``names`` maps ``id`` of a
    parameter to its name.
    """
    twins = {id(p): _twin_of(p, mode) for p in _parameters(optimizer)}
    twin = _copy(optimizer, twins, mode, on_gpu=on_gpu)
    with contextlib.ExitStack() as stack:
        for entered in (_StandIns(),) if mode is None else (mode, KnownValues(), _StandIns()):
            stack.enter_context(entered)
        for parameter in _parameters(optimizer):
            name = names.get(id(parameter))
            if parameter.requires_grad and name is not None and name not in without_gradient:
                twins[id(parameter)].grad = torch.empty_like(twins[id(parameter)])
        step = functools.partial(_step_lbfgs, twin) if isinstance(twin, LBFGS) else twin.step
        step()
        named = {id(p): names[key] for key, p in twins.items() if key in names}
        tracer, states = _register(twin, named)
        with tracer:
            starts = [tracer.tick, *_in_chunks(twin, named, chunks, tracer)] if chunks else []
            if not chunks or any(group["params"] for group in twin.param_groups):
                step()
        tracer.note_deaths()
        chunk_of = _chunk_of(twin, named, chunks, tracer)
    return OptimizerLog(type(optimizer).__name__, tracer, states, tuple(starts), chunk_of)


def _in_chunks(
    twin: Optimizer, names: Mapping[int, str], chunks: Sequence[Collection[str]], tracer: StepTracer
) -> Iterator[int]:
    """Step the chunks of an optimizer one after the other, and yield the tick at which each ends. At the end, the groups hold
    only the parameters of no chunk.
    """
    whole = [list(group["params"]) for group in twin.param_groups]
    members = [frozenset(chunk) for chunk in chunks]
    for chunk in members:
        for group, params in zip(twin.param_groups, whole, strict=True):
            group["params"] = [each for each in params if names.get(id(each)) in chunk]
        twin.step()
        tracer.note_deaths()
        yield tracer.tick
    inside = frozenset().union(*members)
    for group, params in zip(twin.param_groups, whole, strict=True):
        group["params"] = [each for each in params if names.get(id(each)) not in inside]


def _chunk_of(
    twin: Optimizer, names: Mapping[int, str], chunks: Sequence[Collection[str]], tracer: StepTracer
) -> dict[int, int]:
    numbers = {name: number for number, chunk in enumerate(chunks) for name in chunk}
    return {
        tracer.table.find(tensor): numbers[names[id(parameter)]]
        for parameter, state in twin.state.items()
        if names.get(id(parameter)) in numbers
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor) and tensor.nbytes >= LEAST_STATE_BYTES
    }


def with_options(
    trace: Trace,
    optimizer: Optimizer,
    model: nn.Module,
    options: Mapping[str, object],
    without_gradient: frozenset[str],
) -> Trace:
    """Return a trace with the forward and backward of ``trace``, and with an optimizer step that uses other options in its
    parameter groups.

    Options are such as ``{"fused": True, "foreach": None}``. The given trace may or may not end with a step of the optimizer;
    that step is replaced.

    Raises:
        InvalidModel, TracingFailed: as ``trace`` raises them.
    """
    other = copy.copy(optimizer)  # shares parameters and state
    other.param_groups = [{**group, **options} for group in optimizer.param_groups]
    return _with_step(trace, trace_optimizer(other, model, without_gradient, on_gpu=runs_gpu_kernels(trace.device)))


def in_chunks(trace: Trace, optimizer: Optimizer, model: nn.Module, chunks: Sequence[Collection[str]]) -> Trace:
    """Return a trace with the forward and backward of ``trace``, whose optimizer steps ``chunks`` (names of parameters) one
    after the other. The state of these parameters is on the device only while their chunk is stepped.

    Raises:
        TracingFailed: as ``trace`` raises it.
    """
    known = frozenset(state_bytes(trace))
    without = frozenset(parameter_names(optimizer, model).values()) - known
    on_gpu = runs_gpu_kernels(trace.device)
    return _with_step(trace, trace_optimizer(optimizer, model, without, on_gpu=on_gpu, chunks=chunks))


def state_bytes(trace: Trace) -> dict[str, list[int]]:
    """Return the sizes in bytes of the tensors of optimizer state in a trace, by the name of their parameter."""
    found: dict[str, list[int]] = {}
    for storage in trace.storages:
        if storage.category is Category.OPTIMIZER_STATE:
            found.setdefault(parameter_of_state(storage), []).append(storage.bytes)
    return found


def parameter_of_state(storage: Storage) -> str:
    """Return the name of the parameter of a storage of optimizer state."""
    return storage.label.removeprefix(_STATE).rpartition(".")[0]


def _with_step(trace: Trace, log: OptimizerLog) -> Trace:
    """Return the trace with this step of the optimizer instead of its own."""
    first = next((t for t, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER), len(trace.ops))
    last, end = len(trace.ops), first + log.ticks
    kept = [s for s in trace.storages if s.born < first and s.category is not Category.OPTIMIZER_STATE]
    assert [s.id for s in kept] == list(range(len(kept)))
    storages = [msgspec.structs.replace(s, dies=end if s.dies >= last else min(s.dies, first)) for s in kept]
    storages += log.storages(first_id=len(kept), first_tick=first)
    return msgspec.structs.replace(
        trace,
        ops=(*trace.ops[:first], *log.ops()),
        specs=trace.specs | log.specs(),
        storages=tuple(storages),
    )


def _twin_of(tensor: torch.Tensor, mode: FakeTensorMode | None) -> torch.Tensor:
    """Return a tensor without memory that is like this process's part of ``tensor``.

    An optimizer of DTensors steps their local shards.
    """
    (local,) = dense_parts(tensor)
    if local is tensor or not isinstance(tensor, nn.Parameter):
        return fake_like(local, mode)
    return nn.Parameter(fake_like(local, mode), requires_grad=tensor.requires_grad)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def parameter_names(optimizer: Optimizer, model: nn.Module) -> dict[int, str]:
    """Return a mapping from ``id`` to name, for all parameters that the optimizer holds on the model's devices.

    Parameters of a loss, and of layers that were taken out of the model, count too: their state is on the device as well, and
    the step updates them together. All of these are assumed to have gradients, as the parameters of a loss have after backward.
    """
    refuse_optimizer_of_another(optimizer, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    names |= {id(each): f"partition {number}" for number, each in enumerate(partitions(model))}
    devices = {parameter.device for parameter in model.parameters()}
    others = (each for each in _parameters(optimizer) if id(each) not in names and each.device in devices)
    return names | {id(each): f"outside of the model.{number}" for number, each in enumerate(others)}


def parameter_sizes(optimizer: Optimizer, model: nn.Module) -> dict[str, int]:
    """Return the number of elements of each parameter of the optimizer, by name. A sharded parameter counts its local shard."""
    names = parameter_names(optimizer, model)
    return {names[id(each)]: local_of(each).numel() for each in _parameters(optimizer) if id(each) in names}


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether ``step`` has to be given a function that computes the loss again, as in LBFGS."""
    known = inspect.signature(type(optimizer).step).parameters.get("closure")
    return known is not None and known.default is inspect.Parameter.empty


def present_states(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the present state of an optimizer by parameter. State that is offloaded does not come back: stand-ins on the
    meta device are in its place.
    """
    states = optimizer.state
    return dict(dict.items(states) if isinstance(states, dict) else states.items())


def refuse_optimizer_of_another(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that does not train the model. It may train other parameters in addition.

    Raises:
        InvalidModel: the optimizer holds parameters, and none of them is the model's.
    """
    held = list(_parameters(optimizer))  # none under ZeRO-3, while it does not step
    if held and {id(each) for each in every_parameter(model)}.isdisjoint(map(id, held)):
        raise InvalidModel(
            f"{type(optimizer).__name__} does not hold any parameter of {type(model).__name__}.",
            why=f"the first of its {len(held)} parameters has shape {tuple(held[0].shape)}; perhaps the model was moved or "
            "wrapped after the optimizer was created",
            next="create the optimizer from model.parameters() of the model that you plan",
        )


def _copy(
    optimizer: Optimizer, twins: dict[int, torch.Tensor], mode: FakeTensorMode | None, *, on_gpu: bool
) -> Optimizer:
    """Return a copy of the optimizer without hooks. Its parameters and state are copies without memory (``twins`` has those of
    the parameters), so it is small.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = dict(twins)
    for _, tensor in _state_tensors(list(present_states(optimizer).values())):
        if tensor.numel() > 1 and id(tensor) not in memo:
            memo[id(tensor)] = _twin_of(tensor, mode)
    own = {name: value for name, value in vars(optimizer).items() if name not in _PATCHED and "hook" not in name}
    own["state"] = defaultdict(dict, present_states(optimizer))
    twin.__setstate__(copy.deepcopy(own, memo))
    if on_gpu:
        for group in twin.param_groups:
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
    return twin


def _step_lbfgs(twin: LBFGS) -> None:
    """Do to memory what a step of L-BFGS does when its history is full. The real step is not run, because it reads numbers and
    calls the model.

    ``held`` has the vectors that exist in addition to the state, also while the model is evaluated again: the flat gradient,
    two entries that are not in the history yet, and two directions. With a line search, its start and the gradients at tried
    points are added.
    """
    (group,) = twin.param_groups
    parts = [parameter.detach().flatten() for parameter in group["params"]]
    size = sum(part.numel() for part in parts)
    state = twin.state[group["params"][0]]
    for name in ("d", "prev_flat_grad"):
        state.setdefault(name, parts[0].new_empty(size))
    history, held = group["history_size"], 5 if group["line_search_fn"] is None else 11
    for name, count in (("old_dirs", history), ("old_stps", history), ("held", held)):
        there = state.setdefault(name, [])
        there.extend(parts[0].new_empty(size) for _ in range(count - len(there)))
    flat, change, move, *directions = state["held"][:5]
    torch.cat(parts, out=flat)
    torch.sub(flat, state["prev_flat_grad"], out=change)
    torch.mul(state["d"], 1.0, out=move)
    for direction in directions:
        torch.neg(flat, out=direction)


def _register(twin: Optimizer, names: dict[int, str]) -> tuple[StepTracer, frozenset[int]]:
    tracer = StepTracer(lambda: "", phase=Phase.OPTIMIZER)
    elsewhere = {id(parameter) for parameter in _parameters(twin)} - names.keys()
    for parameter in _parameters(twin):
        if id(parameter) in elsewhere:
            continue
        tracer.add_static(parameter, Origin.PARAMETER, f"parameter:{names[id(parameter)]}")
        if parameter.grad is not None:
            tracer.add_static(parameter.grad, Origin.PARAMETER, f"gradient:{names[id(parameter)]}")
    states: set[int] = set()
    for parameter, state in twin.state.items():
        if id(parameter) in elsewhere:
            continue
        owner = names.get(id(parameter), "shared")
        for key, value in _state_tensors(state):
            known = tracer.table.find(value)
            if known < 0:
                tracer.add_static(value, Origin.BUFFER, f"{_STATE}{owner}.{key}")
                states.add(tracer.table.find(value))
    return tracer, frozenset(states)


def _state_tensors(state: Any, key: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield key, state
    elif isinstance(state, dict):
        for name, value in state.items():
            yield from _state_tensors(value, f"{key}.{name}" if key else str(name))
    elif isinstance(state, list | tuple):
        for position, value in enumerate(state):
            yield from _state_tensors(value, f"{key}.{position}")


class _StandIns(TorchDispatchMode):
    """A dispatch mode that answers 1 when Python reads a number from a tensor without memory, and that skips fused steps.

    Some fused steps have no fake implementation (SGD, Adagrad), and torch would run them on zeros as large as the parameters.
    They return nothing and do not change shapes, so they can be skipped.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and (args[0].is_meta or isinstance(args[0], FakeTensor)):
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func._schema.name.startswith("aten::_fused_") and not func._schema.returns:
            return None
        return func(*args, **(kwargs or {}))
