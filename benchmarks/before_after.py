"""Compares two checkouts of Plimsoll in one run: the same plans, the same gradients and peaks, and the time of both.

    git worktree add ../before main~40
    python -m benchmarks.before_after --before ../before --models llama gpt2 vit launch_bound

Each checkout runs in a process of its own that loads its ``src``; the models are this checkout's. The older checkout makes and
saves every plan once, on this device, and both carry it out: newer versions read older files, and steps are the same work.
Steps and plans alternate between the processes, in an order that turns around every round; the clock is each process's CPU
time on one thread. Planning is compared on the roofline of a device that is not here, where costs are no measurements and
decisions must be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import FAMILIES

_SHARES = (0.10, 0.25, 0.50, 0.75, 0.90)
_PROFILE = "H100-SXM"
_ROOT = Path(__file__).resolve().parents[1]


class Checkout:
    """A process that serves one checkout: it takes requests as lines of JSON and answers each with one."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        paths = os.pathsep.join([str(root / "src"), str(_ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.before_after", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, request: str, **given: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"request": request, **given}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name!r} ended during {request!r}; its error is above")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Server:
    """What one checkout does when asked; the answers hold plain numbers and texts."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.case: Any = None
        self.handle: Any = None

    def build(self, model: str, size: str) -> None:
        from benchmarks.models import build

        self.case = build(model, size)

    def plan(self, **options: Any) -> dict[str, Any]:
        """Plan, and say what was decided, what it comes to, and the CPU seconds of planning."""
        import plimsoll

        start = time.process_time()
        try:
            made = plimsoll.plan(self.case.model, self.case.batch, loss=self.case.loss, **options)
        except plimsoll.PlimsollError as error:
            return {"refused": f"{type(error).__name__}: {error}".splitlines()[0]}
        seconds = time.process_time() - start
        path = Path(tempfile.mkdtemp()) / "plan.json"
        made.save(path)
        saved = json.loads(path.read_text(encoding="utf-8"))
        regions = json.dumps(saved.get("regions", saved.get("artifact", {}).get("regions")), sort_keys=True)
        return {
            "seconds": seconds,
            "floor": made.floor_bytes,
            "baseline": made.baseline_peak_bytes,
            "peak": made.predicted_peak_bytes,
            "step": made.predicted_seconds,
            "decisions": hashlib.sha256(regions.encode()).hexdigest()[:12],
            "plan": str(path),
        }

    def verify(self, plan: str) -> dict[str, Any]:
        import plimsoll

        case = self.case
        receipt = plimsoll.verify(case.model, case.batch, plimsoll.load(plan), loss=case.loss, steps=2)
        return {"verdict": str(receipt.verdict), "peak": receipt.measured_peak_bytes}

    def apply(self, plan: str) -> None:
        import plimsoll

        self.handle = plimsoll.apply(self.case.model, plimsoll.load(plan))

    def remove(self) -> None:
        self.handle.remove()

    def step(self, count: int) -> dict[str, Any]:
        """Take steps; their CPU seconds, and a digest of the last one's gradients."""
        import torch

        case = self.case
        torch.manual_seed(0)
        case.model.zero_grad(set_to_none=True)
        start = time.process_time()
        for _ in range(count):
            case.model.zero_grad(set_to_none=True)
            case.loss(case.model(**case.batch)).backward()
        seconds = time.process_time() - start
        digest = hashlib.sha256()
        for parameter in case.model.parameters():
            digest.update(
                b"" if parameter.grad is None else parameter.grad.contiguous().view(torch.uint8).numpy().tobytes()
            )
        return {"seconds": seconds / count, "gradients": digest.hexdigest()[:12]}


def serve() -> None:
    """Answer requests until standard input ends."""
    server = Server()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    for line in sys.stdin:
        given = json.loads(line)
        print(json.dumps(getattr(server, given.pop("request"))(**given)), file=answers, flush=True)


@contextlib.contextmanager
def checkouts(before: Path) -> Iterator[tuple[Checkout, Checkout]]:
    both = Checkout("before", before), Checkout("after", _ROOT)
    try:
        yield both
    finally:
        for checkout in both:
            checkout.close()


def ratio_in_turns(both: Sequence[Checkout], rounds: int, request: str, **given: Any) -> tuple[str, list[list[Any]]]:
    """Ask both in turns; the paired ratio of CPU seconds, after by before, and all answers by checkout."""
    from plimsoll.tracing.meters.timing import median_interval

    answers: list[list[Any]] = [[], []]
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            answers[index].append(both[index].ask(request, **given))
    ratios = [after["seconds"] / before["seconds"] for before, after in zip(*answers, strict=True)]
    return str(median_interval(ratios)), answers


def compare_model(both: Sequence[Checkout], model: str, size: str, rounds: int) -> list[str]:
    """Rows of the table for one model: planning, then each budget's plan as both carry it out."""
    for checkout in both:
        checkout.ask("build", model=model, size=size)
    rows = []
    ratio, answers = ratio_in_turns(both, max(3, rounds // 3), "plan", strategy="none", device_profile=_PROFILE)
    found = answers[1][0]
    for share in _SHARES:
        budget = int(found["floor"] + share * (found["baseline"] - found["floor"]))
        ratio, answers = ratio_in_turns(both, max(3, rounds // 3), "plan", budget=f"{budget}B", device_profile=_PROFILE)
        same = all(answers[0][0][key] == answers[1][0][key] for key in ("decisions", "peak", "step", "floor"))
        rows.append(f"| {model} | planning for {_PROFILE}, {share:.0%} | {ratio} | {_yes(same)} | | |")
    on_device = both[0].ask("plan", strategy="none")
    rows.append(compare_steps(both, model, "every block recomputed", both[0].ask("plan", strategy="full"), rounds))
    for share in _SHARES:
        budget = int(on_device["floor"] + share * (on_device["baseline"] - on_device["floor"]))
        made = both[0].ask("plan", budget=f"{budget}B")
        rows.append(compare_steps(both, model, f"step at {share:.0%}, {budget / 2**20:.1f} MiB", made, rounds))
    return rows


def compare_steps(both: Sequence[Checkout], model: str, what: str, made: dict[str, Any], rounds: int) -> str:
    """A row of the table: one plan, carried out by both."""
    if "refused" in made:
        return f"| {model} | {what} | {made['refused']} | | | |"
    receipts = [checkout.ask("verify", plan=made["plan"]) for checkout in both]
    for checkout in both:
        checkout.ask("apply", plan=made["plan"])
        checkout.ask("step", count=2)
    count = max(1, round(0.2 / both[1].ask("step", count=1)["seconds"]))
    ratio, answers = ratio_in_turns(both, rounds, "step", count=count)
    for checkout in both:
        checkout.ask("remove")
    same_bits = len({answer["gradients"] for each in answers for answer in each}) == 1
    peaks = " / ".join(f"{receipt['peak'] / 2**20:.2f}" for receipt in receipts)
    verdicts = " / ".join(receipt["verdict"] for receipt in receipts)
    return f"| {model} | {what} | {ratio} | {_yes(same_bits)} | {peaks} | {verdicts} |"


def _yes(value: object) -> str:
    return "equal" if value else "DIFFERENT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the root of the other checkout")
    parser.add_argument("--models", nargs="+", default=["llama", "gpt2", "vit", "launch_bound"], choices=FAMILIES)
    parser.add_argument("--size", default="cpu", choices=("tiny", "cpu"))
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds per step (default 10)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return
    if given.before is None or not (given.before / "src" / "plimsoll").is_dir():
        parser.error("--before needs the root of another checkout of Plimsoll")
    print("| model | what | after / before, CPU time (95%) | decisions or gradients | peak MiB | verdicts |")
    print("|---|---|---|---|---|---|")
    with checkouts(given.before.resolve()) as both:
        for model in given.models:
            for row in compare_model(both, model, given.size, given.rounds):
                print(row, flush=True)


if __name__ == "__main__":
    main()
