"""A loop, or only its backward, runs in a thread of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable

import pytest
import torch

import plimsoll
from plimsoll.errors import BudgetBelowFloor
from steps import Stack, mean_square

IN_A_THREAD = """
import threading, torch, plimsoll
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
handle = plimsoll.attach(model, "1GiB")
def loop():
    for _ in range(4):
        model(torch.randn(64, 32)).square().mean().backward()
thread = threading.Thread(target=loop)
thread.start()
thread.join()
assert handle.plan is not None
handle.remove()
"""


@pytest.mark.long
def test_a_process_whose_loop_ran_in_a_thread_ends_without_a_word_of_torch():
    done = subprocess.run([sys.executable, "-c", IN_A_THREAD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stderr


def in_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def losses(budget: str | None, steps: int = 6) -> list[float]:
    torch.manual_seed(0)
    model, found = Stack(4, 32), []
    handle = None if budget is None else plimsoll.attach(model, budget)
    for _ in range(steps):
        loss = mean_square(model(torch.randn(1024, 32)))
        in_thread(loss.backward)
        model.zero_grad()
        found.append(loss.item())
    if handle is not None:
        assert handle.plan is not None
        assert handle.plan.predicted_peak_bytes <= handle.plan.budget_bytes
        handle.remove()
    return found


@pytest.mark.long
def test_a_backward_in_another_thread_is_planned_by_its_trace():
    """The meter sees one thread, so what it reads there is too little."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ran backward in another thread")
        with pytest.raises(BudgetBelowFloor) as refused:
            losses("64KiB")
        (budget,) = re.findall(r'budget="([^"]+)"', refused.value.next)
        assert losses(budget) == losses(None)
