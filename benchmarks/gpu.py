"""Asks the contracts on a GPU, measures a Llama of a billion parameters beside its peers, and writes both on one page.

    make gpu PYTHON=python3     # a Python that has torch: nothing is installed, nothing is fetched
    make gpu DEVICE=cpu         # a dry run of the same at tiny sizes; its page is printed, not kept

It ends within ``--minutes``: the contracts are stopped at half of them, and a peer for which there is no time left is named.
Beyond what Plimsoll needs, every package is optional; what could not be run for want of one is said on the page.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_NEEDED = ("torch", "transformers", "msgspec", "numpy", "scipy", "jinja2")
_TIMING_SECONDS = 100
"""What is left for timing in turns and for the page when the last peer may begin."""
_REPORT_SECONDS = 30
"""How long pytest may take to write what it has found when it is stopped."""
_INTERRUPTED = 2
"""pytest's code of a run that was stopped."""


@dataclass(frozen=True, slots=True)
class Contracts:
    """What the tests said on the device."""

    summary: str
    failed: tuple[str, ...] = ()
    is_kept: bool = True

    @property
    def lines(self) -> list[str]:
        return ["## Contracts", "", self.summary, "", *(f"- failed: `{name}`" for name in self.failed), ""]


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(given)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"{sys.executable} lacks {', '.join(missing)}, which Plimsoll needs: install that, or put it on PYTHONPATH."
        )
        return 2
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"{sys.executable} has torch {torch.__version__}, which sees no GPU. A dry run: make gpu DEVICE=cpu")
        return 2
    start = time.monotonic()
    contracts = _ask_contracts(options.device, options.contracts, seconds=options.minutes * 30)
    print("\n".join(contracts.lines), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        is_dry = options.device == "cpu"
        page = _benchmark(
            contracts,
            Path(scratch) if is_dry else _ROOT / "benchmarks" / "results",
            size="tiny" if is_dry else "h100",
            rounds=options.rounds,
            command=" ".join(["python -m benchmarks.gpu", *given]),
            deadline=start + options.minutes * 60 - _TIMING_SECONDS,
        )
        print(page.read_text(encoding="utf-8"))
    return 0 if contracts.is_kept else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Contracts and benchmark on a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run at tiny sizes")
    parser.add_argument("--minutes", type=float, default=9.0, help="how long all of it may take (default 9)")
    parser.add_argument("--rounds", type=int, default=8, help="timed steps per variant (default 8)")
    parser.add_argument(
        "--contracts", nargs="*", default=["tests/contracts"], metavar="PATH", help="tests to run; none: leave them out"
    )
    return parser.parse_args(arguments)


def _ask_contracts(device: str, paths: Sequence[str], *, seconds: float) -> Contracts:
    """Run the contract suite on the device, in a process of its own: it wants deterministic kernels, timing does not."""
    if not paths:
        return Contracts("Not asked in this run.")
    if importlib.util.find_spec("pytest") is None:
        return Contracts("Not asked: there is no pytest.")
    # A GPU serves several processes; on a CPU they would wait for each other.
    has_workers = device == "cuda" and importlib.util.find_spec("xdist") is not None
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *paths),
            *(("-n", "4", "--dist", "loadfile") if has_workers else ()),
        ]
        environment = {**os.environ, "DEVICE": device, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        code = _run(command, environment, seconds)
        if not report.exists():
            return Contracts(f"pytest ended with code {code} and no report.", is_kept=False)
        return _read(report, code)


def _run(command: Sequence[str], environment: dict[str, str], seconds: float) -> int:
    """Run to the end, or to the limit: what was found until then is still reported."""
    process = subprocess.Popen(command, cwd=_ROOT, env=environment)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(_REPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _read(report: Path, code: int) -> Contracts:
    cases = list(ET.parse(report).iter("testcase"))
    found = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    wrong = [*found["failure"], *found["error"]]
    passed = len(cases) - len(wrong) - len(found["skipped"])
    stopped = " Stopped for want of time." if code == _INTERRUPTED else ""
    return Contracts(
        f"{passed} passed, {len(wrong)} failed, {len(found['skipped'])} skipped.{stopped}",
        tuple(f"{case.get('classname')}::{case.get('name')}" for case in wrong),
        is_kept=code == 0,
    )


def _benchmark(contracts: Contracts, folder: Path, *, size: str, rounds: int, command: str, deadline: float) -> Path:
    """Measure the peers and Plimsoll at each one's peak; the path of the page."""
    from benchmarks.machine import device_name, versions
    from benchmarks.models import build
    from benchmarks.page import Section, write_page
    from benchmarks.peers import ON_A_GPU
    from benchmarks.peers_table import eager_peers

    case = build("llama", size)
    sections, lines = [], contracts.lines
    try:
        table = eager_peers(
            case, rounds=rounds, with_ours=True, chosen=ON_A_GPU, has_time=lambda: time.monotonic() < deadline
        )
        sections = [Section(name=case.name, eager=table)]
    except Exception as error:  # noqa: BLE001 - the contracts' answers are to be kept whatever happens here
        traceback.print_exc()
        lines += [f"The benchmark failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}", ""]
    return write_page(
        sections,
        folder,
        "gpu",
        device=device_name(case.device),
        command=command,
        versions=versions(),
        before=lines,
    )


if __name__ == "__main__":
    raise SystemExit(main())
