"""How contracts ask for deterministic kernels, and how much of a copy's time is hidden."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from contracts.harness import hidden_share, kernels_for


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def without_deterministic_form() -> None:
    """An op that raises in strict deterministic mode on a CPU too."""
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))


def test_an_op_without_a_deterministic_form_runs_for_the_models_that_call_one():
    with kernels_for("mixtral"):
        without_deterministic_form()
    with pytest.raises(RuntimeError):
        without_deterministic_form()


def test_every_other_model_runs_in_strict_mode():
    with kernels_for("llama"), pytest.raises(RuntimeError):
        without_deterministic_form()


@pytest.mark.parametrize(
    ("copying", "computing", "both", "share"), [(5, 55, 55, 1.0), (5, 55, 60, 0.0), (5, 5, 7.5, 0.5), (20, 5, 20, 1.0)]
)
def test_the_hidden_share_is_of_the_shorter_work(copying: float, computing: float, both: float, share: float):
    assert hidden_share(copying, computing, both) == share
