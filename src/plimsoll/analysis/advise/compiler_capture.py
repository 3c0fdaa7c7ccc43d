"""Finds out what ``torch.compile`` would capture of one training step, at which lines the capture breaks, and why.

The step runs once under a Dynamo backend of Plimsoll, which executes every graph op by op and records the ops. Nothing is
compiled to kernels, and the model and Dynamo's settings are restored. An op in backward counts as captured if its autograd node
was made inside a graph: autograd numbers nodes in the order of forward, so a graph's nodes are a range of numbers.

Known weakness: Dynamo's caches are emptied before and after, because a frame that Dynamo once skipped would stay skipped. So
functions that were compiled before are compiled again at their next call. The time limit is checked between frames, graphs and
ops. The capture of a single graph is not interrupted.
"""

from __future__ import annotations

import bisect
import contextlib
import linecache
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters, get_compilation_metrics
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.artifacts.advice import BackwardOp, Capture, GraphBreak
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.tracing.recorder.calling import Loss, scalar_loss
from plimsoll.tracing.recorder.foreign_leaves import foreign_leaves_kept
from plimsoll.tracing.recorder.opkey import cost_key
from plimsoll.tracing.recorder.untouched import private_copy, side_effects_kept, untouched
from plimsoll.tracing.refusals import first_line
from plimsoll.tracing.torch_internals import current_autograd_node, sequence_number

_MARK = "_is_torch_compile"
"""The name of the attribute that torch.compile sets on a module that it compiles."""
_UNKNOWN = "Unknown"
"""The start of the reason that Dynamo gives when it has to trace a frame again because of a function that the frame calls."""
_IN_A_CALL = "step_unsupported"
"""The reason that Dynamo gives for a line with a call that it cannot capture.

The break inside the called function is listed separately.
"""
_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)")
_Place = tuple[str, str, int]
"""A tuple with why and where a graph breaks: the reason, the file and the line number."""
_FAILURES = (
    *(RuntimeError, TypeError, ValueError, LookupError, AttributeError),
    *(AssertionError, ArithmeticError, ImportError, OSError),
)
"""Errors of the step or of Dynamo that mean that the step cannot be captured.

They become part of the result and are not raised.
"""


class _OutOfTimeError(BaseException):
    """Raised when the time limit is over.

    It is not an ``Exception``, so that handlers inside Dynamo or the model cannot swallow it.
    """


def ask_compiler(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Loss | None = None,
    written: Collection[str] = (),
    limit_seconds: float = 60.0,
    progress: Progress | None = None,
) -> Capture:
    """Run one training step of ``model`` under Dynamo, and return which ops Dynamo captured and where its graphs broke.

    If the step cannot be captured, or not within ``limit_seconds``, the result says so; no error is raised. ``loss`` runs
    outside the compiled function. Parameters that the step writes (``written``, by name) are restored, as the rest of the model
    is, and so are objects in the batch and in the loss.

    Example:
        >>> capture = ask_compiler(nn.Linear(4, 1), (torch.ones(2, 4),), {}, loss=torch.sum)
        >>> capture.graphs
        1
    """
    if dynamo.config.disable:
        return Capture(is_asked=False, failure="torch.compile is switched off here (TORCHDYNAMO_DISABLE)")
    recorder = _Recorder(time.monotonic() + limit_seconds, progress or silent)
    failure = ""
    undone = side_effects_kept((args, kwargs), loss)
    with untouched(model, written), undone, _unmarked(model), _fresh_dynamo(recorder.check_time):
        started_microseconds = time.time_ns() // 1000
        try:
            recorder.run(model, private_copy((args, kwargs)), loss)
        except _OutOfTimeError:
            return Capture(is_asked=False, failure=f"it took longer than {limit_seconds:g} s; raise the limit")
        except torch.OutOfMemoryError:
            return Capture(is_asked=False, failure="the device ran out of memory: the step runs without a plan here")
        except _FAILURES as error:
            inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
            failure = f"{type(inner).__name__}: {first_line(inner)}"
        recorder.note_frames(started_microseconds)
    return recorder.capture(failure)


class _Recorder:
    """A backend of torch.compile that runs graphs op by op. It records the ops of one step and the places of graph breaks."""

    def __init__(self, deadline_seconds: float, report: Progress) -> None:
        self._deadline_seconds = deadline_seconds
        self._report = report
        self._graphs = 0
        self._forward: list[tuple[str, ...]] = []
        self._backward: list[BackwardOp] = []
        self._breaks: Counter[_Place] = Counter()
        self._nodes: list[tuple[int, int]] = []
        """Half-open ranges of numbers, ascending.

        They are the sequence numbers of the autograd nodes that captured graphs made.
        """
        self._is_captured = False

    def check_time(self, *_: object) -> None:
        if time.monotonic() > self._deadline_seconds:
            raise _OutOfTimeError

    def run(self, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], loss: Loss | None) -> None:
        self._report("asking torch.compile", 0.0)
        args, kwargs = call
        output = torch.compile(model, backend=self._backend)(*args, **kwargs)
        scalar = scalar_loss(output, loss)
        self._report("asking torch.compile", 0.8)
        autocast = torch.autocast(scalar.device.type, enabled=False)
        with _Watch(self._note_backward, self.check_time), autocast, foreign_leaves_kept(model, scalar):
            scalar.backward()

    def capture(self, failure: str) -> Capture:
        """Return what the compiler captured of the step, as recorded by this backend. ``failure`` says why the step failed.

        If the step failed, no op counts as captured. Each graph break is listed once with its count, the most frequent first.
        """
        breaks = tuple(
            GraphBreak(reason=reason, file=shorten(file), line=line, code=_code(file, line), count=count)
            for (reason, file, line), count in self._breaks.most_common()
        )
        if failure:
            return Capture(is_asked=True, failure=failure, breaks=breaks)
        return Capture(
            is_asked=True,
            graphs=self._graphs,
            forward=tuple(self._forward),
            backward=tuple(self._backward),
            breaks=breaks,
        )

    def _backend(self, graph: GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.check_time()
        self._graphs += 1
        self._report(f"asking torch.compile, graph {self._graphs}", min(0.1 * self._graphs, 0.7))
        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:  # else the function simply returned
            frame = reason.user_stack[-1] if reason.user_stack else None
            place = ("", 0) if frame is None else (frame.filename, frame.lineno or 0)
            self._breaks[_readable(reason.reason), *place] += 1

        def run(*inputs: Any) -> Any:
            keys: list[str] = []
            first = sequence_number()
            with _Watch(keys.append, self.check_time):
                out = graph.forward(*inputs)
            self._forward.append(tuple(keys))
            self._nodes.append((first, sequence_number()))
            return out

        return run

    def _note_backward(self, key: str) -> None:
        node: Any = current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if 0 <= number < 2**63:  # AccumulateGrad's number is larger; its ops count like the node before it
            place = bisect.bisect_right(self._nodes, (number, 2**63)) - 1
            self._is_captured = place >= 0 and number < self._nodes[place][1]
        self._backward.append(BackwardOp(cost_key=key, is_captured=self._is_captured))

    def note_frames(self, started_microseconds: int) -> None:
        """Add graph breaks to the record that only Dynamo's own log shows, from the given time on.

        They are whole frames that Dynamo left to Python, and breaks inside of functions that a frame calls.
        """
        inner: dict[str, tuple[str, str, int]] = {}
        for entry in get_compilation_metrics():
            if (entry.start_time_us or 0) < started_microseconds:
                continue
            if entry.fail_type is not None:
                reason = f"{_readable(entry.fail_reason or entry.fail_type)}; {_frame(entry.co_name)} is not captured"
                self._breaks[reason, entry.fail_user_frame_filename or "", entry.fail_user_frame_lineno or 0] += 1
            for text in entry.restart_reasons or ():
                if not text.startswith(_UNKNOWN):  # the innermost function that met it comes last
                    inner[_readable(text)] = (_frame(entry.co_name), entry.co_filename or "", entry.co_firstlineno or 0)
        known = {reason for reason, _, _ in self._breaks}
        for reason, (name, file, line) in inner.items():
            if not any(text.startswith(reason) for text in known):
                self._breaks[f"{reason}, in {name}", file, line] += 1


class _Watch(TorchDispatchMode):
    """A dispatch mode that watches the ops of a step: before each op, it calls ``check_time`` and passes the op's key to
    ``note``.

    It then runs the op unchanged.
    """

    def __init__(self, note: Callable[[str], None], check_time: Callable[[], None]) -> None:
        super().__init__()
        self._note, self._check_time = note, check_time

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._check_time()
        self._note(cost_key(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _unmarked(model: nn.Module) -> Iterator[None]:
    """A context for a block that compiles a module. When the block ends, the attribute that torch.compile has set on the module
    is removed.

    If the attribute was there before the block, it is put back.
    """
    kept = {name: value for name, value in vars(model).items() if name == _MARK}
    try:
        yield
    finally:
        vars(model).pop(_MARK, None)
        vars(model).update(kept)


@contextlib.contextmanager
def _fresh_dynamo(check_time: Callable[..., None]) -> Iterator[None]:
    """Empty Dynamo's caches before and after the block, and use default settings inside it.

    Afterwards the user's settings, counters and callbacks are restored.
    """
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


def shorten(file: str) -> str:
    """Return a short form of a source file's path, for display in the advice.

    A path in an installed package starts at the package, a path below the working directory is relative to it, and of any other
    path only the file's name remains.
    """
    _, found, inside = file.replace(os.sep, "/").rpartition("/site-packages/")
    if found:
        return inside
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def _code(file: str, line: int) -> str:
    """Return the source line at which a graph breaks, as text.

    The text is empty for a decorator or the head of a function, which does not say more than the function's name.
    """
    text = linecache.getline(file, line).strip() if file else ""
    return "" if text.startswith(("@", "def ")) else text


def _readable(text: str) -> str:
    """Return a short reason for a graph break: the first line of Dynamo's text.

    Its other lines are hints for Dynamo's developers.
    """
    first = text.strip().partition("\n")[0] or "no reason given"
    return "something in this call cannot be captured" if first == _IN_A_CALL else first


def _frame(name: str | None) -> str:
    """Return a readable name for a function that Dynamo left to Python. ``name`` is the name that Dynamo reports.

    After a break, Dynamo makes a function for the rest of the original function. Its made-up name is translated.
    """
    resumed = _RESUMED.fullmatch(name or "")
    if resumed is None:
        return name or "the function"
    return f"the rest of {resumed['name']} after line {resumed['line']}"
