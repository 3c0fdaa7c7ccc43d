"""The longest sequence that each method trains on a card of 24 GiB: the process is capped at that.

A length is doubled until it does not fit, then the gap is halved. Each length that was tried is a line.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

import plimsoll
from benchmarks.gpu_session.session import Session, Way
from benchmarks.models import Case
from benchmarks.models.data import text_ids
from benchmarks.peers import CHECKPOINT, Apply, none
from plimsoll.errors import PlimsollError
from plimsoll.units import GIB, MIB

_MARGIN = 0.02
"""Of the cap: what the allocator holds beyond its tensors, left out of Plimsoll's budget."""


def run(session: Session, part: str) -> None:
    del part
    case = session.case("llama")
    cap_bytes, start, step = (6 * MIB, 256, 256) if session.is_dry else (24 * GIB, 8192, 1024)
    way = Way("none", case_of(case, start // 2), case.model)
    way.step()
    budget_bytes = round((1 - _MARGIN) * cap_bytes) - session.device.workspace_bytes(way.held_bytes)
    methods: dict[str, Callable[[Case], Apply]] = {
        "none": lambda at_length: none.apply,
        "checkpoint every block": lambda at_length: CHECKPOINT.apply,
        "plimsoll": functools.partial(_planned, budget_bytes=budget_bytes),
    }
    for name, method in methods.items():
        tried = functools.partial(_fits, session, case, name, method, cap_bytes)
        longest, is_done = search(tried, start, step, has_time=lambda: session.has(0 if session.is_dry else 10))
        session.write(way=name, longest_tokens=longest, is_search_done=is_done, step_tokens=step, cap_bytes=cap_bytes)
        start = max(longest, step)  # the next method is expected to reach at least as far


def case_of(case: Case, tokens: int) -> Case:
    """The same model with one sequence of another length."""
    ids = text_ids(1, tokens).to(case.device)
    return dataclasses.replace(case, batch={"input_ids": ids, "labels": ids.clone()})


def search(fits: Callable[[int], bool], start: int, step: int, has_time: Callable[[], bool]) -> tuple[int, bool]:
    """The longest length found that fits, to the next ``step``, and whether the search came to its end.

    Example:
        >>> search(lambda tokens: tokens <= 700, start=128, step=64, has_time=lambda: True)
        (640, True)
    """
    good, bad, trial = 0, 0, start
    while (bad == 0 or bad - good > step) and trial >= step:
        if not has_time():
            return good, False
        if fits(trial):
            good = trial
        else:
            bad = trial
        trial = 2 * good if bad == 0 else (good + bad) // 2 // step * step
    return good, True


def _planned(at_length: Case, budget_bytes: int) -> Apply:
    plan = plimsoll.plan(at_length.model, at_length.batch, budget=budget_bytes, loss=at_length.loss)
    return lambda model: plimsoll.apply(model, plan)


def _fits(
    session: Session, case: Case, name: str, method: Callable[[Case], Apply], cap_bytes: int, tokens: int
) -> bool:
    at_length = case_of(case, tokens)
    way = Way(name, at_length, at_length.model)
    error = ""
    try:
        with method(at_length)(case.model), session.device.capped(cap_bytes, way.held_bytes) as run_step:
            run_step(way.step)
    except (torch.OutOfMemoryError, PlimsollError) as refused:
        error = f"{type(refused).__name__}: {str(refused).partition(chr(10))[0][:200]}"
    case.model.zero_grad(set_to_none=True)
    session.device.release()
    session.write(way=name, table=str(tokens), tokens=tokens, is_reached=not error, error_text=error)
    return not error
