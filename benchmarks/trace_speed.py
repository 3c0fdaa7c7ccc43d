"""How long a trace of every catalogue model takes, anew and from the cache, and how much memory.

    python -m benchmarks.trace_speed [NAME ...] [--json FILE]

Every figure comes from a fresh Python with an empty cache of its own, so that resident memory is its own. Process seconds
are those of the processor; on a machine that other work shares, seconds that pass are more.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plimsoll.estimator.catalogue.models import known_models

_DEVICE = "H100-SXM"


def trace_figures(name: str) -> dict[str, Any]:
    start, start_process = time.perf_counter(), time.process_time()
    from plimsoll.estimator.targets.tracing import TraceRequest, trace_target
    from plimsoll.estimator.trace_cache import AnswerCache, TracedTarget

    made = trace_target(TraceRequest(target=name, device_name=_DEVICE), cache=AnswerCache(TracedTarget))
    return {
        "seconds": time.perf_counter() - start,
        "process_seconds": time.process_time() - start_process,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "loads_torch": "torch" in sys.modules,
        "ops": len(made.trace.ops),
        "parameters": made.facts.parameters,
    }


def in_fresh_python(name: str, cache: str) -> dict[str, Any]:
    environment = os.environ | {"PLIMSOLL_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.trace_speed", "--one", name]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def measured(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        anew, again = in_fresh_python(name, cache), in_fresh_python(name, cache)
        kept_bytes = sum(path.stat().st_size for path in Path(cache).iterdir())
    assert anew["loads_torch"], f"{name} was not traced"
    assert not again["loads_torch"], f"{name} did not come from the cache"
    return {"name": name, "anew": anew, "again": again, "kept_bytes": kept_bytes}


def row(figures: dict[str, Any]) -> str:
    anew, again = figures["anew"], figures["again"]
    return (
        f"| {figures['name']} | {anew['parameters'] / 1e9:,.2f} | {anew['ops']:,} | {anew['process_seconds']:.1f} "
        f"| {anew['seconds']:.1f} | {anew['resident_bytes'] / 2**30:.2f} | {again['seconds']:.2f} "
        f"| {again['resident_bytes'] / 2**20:.0f} | {figures['kept_bytes'] / 2**20:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(trace_figures(arguments.one)))
        return
    print("| model | 10⁹ parameters | ops | process s | s | GiB | cached s | cached MiB | file MiB |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    found = []
    for name in arguments.names or known_models():
        found.append(measured(name))
        print(row(found[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
