"""Keeps the state of some of an optimizer's parameters on a link (in host memory or on disk) between steps. The optimizer's own
``step`` then runs in chunks of parameters.

For each chunk, the state is fetched, the optimizer's own code steps the chunk (``param_groups`` hold only the chunk's
parameters meanwhile), and the state is sent away. While one chunk leaves, the next arrives, so the device holds the state of at
most two chunks. Parameters that are in no chunk keep their state on the device and are stepped last, in one call.

``optimizer.step`` is replaced on the instance. The replacement runs the optimizer's hooks and torch's profiler label once for
the whole step, and has a ``__func__``, which torch's schedulers need to wrap it. If other code calls the class's ``step``
directly, all state is brought back first: the step is right, but takes the memory of all state.

*Nothing is half stepped.* Until the step has ended, the link keeps the state from before it, and a copy of the chunks'
parameters. If the optimizer or a transfer fails in a chunk, all chunks are put back. If the link cannot take a tensor, the
tensor stays on the device, and the step completes. There are two exceptions. If the call for the parameters outside of all
chunks fails, these parameters are as the optimizer leaves them. If the link is too full for the copies, the step is run without
them, and an error says so.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from plimsoll.artifacts.offloaded_state import LEAST_STATE_BYTES
from plimsoll.engine.codecs.layout import is_dense
from plimsoll.engine.offload.protocol import Link, Ticket
from plimsoll.engine.optimizer_state.away import AwayTensor, OffloadedStates, is_held_elsewhere
from plimsoll.engine.optimizer_state.narrowed import in_groups, narrowed, step_without_hooks
from plimsoll.errors import InvalidOption, OffloadFailed


@dataclass(slots=True)
class _Away:
    """One tensor of a parameter's optimizer state that is on the link (in host memory or on disk)."""

    key: Any
    stand_in: torch.Tensor
    ticket: Ticket


@dataclass(slots=True)
class _Before:
    """The optimizer state of one parameter before the step, to restore it if the step fails.

    ``entries`` has copies of small tensors, and stand-ins for tensors on the link (to host memory or disk), which ``away``
    lists. A large tensor that something else holds is not copied into ``entries``: the tensor itself is there, and its old
    values are in `_Undo`.
    """

    parameter: torch.Tensor
    entries: dict[Any, Any] | None
    away: list[_Away]


@dataclass(slots=True)
class _Undo:
    """Everything that must be restored if a step fails: tensors with a ticket for their old values on the link, the state of
    parameters, and the entries of parameter groups. It is not complete if the link did not take some values.
    """

    values: list[tuple[torch.Tensor, Ticket]] = field(default_factory=list)
    states: list[_Before] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    is_complete: bool = True


class StateOffload:
    """Keeps the state of the parameters in ``chunks`` on a link between an optimizer's steps.

    Args:
        optimizer: the optimizer. It must step each parameter by itself (see ``by_parameter``).
        chunks: lists of parameters. Each is stepped by one call of the optimizer.
        link: carries the state. It is closed by `remove`.
        least_bytes: smaller tensors stay on the device.

    Raises:
        InvalidOption: other code has replaced ``optimizer.step``, or another `StateOffload` has.

    Example:
        >>> from plimsoll.engine.offload.disk import DiskLink
        >>> weight = torch.nn.Parameter(torch.ones(64, 64))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        >>> offload = StateOffload(optimizer, [[weight]], DiskLink("/var/tmp"))
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> offload.away_bytes
        16384
        >>> offload.remove()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        chunks: Sequence[Sequence[torch.Tensor]],
        link: Link,
        *,
        least_bytes: int = LEAST_STATE_BYTES,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._chunks = [[each for each in chunk if _is_flat(each)] for chunk in chunks]
        self._members = {id(each) for chunk in self._chunks for each in chunk}
        self._link = link
        self._least_bytes = least_bytes
        self._away: dict[torch.Tensor, list[_Away]] = {}
        self._is_home: dict[torch.Tensor, None] = {each: None for chunk in self._chunks for each in chunk}
        """Parameters whose state is on the device and is to be sent to the link by `leave`. A parameter is not in this set
        until the next step if the link has refused its state.
        """
        self._leaving: list[torch.Tensor] = []
        self._is_stepping = self._takes_copies = self._is_removed = False
        self._has_warned = self._has_warned_of_link = False
        self._had_own = vars(optimizer).get("step")
        if self._had_own is not None and not hasattr(self._had_own, "_wrapped_by_lr_sched"):
            raise InvalidOption(
                f"The state of {type(optimizer).__name__} cannot be offloaded: other code has replaced optimizer.step.",
                why=f"the step must run in chunks, and {self._had_own!r:.80} would run it as a whole",
                next="offload the state before that code replaces the step, or leave 'offload-state' out of allow=",
            )
        self._adopt(optimizer)
        self._step = self._replacement(optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]
        self._hooks = [
            optimizer.register_step_pre_hook(self._whole_step_begins),
            optimizer.register_state_dict_pre_hook(self._state_dict_begins),
            optimizer.register_state_dict_post_hook(self._state_dict_ends),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]
        self.leave()

    # What others may ask

    @property
    def away_bytes(self) -> int:
        """The bytes of state that are on the link now."""
        return sum(each.stand_in.numel() * each.stand_in.itemsize for sent in self._away.values() for each in sent)

    def leave(self) -> None:
        """Send state to the link that came back because other code read it. Tensors that other code still holds stay on the
        device.
        """
        optimizer = self._optimizer()
        if not self._is_home or self._is_stepping or self._is_removed or optimizer is None:
            return
        self._adopt(optimizer)
        self._send(list(self._is_home))
        self._settle()

    def remove(self) -> None:
        """Bring all optimizer state back to the device, and restore the optimizer's own ``step``. Calling it twice does no
        harm.
        """
        optimizer = self._optimizer()
        if self._is_removed:
            return
        if optimizer is not None:
            self.bring_back(list(self._away))
            if isinstance(optimizer.state, OffloadedStates):
                optimizer.state = _plain(optimizer.state)
            # A scheduler may have wrapped the replacement. Then it stays, and does nothing.
            if vars(optimizer).get("step") is self._step:
                del optimizer.step
                if self._had_own is not None:
                    optimizer.step = self._had_own  # type: ignore[method-assign]
        self._is_removed = True
        for hook in self._hooks:
            hook.remove()
        self._link.close()

    # The keeper of the mapping `OffloadedStates`

    def bring_back(self, parameters: Iterable[Any]) -> None:
        """Bring the state of these parameters back to the device.

        Raises:
            OffloadFailed: a transfer failed. The state stays on the link.
        """
        for parameter in parameters:
            sent = self._away.get(parameter) if isinstance(parameter, torch.Tensor) else None
            if sent is None:
                continue
            read = [each.ticket.read() for each in sent]
            state = self._states.present(parameter)
            for each, flat in zip(sent, read, strict=True):
                if state.get(each.key) is each.stand_in:
                    state[each.key] = _shaped(flat, each.stand_in)
            del self._away[parameter]
            self._is_home[parameter] = None

    def forget(self, parameters: Iterable[Any]) -> None:
        """Discard the stored state of these parameters, because other state replaces it."""
        for parameter in parameters:
            if isinstance(parameter, torch.Tensor):
                self._away.pop(parameter, None)
                if id(parameter) in self._members:
                    self._is_home[parameter] = None

    def copied(self, parameter: Any, state: Any) -> Any:
        """Return the state of one parameter. Tensors on the link are returned as copies.

        For a GPU the copies are in host memory, because all state together may not fit on the device.
        """
        sent = self._away.get(parameter, ()) if isinstance(parameter, torch.Tensor) else ()
        there = {each.key: each for each in sent if state.get(each.key) is each.stand_in}
        if not isinstance(state, dict):
            return state
        # Always another dict: state that is on the device now may leave later, and the copy must not see that.
        return {
            key: there[key].ticket.read().cpu().as_strided(value.shape, value.stride()) if key in there else value
            for key, value in state.items()
        }

    def takes_copies(self) -> bool:
        """Return True at the first call after ``state_dict``: its caller gets copies of the state, and the state itself stays
        on the link.
        """
        takes, self._takes_copies = self._takes_copies, False
        return takes

    # Hooks

    def _state_dict_begins(self, optimizer: Optimizer) -> None:
        self._takes_copies = True

    def _state_dict_ends(self, optimizer: Optimizer, found: dict[str, Any]) -> None:
        self._takes_copies = False

    def _loaded(self, optimizer: Optimizer) -> None:
        self._adopt(optimizer)
        self.leave()

    def _whole_step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Optimizer pre-hook, called before each step. If other code runs the whole step, bring all state back first."""
        if self._is_stepping:
            return
        self.bring_back(list(self._away))
        if self._states_of_chunks() and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"plimsoll: other code runs {type(optimizer).__name__}.step without optimizer.step, so all of its state is on "
                "the device in this step, which may exceed the budget",
                stacklevel=4,
            )

    def _states_of_chunks(self) -> bool:
        return any(self._states.present(each) for chunk in self._chunks for each in chunk)

    def _adopt(self, optimizer: Optimizer) -> None:
        """Replace the optimizer's state mapping by one that brings tensors back when they are read. Called again after code
        loads or resets the state, because that replaces the mapping.
        """
        found = optimizer.state
        if isinstance(found, OffloadedStates) and found is getattr(self, "_states", None):
            return
        if isinstance(found, OffloadedStates):
            raise InvalidOption(
                f"The state of {type(optimizer).__name__} is offloaded already.",
                why="only one plan can decide where it is",
                next="call remove() on the handle of the other plan first",
            )
        self._away.clear()
        self._is_home.update({each: None for chunk in self._chunks for each in chunk})
        self._states = OffloadedStates(self, found.items())
        optimizer.state = self._states

    def _replacement(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return the function that takes the place of ``optimizer.step``."""
        mine, reference = weakref.ref(self), self._optimizer
        original = type(optimizer).step
        chunked = Optimizer.profile_hook_step(lambda me, *args, **kwargs: _alive(mine).run(me, args, kwargs))

        def step(me: Optimizer, *args: Any, **kwargs: Any) -> Any:
            offload = mine()
            if offload is None or offload._is_removed or me is not reference():
                return type(me).step(me, *args, **kwargs)
            if offload._is_stepping:
                return original(me, *args, **kwargs)
            with offload._stepping():
                return chunked(me, *args, **kwargs)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            me = reference()
            assert me is not None, "the caller holds the optimizer"
            me._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers check it
            return step(me, *args, **kwargs)

        replaced.__func__ = step  # type: ignore[attr-defined]  # torch's schedulers wrap it
        if self._had_own is not None:
            replaced._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or a scheduler warns of a lost wrapper
        return replaced

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    # The step

    def run(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step in chunks. The replaced ``optimizer.step`` calls this between the optimizer's pre hooks and post hooks.

        A closure is called once, before the first chunk.
        """
        result, args, kwargs = _closed(args, kwargs)
        if self._is_removed:  # the closure ran a forward, and that has applied another plan
            out = step_without_hooks(optimizer)(optimizer, *args, **kwargs)
            return out if result is None else result
        self._adopt(optimizer)
        self._send(each for chunk in self._chunks for each in chunk)  # what was read, and what the link did not take
        self._settle()
        inner = step_without_hooks(optimizer)
        whole = [group["params"] for group in optimizer.param_groups]
        rest = [each for params in whole for each in params if id(each) not in self._members]
        held = {id(each) for params in whole for each in params}
        chunks = [[each for each in chunk if id(each) in held] for chunk in self._chunks]
        undo = _Undo(groups=[_others(group) for group in optimizer.param_groups])
        known = set(map(id, self._states))
        is_rest = False
        try:
            for chunk in filter(None, chunks):
                self._arrive(chunk, undo)
                with narrowed(optimizer, in_groups(optimizer, chunk)):
                    out = inner(optimizer, *args, **kwargs)
                self._send(chunk)
            self._settle()
            is_rest = True
            if rest or not any(chunks):
                with narrowed(optimizer, in_groups(optimizer, rest)):
                    out = inner(optimizer, *args, **kwargs)
        except BaseException as error:
            self._put_back(optimizer, undo, error, has_rest=is_rest and bool(rest))
            raise
        self._states.order((each for params in whole for each in params), known)
        return out if result is None else result

    def _arrive(self, chunk: list[torch.Tensor], undo: _Undo) -> None:
        """Fetch the state of a chunk of parameters, while the state of the chunk before is sent to the link. Note in ``undo``
        what the step will change.
        """
        stepped = [each for each in chunk if each.grad is not None]
        for parameter in stepped:
            for each in self._away.get(parameter, ()):
                each.ticket.prefetch()
        known = len(undo.values)
        for parameter in stepped:
            state = self._states.present(parameter)
            undo.states.append(self._before(parameter, state, undo))
            self._save(parameter, undo)
        self._settle()
        saved = undo.values[known:]
        for value in saved:
            try:
                value[1].settle()
            except OffloadFailed:  # the ticket holds the tensor itself, which the step writes to
                undo.values = [each for each in undo.values if each is not value]
                undo.is_complete = False
        self.bring_back(stepped)

    def _before(self, parameter: torch.Tensor, state: Any, undo: _Undo) -> _Before:
        if not isinstance(state, dict):
            return _Before(parameter, None, [])
        entries = {}
        for key, value in state.items():
            if isinstance(value, AwayTensor) or not isinstance(value, torch.Tensor):
                entries[key] = value
            elif value.nbytes < self._least_bytes or not _is_flat(value):
                entries[key] = value.clone()
            else:  # it has not left because something else holds it
                entries[key] = value
                self._save(value, undo)
        return _Before(parameter, entries, list(self._away.get(parameter, ())))

    def _save(self, tensor: torch.Tensor, undo: _Undo) -> None:
        """Begin to copy the old values of a tensor to the link, because the step will write to the tensor."""
        try:
            ticket = self._link.store(_flat(tensor.detach()))
        except OffloadFailed:
            undo.is_complete = False
            return
        undo.values.append((tensor, ticket))

    def _send(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin to send the state of these parameters away. A tensor that the link does not take stays on the device."""
        for parameter in parameters:
            state = self._states.present(parameter)
            self._is_home.pop(parameter, None)
            if not isinstance(state, dict):
                continue
            for key in list(state):
                if self._may_leave(parameter, state, key):
                    try:
                        ticket = self._link.store(_flat(state[key]))
                    except OffloadFailed as failure:
                        self._stays(parameter, failure)
                        continue
                    away = _Away(key, AwayTensor.like(state[key]), ticket)
                    state[key] = away.stand_in
                    self._away.setdefault(parameter, []).append(away)
                elif not isinstance(state[key], AwayTensor) and _is_large(state[key], self._least_bytes):
                    self._is_home[parameter] = None
            self._leaving.append(parameter)

    def _may_leave(self, parameter: torch.Tensor, state: dict[Any, Any], key: Any) -> bool:
        # No local variable holds the tensor while its holders are counted.
        return (
            type(state[key]) is torch.Tensor
            and _is_large(state[key], self._least_bytes)
            and state[key].device == parameter.device
            and not state[key].requires_grad
            and _is_flat(state[key])
            and not is_held_elsewhere(state, key)
        )

    def _settle(self) -> None:
        """Wait until all state that is being sent has arrived on the link, so that its device memory is free."""
        leaving, self._leaving = self._leaving, []
        for parameter in leaving:
            try:
                for each in self._away.get(parameter, ()):
                    each.ticket.settle()
            except OffloadFailed as failure:  # the ticket holds the tensor itself
                self.bring_back([parameter])
                self._stays(parameter, failure)

    def _stays(self, parameter: torch.Tensor, failure: OffloadFailed) -> None:
        """Note that state of a parameter stays on the device until the next step, because the link failed. Warn once."""
        self._is_home.pop(parameter, None)
        if not self._has_warned_of_link:
            self._has_warned_of_link = True
            warnings.warn(
                f"plimsoll: optimizer state stays on the device, which may exceed the budget: {failure.found} "
                f"{failure.why}; next: {failure.next}",
                stacklevel=2,
            )

    def _put_back(self, optimizer: Optimizer, undo: _Undo, error: BaseException, *, has_rest: bool) -> None:
        """Restore parameters and state of the chunks from before the step, after ``error`` ended it. ``has_rest`` says that the
        call failed for the parameters outside of all chunks.
        """
        with contextlib.suppress(OffloadFailed):
            self._settle()
        try:
            with torch.no_grad():
                for tensor, ticket in undo.values:
                    tensor.copy_(ticket.read().as_strided(tensor.shape, tensor.stride()))
        except OffloadFailed as failure:
            undo.is_complete = False
            error.add_note(f"plimsoll: {failure.found}")
        for before in undo.states:
            self._away.pop(before.parameter, None)
            if before.entries is None:
                dict.pop(self._states, before.parameter, None)
                continue
            state = self._states.present(before.parameter)
            state.clear()
            state.update(before.entries)
            if before.away:
                self._away[before.parameter] = before.away
        for group, others in zip(optimizer.param_groups, undo.groups, strict=True):
            group.update(others)
        where, said = "in a chunk", "parameters and state are as before the step"
        if has_rest:
            where = "for the parameters outside of all chunks"
            said = "these are as the optimizer has left them, and all others are as before the step"
        if not undo.is_complete:
            said = "the link could not keep all parameters from before the step, so some are stepped and others are not"
        error.add_note(f"plimsoll: the optimizer's step failed {where}; {said}")


def _alive(reference: weakref.ref[StateOffload]) -> StateOffload:
    found = reference()
    assert found is not None, "the step holds it"
    return found


def _closed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """If a closure was passed to a step, call it. Return its result, and the step's arguments without it."""
    closure = kwargs.get("closure", args[0] if args else None)
    if closure is None:
        return None, args, kwargs
    with torch.enable_grad():
        result = closure()
    return result, (None, *args[1:]) if args else (), {key: value for key, value in kwargs.items() if key != "closure"}


def _others(group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter group other than its parameters. Tensors among them (a learning rate) are copied."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _plain(states: OffloadedStates) -> defaultdict[Any, Any]:
    return defaultdict(dict, dict.items(states))


def _is_large(value: Any, least_bytes: int) -> bool:
    return isinstance(value, torch.Tensor) and value.nbytes >= least_bytes


def _is_flat(tensor: torch.Tensor) -> bool:
    """Return True if the elements of a tensor fill one piece of memory without gaps, in any order of dimensions."""
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and tensor.numel() > 0 and is_dense(tuple(tensor.shape), tensor.stride())


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the memory of ``flat`` as a tensor with the shape and strides of ``like``. It is not a view: the base of a view
    would count as another holder of the memory.
    """
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), flat.storage_offset(), like.shape, like.stride())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor of one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))
