"""Tracks the autograd graphs of a model's forwards until a backward has run through them.

A training step may run several forwards before one backward (pairs, preference losses), so the step is over only when none of
its graphs is waiting. A graph that was dropped does not wait any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from plimsoll.tracing.recorder.untouched import returned_tensors
from plimsoll.tracing.torch_internals import at_end_of_backward, current_graph_task


def is_in_backward() -> bool:
    """Return True if this thread is within a backward. If a module is called then, other checkpointing code is
    recomputing it.
    """
    return current_graph_task() != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has finished.

    Callbacks that wrappers of the model have queued run before it.
    """
    at_end_of_backward(lambda: at_end_of_backward(callback))


class OpenGraphs:
    """Holds weak references to the autograd graphs of a step's forwards that wait for their backward.

    ``on_backward`` is called when backward reaches one of these graphs. ``on_backward_end`` is called after each backward that
    has reached at least one of them.
    """

    def __init__(self, on_backward_end: Callable[[], None], on_backward: Callable[[], None]) -> None:
        self._waiting: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self._on_backward_end, self._on_backward = on_backward_end, on_backward
        self._task = -1
        self.most = 0
        """The largest number of graphs that have waited at the same time since `begin`."""
        self.has_backward = False
        """Whether a backward has run through at least one of the graphs since `begin`."""

    def __len__(self) -> int:
        return len(self._waiting)

    def abandon(self) -> None:
        """Remove the graphs that still wait, because their backward will not run. They no longer count for the step."""
        self.most -= len(self._waiting)
        self._waiting.clear()

    def begin(self) -> None:
        """Begin another step: forget the graphs of the step before."""
        self.abandon()
        self.most, self.has_backward = 0, False

    def note(self, output: Any) -> None:
        """Note the autograd graph of a forward that has returned ``output``."""
        graph = _Graph(weakref.WeakMethod(self._passed))
        for node in {tensor.grad_fn for tensor in returned_tensors(output)}:
            if node is not None:
                node.register_prehook(graph)
                self._waiting.add(graph)
        self.most = max(self.most, len(self._waiting))

    def _passed(self, graph: _Graph) -> None:
        self._waiting.discard(graph)
        self.has_backward = True
        self._on_backward()
        task = current_graph_task()
        # the first graph that this backward reaches; a backward that failed half-way is forgotten
        if task != self._task:
            self._task = task
            after_backward(self._on_backward_end)


class _Graph:
    """A prehook on the last nodes of a graph. It exists as long as these nodes, and is called when backward reaches one of
    them.
    """

    def __init__(self, passed: weakref.WeakMethod[Callable[[_Graph], None]]) -> None:
        self._passed = passed

    def __call__(self, gradients: Any) -> None:
        passed = self._passed()
        if passed is not None:
            passed(self)
