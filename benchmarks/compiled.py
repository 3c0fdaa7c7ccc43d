"""Plans inside of torch.compile beside what else saves memory there, on a CPU, in one run.

    python -m benchmarks.compiled --page benchmarks/results/....md
    python -m benchmarks.compiled --only peers --models llama gpt2 --how block

Parts: ``peers`` (torch's memory budgets, SAC and checkpointing, whole models and block by block; ours at each one's own peak;
all timed in turns), ``budgets`` (between floor and unmanaged peak), ``monotone`` (twenty of them), ``losses`` (with dropout,
beside the default partition), ``deciding`` (seconds to read graphs and to solve), ``warm`` (a second process).

A page that exists keeps the sections which this run does not measure, so that each may be a command of its own. Compiling is
what takes the time: what inductor has generated before it finds in its cache.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

# Read when torch is loaded; without it the allocator warns once a second while memory is measured.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

from benchmarks import compiled_peers, compiled_plans
from benchmarks.compiled_peers import Subject
from benchmarks.machine import device_name, page_head, versions
from benchmarks.models import COMPILED_FAMILIES, COMPILED_SIZES, build
from benchmarks.peers.compiled import BLOCK, WHOLE
from benchmarks.progress import say
from plimsoll.tracing.meters.timing import one_thread

PARTS = ("peers", "budgets", "monotone", "losses", "deciding", "warm")
_EXPLAINED = (
    "One step is forward and backward from empty gradients, in 32 bits; every model is compiled for fixed sizes. *Time ×*: "
    "paired median of CPU seconds on one thread over the same round's step of the compiled model with torch's default "
    "partition, or of the eager model; all rows of a model are taken in turns. *Peak* counts everything, parameters and "
    "gradients included, in steps after the one that compiles. *Ours* is Plimsoll given the peer's own peak as its budget, "
    "compiled in the same way. *Gradients* are held against those of the same model, compiled alike, with the default "
    "partition."
)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--models", nargs="+", choices=COMPILED_FAMILIES, default=list(COMPILED_FAMILIES))
    parser.add_argument("--how", nargs="+", choices=(WHOLE, BLOCK), default=[WHOLE, BLOCK], help="what is compiled")
    parser.add_argument("--size", choices=COMPILED_SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="timed steps per row (default 9)")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=list(compiled_plans.SHARES), help="of floor to peak, for 'budgets'"
    )
    parser.add_argument("--steps", type=int, default=200, help="of the training whose losses are compared")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[12, 80], help="blocks of the graphs that are decided on"
    )
    parser.add_argument("--plans", type=Path, help="a folder for plans; what is in it is not planned again")
    parser.add_argument("--page", type=Path, help="the file of a page of results")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    command = " ".join(["python -m benchmarks.compiled", *given])
    if options.plans is not None:
        options.plans.mkdir(parents=True, exist_ok=True)
    with one_thread(), compiled_plans.roomy_recompiles(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.process_time()
        for title, measure in _sections(options):
            say(title)
            load = os.getloadavg()[0]
            lines = [*measure(), "", f"(`{command}`, {time.process_time() - start:.0f} CPU seconds, load {load:.0f})"]
            start = time.process_time()
            print(f"\n## {title}\n", *lines, sep="\n", flush=True)
            if options.page is not None:
                _write(options.page, command, title, lines)
    return 0


def _sections(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """What was asked for, by the title of its section. All about one model compiled in one way shares its traced step."""
    shares = [at / 20 for at in range(1, 21)]
    of_one: dict[str, tuple[str, Callable[[Subject], list[str]]]] = {
        "peers": ("beside peers", partial(compiled_peers.measure, rounds=options.rounds)),
        "budgets": ("between floor and peak", partial(compiled_plans.budgets, shares=options.shares)),
        "monotone": ("twenty budgets", partial(compiled_plans.budgets, shares=shares)),
    }
    wanted = [of_one[part] for part in of_one if part in options.only]
    for name, how in itertools.product(options.models, options.how) if wanted else ():
        subject = Subject(build(name, options.size), how, options.plans)
        yield from ((f"{name}, {how}, {title}", partial(measure, subject)) for title, measure in wanted)
        subject.close()
    alone: dict[str, tuple[str, Callable[..., list[str]]]] = {
        "losses": ("losses", partial(compiled_plans.same_losses, "gpt2", steps=options.steps)),
        "deciding": ("seconds to decide", partial(compiled_plans.deciding, options.layers)),
        "warm": ("a second process", partial(compiled_plans.warm_start, "llama")),
    }
    for part, (title, measure_how) in alone.items():
        if part in options.only:
            yield from ((f"{how}, {title}", partial(measure_how, how=how)) for how in options.how)


def _write(page: Path, command: str, title: str, lines: list[str]) -> None:
    """Put one section into the page, in the place of what it had under this title."""
    head, *sections = page.read_text(encoding="utf-8").split("\n## ") if page.exists() else [""]
    bodies = dict(section.split("\n", maxsplit=1) for section in sections)
    bodies[title] = "\n".join(["", *lines, ""])
    if not head:
        about = page_head(
            "Plans inside of torch.compile",
            "python -m benchmarks.compiled",
            device=device_name(torch.device("cpu")),
            versions=versions(),
        )
        head = "\n".join([*about, _EXPLAINED, ""])
    page.write_text("".join([head, *(f"\n## {name}\n{body}" for name, body in bodies.items())]), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
