"""A method is taken if it saves time and held-out loss stands it; else not, and it says what is missing."""

from __future__ import annotations

import pytest

from plimsoll.artifacts.traffic import TrafficRuling
from plimsoll.artifacts.verdict import IntervalEstimate, Outcome
from plimsoll.distributed.comm_cost.findings import differences, judge_all, judge_method, validate
from traffic_samples import make_method, make_validation

FAST = IntervalEstimate(value=0.2, low=0.15, high=0.25)
UNCLEAR = IntervalEstimate(value=0.05, low=-0.05, high=0.15)
SLOW = IntervalEstimate(value=-0.2, low=-0.3, high=-0.1)
NONE = make_method("none", saved=0.0, ruling=TrafficRuling.UNDECIDED)


@pytest.mark.parametrize(
    ("saved", "outcome", "ruling"),
    [
        (FAST, Outcome.CLEAR, TrafficRuling.KEEP),
        (FAST, Outcome.BROKEN, TrafficRuling.REFUSE),
        (FAST, Outcome.OPEN, TrafficRuling.UNDECIDED),
        (FAST, Outcome.NOT_MEASURED, TrafficRuling.UNDECIDED),
        (FAST, None, TrafficRuling.UNDECIDED),
        (UNCLEAR, Outcome.CLEAR, TrafficRuling.UNDECIDED),
        (UNCLEAR, Outcome.BROKEN, TrafficRuling.REFUSE),
        (SLOW, Outcome.CLEAR, TrafficRuling.REFUSE),
        (SLOW, None, TrafficRuling.REFUSE),
    ],
)
def test_time_and_held_out_loss_decide(saved: IntervalEstimate, outcome: Outcome | None, ruling: TrafficRuling):
    validation = None if outcome is None else make_validation(outcome)
    assert judge_method("powersgd:4", saved, validation)[0] is ruling


def judged(*methods: tuple[str, float, TrafficRuling]):
    return judge_all([NONE, *(make_method(name, saved=saved, ruling=ruling) for name, saved, ruling in methods)])


def test_the_fastest_of_the_methods_that_are_worth_it_is_the_best_and_of_refused_ones_it_is_named():
    kept = (("int8", 0.1, TrafficRuling.KEEP), ("powersgd:4", 0.2, TrafficRuling.KEEP))
    ruling, reason, best, missing = judged(*kept, ("topk:1%", 0.3, TrafficRuling.REFUSE))
    assert (ruling, best, missing) == (TrafficRuling.KEEP, "powersgd:4", ())
    assert "powersgd:4" in reason
    _, reason, best, _ = judged(("int8", -0.5, TrafficRuling.REFUSE), ("sign", -0.1, TrafficRuling.REFUSE))
    assert best is None
    assert "sign" in reason


def test_what_is_undecided_says_what_is_missing():
    ruling, _, best, missing = judged(("int8", 0.1, TrafficRuling.UNDECIDED))
    assert (ruling, best) == (TrafficRuling.UNDECIDED, None)
    assert any("--validate" in each for each in missing)


def test_a_validation_that_could_not_be_judged_is_no_missing_one_and_says_what_it_lacks():
    validation = make_validation(Outcome.NOT_MEASURED)
    assert validation.found in judge_method("int8", FAST, validation)[1]
    method = make_method("int8", saved=0.1, ruling=TrafficRuling.UNDECIDED, validation=validation)
    *_, missing = judge_all([NONE, method])
    assert len(missing) == 1
    assert "three held-out batches" in missing[0]


def around(value: float) -> IntervalEstimate:
    return IntervalEstimate(value=value, low=value - 0.01, high=value + 0.01)


@pytest.mark.parametrize(
    ("difference", "outcome"),
    [(0.0, Outcome.CLEAR), (0.025, Outcome.OPEN), (0.1, Outcome.BROKEN), (-0.5, Outcome.CLEAR)],
)
def test_a_held_out_loss_may_be_worse_by_a_percent(difference: float, outcome: Outcome):
    rows = [[2.0, 3.0, 2.5]]
    assert validate(rows, rows, around(difference), steps=10).outcome is outcome


def test_it_may_be_worse_by_as_much_as_uncompressed_runs_lie_apart():
    baseline = [[2.0, 3.0], [2.4, 3.4]]
    found = validate(baseline, baseline, around(0.2), steps=10)
    assert found.seed_spread == pytest.approx(0.2828, abs=1e-4)
    assert found.outcome is Outcome.CLEAR


def test_a_run_that_goes_to_nan_breaks_the_rule_and_one_whose_baseline_does_says_nothing():
    fine, nan = [[2.0, 3.0]], [[2.0, None]]
    assert validate(fine, nan, None, steps=10).outcome is Outcome.BROKEN
    assert validate(nan, fine, None, steps=10).outcome is Outcome.NOT_MEASURED
    assert differences(fine, nan) is None


def test_differences_are_taken_batch_by_batch_and_averaged_over_orders():
    assert differences([[1.0, 2.0], [1.0, 2.0]], [[1.5, 2.0], [1.0, 3.0]]) == [0.25, 0.5]
