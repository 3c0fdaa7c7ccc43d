"""Verify each op in the recorded call of a region (a module that the plan decides about): run it twice and compare. If the
second run does not give the same bits, the reason is stored.

Each op runs twice, and the results are compared bit for bit. For torch's own ops on a CPU, two large results are not held at
the same time: the first is reduced to two checksums and freed, and the second is returned. So recording needs no more memory
than the region's own forward. Other ops, and ops that write in place, need memory for one more copy of the op's outputs.

* Undeclared writes: the contents of every input are fingerprinted before and after. An op that writes to existing memory
  without declaring it (batch norm and its running statistics) runs again on scratch copies. It is repeatable only if its result
  does not depend on what it overwrites.
* ``empty``: an op that writes into unset memory is verified on poisoned memory, because old contents could agree by accident.
  The same holds for outputs that an op leaves unset (the seeds of attention without dropout, workspaces): they are never
  rebuilt, but the op's other outputs may be.
* Random ops run again from a generator state that replay will be able to restore. Ops with a dropout of 0 draw nothing and do
  not need a state.
* Collectives run once: ranks that are not recording would not take part in a second one.
* The output of an op must be unchanged when the next op or autograd takes it. This detects writes that PyTorch does not see
  (numpy, raw pointers).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from plimsoll.artifacts.region import Origin
from plimsoll.engine.modes import may_change_numbers
from plimsoll.engine.replay_rng import RandomPoints
from plimsoll.tracing.recorder.calling import flat_tensors
from plimsoll.tracing.recorder.recorder import OpRecorder, RecordedOp, Signature, is_sized_by_values
from plimsoll.tracing.recorder.storages import Geometry, is_plain, same_bits, storage_crc, storage_fingerprint
from plimsoll.tracing.recorder.untouched import RandomState
from plimsoll.tracing.torch_internals import below_autograd, without_modes, without_torch_function

_NO_STATE = "draws random numbers at a point that cannot be restored later"
NOT_EXACT = "gives other bits when it runs again"
_POISON = 0xA5
_PARTLY_UNSET = frozenset({"_ctc_loss"})
"""Names of ops that leave a part of a floating-point result unset (where targets are short), which may agree by accident."""
_PROBABILITIES = ("p", "dropout_p")
"""Names that the argument for the dropout probability has in the schemas of aten's ops."""
_LARGE_BYTES = 1 << 14
"""Outputs count as large if they have at least this many bytes. On a CPU, large outputs are reduced to checksums while the op
runs again.

The reason: two of them at the same time could be the peak of memory.
"""


class VerifyingRecorder(OpRecorder):
    """Records the ops of a region, and verifies that each can be repeated.

    An op in its log without an ``obstacle`` has been shown to be repeatable.
    """

    def __init__(
        self, current_module: Callable[[], str], points: RandomPoints, *, repeats_collectives: bool = False
    ) -> None:
        super().__init__(current_module, repeats_collectives=repeats_collectives)
        self.points = points
        self.not_rebuildable: dict[int, str] = {}
        self.has_hidden_writes = False
        self.is_called: Callable[[], bool] = lambda: True
        """A function that returns whether a torch call is running."""
        self.note_read: Callable[[list[torch.Tensor], Any], None] = lambda tensors, value: None
        """Called after an op has read ``value`` from tensors."""
        self.note_size: Callable[[], None] = lambda: None
        """Called before an op whose results have sizes that depend on the contents of its arguments."""
        self.is_flagged: Callable[[], bool] = lambda: False
        """A function that returns whether torch's flags differ from those at the start of the region. Backward restores the
        flags of the start when it runs ops again.
        """
        self.is_rewritten = may_change_numbers()
        """Whether modes of the user are active that may change ops.

        Backward may run without these modes, so the second run of an op is without them.
        """
        self.has_unseen_callers = False
        """Whether some op was run by code whose torch calls are not seen."""
        self._contents: dict[int, int] = {}
        self._shadows: dict[int, torch.Tensor] = {}
        self._undefined: set[int] = set()
        self._lost: dict[int, str] = {}
        """Storages that were written in place by an op that may not run again; the value is the reason. Later ops that write to
        such a storage are not verified: that would need a copy of it, and the recorded call would take more memory than later
        calls.
        """
        self._outside: set[int] = set()
        self._unset_outputs: tuple[int, ...] = ()

    def mark_outside(self) -> None:
        """Mark all storages that are known so far as memory from before the region."""
        self._outside = set(range(len(self.table)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.has_unseen_callers |= not self.suspended and not self.is_called()
        with without_torch_function():  # our own calls are not part of the region's stream of torch calls
            return super().__torch_dispatch__(func, types, args, kwargs)

    def execute(self, op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature) -> Any:
        func = op.func
        self._unset_outputs = ()
        if self.is_flagged():
            op.obstacle = op.obstacle or "runs under torch flags that the region sets"
        if signature.is_value_read:
            value = func(*args, **kwargs)
            self.note_read(flat_tensors(args), value)
            return value
        if is_sized_by_values(func, args, signature):
            self.note_size()
        if op.name in _PARTLY_UNSET:
            op.obstacle = op.obstacle or "leaves a part of its result unset"
        if signature.is_uninitialised or signature.is_collective or op.name in _PARTLY_UNSET:
            return func(*args, **kwargs)
        if self.is_on_the_way(args):
            op.obstacle = op.obstacle or "reads memory that a collective is still writing"
            return func(*args, **kwargs)
        written = self._written_storages(args, kwargs, signature)
        if any(storage in self._outside for storage in written):
            return func(*args, **kwargs)
        if any(storage in self._lost for storage in written):
            op.obstacle = op.obstacle or next(self._lost[each] for each in written if each in self._lost)
            return func(*args, **kwargs)
        self._refuse_undefined_reads(op, written)
        device = _device(args, kwargs)
        state = self.points.before(op, device) if op.is_random else None
        # Checksums of the inputs, not copies: copies of a weight and an activation per product would raise the peak.
        prints = self._fingerprints(args, kwargs, written)
        bases = {storage: self._base(storage, tensor) for storage, tensor in written.items()}
        earlier = self.points.state(device)
        generators = None if func.namespace == "aten" else RandomState()
        out = func(*args, **kwargs)
        if generators is not None and not generators.is_current_on_host():
            op.obstacle = op.obstacle or "draws from the random generator of Python or numpy"
            return out  # do not run it again: that would draw other numbers, and change the numbers of later calls
        later = self.points.state(device)
        is_drawn = not torch.equal(earlier, later)
        if is_drawn and not op.is_random:
            op.obstacle = op.obstacle or "draws random numbers without declaring it"
        elif op.is_random and not is_drawn and _has_no_dropout(func, args, kwargs):
            op.is_random, op.random_point, state = False, None, None  # recipes need not restore a state
        changed = [storage for storage, (tensor, before) in prints.items() if storage_fingerprint(tensor) != before]
        try:
            # The user's modes see every op once, and forward gets the result that they have seen.
            is_pure = func.namespace == "aten" and not (bases or changed or op.obstacle or self.is_rewritten)
            is_pure = is_pure and (state is not None or not op.is_random)
            if is_pure and self._is_large(out, prints):
                marks, made = _marks(out), memory_of(flat_tensors(out))
                del out
                soil(made, ~_byte(op) & 0xFF)
                out = self._again(op, args, kwargs, state)
                if _marks(out) == marks:
                    return out
                # a result of the second run is not for forward: some kernels depend on whether gradients are enabled
                del out
                if state is not None:
                    self.points.restore(device, state)
                out = func(*args, **kwargs)
            self._check(op, args, kwargs, out, bases, changed, state)
        finally:
            self.points.restore(device, later)
        return out

    def _is_large(self, out: Any, prints: dict[int, tuple[torch.Tensor, int]]) -> bool:
        """Return whether to free an op's first result before the op runs a second time. True if the result is large, on the
        CPU, and entirely in new memory.
        """
        made = flat_tensors(out)
        is_new = all(is_plain(tensor) and tensor.is_cpu and self.table.find(tensor) not in prints for tensor in made)
        return is_new and sum(size for size, _ in memory_of(made)) >= _LARGE_BYTES

    def _again(self, op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any], state: torch.Tensor | None) -> Any:
        """Run an op a second time, in the same way as recomputation in backward would, and return its result."""
        if state is not None:
            self.points.restore(_device(args, kwargs), state)
        with torch.no_grad(), below_autograd(), without_modes() if self.is_rewritten else contextlib.nullcontext():
            return op.func(*args, **kwargs)

    def notice(self, tensors: Iterable[torch.Tensor]) -> None:
        """Check that tensors which are about to be read still have the contents that they had after the last op.

        A difference means that they were written in a way that PyTorch does not see.
        """
        for tensor in tensors:
            known = self._contents.get(self.table.find(tensor)) if is_plain(tensor) else None
            if known is not None and tensor.numel() and not tensor.untyped_storage().nbytes():
                self._let_go(self.table.find(tensor))
            elif known is not None and storage_fingerprint(tensor) != known:
                self.has_hidden_writes = True

    def _let_go(self, storage: int) -> None:
        """Mark the ops that read this storage as not repeatable, because its memory may be gone when backward runs them again.

        It belongs to a parameter that was gathered inside the region and freed again (FSDP2).
        """
        for op in self.ops:
            if any(self.values[read].storage == storage for read in op.reads):
                op.obstacle = op.obstacle or "reads a parameter that is gathered inside the region and freed again"

    def _close(
        self, op: RecordedOp, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
    ) -> None:
        super()._close(op, out, args, kwargs, signature)
        if signature.is_collective and not signature.is_wait:
            self._await(op)
        else:
            self._remember(op, args, kwargs, out)
        if op.id >= len(self.ops) or self.ops[op.id] is not op:
            return
        op.reads = tuple(r for r in op.reads if self.values[r].storage not in op.scratch)
        for position in self._unset_outputs:
            unset = op.outputs[position]
            if unset is not None:
                self._undefined.add(self.values[unset.value].storage)
        for value in op.writes:
            storage = self.values[value].storage
            if self.values[value].is_undefined:
                self._undefined.add(storage)
            if storage in self._undefined:
                self.not_rebuildable[value] = "part of it was never written"

    def _remember(self, op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Store fingerprints of the memory that an op made or wrote. Memory from before the region is not watched."""
        written = {self.values[value].storage for value in op.writes} - self._outside
        for tensor in tree_leaves((out, args, kwargs)):
            if written and isinstance(tensor, torch.Tensor) and is_plain(tensor):
                storage = self.table.find(tensor)
                if storage in written:
                    written.discard(storage)
                    self._contents[storage] = storage_fingerprint(tensor)
                if self.values[self.current[storage]].is_undefined:
                    self._contents.pop(storage, None)

    def _await(self, op: RecordedOp) -> None:
        """Forget the recorded contents of a collective's outputs, because they change until the collective has ended."""
        for value in op.writes:
            storage = self.values[value].storage
            self._contents.pop(storage, None)
            self._shadows.pop(storage, None)
            self._undefined.discard(storage)

    def _written_storages(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
    ) -> dict[int, torch.Tensor]:
        targets = [args[i] for i in signature.written_positions if i < len(args)]
        targets += [kwargs[name] for name in signature.written_names if name in kwargs]
        return {self.table.add(t): t for t in tree_leaves(targets) if isinstance(t, torch.Tensor) and is_plain(t)}

    def _refuse_undefined_reads(self, op: RecordedOp, written: dict[int, torch.Tensor]) -> None:
        for read in op.reads:
            storage = self.values[read].storage
            if storage in self._undefined and storage not in written:
                op.obstacle = op.obstacle or "reads memory that was only partly written"

    def _fingerprints(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], written: dict[int, torch.Tensor]
    ) -> dict[int, tuple[torch.Tensor, int]]:
        prints: dict[int, tuple[torch.Tensor, int]] = {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and is_plain(tensor):
                storage = self.table.find(tensor)
                if storage not in written and storage not in prints:
                    prints[storage] = (tensor, storage_fingerprint(tensor))
                    if self._contents.get(storage, prints[storage][1]) != prints[storage][1]:
                        self.has_hidden_writes = True
        return prints

    def _base(self, storage: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a storage for the second run of an in-place op to write to, so that both runs start from the same
        contents.

        If nothing was written to the storage yet, the copy is filled with a known byte (poison).
        """
        if storage not in self._undefined:
            return whole_storage(tensor, tensor.untyped_storage().clone())
        if storage not in self._shadows:
            poisoned = tensor.untyped_storage().clone()
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(poisoned).fill_(_POISON)
            self._shadows[storage] = whole_storage(tensor, poisoned)
        return self._shadows[storage]

    def _check(
        self,
        op: RecordedOp,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        bases: dict[int, torch.Tensor],
        changed: list[int],
        state: torch.Tensor | None,
    ) -> None:
        if any(self.values[self.current[storage]].origin is not Origin.BUFFER for storage in changed):
            op.obstacle = "writes to one of its inputs without declaring it"
            op.undeclared = tuple(changed)
            return
        op.scratch = frozenset(changed)
        if op.obstacle or (op.is_random and state is None):
            op.obstacle = op.obstacle or _NO_STATE
            self._lost |= dict.fromkeys(bases, op.obstacle)
            for storage in bases:
                self._shadows.pop(storage, None)
            return
        scratch: dict[int, torch.Tensor] = {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and is_plain(tensor) and self.table.find(tensor) in changed:
                scratch[self.table.find(tensor)] = whole_storage(tensor, tensor.untyped_storage().clone())
        replaced = {**bases, **scratch}

        def substitute(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and is_plain(value):
                base = replaced.get(self.table.find(value))
                return value if base is None else Geometry.of(value).view_on(base)
            return value

        again_args, again_kwargs = tree_map(substitute, args), tree_map(substitute, kwargs)
        soil(memory_of(t for t in flat_tensors(out) if is_plain(t) and self.table.find(t) not in bases), _byte(op))
        try:
            again = self._again(op, again_args, again_kwargs, state)
        except Exception as error:  # noqa: BLE001 - whatever the second run raises, forward itself has succeeded
            op.obstacle = f"raises {type(error).__name__} when it runs again"
            return
        self._compare_outputs(op, out, again, bases)
        self._compare_writes(op, args, kwargs, bases)

    def _compare_outputs(self, op: RecordedOp, out: Any, again: Any, bases: dict[int, torch.Tensor]) -> None:
        """Compare the outputs of both runs of an op. Record outputs that the op leaves unset. Any other difference means that
        the op cannot be repeated.
        """
        firsts, seconds = flat_tensors(out), flat_tensors(again)
        if len(firsts) != len(seconds):
            op.obstacle = NOT_EXACT
            return
        made = {i: pair for i, pair in enumerate(zip(firsts, seconds, strict=True)) if is_plain(pair[0])}
        unset = unset_outputs({i: pair for i, pair in made.items() if self.table.find(pair[0]) not in bases})
        if unset is None:
            op.obstacle = NOT_EXACT
        else:
            self._unset_outputs = unset

    def _compare_writes(
        self, op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any], bases: dict[int, torch.Tensor]
    ) -> None:
        live = {
            self.table.find(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and is_plain(t)
        }
        for storage, base in bases.items():
            is_same = same_bits(whole_storage(live[storage], live[storage].untyped_storage()), base)
            if is_same:
                self._undefined.discard(storage)
                self._shadows.pop(storage, None)
            elif storage not in self._undefined:
                op.obstacle = NOT_EXACT


def unset_outputs(pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> tuple[int, ...] | None:
    """Return the positions of outputs that an op never writes. Return ``None`` if its other outputs differ between the two
    runs.

    An output counts as never written if two runs from the same inputs left other bits in it, it holds no floating-point
    numbers, and some other output has equal bits. Fused attention without dropout returns such a seed and offset.

    Args:
        pairs: the outputs of both runs, by position. Call `soil` before the second run, or old contents may agree.
    """
    wrong = [position for position, (first, second) in pairs.items() if not same_bits(first, second)]
    if len(wrong) < len(pairs) and all(_is_no_number(*pairs[position]) for position in wrong):
        return tuple(wrong)
    return None if wrong else ()


def memory_of(made: Iterable[torch.Tensor]) -> list[tuple[int, torch.device]]:
    """Return the size in bytes and the device of each tensor's storage, as pairs."""
    return [(tensor.untyped_storage().nbytes(), tensor.device) for tensor in made]


def _marks(out: Any) -> list[tuple[Any, ...]]:
    """Return, for each tensor of an op's result, its geometry (sizes, strides, offset) and two checksums of different kinds.
    They identify the result after it is freed.
    """
    return [(Geometry.of(t), storage_fingerprint(t), storage_crc(t)) for t in flat_tensors(out)]


def _byte(op: RecordedOp) -> int:
    """Return a byte (0 to 255) to fill memory with before an op runs again, so that old contents cannot agree with its results
    by accident.

    Some results are compared twice. For the other comparison, the memory is filled with the complement of this byte.
    """
    return (37 * op.id + 11) % 256


def soil(sizes: Iterable[tuple[int, torch.device]], byte: int) -> None:
    """Allocate memory of these sizes (in bytes), fill it with ``byte``, and free it. The next run of an op then probably gets
    this memory, so old results in it cannot look like new ones.
    """
    soiled = [torch.full((size,), byte, dtype=torch.uint8, device=device) for size, device in sizes]
    del soiled


def _is_no_number(first: torch.Tensor, second: torch.Tensor) -> bool:
    return Geometry.of(first) == Geometry.of(second) and not (first.dtype.is_floating_point or first.is_complex())


def _has_no_dropout(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the op has a dropout probability that is 0.

    Ops whose draws depend on data (binomial) do not have such an argument.
    """
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in _PROBABILITIES:
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given == 0)
    return False


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device of the op's first tensor or device argument, or the CPU if there is neither."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor | torch.device):
            return leaf.device if isinstance(leaf, torch.Tensor) else leaf
    return torch.device("cpu")


def whole_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the contents of a storage as a flat tensor that has the dtype of ``tensor``."""
    count = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,))  # type: ignore[call-overload, no-any-return]
