"""Draws the batches that both arms of a probe train on, the same sequence every time.

An exhausted stream is iterated again. Every pass starts from the same random state. So a loader that shuffles gives the same
order in every pass, and the batches at its end can be set apart. A checksum covers all drawn batches, so that a resumed run can
check that the data is the same.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from plimsoll.analysis.probe.keeping import own_randomness, seed_everything
from plimsoll.errors import InvalidProbe, ProbeRunMismatch
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.recorder.calling import split_batch
from plimsoll.tracing.recorder.untouched import RandomState

MOST_SET_APART = 8
_SHARE_SET_APART = 10
"""The reciprocal of the share of batches that is set apart for evaluation by default. At most ``MOST_SET_APART`` batches are
set apart.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """Data: one batch, as positional and keyword arguments for a call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Stream:
    """Draws the batches to train on, the same sequence in each run.

    Args:
        source: a batch (tensor, tuple, mapping), or an iterable of batches.
        set_apart: how many batches at the end of each pass are reserved for evaluation. ``None`` reserves a tenth, at most 8,
            if the length of the stream is known, else none.
        seed: the seed of the random state at the start of each pass.

    Raises:
        InvalidProbe: ``set_apart`` is negative, the stream's length is unknown, or no batches would remain for training.
    """

    def __init__(self, source: Any, *, set_apart: int | None, seed: int) -> None:
        self._source = source
        self._seed = seed
        self.is_fixed = is_batch(source)
        self.drawn = 0
        self.checksum = 0
        self._batches = self._passes()
        self._state: RandomState | None = None
        self._first: Call | None = None
        self._length = None if self.is_fixed else _length_of(source)
        self.set_apart = self._count_set_apart(set_apart)

    @property
    def description(self) -> str:
        """A short text that describes the batches of this stream, for the verdict."""
        if self.is_fixed:
            return "one fixed batch"
        length = "" if self._length is None else f" of {self._length} batches"
        return f"a stream{length}"

    def held_out(self) -> list[Call]:
        """Return the batches that this stream sets apart for evaluation, which ``draw`` never returns."""
        if not self.set_apart or self._length is None:
            return []
        if isinstance(self._source, Sequence):
            return [_as_call(batch) for batch in self._source[-self.set_apart :]]
        with own_randomness():
            seed_everything(self._seed)
            return [_as_call(batch) for batch in itertools.islice(self._source, self._length - self.set_apart, None)]

    def first(self) -> Call:
        """Return the next batch without drawing it; ``draw`` still returns it.

        Raises:
            InvalidProbe: the stream does not yield a batch.
        """
        if self._first is None:
            self._first = self._next_call()
        return self._first

    def draw(self, count: int) -> list[Call]:
        """Return the next ``count`` batches.

        Raises:
            InvalidProbe: the stream does not yield batches, or it is an iterator that has ended.
        """
        calls = []
        for _ in range(count):
            call = self._next_call() if self._first is None else self._first
            self._first = None
            self.drawn += 1
            self.checksum = checksum(call, self.checksum)
            calls.append(call)
        return calls

    def skip(self, count: int) -> None:
        """Draw and discard ``count`` batches, because they were used before an interruption."""
        for _ in range(count):
            self.draw(1)

    def check(self, known: int) -> None:
        """Raise if the batches drawn so far are not those that a run has used, by the checksum ``known``.

        Raises:
            ProbeRunMismatch: the checksums differ.
        """
        if known != self.checksum:
            raise ProbeRunMismatch(
                f"The batches have changed since this run began: checksum {self.checksum:08x}, not {known:08x}.",
                why=f"the checksum of the first {self.drawn} batches differs from the saved one",
                next="give the same data in the same order (make a loader with its own generator= again, because its "
                "generator does not restart), or another directory for --run",
            )

    def _next_call(self) -> Call:
        with own_randomness():
            if self._state is not None:
                self._state.put_back()
            call = _as_call(next(self._batches))
            self._state = RandomState()
        return call

    def _passes(self) -> Iterator[Any]:
        """Yield the training batches of one pass after the other, without end. The batches that are set apart are left out."""
        if self.is_fixed:
            yield from itertools.repeat(self._source)
        while True:
            seed_everything(self._seed)
            try:
                batches = iter(self._source)
            except TypeError as error:
                raise InvalidProbe(
                    f"A {type(self._source).__name__} is neither a batch nor a stream of batches.",
                    why=str(error),
                    next="pass a batch (a tensor, a tuple or a dict), or an iterable of batches",
                ) from error
            is_empty = True
            try:
                kept = None if self._length is None or not self.set_apart else self._length - self.set_apart
                for batch in itertools.islice(batches, kept):
                    is_empty = False
                    yield batch
            except Exception as error:  # a loader runs user code
                raise InvalidProbe(
                    f"The stream failed after {self.drawn} batches: {type(error).__name__}: {error}",
                    why="iterating over it raised this error at the next batch",
                    next="check that `for batch in batches` works; with a run directory, progress so far is kept",
                ) from error
            if is_empty:
                raise self._ended()

    def _ended(self) -> InvalidProbe:
        if isinstance(self._source, Iterator) and self.drawn:
            return InvalidProbe(
                f"The stream of batches ended after {self.drawn} batches.",
                why="it is an iterator, which can be read only once",
                next="give a list or a data loader, or run fewer steps",
            )
        return InvalidProbe(
            "The stream of batches is empty.",
            why="it ended before it yielded a batch",
            next="give at least one batch to train on",
        )

    def _count_set_apart(self, wanted: int | None) -> int:
        if wanted is None:
            return 0 if self._length is None else min(MOST_SET_APART, self._length // _SHARE_SET_APART)
        if not wanted:
            return 0
        if self._length is None:
            raise InvalidProbe(
                f"The last {wanted} batches cannot be held out.",
                why="there is only one batch"
                if self.is_fixed
                else "the number of batches is unknown: the stream has no length",
                next="give a list of batches, or pass separate batches as held_out=",
            )
        if wanted < 0 or wanted >= self._length:
            raise InvalidProbe(
                f"{wanted} of {self._length} batches cannot be held out.",
                why="no batch would be left to train on"
                if wanted > 0
                else "the number of batches must not be negative",
                next=f"hold out fewer than {self._length}, or give more batches",
            )
        return wanted


def is_batch(source: Any) -> bool:
    """Whether ``source`` is one batch (a tensor, a tuple or a mapping) and not a stream of batches."""
    return isinstance(source, torch.Tensor | tuple | Mapping)


def held_out_calls(source: Iterable[Any], seed: int) -> list[Call]:
    """Return the batches for evaluation as a list.

    Reading starts from a random state of this seed, so a loader that shuffles gives the same list again. The global random
    state is restored.

    Raises:
        InvalidProbe: ``source`` does not yield batches.
    """
    with own_randomness():
        seed_everything(seed)
        calls = [_as_call(batch) for batch in ([source] if is_batch(source) else source)]
    if not calls:
        raise InvalidProbe(
            "held_out= is empty.",
            why="it ended before it yielded a batch",
            next="give at least three batches, or leave held_out= out",
        )
    return calls


def checksum(call: Call, start: int = 0) -> int:
    """Return a CRC-32 of one batch's tensors and other values, continued from ``start``.

    ``start`` is the checksum of the batches before it.
    """
    code = start
    for leaf in tree_leaves((call.args, {name: call.kwargs[name] for name in sorted(call.kwargs)})):
        if isinstance(leaf, torch.Tensor):
            for part in dense_parts(leaf.detach()):  # of a sparse tensor, its indices and its values
                flat = part.to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
                code = zlib.crc32(flat.view(torch.uint8).numpy().data, code)
        else:
            code = zlib.crc32(repr(leaf).encode(), code)
    return code


def _length_of(source: Any) -> int | None:
    """Return the number of batches, or ``None`` if it is unknown.

    A ``DataLoader`` has ``__len__`` even over a dataset without a length, so only a call of ``len`` shows whether it has one.
    """
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def _as_call(batch: Any) -> Call:
    args, kwargs = split_batch(batch)
    return Call(args, kwargs)


def read_data(batches: Any, held_out: Iterable[Any] | int | None, seed: int) -> tuple[Stream, list[Call]]:
    """Return the stream of batches to train on, and the list of batches for evaluation, from the arguments of ``probe``."""
    if held_out is None or isinstance(held_out, int):
        stream = Stream(batches, set_apart=held_out, seed=seed)
        return stream, stream.held_out()
    return Stream(batches, set_apart=0, seed=seed), held_out_calls(held_out, seed)
