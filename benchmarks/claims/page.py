"""The registry of claims in, the tables of ``docs/project/claims.md`` out.

    python -m benchmarks claims [NAME ...]

Without names all of them are computed, which takes an hour on two cores; the traces are kept in the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from benchmarks.claims import layers, memory, pipelines, published_runs, recomputation, thousand_ranks
from benchmarks.claims.claim import Claim, Figure, Judged, judge
from benchmarks.page import format_table

REGISTRY: tuple[Claim, ...] = (
    *layers.CLAIMS,
    *memory.CLAIMS,
    *recomputation.CLAIMS,
    *pipelines.CLAIMS,
    *published_runs.CLAIMS,
)
"""Every claim, in the order of the page."""


def section(judged: Judged) -> Iterator[str]:
    """One claim as Markdown."""
    claim = judged.claim
    yield f"### {claim.name[0].upper()}{claim.name[1:]}: {judged.summary}"
    yield ""
    yield f"*{claim.statement}.* Source: {claim.source}."
    yield ""
    yield f"Our reading: {claim.reading}."
    yield ""
    yield from format_table(("", "published", "ours", "", ""), [_cells(figure) for figure in judged.figures])
    if claim.why:
        yield ""
        yield f"Why: {claim.why}."
    yield ""


def _cells(figure: Figure) -> list[str]:
    low, high = (figure.unit.format(end) for end in (figure.range.low, figure.range.high))
    published = low if low == high else f"{low} to {high}"
    verdict = "other reading" if figure.is_other_reading else figure.verdict.value
    return [figure.what, published, figure.unit.format(figure.ours), f"{figure.error:+.1%}", verdict]


def main(names: Sequence[str]) -> int:
    """Print the sections of the named claims, or of all."""
    unknown = sorted(set(names) - {claim.name for claim in REGISTRY})
    if unknown:
        print(f"no claim is called {', '.join(unknown)}; known are:", *(c.name for c in REGISTRY), sep="\n  ")
        return 2
    for claim in REGISTRY:
        if names and claim.name not in names:
            continue
        print(claim.name, file=sys.stderr, flush=True)
        print("\n".join(section(judge(claim))), flush=True)
    if not names:
        print("\n".join(thousand_ranks.lines()))
    return 0
