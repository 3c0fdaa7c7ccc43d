"""A model and a batch in, what Dynamo captures of one training step out; the model and Dynamo afterwards as before.

The step runs once under a backend of ours that executes every graph that Dynamo hands over op by op and notes what ran in
it. Nothing is compiled to kernels. In backward an op counts as captured when its autograd node was made inside a graph: nodes
are numbered in the order in which forward makes them.

Known weakness: Dynamo's caches are emptied before and after (a frame that it once skipped would stay skipped), so functions
that were compiled before are compiled again at their next call. The time limit is looked at between frames, graphs and ops;
a single graph that takes longer to capture is finished first.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.analysis.advise.compiler.breaks import BreakBook
from plimsoll.artifacts.capture import BackwardOp, Capture
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.tracing.recorder.calling import Loss, scalar_loss
from plimsoll.tracing.recorder.opkey import cost_key
from plimsoll.tracing.recorder.untouched import private_copy, untouched

_MARK = "_is_torch_compile"
_FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    OSError,
)


class _OutOfTimeError(BaseException):
    """No ``Exception``: what is caught on the way must not swallow it."""


def ask_compiler(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Loss | None = None,
    limit_seconds: float = 60.0,
    progress: Progress | None = None,
) -> Capture:
    """Run one training step of ``model`` under Dynamo and note what it captures.

    Args:
        model: as it trains, not managed by a plan.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        loss: from the output to a scalar; it runs outside of what is compiled.
        limit_seconds: how long it may take; what takes longer is a result that says so.
        progress: told the stage and the share done.

    Returns:
        What was captured. A model that cannot be captured, or not in time, is a result and no error.

    Example:
        >>> capture = ask_compiler(nn.Linear(4, 1), (torch.ones(2, 4),), {}, loss=torch.sum)
        >>> capture.graphs
        1
    """
    if dynamo.config.disable:
        return Capture(is_asked=False, failure="torch.compile is switched off here (TORCHDYNAMO_DISABLE)")
    report = progress or silent
    report("asking torch.compile", 0.0)
    job = _Job(loss, time.monotonic() + limit_seconds, report)
    with untouched(model), _unmarked(model), _fresh_dynamo(job.check_time), job.breaks.watching():
        try:
            job.run(model, *private_copy((args, kwargs)))
        except _OutOfTimeError:
            return Capture(is_asked=False, failure=f"it took longer than {limit_seconds:g} s; raise the limit")
        except torch.OutOfMemoryError:
            return Capture(is_asked=False, failure="the device ran out of memory: the step runs without a plan here")
        except _FAILURES as error:
            return Capture(is_asked=True, failure=_describe(error), breaks=job.breaks.entries())
    return job.capture()


class _Job:
    """One step under the backend that notes what it is given."""

    def __init__(self, loss: Loss | None, deadline_seconds: float, report: Progress) -> None:
        self.breaks = BreakBook()
        self._loss = loss
        self._deadline_seconds = deadline_seconds
        self._report = report
        self._graphs = 0
        self._forward: list[list[str]] = []
        self._backward: list[BackwardOp] = []
        self._nodes: list[tuple[int, int]] = []
        """Half-open ranges of the numbers of the autograd nodes that captured graphs made, ascending."""
        self._is_captured = False

    def check_time(self, *_: object) -> None:
        if time.monotonic() > self._deadline_seconds:
            raise _OutOfTimeError

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        compiled = torch.compile(model, backend=self._backend)
        output = compiled(*args, **kwargs)
        loss = scalar_loss(output, self._loss)
        self._report("asking torch.compile", 0.8)
        with _Watch(self._note_backward), torch.autocast(loss.device.type, enabled=False):
            loss.backward()

    def capture(self) -> Capture:
        return Capture(
            is_asked=True,
            graphs=self._graphs,
            forward=tuple(map(tuple, self._forward)),
            backward=tuple(self._backward),
            breaks=self.breaks.entries(),
        )

    def _backend(self, graph: GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.check_time()
        self._graphs += 1
        self.breaks.note(graph)
        self._report(f"asking torch.compile, graph {self._graphs}", min(0.1 * self._graphs, 0.7))

        def run(*inputs: Any) -> Any:
            self._forward.append([])
            first = torch._C._autograd._get_sequence_nr()
            with _Watch(self._note_forward):
                out = graph.forward(*inputs)
            self._nodes.append((first, torch._C._autograd._get_sequence_nr()))
            return out

        return run

    def _note_forward(self, key: str) -> None:
        self.check_time()
        self._forward[-1].append(key)

    def _note_backward(self, key: str) -> None:
        self.check_time()
        node: Any = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if 0 <= number < 2**63:  # accumulating into .grad belongs to what came before
            place = bisect.bisect_right(self._nodes, (number, 2**63)) - 1
            self._is_captured = place >= 0 and number < self._nodes[place][1]
        self._backward.append(BackwardOp(cost_key=key, is_captured=self._is_captured))


class _Watch(TorchDispatchMode):
    """Tells the key of every op that runs, and runs it."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._note(cost_key(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _unmarked(model: nn.Module) -> Iterator[None]:
    """Take off the mark that torch.compile puts on a module, unless it was there before."""
    kept = {name: value for name, value in vars(model).items() if name == _MARK}
    try:
        yield
    finally:
        vars(model).pop(_MARK, None)
        vars(model).update(kept)


@contextlib.contextmanager
def _fresh_dynamo(check_time: Callable[..., None]) -> Iterator[None]:
    """Empty caches and default settings inside, empty caches and the user's settings, counters and callbacks after."""
    callbacks = [*callback_handler.start_callbacks], [*callback_handler.end_callbacks]
    counted = {name: counter.copy() for name, counter in counters.items()}
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    dynamo.reset()
    callback_handler.register_start_callback(check_time)
    logger.setLevel(logging.ERROR)
    try:
        with torch.compiler.set_stance("default"), dynamo.config.patch(suppress_errors=False):
            yield
    finally:
        logger.setLevel(level)
        dynamo.reset()
        callback_handler.start_callbacks, callback_handler.end_callbacks = callbacks
        counters.clear()
        counters.update(counted)


def _describe(error: BaseException) -> str:
    """The class and the first line of what stopped the capture; of the backend's wrapper, what it wraps."""
    if isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
