"""What the overhead of recomputing every block is made of, by ``plimsoll.diagnose``; how much of the work it attributes.

    python -m benchmarks.overhead_causes --models llama gpt2 vit --size tiny --steps 5

Prints two tables. The shares are of the baseline's step under the profiler.
"""

from __future__ import annotations

import argparse
import sys

import plimsoll
from benchmarks.machine import versions
from benchmarks.models import FAMILIES, SIZES, build
from plimsoll.artifacts.finding import Finding, OverheadCause
from plimsoll.units import format_seconds, format_share


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead_causes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=["llama", "gpt2", "vit"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--strategy", default="full")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    findings: dict[str, Finding] = {}
    for name in options.models:
        case = build(name, options.size)
        plan = plimsoll.plan(case.model, case.batch, strategy=options.strategy, loss=case.loss)
        findings[name] = plimsoll.diagnose(case.model, case.batch, plan, loss=case.loss, steps=options.steps)
    print(f"{options.strategy}, {', '.join(f'{k} {v}' for k, v in versions().items())}\n")
    print("\n".join([*_attribution(findings), "", *_causes(findings), ""]))
    for name, finding in findings.items():
        print("\n".join(f"{name}: {note}" for note in finding.notes))
    return 0


def _attribution(findings: dict[str, Finding]) -> list[str]:
    lines = [
        "| model | plain step | with the plan | under the profiler | with the plan | to an op | to a phase | to a module |"
    ]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, finding in findings.items():
        side = finding.plan
        cells = [
            name,
            format_seconds(finding.measured_baseline_seconds or 0.0),
            format_share(finding.measured_overhead_share or 0.0),
            format_seconds(finding.baseline.step_seconds),
            format_share(finding.overhead_share),
            *(f"{share:.2%}" for share in (side.attributed_share, side.phased_share, side.module_share)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _causes(findings: dict[str, Finding]) -> list[str]:
    lines = [f"| model | {' | '.join(OverheadCause)} | sum | overhead |", f"|---|{'--:|' * (len(OverheadCause) + 2)}"]
    for name, finding in findings.items():
        shares = [part.seconds / finding.baseline.step_seconds for part in finding.parts]
        cells = [name, *map(format_share, shares), format_share(sum(shares)), format_share(finding.overhead_share)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
