"""Run a region's forward once more in backward, if a call made torch calls that were never recorded.

A region (a module that the plan decides about) that reads values of tensors may do something new in any call: a branch on data,
another set of experts. Recipes (recorded ops that rebuild dropped tensors) do not fit such a call, and keeping everything would
break the budget. So the call drops what it has made, and the first read in backward runs the module's own forward again. The
second run starts from the random states of the first one, and everything that it changes (attributes, buffers, random states)
is restored after it.

A second run may do something else than the first one did: it sees what the model's code has changed since. So each dropped
tensor leaves a checksum of all its bytes, and the second run must produce the same bytes. Some calls keep everything instead,
because a second run would be wrong: see `Entrance.obstacle`.

Known weakness: what forward writes elsewhere (to a file, to a variable that its code does not name) it writes twice, as under
``torch.utils.checkpoint``.

Source: the non-reentrant form of ``torch.utils.checkpoint``, which does not restore state and compares only shapes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from plimsoll.artifacts.region import SMALL_BUFFER_BYTES
from plimsoll.engine.attributes import AttributesBefore
from plimsoll.engine.capturing import is_capturing
from plimsoll.engine.guards import Entry, SignatureReader
from plimsoll.engine.hooks import GONE, Cell, OpenCall, modified_in_place
from plimsoll.engine.modes import modes_around
from plimsoll.engine.record import SMALL_PARAMETER_BYTES, RegionForward
from plimsoll.engine.torch_flags import in_force
from plimsoll.errors import ReplayMismatch
from plimsoll.tracing.local_tensors import is_sharded, version_of
from plimsoll.tracing.recorder.contents import with_contents
from plimsoll.tracing.recorder.kept_globals import globals_kept
from plimsoll.tracing.recorder.kept_modules import attributes_of
from plimsoll.tracing.recorder.storages import Geometry, is_plain, storage_fingerprint
from plimsoll.tracing.recorder.untouched import KeptState, RandomState
from plimsoll.tracing.torch_internals import (
    at_end_of_backward,
    current_graph_task,
    preserving_versions,
    without_torch_function,
)

_PLAIN_ARGUMENTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)

_ADVANCED = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, Iterator)
_UNASKED_BYTES = 1 << 16
"""The small buffers of a region are copied before each of its calls if they take at most this many bytes together. Larger
ones are copied only after a call has written to them. Tensors in attributes are copied up to this many bytes together.
"""

Record = Callable[[tuple[Any, ...], dict[str, Any]], list[torch.Tensor] | None]


class Entrance:
    """Data about a call of a region before its forward: everything that a second run of the forward starts from.

    ``writes_buffers`` says whether earlier calls of the region have written to its buffers. Then copies of the small buffers
    are made now, because a second run has to start from them. They are also made if they take few bytes: this call may be the
    first one that writes.
    """

    def __init__(
        self,
        subject: RegionForward,
        entry: Entry,
        reader: SignatureReader,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        writes_buffers: bool = False,
    ) -> None:
        self.subject = subject
        self.arguments = (args, kwargs)
        self.random = RandomState()
        self.entry, self._reader = entry, reader
        self._attributes = AttributesBefore(subject.module.modules())
        watched = (*entry.sources, *entry.inputs, *self._attributes.tensors)
        self._watched = [(tensor, version_of(tensor)) for tensor in watched if tensor is not None]
        """The tensors that forward may write to, each with its version before forward."""
        buffers = {id(each): each for each in self.sources if _is_small_buffer(each)}
        is_copied = writes_buffers or sum(each.nbytes for each in buffers.values()) <= _UNASKED_BYTES
        copied = (buffers if is_copied else {}) | _smallest(self._attributes.tensors)
        self._before = {identity: (each, each.detach().clone()) for identity, each in copied.items()}
        """The small buffers and tensor attributes that forward may write to, each with a copy, by the id of the tensor."""
        self._copies: list[tuple[torch.Tensor, int | None, torch.Tensor]] = []
        """The small buffers and tensor attributes, and the small parameters that autograd has not saved (biases), each with its
        version and a copy of its contents. Forward or other code may write to them before backward. The version is ``None`` if
        forward itself may have written: batch norm writes without a new version.
        """
        self.writes_new_buffers = False
        """Whether forward has written to small buffers that were not copied before. `obstacle` sets this."""
        self._training: list[tuple[nn.Module, bool]] = []
        self._fixed: list[tuple[torch.Tensor, int]] = []
        """Aliases of the tensors that must not change before backward, each with its version."""
        self._sources: list[tuple[dict[str, Any], str, int, torch.Tensor]] = []
        """The places of parameters and buffers (a dictionary and a key), with the id and an alias of the tensor there."""
        kinds = {subject.device_type, "cpu"}
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._is_cached = torch.is_autocast_cache_enabled()

    @property
    def sources(self) -> list[torch.Tensor]:
        """The parameters and buffers that exist."""
        return [source for source in self.entry.sources if source is not None]

    def obstacle(self, call: OpenCall) -> str:
        """Return the reason why this call must not run a second time, or "" if it may. Forward has just returned."""
        leaves = tree_leaves(self.arguments)
        if not all(isinstance(leaf, _PLAIN_ARGUMENTS) or _is_plain_tensor(leaf) for leaf in leaves):
            return "an argument is neither a plain tensor nor a number nor a text"
        if self.entry.modes is not None:
            return "function modes are active"
        if call.sharded or any(map(is_sharded, self.sources)):
            return "its tensors are shards in its forward (DTensors)"
        module = self.subject.module
        hooked = (inner for inner in module.modules() if inner is not module)
        if any(inner._forward_hooks or inner._forward_pre_hooks for inner in hooked):
            return "its submodules have hooks, which would run twice"
        attributes = (value for inner in module.modules() for value in attributes_of(inner).values())
        held = with_contents(attributes, attributes_as_well=True)
        if any(isinstance(value, _ADVANCED) for value in held.values()):
            return "it holds a random generator or an iterator, which a second run would advance"
        if written := self._written(call, held):
            return written
        alive = zip(call.cells, call.tensors, strict=True)
        if any(cell is not GONE and cell.version_now(tensor) != cell.version for cell, tensor in alive):
            return "it writes to tensors that autograd has saved"
        return ""

    def _written(self, call: OpenCall, held: Mapping[int, Any]) -> str:
        """Return the reason why the inputs of a second run cannot be restored, or "": forward may have written to them.

        ``held`` are the values in attributes of the modules after forward, by their ids.
        """
        written = {id(tensor) for tensor, version in self._watched if version_of(tensor) != version}
        restorable = {id(each) for each in self.sources if _is_small_buffer(each)} | self._before.keys()
        if not written <= restorable.difference(map(id, self.entry.inputs)):
            return "it writes to its arguments, to parameters, or to large buffers or tensors in attributes"
        if self._attributes.has_written_large():
            return "it writes to a container with very many items"
        self.writes_new_buffers = not written <= self._before.keys()
        if self.writes_new_buffers:
            return "it is the first call that writes to its buffers, and they were not copied before"
        kept = [*self._attributes.replaced(held), *(copy for _, copy in self._before.values() if written)]
        if kept and sum(each.nbytes for each in kept) >= self._saved_bytes(call, held.values()):
            return "buffers and attributes from before the call take as many bytes as it saves"
        return ""

    def _saved_bytes(self, call: OpenCall, held: Iterable[Any]) -> int:
        """Return the bytes that the call has saved, without its arguments, parameters, buffers, and attributes (``held``)."""
        attributes = [value for value in held if isinstance(value, torch.Tensor)]
        tensors = (*self.sources, *_tensors(self.arguments), *attributes)
        given = {_storage(tensor) for tensor in tensors if is_plain(tensor)}
        storages = {_storage(each): each.untyped_storage().nbytes() for each in call.tensors if is_plain(each)}
        return sum(count for storage, count in storages.items() if storage not in given)

    def hold(self, saved: Collection[int]) -> None:
        """Take the arguments over, without the graph that made them, and copy small buffers.

        Arguments that autograd has saved (``saved`` are the ids of their storages) must not change before backward, as
        without a plan. Other arguments are copied.
        """

        def taken(tensor: torch.Tensor) -> torch.Tensor | _Copy:
            if _storage(tensor) in saved:
                return _alias(tensor)
            return _Copy(tensor.detach().clone(), Geometry.of(tensor), tensor.requires_grad)

        small = {id(each): each for each in self.sources if _is_small(each, saved)}
        self._copies = [(each, None, copy) for each, copy in self._before.values()]
        self._copies += [
            (each, version_of(each), each.detach().clone())
            for identity, each in small.items()
            if identity not in self._before
        ]
        self._attributes.keep_changed()
        self._watched, self._before = [], {}
        inputs = [each for each in self.entry.inputs if _storage(each) in saved]
        fixed = [each for each in self.sources if id(each) not in small]
        self._fixed = [(tensor.detach(), version_of(tensor)) for tensor in (*fixed, *inputs)]
        self._training = [(inner, inner.training) for inner in self.subject.module.modules()]
        places = zip(self._reader.places, self.entry.sources, strict=True)
        self._sources = [(*place, id(source), _alias(source)) for place, source in places if source is not None]
        self.arguments = tree_map_only(torch.Tensor, _once_for_each(taken), self.arguments)
        self.entry = self.entry._replace(sources=[], inputs=[])  # they would hold the graph that made them

    def refuse_changed(self) -> None:
        """Compare the version counters of parameters, large buffers and saved arguments with those of forward.

        Raises:
            SavedTensorModified: at least one of these tensors was written since.
        """
        for tensor, version in self._fixed:
            if version_of(tensor) != version:
                where = f"an argument or a parameter of region {self.subject.name!r}"
                raise modified_in_place(where, version, version_of(tensor))

    @contextlib.contextmanager
    def again(self, *, is_recorded: bool = False) -> Iterator[None]:
        """Return a context manager. Inside, forward runs as it did the first time. At the end, all state is restored.

        ``is_recorded`` says whether a mode of ours shall see the torch calls. Then no other function mode may be active.
        """
        now, state = RandomState(), KeptState(self.subject.module)
        changed = [
            (source.data, kept, source.detach().clone())
            for source, version, kept in self._copies
            if version is None or version_of(source) != version
        ]
        # The model's graphs may have saved a buffer. A second run that writes to it must not look like a new value.
        written = tuple([source for source, version, _ in self._copies if version is None])
        try:
            for data, kept, _ in changed:  # `.data` has its own version counter: other graphs may have saved the buffer
                data.copy_(kept)
            with contextlib.ExitStack() as stack:
                stack.enter_context(preserving_versions(written))
                stack.enter_context(torch.enable_grad())
                if not is_recorded:
                    stack.enter_context(without_torch_function())
                stack.enter_context(globals_kept(self.subject.module.modules()))
                stack.enter_context(in_force(self.entry.flags, self.subject.device_type))
                stack.enter_context(self._module_back())
                for kind, dtype, is_enabled in self._autocast:
                    cached = torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=self._is_cached)
                    stack.enter_context(cached)
                self.random.put_back()
                yield
        finally:
            for data, _, current in changed:
                data.copy_(current)
            state.put_back()
            now.put_back()

    @contextlib.contextmanager
    def _module_back(self) -> Iterator[None]:
        """Return a context manager. Inside, the module has the parameters, buffers, attributes and training flags of the first
        run.

        ``torch.func.functional_call`` gives a module other parameters for one call, a loop may evaluate the model before
        backward, and forward may count its calls.
        """
        replaced = []
        flags = [(inner, inner.training) for inner, _ in self._training]
        for inner, was_training in self._training:
            inner.training = was_training
        for holder, key, identity, alias in self._sources:
            now = holder.get(key)
            if now is None or id(now) != identity or _is_other_buffer(now, alias):
                replaced.append((holder, key, now))
                holder[key] = alias
        try:
            with self._attributes.put_back():  # `again` restores the attributes of the modules
                yield
        finally:
            for holder, key, now in replaced:
                holder[key] = now
            for inner, is_training in flags:
                inner.training = is_training


@dataclass(frozen=True, slots=True)
class _Copy:
    """Data: a copy of an argument that autograd has not saved, with the argument's own layout.

    A view of a larger tensor has gaps between its numbers, and the copy has none until forward runs again.
    """

    tensor: torch.Tensor
    geometry: Geometry
    requires_grad: bool

    def as_it_was(self) -> torch.Tensor:
        """Return a tensor with the contents and the layout of the argument."""
        tensor, made = self.tensor, self.geometry
        if (tensor.stride() == made.stride and not made.offset) or not tensor.numel():
            return tensor
        last = 0
        for step, count in sorted(zip(made.stride, made.size, strict=True)):
            if 0 < step <= last and count > 1:  # windows that overlap
                return tensor
            last += (count - 1) * step
        memory = tensor.new_empty(made.offset + last + 1)
        # An expanded dimension shows one number several times: write that once.
        shown = tuple([slice(0, 1) if step == 0 else slice(None) for step in made.stride])
        made.view_on(memory)[shown].copy_(tensor[shown])
        return made.view_on(memory)


class Rerun:
    """Rebuilds the tensors that one call has dropped, by a second run of the region's forward.

    All of them are rebuilt at the first read, and each is freed when it has been read. ``on_failure`` is called before an error
    is raised because the second run has produced other tensors. ``record``, if not ``None``, runs forward with these arguments
    and records it, so that recipes serve the next call that does the same. It returns the saved tensors by slot, or ``None`` if
    forward cannot be recorded now.
    """

    def __init__(self, entrance: Entrance, on_failure: Callable[[], None], record: Record | None) -> None:
        self._entrance = entrance
        self._on_failure = on_failure
        self._record = record
        self._expected: dict[int, tuple[Geometry, int | None]] = {}
        """The layout of each dropped tensor and a checksum of its storage, by the tensor's number in the order of saving. The
        checksum is ``None`` if a part of the storage was never written.
        """
        self._made: dict[int, torch.Tensor] = {}

    def drop(self, call: OpenCall, partly_unset: Collection[int] = ()) -> None:
        """Drop what the call has saved, except its arguments, parameters and buffers.

        ``partly_unset`` are the ids of storages that forward did not fill.
        """
        entrance = self._entrance
        given = {_storage(tensor) for tensor in (*entrance.sources, *_tensors(entrance.arguments)) if is_plain(tensor)}
        prints: dict[int, int | None] = dict.fromkeys(partly_unset)
        for cell, tensor in zip(call.cells, call.tensors, strict=True):
            if cell is GONE:
                continue
            if not is_plain(tensor) or _storage(tensor) in given:
                cell.keep(tensor)
                continue
            if _storage(tensor) not in prints:
                prints[_storage(tensor)] = storage_fingerprint(tensor)
            self._expected[cell.index] = Geometry.of(tensor), prints[_storage(tensor)]
            cell.drop((), self)
        entrance.hold({_storage(tensor) for tensor in call.tensors if is_plain(tensor)})
        call.close()

    def restore(self, cell: Cell) -> torch.Tensor:
        """Return the tensor that belongs to a cell, the object that autograd holds instead of the dropped tensor."""
        if cell.tensor is not None:
            return cell.read()
        if cell.index not in self._made:
            self._made = self._run()
            if current_graph_task() != -1:  # what this backward does not read must not stay until the next one
                at_end_of_backward(self._made.clear)
        return self._made.pop(cell.index)

    def _run(self) -> dict[int, torch.Tensor]:
        """Run forward again, and return the dropped tensors by their number in the order of saving.

        Raises:
            ReplayMismatch: the second run has saved other tensors than the first one.
            SavedTensorModified: an input or a parameter was written since.
        """
        self._entrance.refuse_changed()
        made = self._once()
        prints: dict[int, int] = {}
        for slot, (_, fingerprint) in self._expected.items():
            tensor = made[slot]
            if fingerprint is None:
                continue
            if _storage(tensor) not in prints:
                prints[_storage(tensor)] = storage_fingerprint(tensor)
            if prints[_storage(tensor)] != fingerprint and not _is_seed(tensor):
                self._fail()
        return made

    def _once(self) -> dict[int, torch.Tensor]:
        args, kwargs = tree_map_only((torch.Tensor, _Copy), _once_for_each(_argument), self._entrance.arguments)
        saved: list[torch.Tensor] | None = None
        record, self._record = self._record, None  # a second backward through the same graph learns nothing more
        is_alone = modes_around() is None and not is_capturing(self._entrance.subject.device_type)
        if record is not None and is_alone:
            with self._entrance.again(is_recorded=True):
                saved = record(args, kwargs)
        last = max(self._expected)
        if saved is None:
            saved = self._unrecorded(last, args, kwargs)
        if len(saved) <= last:
            self._fail()
        for slot, (geometry, _) in self._expected.items():
            if not is_plain(saved[slot]) or Geometry.of(saved[slot]) != geometry:
                self._fail()
        return {slot: saved[slot] for slot in self._expected}

    def _unrecorded(self, last: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Run forward until it has saved tensor number ``last``, and return the saved tensors by their number in the order of
        saving.
        """
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> int:
            saved.append(tensor.detach())
            if len(saved) > last:
                raise _Enough
            return len(saved) - 1

        with contextlib.suppress(_Enough), self._entrance.again(), saved_tensors_hooks(pack, saved.__getitem__):
            self._entrance.subject.forward(*args, **kwargs)
        return saved

    def _fail(self) -> NoReturn:
        self._on_failure()
        raise ReplayMismatch(
            f"Running region {self._entrance.subject.name!r} again gave other tensors than its forward.",
            why="its Python code or an operation depends on something that has changed since, or that a second run changes",
            next="run the step again: the optimizer has not stepped, and from now on the region keeps all its activations",
        )


class _Enough(BaseException):
    """Ends a second run when its last needed tensor is there. Not an ``Exception``, so the model's code does not catch it."""


def _is_seed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be a seed or an offset of fused attention on a GPU, which are never set without dropout."""
    return tensor.is_cuda and tensor.numel() <= 2 and not (tensor.is_floating_point() or tensor.is_complex())


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_plain(value)


def _is_small(source: torch.Tensor, saved: Collection[int]) -> bool:
    """Return whether a parameter or buffer is copied. ``saved`` are the ids of the storages that autograd has saved."""
    if isinstance(source, nn.Parameter):
        return source.dim() <= 1 and source.nbytes <= SMALL_PARAMETER_BYTES and _storage(source) not in saved
    return _is_small_buffer(source)


def _is_small_buffer(source: torch.Tensor) -> bool:
    if isinstance(source, nn.Parameter) or not is_plain(source):
        return False
    # Nothing can be copied into an expanded tensor, which `functional_call` may give a module as a parameter.
    is_expanded = any(stride == 0 and size > 1 for size, stride in zip(source.shape, source.stride(), strict=True))
    return source.is_leaf and not is_expanded and source.nbytes <= SMALL_BUFFER_BYTES


def _smallest(tensors: Collection[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return those small tensors that take few bytes together, the smallest first, by their ids."""
    found, total = {}, 0
    for each in sorted(filter(_is_small_buffer, tensors), key=lambda tensor: tensor.nbytes):
        total += each.nbytes
        if total > _UNASKED_BYTES:
            break
        found[id(each)] = each
    return found


def _is_other_buffer(now: torch.Tensor, alias: torch.Tensor) -> bool:
    """Return whether a buffer that has the id of an earlier buffer is a new one: forward may have replaced the earlier one,
    which is freed then. Parameters stay, but ZeRO-3 gives them other memory.
    """
    return not isinstance(now, nn.Parameter) and _storage(now) != _storage(alias)


def _argument(held: torch.Tensor | _Copy) -> torch.Tensor:
    if isinstance(held, torch.Tensor):
        return _alias(held)
    return held.as_it_was().detach().requires_grad_(held.requires_grad)


def _once_for_each(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls ``function`` once for each object, and returns the same result for the same object.

    Forward may ask whether two arguments are one object (``query is key``). The objects must live as long as the function.
    """
    known: dict[int, Any] = {}

    def call(value: Any) -> Any:
        if id(value) not in known:
            known[id(value)] = function(value)
        return known[id(value)]

    return call


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
