"""``plimsoll.diagnose``: splits a plan's overhead into causes, from a profile without and with the plan or from two traces."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, overload

import msgspec
from torch import nn

from plimsoll.analysis.diagnose.chrome_reader import read_chrome
from plimsoll.analysis.diagnose.comparison import compare_profiles
from plimsoll.analysis.diagnose.nsys_reader import read_nsys
from plimsoll.analysis.diagnose.profile import Profile
from plimsoll.analysis.diagnose.profiling import TurnTraces, named_calls, profile_in_turns
from plimsoll.analysis.verify.evidence import managed_run, read_measurable, versions
from plimsoll.artifacts.files import check_folder, make_folder
from plimsoll.artifacts.finding import Finding, ProfileOrigin
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.errors import InvalidOption, InvalidTrace, TracingFailed, UnknownDevice
from plimsoll.planning.costing.devices import find_device
from plimsoll.session.manage import (
    check_plan,
    manage,
    refuse_optimizer_decisions,
    refuse_other_device,
    refuse_other_model,
    refuse_other_signature,
)
from plimsoll.session.rendezvous.world import refuse_several_ranks
from plimsoll.session.task import check_model, compiled_by
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.compiled.units import find_units
from plimsoll.tracing.meters.timing import one_thread, time_in_turns
from plimsoll.tracing.recorder.calling import Loss, check_devices
from plimsoll.tracing.recorder.untouched import untouched
from plimsoll.tracing.torch_internals import is_profiled
from plimsoll.units import check_count

_BASELINE, _PLAN = "baseline", "plan"
_NOISY_SHARE = 0.05
_IN_KERNELS = (
    "The step is compiled: recomputation happens inside of kernels, which a trace cannot distinguish from others."
)
_SQLITE_MAGIC = b"SQLite format 3\x00"
_WARMUPS = 2
"""Steps to run before timing. In the first step under a plan, Plimsoll records ops; from the second step on, all steps are
alike.
"""


@overload
def diagnose(baseline: str | Path, plan: str | Path, /, *, progress: Progress | None = None) -> Finding: ...


@overload
def diagnose(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    /,
    *,
    loss: Loss | None = None,
    steps: int = 5,
    keep_traces: str | Path | None = None,
    progress: Progress | None = None,
) -> Finding: ...


def diagnose(
    subject: nn.Module | str | Path,
    beside: Any,
    plan: Plan | None = None,
    /,
    *,
    loss: Loss | None = None,
    steps: int = 5,
    keep_traces: str | Path | None = None,
    progress: Progress | None = None,
) -> Finding:
    """Split the overhead of a plan into causes: recomputation, memory, lost fusion, launches, waiting, copies.

    Either a model is profiled alternately without and with the plan, and the two traces are compared; or two traces are
    passed, both from ``torch.profiler`` or both exported from Nsight Systems. Without device activity, CPU ops are compared.
    The finding's notes list what the traces do not show. Model, gradients, buffers and random state are restored; the
    optimizer does not step.

    Args:
        subject: the model, or the trace of the step without the plan.
        beside: the batch if ``subject`` is a model, else the trace of the step with the plan.
        plan: the plan, if ``subject`` is a model.
        loss: as for ``plimsoll.plan``.
        steps: profiled steps without the plan, and as many with it; at least one. On a CPU twice as many are run, and the
            quieter half is used.
        keep_traces: a directory for the two traces; without it they are deleted.
        progress: a function that is called with the name of the current stage and the share of the work that is done.

    Returns:
        A ``Finding``: the seconds per cause, the work by layer, warning signs and notes. Its parts add up to the overhead of
        the profiled steps.

    Raises:
        InvalidTrace: a trace cannot be read, or the two traces are not of the same step.
        InvalidOption: an option was passed together with traces, where it does not have an effect; or ``steps`` is not a
            count.
        InvalidModel: a plan is already applied to the model, or the model is on the meta device.
        PlanMismatch: the plan was made for another model, batch or kind of device.
        TracingFailed: a profiler is already running.
        PlanFileError: the traces cannot be written to ``keep_traces``.

    Example:
        >>> finding = plimsoll.diagnose(model, batch, plan)  # doctest: +SKIP
        >>> finding = plimsoll.diagnose("baseline.json.gz", "plan.json.gz")  # doctest: +SKIP

    Source: docs/diagnose.md defines every part. Known weakness: a profiler costs time per op, so it inflates the overhead of
    steps with many small ops. The finding also shows the overhead without a profiler.
    """
    report = progress or silent
    if isinstance(subject, str | Path):
        if loss is not None or keep_traces is not None:
            raise InvalidOption(
                f"{'keep_traces=' if loss is None else 'loss='} has no effect on traces.",
                why="it is an option for profiling a model, but the traces already exist",
                next='call plimsoll.diagnose("baseline.json.gz", "plan.json.gz")',
            )
        return _of_traces(subject, beside, plan, report)
    if plan is None:
        raise InvalidTrace(
            f"A {type(subject).__name__} was given without a plan.",
            why="diagnose needs a model, a batch and a plan, or the paths of two traces",
            next="call plimsoll.diagnose(model, batch, plan)",
        )
    check_count("steps", steps, least=1)
    return _of_model(subject, beside, plan, loss, steps, keep_traces, report)


def _of_traces(baseline: str | Path, plan: object, extra: object, report: Progress) -> Finding:
    if extra is not None or not isinstance(plan, str | Path):
        raise InvalidTrace(
            "One trace alone cannot be diagnosed.",
            why="the overhead is the difference between two profiles, one without and one with the plan",
            next='call plimsoll.diagnose("baseline.json.gz", "plan.json.gz")',
        )
    report("reading traces", 0.1)
    before, after, origin = read_profiles(Path(baseline), Path(plan))
    report("comparing", 0.6)
    finding = compare_profiles(before, after, origin=origin, bandwidth=_catalogue_bandwidth)
    report("done", 1.0)
    return finding


def read_profiles(baseline: Path, plan: Path) -> tuple[Profile, Profile, ProfileOrigin]:
    """Read two traces of the same profiler. Return both profiles and where they come from.

    Raises:
        InvalidTrace: a file is unreadable or not a trace, or the two come from different profilers.
    """
    origins = [_origin(path) for path in (baseline, plan)]
    if origins[0] is not origins[1]:
        raise InvalidTrace(
            f"{baseline} and {plan} come from different profilers: {origins[0]} and {origins[1]}.",
            why="the two profilers measure and name work differently, so their traces cannot be compared",
            next="give two traces of torch.profiler, or two Nsight Systems exports",
        )
    read = read_nsys if origins[0] is ProfileOrigin.NSYS else read_chrome
    return read(baseline), read(plan), origins[0]


def _origin(path: Path) -> ProfileOrigin:
    try:
        if path.exists() and not path.is_file():
            raise OSError(f"a trace is read more than once, but {path} is not a regular file")
        with path.open("rb") as file:
            start = file.read(len(_SQLITE_MAGIC))
    except (OSError, ValueError) as error:
        raise InvalidTrace(
            f"{path} cannot be read.",
            why=(error.strerror if isinstance(error, OSError) else "") or str(error),
            next="give the path of a trace that torch.profiler or `nsys export --type sqlite` wrote",
        ) from error
    return ProfileOrigin.NSYS if start == _SQLITE_MAGIC else ProfileOrigin.CHROME


def _of_model(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    loss: Loss | None,
    steps: int,
    keep_traces: str | Path | None,
    report: Progress,
) -> Finding:
    _check(model)
    check_plan(plan)
    refuse_optimizer_decisions(plan, "diagnose")
    task = read_measurable(model, batch, loss, None, compile=compiled_by(plan, model))
    refuse_other_model(model, plan)
    refuse_other_device(model, plan)
    check_devices(model, *task.call())
    refuse_other_signature(task.signature(), plan)
    with _folder(keep_traces) as folder, untouched(model, plan.written), task.compiled():
        step = task.step()
        seconds, recording = _run_both(step, plan, steps, folder, report)
        before, after, _ = read_profiles(recording.traces[_BASELINE], recording.traces[_PLAN])
        finding = compare_profiles(before, after, origin=ProfileOrigin.PROFILED, bandwidth=_catalogue_bandwidth)
        step.clear_gradients()
    report("done", 1.0)
    notes = list(finding.notes)
    if plan.compiled:
        notes.append(_IN_KERNELS)
    if recording.lost_share >= _NOISY_SHARE:
        notes.append(
            f"Other programs took {recording.lost_share:.0%} of the time of the profiled steps, and this time is counted in "
            "whatever part was running: diagnose on a quiet machine, or trust only parts well above their spread."
        )
    return msgspec.structs.replace(
        finding,
        model=plan.model,
        fingerprint=plan.fingerprint,
        signature=plan.signature,
        strategy=plan.strategy,
        versions=versions(),
        measured_baseline_seconds=seconds[_BASELINE],
        measured_plan_seconds=seconds[_PLAN],
        notes=tuple(notes),
    )


def _run_both(
    step: TrainingStep, plan: Plan, steps: int, folder: Path, report: Progress
) -> tuple[dict[str, float], TurnTraces]:
    """Run the step without and with the plan, first timed and then profiled, and write the traces into ``folder``.

    Each of the four is done ``steps`` times. The times are taken without a profiler.

    Returns:
        A mapping from each side to its median seconds without a profiler, and the traces.
    """
    report("running the unmanaged step", 0.0)
    for _ in range(_WARMUPS):
        step.run()
    handle = manage(step.model, plan)
    try:
        report("running the plan", 0.1)
        for _ in range(_WARMUPS):
            step.run()
        handle.pause()
        report("timing in turns", 0.2)
        runs: dict[str, Callable[[], object]] = {_BASELINE: step.run, _PLAN: managed_run(step, handle)}
        timings = time_in_turns(runs, device=step.device, rounds=steps)

        def prepare(name: str) -> None:
            (handle.resume if name == _PLAN else handle.pause)()
            step.rewind()

        with (
            named_calls(step.model, find_units(step.model)),
            # With all threads, times vary too much on a busy machine: docs/project/design/seconds-on-one-thread.md.
            one_thread() if step.device.type == "cpu" else contextlib.nullcontext(),
        ):
            recording = profile_in_turns(
                (_BASELINE, _PLAN),
                prepare,
                step.go_on,
                folder,
                device=step.device,
                rounds=steps,
                report=part_of(report, 0.5, 0.9),
            )
    finally:
        handle.remove()
    return {name: timing.median_seconds for name, timing in timings.items()}, recording


def _check(model: nn.Module) -> None:
    check_model(model)
    refuse_several_ranks(model, "diagnose")
    if is_profiled():
        raise TracingFailed(
            "A profiler is already running.",
            why="torch can run only one profiler at a time, and diagnose needs it",
            next="call diagnose before the profiler starts, or export the profiler's traces and diagnose them",
        )


@contextlib.contextmanager
def _folder(keep_traces: str | Path | None) -> Iterator[Path]:
    """A context that yields the directory for the traces.

    It is the user's directory, or a temporary directory that is deleted afterwards.
    """
    if keep_traces is None:
        with tempfile.TemporaryDirectory(prefix="plimsoll-") as temporary:
            yield Path(temporary)
        return
    make_folder(keep_traces)
    check_folder(keep_traces)
    yield Path(keep_traces)


def _catalogue_bandwidth(device: str) -> float | None:
    try:
        return find_device(device).bandwidth_bytes_per_second
    except UnknownDevice:
        return None
