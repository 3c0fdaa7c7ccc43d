"""Decides for each call of one signature whether its torch calls have to be compared with the recorded ones.

A call is served without the comparison once three things are known. One call was watched, and `HostState` found all that its
code can read. That state was the same before and after a later call. That later call made the recorded torch calls. From then
on an unchanged state implies the same calls. Where the state has changed, the call is compared as usual and the proof begins
anew. After `MOST_FAILURES` changes it is not tried again, for such a model changes all the time.

Some calls are compared all the same, the first ones often. If one of them finds other torch calls though the state is
unchanged, the state does not decide them, and every later call is compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from plimsoll.engine.executed_code import ExecutedCode
from plimsoll.engine.guards import SCALARS
from plimsoll.engine.host_state import HostState

CALLS_BEFORE = 4
"""A signature that is met less often, as sizes that vary are, is not worth watching: it takes about 20 ms a block."""
MOST_FAILURES = 3
COMPARED_EVERY = 64
"""Every 64th call is compared, and before that the 1st, 2nd, 4th, 8th …"""


class Constancy:
    """The proof for the calls of one signature, as far as it has come. ``reason`` says why there is none."""

    def __init__(self, module: nn.Module) -> None:
        self.reason = ""
        self._module = module
        self._calls = 0
        self._failures = 0
        self._watch: ExecutedCode | None = None
        self._state: HostState | None = None
        self._held = False
        """Whether the state was unchanged when the latest call began."""
        self._program: Any = None
        self.is_proved = False
        """Whether an unchanged state is known to imply the recorded torch calls."""

    def give_up(self, reason: str) -> None:
        """Compare every call from now on."""
        self.reason = reason
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._watch, self._state, self._program = None, None, None
        self._held = self.is_proved = False
        self._calls = 0

    def begin(self) -> Any:
        """A call begins: the program that serves it, or ``None`` where its torch calls have to be compared."""
        self._calls += 1
        if self._state is None:
            return None
        self._held = self._state.holds()
        if not self._held or not self.is_proved or _is_compared(self._calls):
            return None
        return self._program

    def watching(
        self, ops: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[object]:
        """Around forward of a call that is compared. ``ops`` are names of torch functions that return tensors."""
        if self._state is not None or self.reason or self._calls < CALLS_BEFORE:
            return contextlib.nullcontext()
        if not all(
            isinstance(leaf, (torch.Tensor, *SCALARS)) for leaf in tree_leaves((args, kwargs)) if leaf is not None
        ):
            self.give_up("its arguments hold objects, whose state a signature does not show")
            return contextlib.nullcontext()
        self._watch = ExecutedCode(ops)
        return self._watch

    def end(self, program: Any, asked: Iterable[Any], sources: Sequence[torch.Tensor | None]) -> None:
        """A compared call has ended; its program is ``None`` if its torch calls were new.

        ``asked`` are the torch functions that returned no tensor.
        """
        watch, self._watch = self._watch, None
        if watch is not None and program is not None:
            watch.judge(asked)
            state = HostState.of(self._module, watch, sources)
            if state.obstacle:
                self.give_up(state.obstacle)
            else:
                self._state, self._program = state, program
        elif self._state is None:
            return
        elif self._held and program is not self._program:
            if self.is_proved:
                self.give_up("its torch calls differ though nothing that its code can read has changed")
            else:
                self._fail()
        elif not self._held or not (self.is_proved or self._state.holds()):
            self._fail()
        else:
            self.is_proved = True

    def _fail(self) -> None:
        self._failures += 1
        self.forget()
        if self._failures >= MOST_FAILURES:
            self.give_up("what its code can read changes all the time")


def _is_compared(calls: int) -> bool:
    """Whether this call is compared though its state is unchanged."""
    return calls % COMPARED_EVERY == 0 if calls > COMPARED_EVERY else calls & (calls - 1) == 0
