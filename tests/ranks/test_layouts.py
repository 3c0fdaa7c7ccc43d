"""What every layout is held to: no bit of a gradient changes, the peak keeps to the budget, no collective more.

Two of them train here; ``python -m benchmarks.layouts`` has the others, pipelines included.
"""

from __future__ import annotations

import pytest
from benchmarks.layouts import Case, Facts, run

pytestmark = pytest.mark.long

CASES = [
    Case("ddp", 2, "test", 0.25),
    Case("fsdp2 x tp", 4, "test", 0.25),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.layout} on {case.ranks}")
def facts(request: pytest.FixtureRequest) -> list[Facts]:
    return run(request.param)


def test_the_plan_drops_something_on_every_rank(facts: list[Facts]):
    assert all(rank.dropped > 0 for rank in facts)


def test_gradients_and_weights_are_equal_bit_for_bit_on_every_rank(facts: list[Facts]):
    assert [rank.differing for rank in facts] == [()] * len(facts)
    assert all(rank.compared > 100 for rank in facts)


def test_the_measured_peak_keeps_to_the_budget_on_every_rank(facts: list[Facts]):
    for rank in facts:
        assert rank.measured_peak_bytes <= rank.budget_bytes < rank.unmanaged_peak_bytes


def test_a_step_has_as_many_collectives_as_without_a_plan(facts: list[Facts]):
    assert [rank.collectives_with for rank in facts] == [rank.collectives_without for rank in facts]
    assert all(rank.collectives_without > 0 for rank in facts)
