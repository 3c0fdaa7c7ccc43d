"""Compares the measurements of a real run with an estimate of it, item by item, and explains each difference.

Figures come from a JSON file of numbers, from a snapshot of torch's allocator (``torch.cuda.memory._dump_snapshot``), from a
trace of ``torch.profiler``, or from a JSON file that names a snapshot or a trace. A snapshot is a pickle. Only lists, dicts,
texts and numbers are read from it, so that it cannot run code.

torch counts the workspaces of cuBLAS, and the padding of rounded-up blocks, as allocated. So both are part of the comparison.

Known weaknesses: a snapshot does not record categories, so its peak is one figure. Kernels are classified by their names. If
collectives overlap with computation, the profile's kernel seconds include the slowdown that the collectives cause.
"""

from __future__ import annotations

import difflib
import io
import itertools
import pickle
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from plimsoll.analysis.diagnose.chrome_reader import read_chrome
from plimsoll.analysis.diagnose.profile import DeviceKind, Profile, clip
from plimsoll.artifacts.estimate import Estimate, MeasuredFigure, StageEstimate
from plimsoll.artifacts.files import FileRefused, ReadLimits, decode_json, read_file, write_whole
from plimsoll.errors import InvalidOption, PlimsollError
from plimsoll.planning.costing.devices import DeviceCorrection
from plimsoll.units import GIB, parse_bytes

_LIMITS = ReadLimits(most_bytes=4 * GIB, most_items=100_000_000)
_INSIDE = ("fragmentation", "workspaces of convolutions")
"""Names of the estimate's items that are inside the allocator's memory and whose uncertainty is not added to the error bar of
the peak allocated."""
_PRODUCTS = re.compile(r"gemm|xmma|cutlass|matmul|nvjet|flash|fmha|attention|conv|cudnn", re.IGNORECASE)
_COLLECTIVES = re.compile(r"nccl|rccl", re.IGNORECASE)
_BYTES, _SECONDS, _RATE = "bytes", "seconds", "per second"
_MOST_CORRECTION = 4.0
"""A factor. If the device seems faster or slower than its catalogue figures by more than this factor, the run was probably
another job.
"""
_ROUNDED = 0.005
"""The least error bar, as a share of the estimate: people write figures with three digits, so even an exact figure may differ
by this.
"""


class RunFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measured figures of a run: the keys that a file of numbers may have.

    Bytes are numbers, or text with a unit. ``allocated`` and ``reserved`` are torch's peaks; ``device`` is the use that the
    driver reports. ``snapshot`` and ``trace`` name files in the same folder. ``items`` are bytes by the estimate's own item
    names. ``stage`` is the pipeline stage of the rank that measured.
    """

    step_seconds: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    allocated: int | str | None = None
    reserved: int | str | None = None
    device: int | str | None = None
    items: dict[str, int | str] = {}
    stage: int | None = None
    snapshot: str = ""
    trace: str = ""
    product_seconds: float | None = None
    other_seconds: float | None = None


def set_beside(estimate: Estimate, run: RunFigures, path: Path) -> Estimate:
    """Return the estimate together with the run's measured figures, for a comparison figure by figure.

    Args:
        estimate: of the job that was run.
        run: the figures that ``read_run`` read.
        path: the file that they come from.

    Raises:
        InvalidOption: the run names a stage or an item that the estimate does not have, or it has no figures.

    Example:
        >>> beside = set_beside(estimate, read_run(path), path)  # doctest: +SKIP
        >>> [figure.name for figure in beside.measured if not figure.is_inside]  # doctest: +SKIP
        ['peak reserved']
    """
    if run.stage is not None and not 0 <= run.stage < len(estimate.stages):
        raise _refused(
            path,
            f"it names stage {run.stage}, which the estimate does not have",
            f"give a stage from 0 to {len(estimate.stages) - 1}",
        )
    stage = estimate.tightest if run.stage is None else estimate.stages[run.stage]
    figures = tuple(itertools.chain(_memory(stage, run, path), _speed(estimate, stage, run)))
    if not figures:
        raise _refused(
            path, "it does not contain a figure", "give step_seconds, tokens_per_second, allocated, reserved or items"
        )
    return replace(estimate, measured=figures, measured_source=path.name)


def read_run(path: Path) -> RunFigures:
    """Read a run's figures from a file of numbers, a snapshot or a trace.

    Raises:
        InvalidOption: the file cannot be read, or does not contain figures.
        InvalidTrace: the file is a damaged trace.
    """
    run = _read(path)
    for name in filter(None, (run.snapshot, run.trace)):
        measured = _read(path.parent / name)
        if measured.snapshot or measured.trace:
            raise _refused(
                path,
                f"it refers to {name}, which refers to further files",
                "refer to a snapshot of the allocator or to a trace",
            )
        found = msgspec.structs.asdict(measured)
        run = replace(run, **{key: value for key, value in found.items() if value and not getattr(run, key)})
    return run


def _read(path: Path) -> RunFigures:
    try:
        content = read_file(path, _LIMITS)
        if content[:1] == b"\x80":  # the first byte of every pickle since protocol 2
            return _of_snapshot(_unpickled(content), path)
        node = decode_json(content, _LIMITS)
        if isinstance(node, dict) and "traceEvents" in node:
            return _of_profile(read_chrome(path))
        if isinstance(node, dict) and "segments" in node:
            return _of_snapshot(node, path)
        return _checked(msgspec.convert(node, RunFigures))
    except (FileRefused, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise _refused(path, str(error), f"use the keys {', '.join(RunFigures.__struct_fields__)}") from error


def _checked(run: RunFigures) -> RunFigures:
    """Return the figures unchanged, after a check that each is above zero and that each size has a known unit.

    Raises:
        ValueError: a figure is not above zero, or a size cannot be parsed.
    """
    figures = {key: value for key, value in msgspec.structs.asdict(run).items() if key not in ("stage", "items")}
    for name, value in [*figures.items(), *run.items.items()]:
        if isinstance(value, int | float) and value <= 0:
            raise ValueError(f"its {name} is {value:g}, but a measured figure must be above 0")
    sizes = {"allocated": run.allocated, "reserved": run.reserved, "device": run.device} | run.items
    for name, size in sizes.items():
        if size is None:
            continue
        try:
            parse_bytes(size)
        except PlimsollError as error:
            raise ValueError(f"its {name} is {size!r}, which is not a size such as 31.2GiB") from error
    return run


def _refused(path: Path, why: str, advice: str) -> InvalidOption:
    return InvalidOption(f"{path} cannot be compared with the estimate.", why=why, next=advice)


# Where figures come from ----------------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles lists, dicts, tuples, texts and numbers, and refuses every class, because a pickle's classes can run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it contains a {module}.{name}, and a snapshot of the allocator never contains such an object"
        )


def _unpickled(content: bytes) -> Mapping[str, Any]:
    found = _PlainUnpickler(io.BytesIO(content)).load()
    if not isinstance(found, dict) or "segments" not in found:
        raise pickle.UnpicklingError("it is a pickle, but not a snapshot of torch's allocator")
    return found


def _of_snapshot(snapshot: Mapping[str, Any], path: Path) -> RunFigures:
    """Read a run's figures from a snapshot: the allocated and the reserved peak of the device that reserves most.

    They come from the snapshot's recorded history. Without a history, they are the state when the snapshot was taken.
    """
    try:
        by_device: dict[int, list[int]] = {}
        for segment in snapshot["segments"]:
            held = by_device.setdefault(int(segment.get("device", 0)), [0, 0])
            held[0] += int(segment["allocated_size"])
            held[1] += int(segment["total_size"])
        if not by_device:
            raise _refused(path, "the snapshot does not contain segments", "take the snapshot on a rank that trains")
        device = max(by_device, key=lambda number: by_device[number][1])
        histories = snapshot.get("device_traces") or []
        events = histories[device] if device < len(histories) else []
        allocated, reserved = by_device[device]
        return RunFigures(
            allocated=_peak(allocated, events, ("alloc",), ("free_requested", "free")),
            reserved=_peak(reserved, events, ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the snapshot is incomplete: {error}") from error


def _peak(at_end: int, events: Iterable[Mapping[str, Any]], adds: tuple[str, ...], takes: tuple[str, ...]) -> int:
    """Return the highest number of bytes in a snapshot's history of allocations and releases.

    It is computed backwards from ``at_end``, the bytes at the end. ``adds`` and ``takes`` name the events that allocate and
    release.
    """
    changes = [
        int(event["size"]) * (1 if event["action"] in adds else -1)
        for event in events
        if event["action"] in (*adds, *takes)
    ]
    levels = itertools.accumulate(changes, initial=at_end - sum(changes))
    return max(levels)


def _of_profile(profile: Profile) -> RunFigures:
    """Read a run's figures from a profile: seconds per step, and seconds of kernels by kind.

    The figures are of the device with the most kernels.
    """
    if not profile.steps:
        raise InvalidOption(
            f"{profile.source} does not mark steps.",
            why="the comparison needs the seconds of each step",
            next="call profiler.step() after each step, or give step_seconds in a file of numbers",
        )
    starts = profile.step_starts
    between = [later - earlier for earlier, later in itertools.pairwise(starts)]
    lengths = between if between and not profile.are_steps_apart else [end - start for start, end in profile.steps]
    kernels = [span for span in profile.device if span.kind is DeviceKind.KERNEL]
    busiest = statistics.mode(span.device for span in kernels) if kernels else 0
    window = [(starts[0], profile.steps[-1][1])]
    seconds = {"product": 0.0, "other": 0.0}
    for span in kernels:
        if span.device == busiest and not _COLLECTIVES.search(span.name):
            inside = sum(end - start for start, end in clip((span.start_ns, span.end_ns), window))
            seconds["product" if _PRODUCTS.search(span.name) else "other"] += inside / 1e9 / len(starts)
    return RunFigures(
        step_seconds=statistics.median(lengths) / 1e9,
        product_seconds=seconds["product"] or None,
        other_seconds=seconds["other"] or None,
    )


# Item by item ---------------------------------------------------------------------------------------------------------


def _memory(stage: StageEstimate, run: RunFigures, path: Path) -> Iterator[MeasuredFigure]:
    by_name = {item.name: item for item in stage.items}
    for name, size in run.items.items():
        if name not in by_name:
            close = difflib.get_close_matches(name, by_name, n=2)
            raise _refused(path, f"the estimate does not have an item {name!r}", f"try {' or '.join(close or by_name)}")
        item = by_name[name]
        yield _figure(name, item.bytes, item.error_bytes, parse_bytes(size))
    errors = {item.name: item.error_bytes for item in stage.items}
    workspace = by_name.get("cuBLAS workspaces")
    beside = 0 if workspace is None else workspace.bytes or 0
    outside = stage.total_bytes - (stage.reserved_bytes or stage.allocated_bytes) - beside
    in_allocator = _in_allocator(stage)
    fragmentation = by_name["fragmentation"].bytes or 0 if "fragmentation" in by_name else 0
    reserved = None if stage.reserved_bytes is None else stage.reserved_bytes + beside
    allocated = stage.total_bytes - outside - fragmentation
    of_tensors = sum(errors[name] for name in in_allocator if name not in _INSIDE)
    measured = {
        name: None if size is None else parse_bytes(size)
        for name, size in (("allocated", run.allocated), ("reserved", run.reserved), ("device", run.device))
    }
    if measured["allocated"] is not None:
        yield _figure("peak allocated", allocated, of_tensors, measured["allocated"], _ALLOCATED_DIFFERS)
    if measured["reserved"] is not None:
        error = sum(errors[name] for name in in_allocator)
        yield _figure("peak reserved", reserved, error, measured["reserved"], _RESERVED_DIFFERS)
        if measured["allocated"] is not None and reserved is not None:
            cached = measured["reserved"] - measured["allocated"]
            yield _figure(
                "reserved, not allocated", reserved - allocated, errors["fragmentation"], cached, _CACHED_DIFFERS
            )
    if measured["device"] is not None:
        yield _figure("on the device", stage.total_bytes, stage.error_bytes, measured["device"])
        if measured["reserved"] is not None:
            error = sum(error for name, error in errors.items() if name not in in_allocator)
            beside_it = measured["device"] - measured["reserved"]
            yield _figure("outside the allocator", outside, error, beside_it, _OUTSIDE_DIFFERS)


_ALLOCATED_DIFFERS = (
    "the run has more or fewer tensors than the trace; compare single items, or look in the snapshot for their holders"
)
_RESERVED_DIFFERS = "the tensors differ, or the memory that the allocator keeps in addition to them"
_CACHED_DIFFERS = "fragmentation and cached blocks differ: other tensor sizes, or expandable segments"
_OUTSIDE_DIFFERS = (
    "CUDA context, kernels and communicators: NCCL's buffers depend on its settings, and other processes count too"
)
_STEP_DIFFERS = (
    "an estimate does not include data loading, host work and logging; compare a trace to separate kernels and gaps"
)
_PRODUCTS_DIFFER = "matrix products and attention reach another share of the peak arithmetic at these shapes"
_OTHERS_DIFFER = "the other kernels reach another share of the bandwidth, or there are more or fewer of them"


def _in_allocator(stage: StageEstimate) -> list[str]:
    """Return the names of the estimate's items whose memory the caching allocator holds.

    The items of a stage have a fixed order: the allocator holds all items up to ``fragmentation``, and the cuBLAS workspaces,
    which come later in the list.
    """
    names = [item.name for item in stage.items]
    if "fragmentation" not in names:
        return names
    return [*names[: names.index("fragmentation") + 1], *(name for name in names if name == "cuBLAS workspaces")]


def _speed(estimate: Estimate, stage: StageEstimate, run: RunFigures) -> Iterator[MeasuredFigure]:
    speed, seconds, repeats = estimate.throughput, stage.seconds, estimate.layout.micro_batches
    share = speed.relative_error
    for name, found, measured in (
        ("tokens per second", speed.tokens_per_second, run.tokens_per_second),
        ("samples per second", speed.samples_per_second, run.samples_per_second),
    ):
        if measured is not None:
            yield _figure(name, found, share * (found or 0), measured, _STEP_DIFFERS, _RATE)
    if run.step_seconds is not None:
        yield _figure("step", speed.step_seconds, share * speed.step_seconds, run.step_seconds, _STEP_DIFFERS, _SECONDS)
    computing = seconds.forward_seconds + seconds.backward_seconds - seconds.communication_seconds
    again = 1 + seconds.recompute_seconds / computing if computing else 1.0
    products = repeats * seconds.product_seconds * again
    others = repeats * (computing - seconds.product_seconds) * again + seconds.optimizer_seconds
    for name, found, measured, note in (
        ("products and attention", products, run.product_seconds, _PRODUCTS_DIFFER),
        ("other kernels", others, run.other_seconds, _OTHERS_DIFFER),
    ):
        if measured is not None:
            yield _figure(name, found, share * found, measured, note, _SECONDS)


def _figure(
    name: str, estimated: float | None, error: float, measured: float, note: str = "", unit: str = _BYTES
) -> MeasuredFigure:
    """Return one row of the comparison of an estimate with a run.

    The row gets ``note`` only if measurement and estimate differ by more than the error bar.
    """
    error = max(error, _ROUNDED * (estimated or 0))
    made = MeasuredFigure(name=name, unit=unit, estimated=estimated, error=error, measured=measured)
    return made if made.is_inside else replace(made, note=note)


# The device's profile -------------------------------------------------------------------------------------------------


def correct_device(estimate: Estimate) -> DeviceCorrection:
    """Return factors that correct a device's catalogue figures to the speed that a run measured.

    With a profile, matrix products and all other kernels get separate factors. Otherwise the whole step gets one factor,
    because the step's time alone does not show whether arithmetic, memory, links or the host cause the difference.

    Raises:
        InvalidOption: the run did not measure time, or the factor is below 1/4 or above 4, so that it is another job.
    """
    by_name = {figure.name: figure for figure in estimate.measured if figure.estimated}
    factors = {name: (figure.estimated or 0) / figure.measured for name, figure in by_name.items() if figure.measured}
    rate = next((1 / factors[name] for name in ("tokens per second", "samples per second") if name in factors), None)
    step = factors.get("step", rate)
    arithmetic, movement = factors.get("products and attention", step), factors.get("other kernels", step)
    if (
        arithmetic is None
        or movement is None
        or not all(1 / _MOST_CORRECTION < factor < _MOST_CORRECTION for factor in (arithmetic, movement))
    ):
        raise InvalidOption(
            "A correction of the device cannot be computed.",
            why="the run does not contain a measured time"
            if arithmetic is None or movement is None
            else f"the run took {1 / min(arithmetic, movement):.1f} times the estimate, so it is probably a different job",
            next="compare with step_seconds, tokens_per_second or a profiler's trace of the same job",
        )
    has_kernels = "products and attention" in factors
    return DeviceCorrection(
        device=estimate.device,
        arithmetic=arithmetic,
        bandwidth=movement,
        links=1.0 if has_kernels or step is None else step,
        launches=movement,
        source=f"{estimate.target} on {estimate.layout}: {estimate.measured_source}",
    )


def save_correction(correction: DeviceCorrection, path: Path) -> None:
    """Write the correction as a JSON file. The option ``--device`` accepts this file instead of a device's name."""
    write_whole(msgspec.json.format(msgspec.json.encode(correction), indent=1) + b"\n", path)
