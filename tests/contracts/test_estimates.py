"""An estimate, made without weights, against a real training step: bytes by category, and the truth within the error bar."""

from __future__ import annotations

import pytest
from benchmarks.estimate_accuracy import CATEGORY_WITHIN, PEAK_WITHIN, compare
from benchmarks.real_steps import Training

pytestmark = pytest.mark.long

ALIKE = (
    Training(target="bert-tiny", precision="bf16-mixed", optimizer="adafactor"),
    Training(target="mixtral-tiny", optimizer="sgd-momentum", micro_batches=2),
    Training(target="mamba2-tiny"),
)


@pytest.mark.parametrize("training", ALIKE, ids=str)
def test_peak_and_every_category_are_those_of_a_real_step(training: Training):
    row = compare(training)
    assert abs(row.peak.error) <= PEAK_WITHIN
    assert {figure.name: figure.error for figure in row.figures if abs(figure.error) > CATEGORY_WITHIN} == {}
    assert abs(row.peak.predicted - row.peak.measured) <= row.stage.error_bytes
    exact = {figure.name: figure for figure in row.figures}
    for name in ("parameters", "gradients"):
        assert exact[name].predicted == exact[name].measured


def test_what_convolutions_allocate_for_themselves_is_called_unsupported():
    row = compare(Training(target="clip-tiny"))
    assert row.peak.predicted < row.peak.measured
    assert row.unsupported == "workspaces of convolutions"
    assert "+ unsupported" in str(row.stage) or row.stage.unsupported[0].bytes is None
