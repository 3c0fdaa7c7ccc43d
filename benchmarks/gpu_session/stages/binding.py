"""A budget that binds: the process may not take more from the device, and fifty steps run where the plain model fails.

The cap is the budget, plus what libraries hold on the device, plus a margin for the allocator, which takes whole segments.
The smallest of three margins under which all steps run is the result.
"""

from __future__ import annotations

import time

import torch

import plimsoll
from benchmarks.gpu_session.session import Session, Way
from benchmarks.models import Case
from benchmarks.peers import CHECKPOINT, Apply, none
from plimsoll.artifacts.plan import Plan

_MARGINS = (0.0, 0.02, 0.05)


def run(session: Session, part: str) -> None:
    del part
    case = session.case("llama")
    plain = Way("none", case, case.model)
    plain.step()
    workspace_bytes = session.device.workspace_bytes(plain.held_bytes)
    full = plimsoll.plan(case.model, case.batch, strategy="full", loss=case.loss)
    budget_bytes = (2 * full.floor_bytes + full.baseline_peak_bytes) // 3
    plan = plimsoll.plan(case.model, case.batch, budget=budget_bytes, loss=case.loss)
    session.write(
        way="budget",
        budget_bytes=budget_bytes,
        workspace_bytes=workspace_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        unmanaged_peak_bytes=plan.baseline_peak_bytes,
    )
    for margin in _MARGINS:
        cap_bytes = round((budget_bytes + workspace_bytes) * (1 + margin))
        if _holds(session, case, "plimsoll", _applied(plan), cap_bytes, margin):
            break
    for name, apply in (("checkpoint every block", CHECKPOINT.apply), ("none", none.apply)):
        _holds(session, case, name, apply, cap_bytes, margin)


def _applied(plan: Plan) -> Apply:
    return lambda model: plimsoll.apply(model, plan)


def _holds(session: Session, case: Case, name: str, apply: Apply, cap_bytes: int, margin: float) -> bool:
    """Whether all steps run under the cap; a line says how many did."""
    wanted = 3 if session.is_dry else 50
    done, error = 0, ""
    start = time.monotonic()
    with apply(case.model):
        way = Way(name, case, case.model)
        with session.device.capped(cap_bytes, way.held_bytes) as run_step:
            try:
                while done < wanted and session.has(0):
                    run_step(way.step)
                    done += 1
            except torch.OutOfMemoryError as out_of_memory:
                error = str(out_of_memory).partition(". ")[0]
    case.model.zero_grad(set_to_none=True)
    session.device.release()
    session.write(
        way=name,
        table=f"margin {margin:.0%}",
        cap_bytes=cap_bytes,
        steps_done=done,
        steps_wanted=wanted,
        out_of_memory=error,
        took_seconds=time.monotonic() - start,
    )
    return done == wanted
