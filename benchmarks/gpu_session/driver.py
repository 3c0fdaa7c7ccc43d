"""Runs stages one after the other, each in a process of its own with a limit of its own.

The driver imports torch, transformers and Plimsoll once and forks: an import takes seconds, and there are a dozen stages.
It never uses the device itself, because CUDA does not survive a fork. Where a forked process cannot use CUDA all the same
(something that was imported has started it), each stage starts a Python of its own.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import importlib
import importlib.util
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_session.lines import RESULTS, Lines
from benchmarks.gpu_session.settings import ROOT

if TYPE_CHECKING:
    from benchmarks.gpu_session.stages import Stage

_NEEDED = ("torch", "transformers", "msgspec", "numpy", "scipy", "jinja2")
PRELOADED = (
    "benchmarks.gpu_session.stages.smoke",
    "benchmarks.models.llama",
    "benchmarks.models.qwen3",
    "transformers.models.gpt2.modeling_gpt2",
    "plimsoll.session.plan",
    "plimsoll.planning.solve",
    "plimsoll.engine.apply",
    "plimsoll.analysis.verify.verify",
)
"""Imported once, for all stages."""
_GRACE_SECONDS = 3.0
"""A stage is asked to end this long before it is killed."""
_PR_SET_PDEATHSIG = 1


def drive(
    only: Sequence[str] | None, device: str, seconds: float, *, folder: Path, command: str, started: float
) -> int:
    """Run the stages that there is time for; 0, or 2 where nothing could be run.

    Args:
        only: names of stages, or all of them.
        device: ``cuda`` or ``cpu``.
        seconds: how long all of it may take.
        folder: where the lines go.
        command: what was typed, for the page.
        started: when the time began, of ``time.monotonic``.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{sys.executable} lacks {', '.join(missing)}: install that, or put it on PYTHONPATH.")
        return 2
    from benchmarks.gpu_session.stages import STAGES

    unknown = set(only or ()) - {stage.name for stage in STAGES}
    if unknown:
        print(f"No stage {', '.join(sorted(unknown))}. Stages: {', '.join(stage.name for stage in STAGES)}.")
        return 2
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # half a million objects of modules: every stage collects garbage before it measures
    must_execute = False
    if device == "cuda":
        must_execute = not _succeeds(_use_cuda)
        if must_execute and not _succeeds(lambda: _execute("-c", "import torch; torch.ones(1, device='cuda')")):
            print(f"{sys.executable} cannot use a GPU. A dry run: python -m benchmarks.gpu_session --device cpu")
            return 2
    lines = Lines(folder / RESULTS)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines.write(run=now, command=command, device=device, seconds=seconds, starts_python_per_stage=must_execute)
    chosen = [stage for stage in STAGES if not only or stage.name in only]
    _Driver(lines, device, folder, must_execute).run(chosen, started + seconds - _GRACE_SECONDS)
    gc.unfreeze()  # triton's bindings complain about objects that are left at the exit
    print(f"{folder / RESULTS}: {time.monotonic() - started:.0f} s")
    return 0


def run_stage(name: str, part: str, device: str, folder: Path, limit_seconds: float) -> int:
    """Run one stage in this process; 1 where it failed as a whole."""
    from benchmarks.gpu_session.devices import open_device
    from benchmarks.gpu_session.session import Session
    from benchmarks.gpu_session.stages import STAGES

    [stage] = [each for each in STAGES if each.name == name]
    session = Session(name, open_device(device), folder, limit_seconds)
    try:
        stage.run(session, part)
    except Exception as error:  # noqa: BLE001 - a line has to say what failed, whatever it was
        traceback.print_exc()
        session.write(way=part, error=f"{type(error).__name__}: {error}"[:600], at=traceback.format_exc()[-600:])
        return 1
    return 0


class _Driver:
    def __init__(self, lines: Lines, device: str, folder: Path, must_execute: bool) -> None:  # noqa: FBT001 - one fact
        self._lines, self._device, self._folder, self._must_execute = lines, device, folder, must_execute

    def run(self, stages: Sequence[Stage], end: float) -> None:
        """Run every stage for which its least time is left; time is reserved for as many as fit from the start."""
        chosen = fitting(stages, end - time.monotonic())
        for index, stage in enumerate(stages):
            left = end - time.monotonic()
            reserved = sum(later.least_seconds for later in chosen[index + 1 :])
            # A dry run is to reach every stage, on however busy a machine.
            if left < (stage.least_seconds if self._device == "cuda" else _GRACE_SECONDS + 2):
                self._lines.write(
                    stage=stage.name, skipped=f"{left:.0f} s were left, it needs {stage.least_seconds:.0f}"
                )
                continue
            limit = max(left - reserved, min(stage.least_seconds, left))
            if self._device == "cuda":
                limit = min(stage.most_seconds, limit)
            self._run_parts(stage, limit)

    def _run_parts(self, stage: Stage, limit_seconds: float) -> None:
        end = time.monotonic() + limit_seconds
        waiting, running = list(stage.parts), {}
        at_once = stage.at_once if self._device == "cuda" else 1
        while waiting or running:
            while waiting and len(running) < at_once and end - time.monotonic() > _GRACE_SECONDS:
                part = waiting.pop(0)
                limit = end - time.monotonic() - _GRACE_SECONDS
                running[self._start(stage.name, part, limit)] = part
            if not running:
                break
            is_late = time.monotonic() > end
            for process, part in list(running.items()):
                if is_late:
                    _kill(process)
                ended, status, usage = os.wait4(process, 0 if is_late else os.WNOHANG)
                if ended:
                    del running[process]
                    code = os.waitstatus_to_exitcode(status)
                    spent = round(usage.ru_utime + usage.ru_stime, 2)
                    end_of = {"stage": stage.name, "part": part, "processor_seconds": spent}
                    self._lines.write(**end_of, ended=code, was_stopped=is_late)
            time.sleep(0.02)
        for part in waiting:
            self._lines.write(stage=stage.name, part=part, skipped=f"{limit_seconds:.0f} s were over")

    def _start(self, name: str, part: str, limit_seconds: float) -> int:
        def work() -> int:
            began = os.getpid()  # written here, so that it comes before the stage's own lines
            self._lines.write(stage=name, part=part, began=began, limit_seconds=round(limit_seconds, 1))
            if self._must_execute:
                os.environ["OUT"] = str(self._folder)
                where = ("--device", self._device, "--limit", f"{limit_seconds:.1f}")
                _execute("-m", "benchmarks.gpu_session", "--stage", name, "--part", part, *where)
            return run_stage(name, part, self._device, self._folder, limit_seconds)

        return _fork(work)


def fitting(stages: Sequence[Stage], seconds: float) -> list[Stage]:
    """The first stages that fit into the time when each takes its least."""
    chosen: list[Stage] = []
    for stage in stages:
        seconds -= stage.least_seconds
        if seconds < 0:
            break
        chosen.append(stage)
    return chosen


def _fork(work: Callable[[], int]) -> int:
    """Run ``work`` in a forked process that dies with this one; the process's number."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()  # so that a stage and what it starts can be killed together
        _die_with(parent)
        code = work()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - nothing may return into the driver's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends. Linux alone can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def _kill(process: int) -> None:
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(process, signal.SIGKILL)


def _succeeds(work: Callable[[], int]) -> bool:
    return os.waitpid(_fork(work), 0)[1] == 0


def _use_cuda() -> int:
    from benchmarks.gpu_session.devices import CudaDevice

    CudaDevice().start()
    return 0


def _execute(*arguments: str) -> int:
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, *arguments])
