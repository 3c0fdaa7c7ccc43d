"""Reads Chrome traces as ``torch.profiler`` writes them.

Microseconds become integer nanoseconds. From Python's call stack (``with_stack=True``) only modules are read. Events of
categories that are not listed below are skipped (memory events, the device's copies of annotations, other vendors' rows).

Source: libkineto writes these categories and arguments, see ``output_json.cpp`` in pytorch/kineto.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from plimsoll.analysis.diagnose.profile import (
    TORCH_MODULE_PREFIX,
    DeviceKind,
    DeviceSpan,
    HostKind,
    HostSpan,
    Profile,
    find_steps,
)
from plimsoll.artifacts.files import FileRefused, ReadLimits, decode_json, read_file
from plimsoll.errors import InvalidTrace
from plimsoll.units import GIB

_NS_PER_US = 1000
_LIMITS = ReadLimits(most_bytes=1 * GIB, most_items=100_000_000)
"""Limits for reading a trace.

For scale: a step of a large model has some hundred thousand events of about 400 bytes and 25 JSON items each.
"""
_MOST_US = 1e17
"""Times above this, in microseconds, count as damage of the file: they are beyond three thousand years. Traces count from the
machine's boot or from 1970."""
_MOST_DIMENSIONS = 64
"""The largest number of dimensions that a tensor of torch can have."""
_MOST_INTEGER = 2**63
_HOST = {
    "cpu_op": HostKind.OP,
    "operator": HostKind.OP,
    "user_annotation": HostKind.RANGE,
    "cuda_runtime": HostKind.CALL,
    "cuda_driver": HostKind.CALL,
    "runtime": HostKind.CALL,
}
_DEVICE = {
    "kernel": DeviceKind.KERNEL,
    "gpu_memcpy": DeviceKind.COPY,
    "memcpy": DeviceKind.COPY,
    "gpu_memset": DeviceKind.SET,
    "memset": DeviceKind.SET,
}
_BYTES_BY_TYPE = {
    **dict.fromkeys(("c10::complex<double>",), 16),
    **dict.fromkeys(("double", "long int", "long", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::half", "c10::bfloat16", "short int", "short"), 2),
    **dict.fromkeys(("bool", "unsigned char", "signed char", "c10::float8_e4m3fn", "c10::float8_e5m2"), 1),
}


class _Arguments(msgspec.Struct, gc=False):
    """Data: those arguments of a trace event that are used. All other arguments are skipped while decoding."""

    external: Any = msgspec.field(name="External id", default=None)
    old_external: Any = msgspec.field(name="external id", default=None)
    sequence: Any = msgspec.field(name="Sequence number", default=-1)
    node_thread: Any = msgspec.field(name="Fwd thread id", default=0)
    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    hierarchy: Any = msgspec.field(name="Module Hierarchy", default="")
    correlation: Any = None
    device: Any = None
    stream: Any = None
    bytes: Any = None
    grid: Any = None
    block: Any = None


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | int = ""
    pid: Any = None
    tid: Any = None
    id: Any = None
    ts: float = 0.0
    dur: float = 0.0
    args: _Arguments | None = None


class _DeviceProperties(msgspec.Struct):
    id: int = 0
    name: str = ""


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    devices: list[_DeviceProperties] = msgspec.field(name="deviceProperties", default_factory=list)


def read_chrome(path: Path) -> Profile:
    """Read a trace of ``torch.profiler``, which may be compressed with gzip, and return it as a `Profile`, the form that all
    readers return.

    Raises:
        InvalidTrace: the file is unreadable, empty, truncated, or not a trace of ``torch.profiler``.
    """
    trace = _decode(_unpack(path), path)
    _check_times(trace, path)
    complete = [event for event in trace.events if event.ph == "X" and event.cat]
    origin_us = min((event.ts for event in complete), default=0.0)
    host = tuple(_host_spans(complete, origin_us))
    device = tuple(_device_spans(complete, origin_us))
    if not host and not device:
        raise InvalidTrace(
            f"{path} does not contain operations or kernels.",
            why=f"none of its {len(trace.events)} events is a cpu_op, an annotation, a runtime call or a kernel",
            next="profile whole training steps: with torch.profiler.profile() as p: ...; p.export_chrome_trace(path)",
        )
    steps, are_steps_apart = find_steps(host)
    return Profile(
        source=str(path),
        host=host,
        device=device,
        steps=steps,
        are_steps_apart=are_steps_apart,
        device_names={properties.id: properties.name for properties in trace.devices},
        forward_links=_forward_links(trace.events, origin_us),
    )


def _unpack(path: Path) -> bytes:
    try:
        content = read_file(path, _LIMITS)
    except FileRefused as error:
        raise InvalidTrace(
            f"{path} cannot be read.",
            why=str(error),
            next="check the path; if a .gz was truncated, copy it again; if the file is too large, profile fewer steps",
        ) from error
    if not content.strip():
        raise InvalidTrace(
            f"{path} is empty.", why="its size is 0", next="export the trace after the profiler has stopped"
        )
    return content


def _decode(content: bytes, path: Path) -> _Trace:
    try:
        if content.lstrip().startswith(b"["):
            return _Trace(events=decode_json(content, _LIMITS, list[_Event]))
        trace: _Trace = decode_json(content, _LIMITS, _Trace)
        return trace
    except FileRefused as error:
        raise InvalidTrace(
            f"{path} is too large or too deeply nested for a trace.", why=str(error), next="profile fewer steps"
        ) from error
    except msgspec.ValidationError as error:
        raise InvalidTrace(
            f"{path} is JSON, but not a trace of torch.profiler.",
            why=str(error),
            next="give a file that profile.export_chrome_trace(path) wrote",
        ) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidTrace(
            f"{path} is not complete JSON.",
            why=f"parsing failed: {error}",
            next="export the trace again, after the profiler has stopped; export an .nsys-rep to SQLite first",
        ) from error


def _check_times(trace: _Trace, path: Path) -> None:
    for number, event in enumerate(trace.events):
        if not abs(event.ts) <= _MOST_US or not 0 <= event.dur <= _MOST_US:
            raise InvalidTrace(
                f"{path} contains an invalid time.",
                why=f"event {number} starts at {event.ts:g} µs and takes {event.dur:g} µs",
                next="give the unchanged file that torch.profiler exported",
            )


def _host_spans(events: Iterable[_Event], origin_us: float) -> Iterable[HostSpan]:
    for event in events:
        category = (event.cat or "").lower()
        kind = _HOST.get(category)
        name = str(event.name)
        if kind is None:
            if category != "python_function" or not name.startswith(TORCH_MODULE_PREFIX):
                continue
            kind = HostKind.RANGE
        args = event.args or _Arguments()
        start_ns, end_ns = _times(event, origin_us)
        yield HostSpan(
            name=name,
            kind=kind,
            thread=_thread(event),
            start_ns=start_ns,
            end_ns=end_ns,
            sequence=_integer(args.sequence, -1),
            node_thread=_integer(args.node_thread, 0),
            correlation=_text(args.correlation),
            external=_text(args.external) or _text(args.old_external),
            shape=_text(args.dims),
            bytes=input_bytes(args.dims, args.types),
            module=_text(args.hierarchy),
        )


def _device_spans(events: Iterable[_Event], origin_us: float) -> Iterable[DeviceSpan]:
    for event in events:
        kind = _DEVICE.get((event.cat or "").lower())
        if kind is None:
            continue
        args = event.args or _Arguments()
        start_ns, end_ns = _times(event, origin_us)
        yield DeviceSpan(
            name=str(event.name),
            kind=kind,
            device=_integer(args.device, _integer(event.pid, 0)),
            stream=_integer(args.stream, _integer(event.tid, 0)),
            start_ns=start_ns,
            end_ns=end_ns,
            correlation=_text(args.correlation),
            external=_text(args.external) or _text(args.old_external),
            shape=f"{args.grid}{args.block}" if args.grid else "",
            bytes=None if args.bytes is None else _integer(args.bytes, 0),
        )


def _forward_links(events: Iterable[_Event], origin_us: float) -> dict[tuple[str, int], tuple[str, int]]:
    """Return which forward op each backward op belongs to, from the arrows that the trace draws between them.

    The result maps the backward op's start to the forward op's start. A start is a thread and a nanosecond.
    """
    starts: dict[str, tuple[str, int]] = {}
    ends: dict[str, tuple[str, int]] = {}
    for event in events:
        if event.cat == "fwdbwd" and event.ph in "sf":
            place = (_thread(event), _times(event, origin_us)[0])
            (starts if event.ph == "s" else ends)[_text(event.id)] = place
    return {end: starts[name] for name, end in ends.items() if name in starts}


def input_bytes(dims: object, types: object) -> int | None:
    """Return the bytes of an op's input tensors, from the shapes and dtypes in a trace.

    The op reads at least this much if it reads each tensor once. ``dims`` has one list of sizes per argument, which is empty
    for an argument that is not a tensor. A list of tensors is one level deeper. Returns ``None`` if the trace lacks shapes, or
    if a dtype (in its C++ name) is unknown.

    Example:
        >>> input_bytes([[2, 8], [8], []], ["float", "c10::BFloat16", "Scalar"])
        80
    """
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
        return None
    total = 0
    for sizes, type_ in zip(dims, types, strict=True):
        if isinstance(sizes, str) and not sizes:
            continue
        if not isinstance(sizes, list):
            return None
        if not sizes or not isinstance(type_, str):
            continue
        width = _BYTES_BY_TYPE.get(type_.lower())
        tensors = sizes if isinstance(sizes[0], list) else [sizes]
        if width is None or not all(map(_is_shape, tensors)):
            return None
        total += width * sum(math.prod(tensor) for tensor in tensors)
    return total


def _is_shape(sizes: object) -> bool:
    """Whether the sizes in a trace could be the shape of a real tensor, so that the file is not damaged there."""
    return (
        isinstance(sizes, list)
        and len(sizes) <= _MOST_DIMENSIONS
        and all(isinstance(size, int) and 0 <= size < _MOST_INTEGER for size in sizes)
    )


def _times(event: _Event, origin_us: float) -> tuple[int, int]:
    start_ns = round((event.ts - origin_us) * _NS_PER_US)
    return start_ns, start_ns + round(event.dur * _NS_PER_US)


def _thread(event: _Event) -> str:
    return f"{event.pid}/{event.tid}"


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _integer(value: object, default: int) -> int:
    """Return a number or a text from a trace as an int; ``default`` if this fails or if the number exceeds 63 bits."""
    try:
        number = int(value) if isinstance(value, int | float | str) else default
    except (ValueError, OverflowError):  # no digits, too many of them, or not finite
        return default
    return number if abs(number) < _MOST_INTEGER else default
