"""Profiles a step alternately without and with a plan, in one session of ``torch.profiler``, and labels its modules.

Both variants share one session, so that any drift affects both. Afterwards the trace is split by step. On a CPU, only the
rounds that lost the least time to other programs are kept. Lost time is the step's wall time minus its CPU time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import gzip
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from plimsoll.analysis.diagnose.profile import MODULE_PREFIX
from plimsoll.artifacts.files import write_whole
from plimsoll.artifacts.progress import Progress
from plimsoll.tracing.compiled.units import Unit
from plimsoll.tracing.meters.timing import wait_for_device

_STEP_PREFIX = "plimsoll.step: "
_US = 1e6
_RUN_PER_KEPT = 2
"""On a CPU, the number of rounds that are run for each round that is kept. The rounds that other programs disturbed least are
kept.
"""
_MARGIN_US = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Data: one profiled step. It has its number in the session, its variant ``name``, its round ``turn``, and its seconds.

    ``lost_seconds`` are the seconds that other programs took.
    """

    number: int
    name: str
    turn: int
    seconds: float
    lost_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTraces:
    """Data: the path of the trace file of each variant (without and with the plan).

    ``lost_share`` is the share of the kept steps' time that other programs took (always 0 on a GPU).
    """

    traces: dict[str, Path]
    lost_share: float


def profile_in_turns(
    names: Sequence[str],
    prepare: Callable[[str], None],
    step: Callable[[], object],
    folder: Path,
    *,
    device: torch.device,
    rounds: int,
    report: Progress,
) -> TurnTraces:
    """Profile one step per round and variant (with and without the plan), and write one trace per variant.

    ``prepare(name)`` switches to a variant before each step and is not part of the profiled step. Warm up ``step`` in every
    variant before the call. The files are ``<name>.trace.json.gz`` in ``folder``, which must exist.
    """
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    total = rounds if is_cuda else rounds * _RUN_PER_KEPT
    turns: list[Turn] = []
    with profile(activities=activities, record_shapes=True) as profiler:
        for turn in range(total):
            report("profiling in turns", turn / total)
            # The order alternates, so that no variant always runs second.
            for name in names if turn % 2 == 0 else reversed(names):
                prepare(name)
                turns.append(_run(step, len(turns), name, turn, device))
    report("writing traces", 1.0)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole.json"
        profiler.export_chrome_trace(str(whole))
        trace: dict[str, Any] = msgspec.json.decode(whole.read_bytes())
    kept = _quietest(turns, rounds)
    traces = {name: _write(trace, [turn for turn in kept if turn.name == name], folder, name) for name in names}
    lost_share = 0.0 if is_cuda else sum(turn.lost_seconds for turn in kept) / sum(turn.seconds for turn in kept)
    return TurnTraces(traces=traces, lost_share=max(0.0, lost_share))


def _run(step: Callable[[], object], number: int, name: str, turn: int, device: torch.device) -> Turn:
    gc.collect()  # so that garbage of the previous step is not collected during this step
    start, start_of_process = time.perf_counter(), time.process_time()
    with record_function(f"{_STEP_PREFIX}{number}"):
        step()
        wait_for_device(device)
    seconds, busy_seconds = time.perf_counter() - start, time.process_time() - start_of_process
    return Turn(number=number, name=name, turn=turn, seconds=seconds, lost_seconds=seconds - busy_seconds)


def _quietest(turns: list[Turn], rounds: int) -> list[Turn]:
    """Return the profiled steps of the rounds that lost the least time to other programs.

    Rounds are kept whole, so that each step keeps its counterpart.
    """
    lost: dict[int, float] = {}
    for turn in turns:
        lost[turn.turn] = max(lost.get(turn.turn, 0.0), turn.lost_seconds)
    kept = set(sorted(lost, key=lambda turn: lost[turn])[:rounds])
    return [turn for turn in turns if turn.turn in kept]


def _write(trace: dict[str, Any], turns: list[Turn], folder: Path, name: str) -> Path:
    """Write a copy of the trace that has only the events of the given steps, and return its path."""
    events = trace["traceEvents"]
    names = {f"{_STEP_PREFIX}{turn.number}" for turn in turns}
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") in names and event.get("cat") == "user_annotation"
    )
    kept = [event for event in events if event.get("ph") == "M" or _is_inside(event.get("ts", 0.0), ranges)]
    path = folder / f"{name}.trace.json.gz"
    content = msgspec.json.encode({**trace, "traceEvents": kept, "traceName": path.name})
    write_whole(gzip.compress(content, compresslevel=1), path)
    return path


def _is_inside(at_us: float, ranges: list[tuple[float, float]]) -> bool:
    return any(start - _MARGIN_US <= at_us <= end + _MARGIN_US for start, end in ranges)


@contextlib.contextmanager
def named_calls(model: nn.Module, units: Sequence[Unit] = ()) -> Iterator[None]:
    """Mark each forward call of a module as a named profiler range inside the block. Recomputed calls are marked too.

    Modules inside ``units``, which torch.compile compiles, are not marked: a hook would trigger a recompilation.

    Ranges stay nested even if a forward raises, as recomputation with early stop does.
    """
    opened: list[record_function] = []
    handles: list[RemovableHandle] = []

    def open_range(name: str, *_: object) -> None:
        mark = record_function(MODULE_PREFIX + name)
        mark.__enter__()
        opened.append(mark)

    def close_range(*_: object) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    try:
        for name, module in model.named_modules():
            if name and not any(unit.holds(name) for unit in units):
                handles.append(module.register_forward_pre_hook(functools.partial(open_range, name), prepend=True))
                handles.append(module.register_forward_hook(close_range, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
