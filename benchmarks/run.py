"""Models and peers by name in, a page of measured results out.

    python -m benchmarks.run --models llama gpt2 vit --size cpu --repeats 10

In one process, for each model: the unmanaged step; every eager peer's peak and paired time; Plimsoll given each peer's own
measured peak as its budget; budgets between Plimsoll's floor and the unmanaged peak. Writes
``benchmarks/results/<date>-<device>.md`` and a plot per model. `benchmarks.compiled` does this inside of torch.compile.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Read when torch is loaded; without it the allocator warns once a second while memory is measured.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from benchmarks.budgets_table import budget_table
from benchmarks.machine import device_name, page_stem, versions
from benchmarks.models import FAMILIES, SIZES, build
from benchmarks.page import Section, write_page
from benchmarks.peers_table import eager_peers
from plimsoll.tracing.meters.timing import one_thread

_RESULTS = Path(__file__).parent / "results"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure Plimsoll beside its peers in one run."
    )
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=["llama", "gpt2", "vit"], help="what to train")
    parser.add_argument(
        "--size", choices=SIZES, default="cpu", help="tiny: to try it; cpu: seconds a step; h200: fills one"
    )
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="timed steps per variant (default 10)")
    parser.add_argument("--peers-only", action="store_true", help="leave Plimsoll out")
    parser.add_argument("--no-budgets", action="store_true", help="leave the sweep over budgets out")
    parser.add_argument("--label", default="", help="added to the names of the files that are written")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    # One thread all the way: kernels on the CPU take scratch memory per thread, so plan and measurement must agree on it.
    with one_thread():
        sections = [_section(name, options) for name in options.models]
    device = build(options.models[0], options.size).device
    stem = page_stem(device)
    page = write_page(
        sections,
        _RESULTS,
        f"{stem}-{options.label}" if options.label else stem,
        device=device_name(device),
        command=" ".join(["python -m benchmarks", *given]),
        versions=versions(),
    )
    print(page.read_text(encoding="utf-8"))
    return 0


def _section(name: str, options: argparse.Namespace) -> Section:
    case = build(name, options.size)
    with_ours = not options.peers_only
    return Section(
        name=name,
        eager=eager_peers(case, rounds=options.repeats, with_ours=with_ours),
        budgets=budget_table(case, rounds=options.repeats) if with_ours and not options.no_budgets else None,
    )


if __name__ == "__main__":
    raise SystemExit(main())
