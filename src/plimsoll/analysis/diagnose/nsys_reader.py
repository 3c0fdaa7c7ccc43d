"""Reads SQLite exports of Nsight Systems.

An export omits empty tables and columns, so both are looked up first. A kernel belongs to the NVTX range around its launch,
which is found by the correlation id and the process. If CUDA graphs were traced as a whole, each launch is one ``GRAPH`` span;
if their nodes were traced, the nodes are kernels. ``torch.autograd.profiler.emit_nvtx`` writes ops as ranges
(``aten::mm, seq = 12``), which are read as ops.

Source: "SQLite Schema Reference" in NVIDIA's Nsight Systems user guide. Times are nanoseconds; a global thread id holds
the process in its upper bits and the thread in its lower 24.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from plimsoll.analysis.diagnose.profile import DeviceKind, DeviceSpan, HostKind, HostSpan, Profile, find_steps
from plimsoll.errors import InvalidTrace
from plimsoll.units import GIB, MIB

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
_SETS = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_RANGES = "NVTX_EVENTS"
_OF_NSYS = (_KERNELS, _COPIES, _SETS, _GRAPHS, _CALLS, _RANGES, "META_DATA_EXPORT", "TARGET_INFO_GPU", "StringIds")
_RANGE_TYPES = (59, 60, 70, 71)
"""The event types of ranges: push/pop and start/end, of NVTX and of its extension."""
_OP_NAME = re.compile(r"(?P<name>[^,]+), (?:op_id = -?\d+, |)(?:input_op_ids = .*?, |)seq = (?P<sequence>-?\d+)")
_NODE_NAME = re.compile(r"autograd::engine::evaluate_function: |\w+Backward\d*$")
_VERSION = re.compile(r"_v\d+$|_ptsz$|_ptds$")
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
_THREAD_BITS = 24
_PATIENCE_SECONDS = 2.0
_SLOWEST_BYTES_PER_SECOND = 1e6
"""The time limit for reading assumes this speed; an export is normally read twenty times as fast."""
_STEPS = 100_000
"""The number of instructions of SQLite's virtual machine after which the time limit is checked again."""
_MOST_BYTES = 8 * GIB
_MOST_TEXT = 16 * MIB
_MOST_INTEGER = 2**63
_DIGITS = 18
"""The number of digits of a sequence number that are read, so that it fits in 63 bits."""


def read_nsys(path: Path) -> Profile:
    """Read an export that ``nsys export --type sqlite`` wrote, and return it as a `Profile`, the form that all readers return.

    Raises:
        InvalidTrace: the file is not a database, is damaged, comes from another program, or lacks a timeline.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return _read(_Export(database, path.stat().st_size), path)
    except (sqlite3.Error, OSError, UnicodeError) as error:
        raise InvalidTrace(
            f"{path} is a damaged database.",
            why="reading it took far longer than a file of its size should take"
            if str(error) == "interrupted"
            else str(error),
            next="export it again: nsys export --type sqlite --force-overwrite true report.nsys-rep",
        ) from error


class _Export:
    """Reads an export of Nsight Systems, which is an SQLite database: its tables, columns and strings."""

    def __init__(self, database: sqlite3.Connection, file_bytes: int) -> None:
        self._database = database
        self._left_bytes = min(file_bytes, _MOST_BYTES)
        until = time.monotonic() + _PATIENCE_SECONDS + file_bytes / _SLOWEST_BYTES_PER_SECOND
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_TEXT)
        database.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
        database.execute("PRAGMA trusted_schema = OFF")  # views of an unknown file must not call unsafe functions
        rows = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        self.tables = {str(name) for (name,) in rows}
        self.strings: dict[object, str] = {}
        if "StringIds" in self.tables:
            self.strings = {key: str(text) for key, text in self._counted("SELECT id, value FROM StringIds")}

    def rows(self, table: str, columns: tuple[str, ...]) -> Iterator[dict[str, object]]:
        """Yield the rows of a table of the export, each as a mapping from column to value.

        A missing column has the value ``None``.
        """
        if table not in self.tables:
            return
        present = {str(row[1]) for row in self._database.execute(f'PRAGMA table_info("{table}")')}
        selected = ", ".join(f'"{column}"' if column in present else "NULL" for column in columns)
        for row in self._counted(f'SELECT {selected} FROM "{table}"'):
            yield dict(zip(columns, row, strict=True))

    def _counted(self, query: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of an SQL query.

        Raise if the rows together exceed the file's size, because a view could make more rows than fit in memory.
        """
        for row in self._database.execute(query):
            self._left_bytes -= 1 + sum(len(value) for value in row if isinstance(value, str | bytes))
            if self._left_bytes < 0:
                raise sqlite3.DataError("its tables contain more rows and text than a file of this size can hold")
            yield row

    def text(self, key: object) -> str:
        """Return the string that belongs to an id of the export.

        Old exports contain the string itself instead of an id, and it is returned unchanged.
        """
        if key is None:
            return ""
        return key if isinstance(key, str) else self.strings.get(key, "")


def _read(export: _Export, path: Path) -> Profile:
    if not export.tables.intersection(_OF_NSYS):
        found = ", ".join(sorted(export.tables)[:5]) or "no tables"
        raise InvalidTrace(
            f"{path} is a database, but not an export of Nsight Systems.",
            why=f"it has {found}; an export has tables such as {_CALLS} and StringIds",
            next="run nsys export --type sqlite report.nsys-rep",
        )
    host = (*_ranges(export), *_calls(export))
    device = tuple(_device_spans(export))
    if not host and not device:
        raise InvalidTrace(
            f"{path} does not contain a timeline.",
            why=f"{_describe_version(export)}the tables {_KERNELS}, {_CALLS} and {_RANGES} are missing or empty",
            next="record with nsys profile --trace=cuda,nvtx, and run whole training steps",
        )
    steps, are_steps_apart = find_steps(host)
    gpus = list(export.rows("TARGET_INFO_GPU", ("id", "name", "memoryBandwidth")))
    return Profile(
        source=str(path),
        host=host,
        device=device,
        steps=steps,
        are_steps_apart=are_steps_apart,
        device_names={_number(gpu["id"]): str(gpu["name"]) for gpu in gpus if gpu["name"]},
        bandwidth_bytes_per_second={
            _number(gpu["id"]): float(_number(gpu["memoryBandwidth"])) for gpu in gpus if gpu["memoryBandwidth"]
        },
    )


def _describe_version(export: _Export) -> str:
    versions = [
        row["value"] for row in export.rows("META_DATA_EXPORT", ("name", "value")) if "VERSION" in str(row["name"])
    ]
    return f"exported by version {versions[0]}; " if versions else ""


def _ranges(export: _Export) -> Iterator[HostSpan]:
    columns = ("start", "end", "eventType", "text", "textId", "globalTid")
    for row in export.rows(_RANGES, columns):
        if row["end"] is None or row["start"] is None:
            continue
        if row["eventType"] is not None and row["eventType"] not in _RANGE_TYPES:
            continue
        text = str(row["text"]) if row["text"] else export.text(row["textId"])
        match = _OP_NAME.match(text)
        name = match["name"] if match else text
        is_node = bool(_NODE_NAME.match(name))
        yield HostSpan(
            name=name,
            kind=HostKind.OP if match or is_node or "::" in name.partition(" ")[0] else HostKind.RANGE,
            thread=str(row["globalTid"]),
            start_ns=_number(row["start"]),
            end_ns=_number(row["end"]),
            sequence=int(match["sequence"][:_DIGITS]) if match else -1,
            node_thread=int(is_node),
        )


def _calls(export: _Export) -> Iterator[HostSpan]:
    for row in export.rows(_CALLS, ("start", "end", "globalTid", "correlationId", "nameId")):
        yield HostSpan(
            name=_VERSION.sub("", export.text(row["nameId"])),
            kind=HostKind.CALL,
            thread=str(row["globalTid"]),
            start_ns=_number(row["start"]),
            end_ns=_number(row["end"]),
            correlation=_correlation(row["globalTid"], row["correlationId"]),
        )


def _device_spans(export: _Export) -> Iterator[DeviceSpan]:
    place = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
    grid = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
    for row in export.rows(_KERNELS, (*place, "demangledName", "shortName", "name", *grid)):
        name = export.text(row["demangledName"]) or export.text(row["shortName"]) or export.text(row["name"])
        sizes = [row[column] for column in grid]
        yield _device_span(row, DeviceKind.KERNEL, name, shape="" if sizes[0] is None else str(sizes))
    for row in export.rows(_COPIES, (*place, "bytes", "copyKind")):
        kind = row["copyKind"] if isinstance(row["copyKind"], int) else 0
        yield _device_span(row, DeviceKind.COPY, f"Memcpy {_COPY_KINDS.get(kind, 'of another kind')}")
    for row in export.rows(_SETS, (*place, "bytes")):
        yield _device_span(row, DeviceKind.SET, "Memset")
    for row in export.rows(_GRAPHS, place):
        yield _device_span(row, DeviceKind.GRAPH, "CUDA graph")


def _device_span(row: dict[str, object], kind: DeviceKind, name: str, *, shape: str = "") -> DeviceSpan:
    return DeviceSpan(
        name=name,
        kind=kind,
        device=_number(row["deviceId"]),
        stream=_number(row["streamId"]),
        start_ns=_number(row["start"]),
        end_ns=_number(row["end"]),
        correlation=_correlation(row["globalPid"], row["correlationId"]),
        shape=shape,
        bytes=None if row.get("bytes") is None else _number(row["bytes"]),
    )


def _correlation(global_id: object, correlation: object) -> str:
    """Return one text for a process and a correlation id, to match a launch with its kernel.

    Correlation ids are unique only within a process.
    """
    return "" if correlation is None else f"{_number(global_id) >> _THREAD_BITS}/{correlation}"


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) and abs(value) < _MOST_INTEGER else 0
