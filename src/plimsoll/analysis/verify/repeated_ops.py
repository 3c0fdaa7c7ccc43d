"""Finds the first op whose result differs when backward runs the op again, and says why.

Every forward op is recorded with checksums of its inputs and outputs. An op in backward counts as recomputation if autograd is
enabled, or if it runs in a module while a saved tensor is unpacked. Each recomputed op is matched with the forward op that it
repeats. The first match with different outputs is the fault. If its inputs are equal, the op itself gave another result; if an
input differs, that input was changed in between.

Memory that no op has written is not compared: results of ``empty``, and outputs that an op leaves unset next to valid ones (the
seed and offset of fused attention without dropout). Such outputs are found by running the op twice (``unset_outputs``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from plimsoll.analysis.verify.saved_tensors import Hook
from plimsoll.artifacts.fault import Cause, Fault
from plimsoll.engine.replay_rng import generators_of
from plimsoll.engine.verifying import memory_of, soil, unset_outputs, whole_storage
from plimsoll.tracing.recorder.calling import ModuleStack, flat_tensors
from plimsoll.tracing.recorder.storages import Geometry, content_fingerprint, is_plain
from plimsoll.tracing.torch_internals import below_autograd, current_graph_task, without_modes

_UNSET = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Names of ops that return uninitialised memory."""
_UNNOTED = {*_UNSET, "detach", "alias"}
"""Names of ops that compute nothing and are therefore not recorded. Checkpointing itself runs some of them."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """The record of one op that ran: its module, its inputs, its outputs, and the settings under which it ran."""

    module: str
    name: str
    is_random: bool
    constants: tuple[str, ...]
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    """The checksum of each output tensor of the op; ``None`` for memory that no op has written."""
    shapes: tuple[tuple[Any, ...], ...]
    setting: dict[str, object]
    """Settings outside the arguments that affect the op. The keys are the names that a fault shows."""
    sources: tuple[str, ...]
    """For each input, the name of the parameter or buffer that it is, or ``""`` for another tensor."""

    @property
    def place(self) -> tuple[str, str]:
        return self.module, self.name


class RepeatedOps(TorchDispatchMode):
    """A dispatch mode that records each op of a step, in forward and in recomputation, and finds the first op that differs.

    Args:
        root: the model.
        stack: tracks the running module.
    """

    def __init__(self, root: nn.Module, stack: ModuleStack) -> None:
        super().__init__()
        self._stack = stack
        self._modules = dict(root.named_modules())
        self._names = {p.untyped_storage()._cdata: f"parameter {n}" for n, p in root.named_parameters()}
        self._names.update({b.untyped_storage()._cdata: f"buffer {n}" for n, b in root.named_buffers()})
        self._forward: list[_Entry] = []
        self._again: list[list[_Entry]] = []
        self._task = -1
        self._unpacking = 0
        self._unset: dict[int, StorageWeakRef] = {}
        self._generators = generators_of([p.device for p in root.parameters()])
        self._proofs = 0

    def wrap(self, pack: Hook, unpack: Hook) -> tuple[Hook, Hook]:
        """Wrap a pair of saved-tensor hooks, so that ops which run while a tensor is unpacked count as recomputation."""

        def watched_unpack(packed: Any) -> Any:
            self._unpacking += 1
            try:
                return unpack(packed)
            finally:
                self._unpacking -= 1

        return pack, watched_unpack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        task = current_graph_task()
        if task != -1 and not torch.is_grad_enabled() and not (self._unpacking and self._stack.path):
            self._task = -1  # an op of backward itself ends the recomputation: the next recomputed op starts a new list
            return func(*args, **kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and is_plain(leaf)]
        inputs = self._checksums(read)
        states = [generator.get_state() for generator in self._generators]
        out = func(*args, **kwargs)
        self._note_unset(func, args, kwargs, out, states)
        if _name_of(func) in _UNNOTED:
            return out
        entry = self._entry(func, args, kwargs, read, inputs, out)
        if task == -1:
            self._forward.append(entry)
        else:
            if self._task != task:
                self._again.append([])
                self._task = task
            self._again[-1].append(entry)
        return out

    def is_unset(self, tensor: torch.Tensor) -> bool:
        """Whether no op has written the memory of the tensor yet."""
        reference = self._unset.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    def _checksums(self, tensors: Sequence[torch.Tensor]) -> tuple[int | None, ...]:
        return tuple(None if self.is_unset(tensor) else content_fingerprint(tensor) for tensor in tensors)

    def _note_unset(self, func: Any, args: Any, kwargs: Any, out: Any, states: Sequence[torch.Tensor]) -> None:
        """Update, after an op has run, the record of storages whose memory no op has written yet."""
        unset: Iterable[torch.Tensor] = ()
        if _name_of(func) in _UNSET:
            unset = (out,)
        elif func._schema.is_mutable:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | dict(kwargs)
            written = [given.get(each.name) for each in func._schema.arguments if each.is_write]
            for tensor in flat_tensors(written):
                self._unset.pop(tensor.untyped_storage()._cdata, None)
        else:
            unset = self._left_unset(func, args, kwargs, out, states)
        for storage in (tensor.untyped_storage() for tensor in unset):
            self._unset[storage._cdata] = StorageWeakRef(storage)

    def _left_unset(
        self, func: Any, args: Any, kwargs: Any, out: Any, states: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return those outputs of an op that the op has not written.

        To find them, the op runs again after free memory was filled with another byte. The second run reads copies of the
        inputs, because an op may write to its inputs without declaring it.
        """
        made = dict(enumerate(flat_tensors(out)))
        is_asked = len(made) > 1 and all(map(is_plain, made.values()))
        if not is_asked or all(map(torch.is_floating_point, made.values())) or _returns_views(func):
            return []
        again_args, again_kwargs = tree_map(_copied, (args, kwargs))
        later = [generator.get_state() for generator in self._generators]
        self._proofs += 1
        soil(memory_of(made.values()), (37 * self._proofs + 11) % 256)
        try:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            with without_modes(), torch.no_grad(), below_autograd():
                again = flat_tensors(func(*again_args, **again_kwargs))
        except Exception:  # noqa: BLE001 - the second run may raise anything, the first has succeeded
            return []
        finally:
            for generator, state in zip(self._generators, later, strict=True):
                generator.set_state(state)
        if len(again) != len(made):
            return []
        return [made[i] for i in unset_outputs({i: (each, again[i]) for i, each in made.items()}) or ()]

    def _entry(
        self, func: Any, args: Any, kwargs: Any, read: Sequence[torch.Tensor], inputs: tuple[int | None, ...], out: Any
    ) -> _Entry:
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and is_plain(leaf)]
        constants = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, bool | int | float | str)]
        module = self._modules.get(self._stack.path)
        return _Entry(
            module=self._stack.path,
            name=_name_of(func),
            is_random=torch.Tag.nondeterministic_seeded in func.tags,
            constants=tuple(map(repr, constants)),
            inputs=inputs,
            outputs=self._checksums(made),
            shapes=tuple((tuple(tensor.shape), tensor.dtype) for tensor in made),
            setting={
                "training flag": module is not None and module.training,
                "default dtype": torch.get_default_dtype(),
            },
            sources=tuple(self._names.get(tensor.untyped_storage()._cdata, "") for tensor in read),
        )

    def faults(self) -> Iterator[Fault]:
        """Yield, for each recomputation, the first op whose result differs from forward, as a fault.

        A recomputation without a difference yields nothing.
        """
        for episode in self._again:
            fault = self._first_fault(episode)
            if fault is not None:
                yield fault

    def _first_fault(self, episode: Sequence[_Entry]) -> Fault | None:
        position = self._start(episode)
        skipped: _Entry | None = None
        for entry in episode:
            found = self._next(position, entry)
            if found is None:
                expected = self._forward[position] if position < len(self._forward) else None
                return _other_path(entry, expected)
            first = self._forward[found]
            skipped = self._forward[position] if found > position else skipped
            position = found + 1
            if first.shapes != entry.shapes or any(map(_differ, first.outputs, entry.outputs)):
                return _fault(entry, *_why(first, entry, skipped))
        return None

    def _start(self, episode: Sequence[_Entry]) -> int:
        """Return the position among the forward ops where one recomputation (``episode``) begins.

        It is the candidate whose following ops match most often with equal inputs. Among equal candidates, it is the candidate
        with the most ops that match at all.
        """
        starts = [index for index, entry in enumerate(self._forward) if entry.place == episode[0].place]

        def agreement(start: int) -> tuple[int, int]:
            length = same = 0
            for ahead, entry in zip(self._forward[start:], episode, strict=False):
                if ahead.place != entry.place:
                    break
                length += 1
                same += ahead.inputs == entry.inputs
            return same, length

        return max(starts, key=agreement, default=0)

    def _next(self, position: int, entry: _Entry) -> int | None:
        """Return the position of the next forward op that a recomputed op (``entry``) can repeat, or ``None``.

        The search begins at ``position``. Forward ops that it skips were not needed again.
        """
        for index in range(position, len(self._forward)):
            if self._forward[index].place == entry.place:
                return index
        return None


def _name_of(func: Any) -> str:
    name: str = func._schema.name.split("::")[1]
    return name


def _differ(first: int | None, again: int | None) -> bool:
    """Whether two checksums of tensors differ. ``None`` (memory that no op has written) equals every checksum."""
    return first != again and first is not None and again is not None


def _returns_views(func: Any) -> bool:
    return any(returned.alias_info is not None for returned in func._schema.returns)


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, with the same geometry on a copy of its storage. Return other values unchanged."""
    if not isinstance(value, torch.Tensor) or not is_plain(value):
        return value
    return Geometry.of(value).view_on(whole_storage(value, value.untyped_storage().clone()))


def _why(first: _Entry, again: _Entry, skipped: _Entry | None) -> tuple[Cause, str]:
    """Return why a recomputed op gave another result than in forward: a cause, and details as text.

    ``skipped`` is an earlier forward op that was not run again.
    """
    if first.setting != again.setting:
        return Cause.CHANGED_CONTEXT, _describe_change(first.setting, again.setting)
    dtypes = [dtype for _, dtype in first.shapes], [dtype for _, dtype in again.shapes]
    if dtypes[0] != dtypes[1]:  # below autograd the autocast setting is not visible, but the dtypes that it causes are
        return Cause.CHANGED_CONTEXT, f"{dtypes[0]} became {dtypes[1]}: autocast or the default dtype was different"
    if first.constants != again.constants:
        changed = [f"{a} became {b}" for a, b in zip(first.constants, again.constants, strict=False) if a != b]
        return Cause.CHANGED_CONTROL_FLOW, f"its argument changed: {', '.join(changed[:3])}"
    for one, other, source in zip(first.inputs, again.inputs, again.sources, strict=False):
        if _differ(one, other):
            if source.startswith("buffer"):
                return Cause.CHANGED_BUFFER, f"{source} changed"
            if skipped is not None and not source:
                return Cause.CHANGED_CONTROL_FLOW, f"{skipped.name!r} in {skipped.module!r} was not recomputed"
            return Cause.IN_PLACE_WRITE, f"{source or 'a tensor that it reads'} changed"
    if again.is_random:
        return Cause.RANDOM_STATE, ""
    return Cause.NON_DETERMINISTIC, ""


def _other_path(entry: _Entry, expected: _Entry | None) -> Fault:
    if expected is not None and expected.setting != entry.setting:
        return _fault(entry, Cause.CHANGED_CONTEXT, _describe_change(expected.setting, entry.setting))
    was = "" if not expected or not expected.module else f"; it ran {expected.name!r} in {expected.module!r}"
    return _fault(entry, Cause.CHANGED_CONTROL_FLOW, f"forward did not run this op at this point{was}")


def _describe_change(first: dict[str, object], again: dict[str, object]) -> str:
    return ", ".join(f"{name} {value} became {again[name]}" for name, value in first.items() if value != again[name])


def _fault(entry: _Entry, cause: Cause, detail: str) -> Fault:
    shape, dtype = entry.shapes[0] if entry.shapes else ((), None)
    elements = math.prod(shape)
    return Fault(
        step=1,
        region=entry.module,
        value=f"output of {entry.name}, {tuple(shape)} {dtype}",
        op=entry.name,
        cause=cause,
        elements=elements,
        differing_elements=elements,
        detail=detail,
    )
