"""Traces with known answers: Chrome traces as the profiler writes them, databases as Nsight Systems exports them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

HOST, BACKWARD = 100, 101
"""Threads: the one that runs the step, and autograd's."""
PID = 7


class ChromeBuilder:
    """A Chrome trace in microseconds; launches and their device work are added together."""

    def __init__(self, *, device: str = "Test GPU") -> None:
        self.events: list[dict[str, Any]] = []
        self._device = device
        self._correlation = 0

    def host(self, category: str, name: str, start: float, end: float, *, thread: int = HOST, **args: Any) -> None:
        named = {key.replace("_", " "): value for key, value in args.items()}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": PID, "tid": thread, "ts": start, "dur": end - start}
            | {"args": named}
        )

    def step(self, number: int, start: float, end: float) -> None:
        self.host("user_annotation", f"ProfilerStep#{number}", start, end)

    def op(self, name: str, start: float, end: float, *, thread: int = HOST, sequence: int = -1, **args: Any) -> None:
        numbered = {} if sequence < 0 else {"Sequence number": sequence, "Fwd thread id": 0}
        self.host("cpu_op", name, start, end, thread=thread, **numbered, **args)

    def node(self, name: str, start: float, end: float, *, sequence: int, thread: int = BACKWARD) -> None:
        """A node of backward, as autograd's engine runs it."""
        args = {"Sequence number": sequence, "Fwd thread id": 1}
        for prefix in ("autograd::engine::evaluate_function: ", ""):
            self.host("cpu_op", prefix + name, start, end, thread=thread, **args)

    def launch(
        self,
        at: float,
        start: float,
        end: float,
        name: str = "gemm",
        *,
        category: str = "kernel",
        thread: int = HOST,
        call: str = "cudaLaunchKernel",
        stream: int = 7,
        **args: Any,
    ) -> None:
        """A runtime call of one microsecond, and what it makes the device do."""
        self._correlation += 1
        self.host("cuda_runtime", call, at, at + 1, thread=thread, correlation=self._correlation)
        self.on_device(name, start, end, category=category, stream=stream, correlation=self._correlation, **args)

    def on_device(self, name: str, start: float, end: float, *, category: str = "kernel", **args: Any) -> None:
        stream = args.pop("stream", 7)
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": end - start}
            | {"args": {"device": 0, "stream": stream} | args}
        )

    def write(self, path: Path) -> Path:
        properties = [{"id": 0, "name": self._device}]
        path.write_text(json.dumps({"deviceProperties": properties, "traceEvents": self.events}))
        return path


def recomputing_traces(directory: Path) -> tuple[str, str]:
    """``baseline.json`` and ``with-plan.json``: of one step, and of the same that recomputes two products of 20 µs."""

    def trace(recomputed: int) -> ChromeBuilder:
        built = ChromeBuilder()
        built.op("aten::mm", 10, 14, sequence=5)
        built.launch(12, 20, 40, "gemm")
        built.node("MmBackward0", 15, 90, sequence=5)
        for index in range(recomputed):
            built.op("aten::mm", 20 + 5 * index, 24 + 5 * index, thread=BACKWARD, sequence=7 + index)
            built.launch(21 + 5 * index, 40 + 20 * index, 60 + 20 * index, "gemm", thread=BACKWARD)
        built.step(0, 0, 40 + 20 * recomputed)
        return built

    return str(trace(0).write(directory / "baseline.json")), str(trace(2).write(directory / "with-plan.json"))


GLOBAL_PID = (1 << 56) | (PID << 24)
_TIMES = "start INTEGER NOT NULL, end INTEGER NOT NULL, "
_ON_DEVICE = f"{_TIMES}deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
_SIZES = ", ".join(f"{name} INTEGER NOT NULL" for name in ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"))
SCHEMA = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "TARGET_INFO_GPU": "id INTEGER NOT NULL, name TEXT, memoryBandwidth INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER, "
    "textId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": _TIMES + "globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, "
    "returnValue INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_ON_DEVICE}demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, {_SIZES}",
    "CUPTI_ACTIVITY_KIND_MEMCPY": _ON_DEVICE + "bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_MEMSET": _ON_DEVICE + "bytes INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": _ON_DEVICE + "graphId INTEGER NOT NULL",
}
"""The documented columns that matter, in the order in which the builder fills them."""


class NsysBuilder:
    """A database in nanoseconds; a table exists only once it has a row, as in a real export."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[Any, ...]]] = {"META_DATA_EXPORT": [("EXPORT_SCHEMA_VERSION", "3.15.0")]}
        self._strings: dict[str, int] = {}
        self._correlation = 0

    def _text(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def _add(self, table: str, *values: Any) -> None:
        self.rows.setdefault(table, []).append(values)

    def gpu(self, name: str, bandwidth: int) -> None:
        self._add("TARGET_INFO_GPU", 0, name, bandwidth)

    def range(self, text: str, start: int, end: int | None, *, thread: int = HOST, by_id: bool = False) -> None:
        named = (None, GLOBAL_PID | thread, self._text(text)) if by_id else (text, GLOBAL_PID | thread, None)
        self._add("NVTX_EVENTS", start, end, 59, *named)

    def call(self, name: str, start: int, end: int, *, thread: int = HOST) -> int:
        self._correlation += 1
        self._add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start, end, GLOBAL_PID | thread, self._correlation, self._text(name), 0
        )
        return self._correlation

    def _on_device(
        self, table: str, call: str, at: int, start: int, end: int, *rest: int, thread: int = HOST, stream: int = 7
    ) -> None:
        """A runtime call of one microsecond, and what it makes the device do."""
        correlation = self.call(call, at, at + 1000, thread=thread)
        self._add(f"CUPTI_ACTIVITY_KIND_{table}", start, end, 0, stream, correlation, GLOBAL_PID, *rest)

    def kernel(self, at: int, start: int, end: int, name: str = "gemm", *, thread: int = HOST, stream: int = 7) -> None:
        rest = (*[self._text(name)] * 2, 8, 1, 1, 128, 1, 1)
        self._on_device("KERNEL", "cudaLaunchKernel_v7000", at, start, end, *rest, thread=thread, stream=stream)

    def copy(self, at: int, start: int, end: int, size: int) -> None:
        self._on_device("MEMCPY", "cudaMemcpyAsync_v3020", at, start, end, size, 2)

    def fill(self, at: int, start: int, end: int, size: int) -> None:
        self._on_device("MEMSET", "cudaMemsetAsync_v3020", at, start, end, size)

    def graph(self, at: int, start: int, end: int) -> None:
        self._on_device("GRAPH_TRACE", "cudaGraphLaunch_v10000", at, start, end, 1)

    def write(self, path: Path) -> Path:
        rows = {**self.rows, "StringIds": [(key, text) for text, key in self._strings.items()]}
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as database, database:
            for table, values in rows.items():
                if values:
                    database.execute(f"CREATE TABLE {table} ({SCHEMA[table]})")
                    marks = ", ".join("?" * len(values[0]))
                    database.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
        return path
