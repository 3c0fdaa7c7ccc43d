"""What compression and offloading add to recomputation: measured frontiers of one model, on one page.

    python -m benchmarks.forms --models llama --size cpu --repeats 7

For each model, in one process and in turns: the unmanaged step; int8 by plain hooks; named strategies that compress or
offload; and at a few budgets the plans that may recompute, compress as well, offload as well, or do all three. Writes
``benchmarks/results/<date>-<device>-forms[-<label>].md`` and a plot per model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

# Read when torch is loaded; without it the allocator warns once a second while memory is measured.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from benchmarks import peers
from benchmarks.forms_page import FormRow, FormTable, write_page
from benchmarks.machine import device_name, page_stem, versions
from benchmarks.measure import Variant, prepare
from benchmarks.models import FAMILIES, SIZES, Case, build
from benchmarks.peers_table import apply_plan
from benchmarks.progress import say
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import PlimsollError
from plimsoll.tracing.meters.timing import one_thread, paired_ratio, time_in_turns

_RESULTS = Path(__file__).parent / "results"
SHARES = (0.10, 0.25, 0.50)
MAX_ERROR = 0.01
ALLOWANCES = {
    "recompute": ("recompute",),
    "+ compress": ("recompute", "compress"),
    "+ offload": ("recompute", "offload"),
    "all": ("recompute", "compress", "offload"),
}
STRATEGIES = ("full", "int8", "int4", "offload")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """A variant that is ready to be timed."""

    group: str
    variant: Variant
    plan: Plan | None = None


def form_table(case: Case, *, rounds: int, max_error: float) -> FormTable:
    """Everything about one model."""
    with contextlib.ExitStack() as stack:
        baseline = prepare(stack, peers.NONE.name, case, peers.NONE.apply)
        made: list[_Made] = []
        failures: list[str] = []
        for peer in peers.LOSSY:
            say(f"{case.name}: {peer.name}")
            made.append(_Made(group="peer", variant=prepare(stack, peer.name, case, peer.apply, baseline)))
        for strategy in (*STRATEGIES, _hybrid(case)):
            _add(stack, case, baseline, made, failures, "strategy", strategy, {"strategy": strategy})
        budgets = {"at the int8 hook's peak": made[0].variant.steady.total_peak_bytes, **_budgets(case, baseline)}
        for place, budget in budgets.items():
            for name, allow in ALLOWANCES.items():
                error = max_error if "compress" in allow else 0.0
                asked = {"budget": budget, "allow": allow, "max_error": error}
                _add(stack, case, baseline, made, failures, name, f"{place}, {name}", asked)
        steps = {each.name: each.step for each in (baseline, *(one.variant for one in made))}
        say(f"{case.name}: {rounds} rounds of {len(steps)} steps")
        timings = time_in_turns(steps, device=case.device, rounds=rounds)
        rows = tuple(
            FormRow(
                group=one.group,
                variant=one.variant,
                plan=one.plan,
                ratio=paired_ratio(timings[one.variant.name], timings[baseline.name]),
            )
            for one in made
        )
    return FormTable(
        name=case.name,
        baseline=baseline,
        timing=timings[baseline.name],
        rows=rows,
        failures=tuple(failures),
        max_error=max_error,
    )


def _hybrid(case: Case) -> str:
    """A quarter of the regions compressed, the rest checkpointed in groups, as in the claim of 10 of 40, every 6."""
    import plimsoll

    regions = len(plimsoll.plan(case.model, case.batch, strategy="none", loss=case.loss).regions)
    return f"hybrid:{regions // 4},{max(regions // 6, 2)}"


def _budgets(case: Case, baseline: Variant) -> dict[str, int]:
    """Shares of the way from the floor of recomputation to the unmanaged peak."""
    import plimsoll

    peak_bytes = baseline.steady.total_peak_bytes
    floor_bytes = plimsoll.plan(case.model, case.batch, budget=peak_bytes, loss=case.loss).floor_bytes
    return {f"{share:.0%}": int(floor_bytes + share * (peak_bytes - floor_bytes)) for share in SHARES}


def _add(
    stack: contextlib.ExitStack,
    case: Case,
    baseline: Variant,
    made: list[_Made],
    failures: list[str],
    group: str,
    name: str,
    asked: dict[str, object],
) -> None:
    import plimsoll

    say(f"{case.name}: {name}")
    try:
        plan = plimsoll.plan(case.model, case.batch, loss=case.loss, **asked)  # type: ignore[arg-type]
        variant = prepare(stack, name, case, apply_plan(plan), baseline)
    except PlimsollError as error:
        failures.append(f"{name}: {type(error).__name__}: {error.found}")
    else:
        made.append(_Made(group=group, variant=variant, plan=plan))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forms", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=["llama"])
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="timed steps per variant (default 7)")
    parser.add_argument("--max-error", type=float, default=MAX_ERROR, help="relative gradient error (default 0.01)")
    parser.add_argument("--label", default="", help="added to the names of the files that are written")
    options = parser.parse_args()
    with one_thread():
        tables = [
            form_table(build(name, options.size), rounds=options.repeats, max_error=options.max_error)
            for name in options.models
        ]
    device = build(options.models[0], options.size).device
    stem = page_stem(device, "forms")
    command = f"python -m benchmarks.forms --models {' '.join(options.models)} --size {options.size} "
    page = write_page(
        tables,
        _RESULTS,
        f"{stem}-{options.label}" if options.label else stem,
        device=device_name(device),
        command=f"{command}--repeats {options.repeats}",
        versions=versions(),
    )
    print(page.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
