"""Training on real text with lossy activations: does the held-out loss end where it ends without a plan?

    python -m benchmarks.convergence --steps 500 --max-error 0.01

Trains the tiny Llama on source files of Python's standard library from three seeds (weights and order of the text), without
a plan and under a plan that compresses, and measures the loss on files that it never sees. The lossy runs pass if the
mean of their final losses lies within the spread of the unmanaged ones.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

from benchmarks.measure import run_step
from benchmarks.models import SIZES, Case, build
from benchmarks.progress import say
from plimsoll.artifacts.plan import Plan
from plimsoll.tracing.meters.timing import one_thread

_TRAINING = ("argparse", "ast", "asyncio.base_events", "collections", "configparser", "dataclasses", "datetime", "decimal",
             "difflib", "doctest", "email.message", "enum", "fractions", "functools", "gettext", "heapq", "html.parser",
             "http.client", "imaplib", "inspect", "ipaddress", "json.decoder", "logging", "mailbox", "optparse", "pathlib",
             "pdb", "pickle", "platform", "plistlib", "pprint", "random", "shutil", "smtplib", "socket", "ssl", "statistics",
             "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize", "traceback", "turtle", "typing",
             "unittest.mock", "urllib.request", "uuid", "zipfile")  # fmt: skip
_HELD_OUT = ("calendar", "csv", "ftplib", "glob", "locale", "poplib", "sched", "shelve", "telnetlib", "wave", "weakref")
_BATCHES_HELD_OUT = 64
_ABOVE_FLOOR = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """How one training run ended: held-out loss in nats per byte."""

    seed: int
    loss: float


def corpus(modules: Sequence[str]) -> torch.Tensor:
    """The source of the modules that this Python has, as bytes."""
    texts = []
    for name in modules:
        with contextlib.suppress(ImportError):
            texts.append(inspect.getsource(importlib.import_module(name)).encode())
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).long()


def windows(text: torch.Tensor, like: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A batch of pieces of the text, of the shape of ``like``."""
    count, length = like.shape
    starts = torch.randint(0, len(text) - length, (count,), generator=generator).tolist()
    ids = torch.stack([text[start : start + length] for start in starts])
    return {"input_ids": ids, "labels": ids.clone()}


def train(seed: int, steps: int, plan: Plan | None, size: str) -> Run:
    """Train from one seed and measure the loss on held-out text."""
    import plimsoll

    case = seeded(seed, size)
    training, held_out = corpus(_TRAINING), corpus(_HELD_OUT)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=2e-3)
    # Falls to zero, so that the end does not depend on where the last few steps happened to be.
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    with contextlib.nullcontext() if plan is None else plimsoll.apply(case.model, plan):
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            batch = windows(training, case.batch["input_ids"], generator)
            run_step(Case(case.name, case.size, case.model, batch, case.loss), case.model)
            optimizer.step()
            decay.step()
    same = torch.Generator().manual_seed(0)
    case.model.eval()
    with torch.no_grad():
        losses = [
            float(case.model(**windows(held_out, case.batch["input_ids"], same)).loss) for _ in range(_BATCHES_HELD_OUT)
        ]
    return Run(seed, statistics.fmean(losses))


def seeded(seed: int, size: str) -> Case:
    """The Llama with weights of its own for every seed."""
    case = build("llama", size)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in case.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
    return case


def main() -> int:
    import plimsoll

    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-error", type=float, default=0.01)
    parser.add_argument(
        "--share", type=float, default=0.1, help="budget: this far from the floor to the unmanaged peak"
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    options = parser.parse_args()
    with one_thread():
        case = seeded(options.seeds[0], options.size)
        whole = plimsoll.plan(case.model, case.batch, strategy="none", loss=case.loss)
        # Nothing is recomputed, so all that is saved is saved by codecs; at their floor they err by as much as they may.
        asked = {"loss": case.loss, "allow": ("compress",), "max_error": options.max_error}
        near_peak = int(0.9 * whole.baseline_peak_bytes)
        lowest = plimsoll.plan(case.model, case.batch, near_peak, **asked).floor_bytes
        plan = plimsoll.plan(case.model, case.batch, int((1 + _ABOVE_FLOOR) * lowest), **asked)
        print(
            f"plan: peak {plan.predicted_peak_bytes / 2**20:.1f} of {plan.baseline_peak_bytes / 2**20:.1f} MiB, error expected "
            f"{plan.predicted_error:.3%}, measured {plan.measured_error or 0:.3%}",
            flush=True,
        )
        plain, lossy = [], []
        for seed in options.seeds:
            say(f"seed {seed}, {options.steps} steps, unmanaged")
            plain.append(train(seed, options.steps, None, options.size))
            say(f"seed {seed}, {options.steps} steps, lossy")
            lossy.append(train(seed, options.steps, plan, options.size))
    for one, other in zip(plain, lossy, strict=True):
        print(
            f"seed {one.seed}: held-out loss {one.loss:.4f} unmanaged, {other.loss:.4f} lossy ({other.loss - one.loss:+.4f})"
        )
    low, high = min(run.loss for run in plain), max(run.loss for run in plain)
    mean = statistics.fmean(run.loss for run in lossy)
    within = low <= mean <= high
    print(f"unmanaged seeds: {low:.4f} to {high:.4f}; lossy mean {mean:.4f}, {'within' if within else 'NOT within'} it")
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
