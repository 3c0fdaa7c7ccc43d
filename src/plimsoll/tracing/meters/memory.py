"""Measure the bytes that a block of code has alive at the same time. On the CPU the result is exact; on CUDA it is the
allocator's peak.

On the CPU torch's profiler logs every allocation and release in the thread that entered the meter, in requested bytes, without
sampling or rounding. The log does not show the release of memory from before the meter. So storages that exist at the start are
watched through weak references, also those that existing autograd graphs have saved. Storages that only other C++ code holds
cannot be found; if they are freed inside the meter, measured peaks are too high, but never too low. Memory that libraries
allocate outside of torch's allocator (oneDNN's packed weights) is not measured.

On CUDA the figures come from the caching allocator's statistics, which round every block up to 512 bytes. The meter resets the
device's peak counters.

The log is private to torch: its names were seen in torch 2.9 to 2.15. While the CPU meter runs, no other profiler may run.
Torch's allocator would warn once a second on stderr about releases that its log lacks. So the meter raises torch's C++ log
level to errors while it runs, unless ``TORCH_CPP_LOG_LEVEL`` asks for warnings.
"""

from __future__ import annotations

import atexit
import bisect
import ctypes
import functools
import gc
import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.profiler import profile
from torch.nn.parameter import is_lazy

from plimsoll.errors import PlimsollError
from plimsoll.tracing.local_tensors import dense_parts, is_wrapper
from plimsoll.tracing.meters.saved import saved_tensors
from plimsoll.tracing.torch_internals import has_storage, internal, is_profiled, is_profiler_on

_prepare_profiler, _enable_profiler, _disable_profiler = (
    internal(f"torch._C._autograd.{name}") for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler")
)
_Allocation: Any = internal("torch._C._profiler._ExtraFields_Allocation")
_MEMORY_ALONE: Any = internal("torch._C._profiler.RecordScope.STATIC_RUNTIME_MODEL")
"""A scope of torch's profiler. Plimsoll's code never runs in it, so only memory events are logged. That takes a tenth of the
time and space.
"""
_KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"
_KINETO_SILENT = "99"
_CPP_ERRORS = 2
"""The C++ log level of torch that shows only errors. Level 1 also shows warnings, level 0 everything."""
_CPP_WARNINGS = ("INFO", "WARNING", "0", "1")
"""Values of ``TORCH_CPP_LOG_LEVEL`` with which the user asks for warnings."""


@dataclass(frozen=True, slots=True)
class Window:
    """Data: the bytes in the time from the mark ``name`` to the next mark. ``peak_bytes`` is the most that was alive at the
    same time.

    Bytes are counted from the level at the start of the meter.
    """

    name: str
    peak_bytes: int
    resident_bytes: int
    """The bytes that were alive when the window ended."""


class _Event(NamedTuple):
    """Data: one allocation (positive bytes) or release (negative bytes).

    ``address`` is 0 for memory from before the meter.
    """

    at_ns: int
    bytes: int
    address: int


class MeasurementLost(PlimsollError):
    """Raised when memory could not be measured, because other code ended the profiler that a meter had started."""


class PeakMeter:
    """A context manager that measures the memory of one device while its block runs. Other devices are ignored.

    Example:
        >>> with PeakMeter("cpu") as meter:
        ...     meter.mark("forward")
        ...     rows = torch.zeros(1024, 256)
        >>> meter.peak_bytes
        1048576
    """

    def __init__(self, device: torch.device | str = "cpu", held: Iterable[torch.Tensor] | None = None) -> None:
        """Create a meter for a device.

        Args:
            device: the device to measure.
            held: the tensors that the caller counts as existing at the start. Bytes are subtracted only when these tensors are
                freed. Other tensors from before, which the caller has not counted, are not subtracted: they would hide a part
                of the peak as large as themselves. By default all tensors that exist count, except garbage, which is collected
                first because it could be freed at any moment.
        """
        self.device = torch.device(device)
        self.peak_bytes = 0
        """The most bytes that were alive at the same time, above the bytes that were alive at the start."""
        self.resident_bytes = 0
        """The bytes alive at the end, above the bytes at the start. The number is negative if the block freed more than it
        allocated.
        """
        self.windows: tuple[Window, ...] = ()
        """The windows from each mark to the next mark. The first window begins with the meter and is called ``start``."""
        self._counts_everything = held is None
        self._meter: _CpuMeter | _CudaMeter = (
            _CudaMeter(self.device, held) if self.device.type == "cuda" else _CpuMeter(held)
        )

    def __enter__(self) -> PeakMeter:
        # Garbage would count as there at the start, and its release inside would lower the peak: a trial read 20 KB too little.
        if self._counts_everything:
            gc.collect()
        self._meter.start()
        return self

    def mark(self, name: str) -> None:
        """Begin a window (an interval with its own peak) called ``name`` at this moment. The window before it ends."""
        self._meter.mark(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop measuring. An error of the block itself is raised in place of ``MeasurementLost``.

        Raises:
            MeasurementLost: another profiler has ended the profiler of this meter.
        """
        try:
            self.windows = self._meter.stop()
        except MeasurementLost:
            if error is not None:  # the block's own error says more
                return
            raise
        self.peak_bytes = max(window.peak_bytes for window in self.windows)
        self.resident_bytes = self.windows[-1].resident_bytes

    @property
    def timeline(self) -> tuple[tuple[int, int], ...]:
        """The number of bytes above the start after each change, as pairs ``(nanoseconds of the Unix epoch, bytes)``.

        On CUDA there are pairs only at the marks.
        """
        return self._meter.timeline

    def window(self, name: str) -> Window:
        """Return the last window that begins at a mark called ``name``."""
        return next(window for window in reversed(self.windows) if window.name == name)

    def peak_bytes_without(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the peak in bytes that the block would have had without the storages of ``tensors``. These must have been made
        inside the block and be alive still. This works only on the CPU.

        This separates activations from gradients: ``meter.peak_bytes_without(p.grad for p in parameters)``.
        """
        addresses = {part.untyped_storage().data_ptr() for tensor in tensors for part in dense_parts(tensor)}
        return self._meter.peak_bytes_without(addresses)


def is_meter_running() -> bool:
    """Return True if a meter measures memory on the CPU now. No other meter can be started then."""
    found = None if _CpuMeter.running is None else _CpuMeter.running()
    return found is not None and found.is_measuring


def storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device | str | None = None) -> int:
    """Return the bytes of this process's storages behind ``tensors``, each storage counted once.

    If ``device`` is given, only storages on a device of this type count.
    """
    kind = None if device is None else torch.device(device).type
    sizes: dict[int, int] = {}
    for tensor in (part for whole in tensors for part in dense_parts(whole)):
        if kind is None or tensor.device.type == kind:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def free_bytes(device: torch.device) -> int:
    """Return the bytes that could be allocated on ``device`` now, or 0 if that is unknown.

    On CUDA this includes unused memory that torch's allocator holds: the allocator uses this memory first.
    """
    if device.type == "cuda":
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached_bytes
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return 0


def release_free_memory() -> None:
    """Return freed memory to the system, if the C library is glibc. Without this, glibc's heap cannot shrink below any block
    that is still in use.

    A traced step leaves small records between large freed tensors. For a model of a few hundred MiB, these freed tensors take
    gigabytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _end_profiler() -> None:
    """Function that runs when the process ends: end the profiler if one is running, because the process would crash otherwise.

    A user's error may end the process while a meter measures. A profiler of another thread, such as one that trained, cannot be
    ended from here. Another one takes its place, and is ended.
    """
    if not is_profiler_on():
        _enable(profile(use_kineto=True, profile_memory=True))
    _disable_profiler()


def _enable(session: profile) -> None:
    """Begin to log memory events in this thread."""
    before = os.environ.get(_KINETO_LOG_LEVEL)
    os.environ.setdefault(_KINETO_LOG_LEVEL, _KINETO_SILENT)  # read once, when the first profiler starts
    try:
        _prepare_profiler(session.config(create_trace_id=True), session.kineto_activities)
        _enable_profiler(session.config(), session.kineto_activities, {_MEMORY_ALONE})
    finally:
        if before is None:
            del os.environ[_KINETO_LOG_LEVEL]


@functools.cache
def prepare_for_threads() -> None:
    """Start the profiler of the CPU's meter once in the main thread, so that it may start in other threads later.

    Where it starts first in another thread, kineto prints "External init callback must run in same thread".
    """
    if threading.current_thread() is threading.main_thread() and not (is_profiled() or is_profiler_on()):
        _enable(profile(use_kineto=True, profile_memory=True))
        _disable_profiler()


def _silence_allocator(owner: object) -> Callable[[], object]:
    """Hide the C++ warnings of torch's allocator. Return a function that restores the level; it also runs when ``owner`` is
    deleted.

    The warnings say only that the profiler does not log the release of older memory, which the meter counts in another way.
    """
    level = _cpp_log_level()
    if level is None or level.value >= _CPP_ERRORS or os.environ.get("TORCH_CPP_LOG_LEVEL", "") in _CPP_WARNINGS:
        return lambda: None
    restore = weakref.finalize(owner, setattr, level, "value", level.value)
    level.value = _CPP_ERRORS
    return restore


@functools.cache
def _cpp_log_level() -> ctypes.c_int | None:
    """Return torch's C++ log level, a variable of its library (seen in torch 2.11 to 2.15), or None if it cannot be found."""
    name = {"darwin": "libc10.dylib", "win32": "c10.dll"}.get(sys.platform, "libc10.so")
    try:
        return ctypes.c_int.in_dll(
            ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / name)), "FLAGS_caffe2_log_level"
        )
    except (OSError, ValueError):  # torch was built as one library, or built with gflags
        return None


class _CpuMeter:
    """Measures memory on the CPU: by allocator events of this thread, and by the ends of storages that existed before."""

    running: ClassVar[weakref.ref[_CpuMeter] | None] = None
    """The meter that has started the profiler last, unless it has stopped."""
    _starts: ClassVar[int] = 0
    """How often a meter has started torch's profiler. The profiler exists once per process, and belongs to the meter that
    started it last.
    """

    def __init__(self, held: Iterable[torch.Tensor] | None) -> None:
        self.timeline: tuple[tuple[int, int], ...] = ()
        self._held = None if held is None else [part for tensor in held for part in dense_parts(tensor)]
        self._events: list[_Event] = []
        self._deaths: list[_Event] = []
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []
        self._marks: list[tuple[int, str]] = []
        self._restore_log_level: Callable[[], object] = lambda: None

    def start(self) -> None:
        held, self._held = self._held, None  # a reference would keep them alive
        self._watched = _watch_deaths(live_tensors("cpu") if held is None else held, self._note_death)
        del held
        self._restore_log_level = _silence_allocator(self)
        self._run_profiler()
        self._thread = threading.get_ident()
        atexit.register(_end_profiler)
        torch.empty(1)  # the first event of the log identifies this thread
        self._marks.append((time.time_ns(), "start"))

    @property
    def is_measuring(self) -> bool:
        """Whether the profiler is running and belongs to this meter."""
        return is_profiler_on() and self._start == _CpuMeter._starts

    def _run_profiler(self) -> None:
        _CpuMeter._starts += 1
        _CpuMeter.running = weakref.ref(self)
        self._start = _CpuMeter._starts
        if is_profiler_on() and not is_profiled():
            _disable_profiler()  # of a meter that another thread has stopped
        _enable(profile(use_kineto=True, profile_memory=True))

    def mark(self, name: str) -> None:
        self._marks.append((time.time_ns(), name))

    def stop(self) -> tuple[Window, ...]:
        if threading.get_ident() == self._thread:
            atexit.unregister(_end_profiler)
        events = _disable_profiler().experimental_event_tree() if self.is_measuring else []
        self._restore_log_level()
        _CpuMeter.running = None
        if is_profiled():
            # our profiler has ended the user's; before torch 2.13 the user's then fails if no profiler is running
            self._run_profiler()
        self._watched.clear()
        # Every access to an event's fields makes an object, and there are many events.
        found = [
            (event.start_time_ns, event.start_tid, fields.alloc_size, fields.ptr)
            for event in _flatten(events)
            if isinstance(fields := event.extra_fields, _Allocation) and fields.device.type == "cpu"
        ]
        if not found:
            raise MeasurementLost(
                "Memory was not measured: the log of allocations is empty.",
                why="on a CPU, memory is measured with torch's profiler; only one can run, and other code ended it",
                next="measure again, without starting a profiler or another PeakMeter inside",
            )
        first = min(found, key=operator.itemgetter(0))
        logged = [
            _Event(at_ns, size, address)
            for event in found
            for at_ns, thread, size, address in (event,)
            if size < 0 or (thread == first[1] and event is not first)
        ]
        self._events = _merge(logged, self._deaths)
        self.timeline = _running_sum(self._events)
        return _windows(self.timeline, self._marks)

    def peak_bytes_without(self, addresses: set[int]) -> int:
        last = {event.address: i for i, event in enumerate(self._events) if event.bytes > 0}
        skipped = {last[address] for address in addresses if address in last}
        kept = [event for i, event in enumerate(self._events) if i not in skipped]
        return max(0, *(bytes_ for _, bytes_ in _running_sum(kept)), 0)

    def _note_death(self, bytes_: int) -> None:
        self._deaths.append(_Event(time.time_ns(), -bytes_, 0))


class _CudaMeter:
    """Measures memory on CUDA by the caching allocator's counters. The peak is reset at each mark, to get a peak per window.

    When a tensor from before is freed that is not in ``held``, the counters cannot separate it from counted tensors. So its
    bytes are added to the peak, which may be too high but never too low.
    """

    def __init__(self, device: torch.device, held: Iterable[torch.Tensor] | None) -> None:
        self.device = device
        self._held = None if held is None else {storage_of(part) for tensor in held for part in dense_parts(tensor)}
        self._uncounted_bytes = 0
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []
        self.timeline: tuple[tuple[int, int], ...] = ()
        self._start_bytes = 0
        self._name = "start"
        self._windows: list[Window] = []

    def start(self) -> None:
        if self._held is not None:
            others = [tensor for tensor in live_tensors("cuda") if storage_of(tensor) not in self._held]
            self._watched = _watch_deaths(others, self._note_death)
        self._start_bytes = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def mark(self, name: str) -> None:
        self._close()
        self._name = name

    def stop(self) -> tuple[Window, ...]:
        self._close()
        self._watched.clear()
        return tuple(self._windows)

    def peak_bytes_without(self, addresses: set[int]) -> int:
        raise PlimsollError(
            f"A peak that leaves out some tensors cannot be measured on {self.device}.",
            why="the allocator's counters do not show which tensor an allocation belongs to",
            next="measure the whole peak, or measure on the CPU",
        )

    def _close(self) -> None:
        start_bytes = self._start_bytes - self._uncounted_bytes
        peak_bytes = torch.cuda.max_memory_allocated(self.device) - start_bytes
        resident_bytes = torch.cuda.memory_allocated(self.device) - start_bytes
        torch.cuda.reset_peak_memory_stats(self.device)
        self._windows.append(Window(self._name, peak_bytes, resident_bytes))
        self.timeline = (*self.timeline, (time.time_ns(), resident_bytes))

    def _note_death(self, bytes_: int) -> None:
        self._uncounted_bytes += bytes_


class RisingPeak:
    """Tells whether a step has raised the process's peak of memory, by reading CUDA's peak counter before and after. The
    counter is not reset.

    Other devices do not have a counter, so the methods return 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_bytes = 0

    def begin(self) -> int:
        """Begin a step. Return the bytes that are allocated now."""
        if self._device.type != "cuda":
            return 0
        self._before_bytes = torch.cuda.max_memory_allocated(self._device)
        return torch.cuda.memory_allocated(self._device)

    def risen_to(self) -> int:
        """Return the process's peak in bytes if it has risen since the step began, else 0."""
        if self._device.type != "cuda":
            return 0
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        return peak_bytes if peak_bytes > self._before_bytes else 0


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id of the tensor's storage. The id is valid as long as the storage exists."""
    return int(tensor.untyped_storage()._cdata)


def _watch_deaths(
    tensors: Iterable[torch.Tensor], note: Callable[[int], None]
) -> list[weakref.ref[torch.UntypedStorage]]:
    """Return weak references to the storages of tensors.

    While the caller holds these references, ``note`` is called with the bytes of each storage that is freed.
    """
    storages = {storage_of(part): part.untyped_storage() for tensor in tensors for part in dense_parts(tensor)}
    return [
        weakref.ref(storage, functools.partial(_tell, note, storage.nbytes()))
        for storage in storages.values()
        if storage.nbytes()
    ]


def _tell(note: Callable[[int], None], bytes_: int, _: object) -> None:
    note(bytes_)


def live_tensors(device_type: str, known: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Return the dense tensors with memory on a device of this type that Python knows, their gradients, and what autograd
    graphs have saved. ``known`` are all tensors of the process if the caller has found them already (see `instances_of`).
    """
    known = instances_of(torch.Tensor) if known is None else known
    gradients = (
        gradient for each in known if _has_memory(each, device_type) and (gradient := _gradient_of(each)) is not None
    )
    saved = live_saved_tensors(device_type, known)
    return [each for each in (*known, *gradients, *saved) if _has_memory(each, device_type)]


def live_saved_tensors(device_type: str, known: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the dense tensors with memory on a device of this type that the autograd graphs of the ``known`` tensors have
    saved.
    """
    roots = (each for each in known if not is_lazy(each) and not isinstance(each, FakeTensor))
    return [each for each in saved_tensors(roots) if _has_memory(each, device_type)]


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.requires_grad and tensor.is_leaf else None
    # reading the gradient raises for a view whose base was written in a way that autograd forbids (FSDP1)
    except RuntimeError:
        return None


def instances_of(*bases: type) -> list[Any]:
    """Return all objects that Python's garbage collector knows and that are instances of one of these types or their
    subclasses.

    This looks at each object of the process. With a million objects it takes as long as a small training step.
    """
    kinds = {kind for base in bases for kind in _with_subclasses(base)}
    # `isinstance` would run the code of proxy objects. A look-up of the type is also faster with many objects.
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


def _has_memory(tensor: torch.Tensor, device_type: str) -> bool:
    if is_lazy(tensor) or is_wrapper(tensor):  # not allocated yet, or made of tensors that are found themselves
        return False
    if isinstance(tensor, FakeTensor):  # has a device but does not allocate there
        return False
    return tensor.device.type == device_type and tensor.layout is torch.strided and has_storage(tensor)


def _flatten(events: Iterable[Any]) -> Iterator[Any]:
    pending = list(events)
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        yield event


def _merge(logged: list[_Event], deaths: list[_Event]) -> list[_Event]:
    """Return one list, in order of time, of the logged events and of the releases that weak references have shown (``deaths``).

    Of the logged releases, only those of memory that was allocated inside the meter are taken. The log also contains some
    releases of earlier memory, with the size that an earlier profiler saw at the address. The size is wrong if the address was
    reused since. The log also lacks releases by threads of a process group, which may be the last to hold a collective's
    memory. Such memory counts as freed when its address is allocated again.
    """
    alive: dict[int, int] = {}
    places: list[int] = []
    inside: list[_Event] = []
    for event in sorted(logged, key=lambda event: event.at_ns):
        place = bisect.bisect_left(places, event.address)
        if event.bytes > 0:
            if place and places[place - 1] + alive[places[place - 1]] > event.address:
                place -= 1
            while place < len(places) and places[place] < event.address + event.bytes:
                gone = places.pop(place)
                inside.append(_Event(event.at_ns, -alive.pop(gone), gone))
            places.insert(place, event.address)
            alive[event.address] = event.bytes
            inside.append(event)
        elif alive.pop(event.address, 0):
            del places[place]
            inside.append(event)
    return sorted([*inside, *deaths], key=lambda event: event.at_ns)


def _running_sum(events: Sequence[_Event]) -> tuple[tuple[int, int], ...]:
    return tuple(zip((each.at_ns for each in events), accumulate(each.bytes for each in events), strict=True))


def _windows(timeline: tuple[tuple[int, int], ...], marks: list[tuple[int, str]]) -> tuple[Window, ...]:
    windows: list[Window] = []
    alive_bytes, position = 0, 0
    ends = [at_ns for at_ns, _ in marks[1:]]
    for (_, name), end_ns in zip(marks, [*ends, None], strict=True):
        peak_bytes = alive_bytes
        while position < len(timeline) and (end_ns is None or timeline[position][0] < end_ns):
            alive_bytes = timeline[position][1]
            peak_bytes = max(peak_bytes, alive_bytes)
            position += 1
        windows.append(Window(name, peak_bytes, alive_bytes))
    return tuple(windows)
