"""Published claims that are cheap to compute keep the verdict that the docs give them."""

from __future__ import annotations

import pytest
from benchmarks.claims import layers, memory, pipelines
from benchmarks.claims.claim import Claim, Figure, Range, Verdict, judge
from benchmarks.claims.page import REGISTRY
from benchmarks.claims.traces import KORTHIKANTI, layer

CHEAP = {claim.name: claim for claim in (*layers.CLAIMS, *memory.CLAIMS, *pipelines.CLAIMS) if claim.is_cheap}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(CHEAP))
def test_cheap_claims_are_reproduced(name: str):
    judged = judge(CHEAP[name])
    assert judged.verdict is Verdict.REPRODUCED, [(figure.what, figure.error) for figure in judged.counted]


@pytest.mark.long
def test_a_layer_of_gpt3_holds_what_the_published_formula_says():
    sizes = KORTHIKANTI["175B"]
    formula = 34 + 5 * sizes.heads * sizes.sequence / sizes.hidden
    assert layer(sizes).bytes / sizes.sbh == pytest.approx(formula, rel=1e-4)


def test_names_of_claims_are_unique_and_each_says_where_it_is_from():
    assert len({claim.name for claim in REGISTRY}) == len(REGISTRY)
    assert all(claim.source and claim.reading for claim in REGISTRY)


@pytest.mark.parametrize(
    ("ours", "verdict"), [(1.04, Verdict.REPRODUCED), (1.2, Verdict.OFF), (0.5, Verdict.WRONG), (2.5, Verdict.WRONG)]
)
def test_a_claim_is_as_good_as_its_worst_figure(ours: float, verdict: Verdict):
    figures = (
        Figure(what="good", published=1.0, ours=1.0),
        Figure(what="judged", published=Range(0.9, 1.0), ours=ours),
        Figure(what="aside", published=1.0, ours=9.0, is_other_reading=True),
    )
    claim = Claim(name="n", statement="s", source="s", reading="r", figures=lambda: figures)
    assert judge(claim).verdict is verdict
