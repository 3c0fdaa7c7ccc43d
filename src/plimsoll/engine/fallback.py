"""What serves the calls that recipes cannot: the region is re-run by ``torch.utils.checkpoint``, or keeps everything.

A re-run must do what forward did. Python's and numpy's random states are put back for it (torch's are by
``torch.utils.checkpoint``), the torch calls of both runs are compared, and a region that changes anything outside of itself
is not re-run at all.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from plimsoll.artifacts.decision import Engine
from plimsoll.engine.call_stream import Stream, StreamGuard, StreamRecorder, called, references
from plimsoll.engine.guards import Entry, Places
from plimsoll.errors import RanksDiffer, ReplayMismatch
from plimsoll.tracing.recorder.collectives import is_routing

_CONTAINERS = (list, dict, set)


class Fallback:
    """What is known of one region about running it twice, and the ways to run it without recipes."""

    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        self._name = name
        self._forward = forward
        self.may_rerun = True
        """Whether nothing was seen yet that speaks against running it twice."""
        self.routes = False
        """Whether some op chooses which token goes where."""
        self.peers: tuple[int, ...] = ()
        """Global ranks with which its collectives talk."""

    @property
    def engine(self) -> Engine:
        """Which way to take: a region that changes anything outside of itself must not run twice.

        It writes or replaces buffers, attributes or inputs, is given an object (a cache) that it may write to, or talks to
        other ranks, which would not answer a second time.
        """
        return Engine.RERUN if self.may_rerun and not self.peers else Engine.KEEP

    def run(self, engine: Engine, entry: Entry, places: Places, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region without recipes. ``places`` are where the parameters and buffers of ``entry`` were found.

        Raises:
            ReplayMismatch: in backward, where the second run makes other torch calls than forward.
        """
        if engine is Engine.KEEP:
            return self._forward(*args, **kwargs)
        runs = _TwoRuns(self, entry, places)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=runs.contexts, **kwargs)

    def warn(self, engine: Engine, reason: str) -> None:
        """Say once how calls of the region are served from now on."""
        what = (
            "is re-run as a whole in backward (torch.utils.checkpoint)"
            if engine is Engine.RERUN
            else "keeps everything"
        )
        warnings.warn(f"plimsoll: region {self._name!r} {what}: {reason}", stacklevel=5)

    def say_surprise(self, guard: StreamGuard, calls: int) -> None:
        """Say that a call has kept everything because it was none of those known."""
        warnings.warn(
            f"plimsoll: a call of region {self._name!r} made torch calls that no recorded one has made, first "
            f"{called(guard.stranger)}: state of the host that its Python code reads has changed. The call kept everything, "
            f"so its gradients are right and this step may be over its budget; the next {calls} calls are recorded anew.",
            stacklevel=6,
        )

    def refusal(self, reason: str) -> RanksDiffer:
        """The error of a call on this rank that cannot follow its recipes while other ranks count on its collectives."""
        rank = torch.distributed.get_rank()
        return RanksDiffer(
            f"Region {self._name!r} cannot be rebuilt on rank {rank} as it was recorded: {reason}.",
            why="its recipes repeat collectives, in which all ranks must take part; this one would leave the others waiting",
            next="nothing was stepped; give the region's calls equal shapes, or plan without 'collectives' in allow=",
            ranks=(rank,),
        )

    def compare_runs(self, first: Stream, second: Stream) -> None:
        """Refuse a second run that went another way; it may stop early, when all that backward needs is there."""
        if second == first[: len(second)]:
            return
        self.may_rerun = False
        pairs = zip(first, second, strict=False)
        other = next((again for once, again in pairs if once != again), second[-1])
        raise ReplayMismatch(
            f"Region {self._name!r} did something else when it was run again, first {called(other.func)}.",
            why="state of the host that its Python code reads has changed between forward and backward",
            next="the optimizer has not stepped; run the step again: the region keeps everything from now on",
        )


class _TwoRuns:
    """Forward's run and the one in backward, with the same parameters and under the same random states of the host."""

    def __init__(self, fallback: Fallback, entry: Entry, places: Places) -> None:
        self._fallback = fallback
        self._places = tuple(places)
        self._sources = entry.sources
        self._known = references((*entry.sources, *entry.inputs))
        self._states = _host_random()
        self._stream: Stream = ()
        self._choices: list[Any] = []

    def _routing(self, made: Sequence[Any] | None = None) -> contextlib.AbstractContextManager[Any]:
        if not self._fallback.routes:
            return contextlib.nullcontext()
        return _Routing(self._choices if made is None else None, made or ())

    def contexts(self) -> tuple[Any, Any]:
        """For ``torch.utils.checkpoint``: the contexts of forward and of the second run."""
        return self._first(), self._second()

    @contextlib.contextmanager
    def _first(self) -> Iterator[None]:
        recorder = StreamRecorder([*self._known])
        with self._routing(), recorder:
            yield
        self._stream = recorder.stream

    @contextlib.contextmanager
    def _second(self) -> Iterator[None]:
        recorder, now = StreamRecorder([*self._known]), _host_random()
        _set_host_random(self._states)
        others = [holder.get(key) for holder, key in self._places]
        self._put(self._sources)
        try:
            with self._routing(self._choices), recorder:
                yield
        finally:
            self._put(others)
            _set_host_random(now)
            self._fallback.compare_runs(self._stream, recorder.stream)

    def _put(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Forward may have run with other objects under the same names (a functional call)."""
        for (holder, key), tensor in zip(self._places, tensors, strict=True):
            if holder.get(key) is not tensor:
                holder[key] = tensor


def host_state(module: nn.Module) -> list[Any]:
    """What forward may change in its modules beside the contents of tensors: equal lists, equal objects and containers."""
    found: list[Any] = []
    for inner in module.modules():
        for name, value in (*inner.__dict__.items(), *inner._buffers.items()):
            found += [name, id(value)]
            if type(value) in _CONTAINERS:
                found.append([id(item) for item in (value.values() if isinstance(value, dict) else value)])
    return found


def _host_random() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy.random")  # who has not imported it cannot draw from it
    return random.getstate(), None if numpy is None else numpy.get_state()


def _set_host_random(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])


class _Routing(TorchDispatchMode):
    """Notes what chose tokens or experts in forward, or gives it again.

    A router that runs again may break a tie otherwise, and would then send tokens to experts that forward did not use. Copies
    are noted and given: routers normalise their choice in place.
    """

    supports_higher_order_operators = True

    def __init__(self, noted: list[Any] | None, made: Sequence[Any]) -> None:
        super().__init__()
        self._noted = noted
        self._made = iter(made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not isinstance(func, torch._ops.OpOverload) or not is_routing(func):
            return func(*args, **(kwargs or {}))
        if self._noted is None:
            return tree_map_only(torch.Tensor, torch.clone, next(self._made))
        out = func(*args, **(kwargs or {}))
        self._noted.append(tree_map_only(torch.Tensor, torch.clone, out))
        return out
