"""Log the ATen calls of running code as ops that read and write versions of storages. Both the trace and the recipes (ops that
rebuild a value) are made from this log.

Every storage has a current *value*, which is a version of its contents. An op that writes to the storage (according to the op's
schema) makes a new value. A view does not. So the log is in static single assignment form: each value has one producer, and
views cost nothing.

DTensors themselves turn their ops into ops on local shards and collectives, and the log has these. The result of a collective
is a value. The result of waiting for it is a later version of the same storage.

Source: torch's functorch ``FunctionalTensor`` also functionalises in-place ops on storages. This log keeps the original ops and
only numbers the versions. Known weakness: writes that a schema does not declare are invisible here. The verifying recorder,
which runs in training, finds them by comparing contents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.artifacts.region import IS_COLLECTIVE, Origin
from plimsoll.tracing.local_tensors import dispatches_itself, local_of, parts_of_sparse
from plimsoll.tracing.recorder.calling import flat_tensors
from plimsoll.tracing.recorder.collectives import (
    IS_ROUTING,
    chooses_alike,
    is_collective,
    is_repeatable_collective,
    is_routing,
    is_wait,
    masks_of,
    undeclared_writes,
)
from plimsoll.tracing.recorder.opkey import cost_key, op_name, value_stem
from plimsoll.tracing.recorder.storages import Geometry, StorageTable, has_lazy_bits, is_plain

_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "empty_quantized"}
)
_NOT_OF_THE_STEP = frozenset({"profiler", "prim"})
"""Namespaces of ops that are not logged. They only mark a range, or ask a tensor subclass for its device."""
_READS_A_VALUE = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})


@dataclass(frozen=True, slots=True)
class Ref:
    """Data about a tensor among the arguments or results of a recorded op: the id of the tensor's value, and the geometry
    (sizes, strides, offset) that the op sees.
    """

    value: int
    geometry: Geometry


@dataclass(slots=True)
class RecordedValue:
    """Data about a value: one version of the contents of one storage. ``base`` is the geometry that it had when it was made."""

    id: int
    storage: int
    bytes: int
    origin: Origin
    name: str
    base: Geometry
    producer: int = -1
    is_undefined: bool = False


@dataclass(slots=True)
class RecordedOp:
    """Data about one op call: its arguments (tensors as ``Ref``), and the values that it read, wrote and returned, by id."""

    id: int
    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    name: str
    module: str
    cost_key: str
    writes: tuple[int, ...] = ()
    outputs: tuple[Ref | None, ...] = ()
    is_random: bool = False
    obstacle: str = ""
    line: str = ""
    """The line of the user's code that ran an op with an obstacle, or "" if it was not noted."""
    births: tuple[int, ...] = ()
    random_point: tuple[int, int] | None = None
    """For a random op that can be repeated: its generator's index, and the point in the region (planned module) where the
    generator's state is taken.
    """
    scratch: frozenset[int] = frozenset()
    """The ids of buffers' storages that the op writes without declaring it. To run the op again, copies of these buffers are
    needed.
    """
    undeclared: tuple[int, ...] = ()
    """The ids of other storages that the op writes without declaring it. Each of them gets a new version, as with any write."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Data: the properties of an op that its schema declares."""

    written_positions: tuple[int, ...]
    written_names: tuple[str, ...]
    is_random: bool
    is_view: bool
    is_uninitialised: bool
    is_value_read: bool
    is_sized_by_data: bool
    is_collective: bool
    is_wait: bool
    is_routing: bool


def reads_values(func: torch._ops.OpOverload, args: tuple[Any, ...], signature: Signature) -> bool:
    """Return whether an op reads values of tensors in such a way that later calls may run other ops.

    It gives a value to Python code, or the contents of its arguments decide the sizes of its results.
    """
    return signature.is_value_read or is_sized_by_values(func, args, signature)


def is_sized_by_values(func: torch._ops.OpOverload, args: tuple[Any, ...], signature: Signature) -> bool:
    """Return whether the contents of an op's arguments decide the sizes of its results. Indexing does that with masks alone."""
    return signature.is_sized_by_data and (func is not torch.ops.aten.index.Tensor or bool(masks_of(func, args)))


def read_schema(func: torch._ops.OpOverload) -> Signature:
    """Return the properties of an op from its schema.

    They say which arguments the op writes, and whether it draws random numbers, only makes a view, or leaves memory unset.
    """
    written = [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    name = func._schema.name.split("::")[1]
    return Signature(
        written_positions=tuple(position for position, _ in written),
        written_names=tuple(argument for _, argument in written),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_view=func.is_view,
        is_uninitialised=name in _UNINITIALISED,
        is_value_read=name in _READS_A_VALUE,
        is_sized_by_data=torch.Tag.dynamic_output_shape in func.tags,
        is_collective=is_collective(func),
        is_wait=is_wait(func),
        is_routing=is_routing(func),
    )


class OpRecorder(TorchDispatchMode):
    """A dispatch mode that logs the ops that run while it is active.

    Subclasses override ``execute`` to time, watch or verify the call itself. ``current_module`` is a function that returns the
    path of the running module. While ``suspended``, Plimsoll's own ops are not logged. With ``repeats_collectives``, all ranks
    may together run ops again that communicate with other ranks.
    """

    supports_higher_order_operators = True
    """Let operators that take functions (flexible attention, scans) run unchanged. The log treats their results as from
    outside.
    """

    def __init__(self, current_module: Callable[[], str] = lambda: "", *, repeats_collectives: bool = False) -> None:
        super().__init__()
        self._repeats_collectives = repeats_collectives
        self._on_the_way: set[int] = set()
        self.table = StorageTable()
        self.values: list[RecordedValue] = []
        self.ops: list[RecordedOp] = []
        self.current: dict[int, int] = {}
        self.suspended = False
        self.takes_functions = False
        """Whether an operator that takes functions has run so far."""
        self._current_module = current_module
        self._occurrences: Counter[tuple[str, str]] = Counter()
        self._signatures: dict[torch._ops.OpOverload, Signature] = {}

    def add_leaf(self, tensor: torch.Tensor, origin: Origin, name: str) -> int:
        """Register a tensor's storage as one that existed before. Return the id of its value.

        If the storage is known already, the first name stays.
        """
        local = local_of(tensor)
        storage = self.table.add(local)
        known = self.current.get(storage)
        if known is not None:
            return known
        return self._new_value(storage, local, origin, name, producer=-1)

    def value_of(self, tensor: torch.Tensor) -> int:
        """Return the id of the value that the tensor shows now, or ``-1`` if its storage is unknown."""
        local = local_of(tensor)
        return self.current.get(self.table.find(local), -1) if is_plain(local) else -1

    def is_on_the_way(self, args: tuple[Any, ...]) -> bool:
        """Return True if a collective is still filling some of these tensors. Their contents then change although no op
        runs.
        """
        return bool(self._on_the_way) and any(
            self.table.find(tensor) in self._on_the_way for tensor in flat_tensors(args)
        )

    def forget_names(self) -> None:
        """Set the counts of how often each op has run in each module to 0, as at the start of a region.

        Names of values contain these counts.
        """
        self._occurrences.clear()

    def execute(self, op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature) -> Any:
        """Run the op, and return its result. The op is not in the log yet: only its result shows whether it is a view."""
        return op.func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self.takes_functions = True
            return func(*args, **kwargs)
        if self.suspended or func.namespace in _NOT_OF_THE_STEP:
            return func(*args, **kwargs)
        if dispatches_itself(types):
            return NotImplemented
        signature = self._signatures.get(func)
        if signature is None:
            signature = self._signatures[func] = read_schema(func)
        # Views are not logged: recipes make the view that an op reads with one as_strided.
        if signature.is_view:
            for tensor in flat_tensors(args):
                self.known(tensor)
            return func(*args, **kwargs)
        return self.record(func, args, kwargs, signature)

    def record(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
    ) -> Any:
        """Run an op that may be more than a view, log it, and return its result."""
        op = self._open(func, args, kwargs, signature)
        out = self.execute(op, args, kwargs, signature)
        self._close(op, out, args, kwargs, signature)
        return out

    def known(self, tensor: torch.Tensor) -> int:
        """Return the id of the value that a tensor shows, or ``-1`` if the tensor is not plain (see `is_plain`).

        If its storage is new, the value is registered as one from outside the log.
        """
        if not is_plain(tensor):
            return -1
        return self.add_leaf(tensor, Origin.EXTERNAL, "external")

    def _open(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
    ) -> RecordedOp:
        reads: list[int] = []
        obstacles: list[str] = []

        def template(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                known = self.known(value)
                if known < 0:
                    obstacles.append(f"reads a {type(value).__name__} that is not a plain dense tensor")
                    return None
                if has_lazy_bits(value):
                    obstacles.append("reads a lazily conjugated or negated tensor")
                reads.append(known)
                return Ref(known, Geometry.of(value))
            if isinstance(value, list | tuple):
                return type(value)(template(item) for item in value)
            if isinstance(value, torch.Generator):
                obstacles.append("draws from its own random generator")
            return value

        if signature.is_collective and not (self._repeats_collectives and is_repeatable_collective(func)):
            obstacles.append(IS_COLLECTIVE)
        if signature.is_routing and not chooses_alike(func, args):
            obstacles.append(IS_ROUTING)
        self._keep_masks(func, args)
        op_args = tuple(template(value) for value in args)
        op_kwargs = {name: template(value) for name, value in kwargs.items()}
        return RecordedOp(
            id=len(self.ops),
            func=func,
            args=op_args,
            kwargs=op_kwargs,
            reads=tuple(dict.fromkeys(reads)),
            name=op_name(func),
            module=self._current_module(),
            cost_key=cost_key(func, args, kwargs),
            is_random=signature.is_random,
            obstacle=obstacles[0] if obstacles else "",
        )

    def _keep_masks(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        """Mark the ops that made this op's masks (the op selects rows with them): they must not run again.

        A mask that is made again could select other rows.
        """
        for mask in masks_of(func, args):
            producer = self.values[value].producer if (value := self.value_of(mask)) >= 0 else -1
            if producer >= 0:
                self.ops[producer].obstacle = self.ops[producer].obstacle or IS_ROUTING

    def _written(
        self, op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
    ) -> list[torch.Tensor]:
        """Return the tensors among an op's arguments whose contents the op changes."""
        written: list[Any] = [args[i] for i in signature.written_positions if i < len(args)]
        written += [kwargs[name] for name in signature.written_names if name in kwargs]
        if signature.is_collective:
            written += undeclared_writes(op.func, args)
        if signature.is_wait:
            written += [tensor for tensor in flat_tensors(args) if self.table.find(tensor) in self._on_the_way]
        return [tensor for tensor in flat_tensors(written) if is_plain(tensor)]

    def _close(
        self, op: RecordedOp, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
    ) -> None:
        outputs = flat_tensors(out)
        written = {self.table.add(tensor): tensor for tensor in self._written(op, args, kwargs, signature)}
        written_storages = written.keys() | set(op.undeclared)
        fresh = [t for t in outputs if is_plain(t) and self.table.find(t) < 0]
        if not written_storages and not fresh and all(is_plain(t) for t in outputs) and outputs:
            return
        op.id = len(self.ops)
        self.ops.append(op)
        called = value_stem(op.name)
        count = self._occurrences[op.module, called]
        self._occurrences[op.module, called] += 1
        stem = f"{op.module}::{called}#{count}" if op.module else f"{called}#{count}"
        writes: list[int] = []
        for storage in sorted(written_storages):
            old = self.values[self.current[storage]]
            is_only_write = len(written_storages) == 1 and not fresh
            name = stem if is_only_write else f"{stem}!{len(writes)}"
            size = (
                written[storage].untyped_storage().nbytes() if storage in written else old.bytes
            )  # out= may have resized it
            writes.append(self._new_version(old, name, op.id, size))
        births: list[int] = []
        for position, tensor in enumerate(outputs):
            if not is_plain(tensor):
                op.obstacle = op.obstacle or f"makes a {type(tensor).__name__} that is not a plain dense tensor"
                for part in parts_of_sparse(tensor):
                    if self.table.find(part) < 0:  # its bytes count; recipes do not rebuild it
                        births.append(self.table.add(part))
                        writes.append(self._new_value(births[-1], part, Origin.OP, f"{stem}!{len(births)}", op.id))
                continue
            storage = self.table.find(tensor)
            if storage < 0:
                storage = self.table.add(tensor)
                name = stem if len(outputs) == 1 else f"{stem}.{position}"
                value = self._new_value(storage, tensor, Origin.OP, name, op.id)
                self.values[value].is_undefined = signature.is_uninitialised
                writes.append(value)
                births.append(storage)
        op.writes, op.births = tuple(writes), tuple(births)
        op.outputs = tuple(
            Ref(self.value_of(tensor), Geometry.of(tensor)) if is_plain(tensor) else None for tensor in outputs
        )
        if signature.is_wait:
            self._on_the_way -= written_storages
        elif signature.is_collective:
            self._on_the_way |= written_storages.union(births)

    def _new_version(self, old: RecordedValue, name: str, producer: int, size: int) -> int:
        fresh = RecordedValue(len(self.values), old.storage, size, Origin.OP, name, old.base, producer)
        return self._append(fresh)

    def _new_value(self, storage: int, tensor: torch.Tensor, origin: Origin, name: str, producer: int) -> int:
        size = tensor.untyped_storage().nbytes()
        fresh = RecordedValue(len(self.values), storage, size, origin, name, Geometry.of(tensor), producer)
        return self._append(fresh)

    def _append(self, value: RecordedValue) -> int:
        self.values.append(value)
        self.current[value.storage] = value.id
        return value.id
