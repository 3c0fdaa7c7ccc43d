"""Three small models under a plan, verified: gradients bit for bit, the peak within the budget."""

from __future__ import annotations

import time

import torch

import plimsoll
import steps
from benchmarks.gpu_session.session import Session

_MODELS = ("llama", "gpt2", "conv_net")


def run(session: Session, part: str) -> None:
    del part
    for name in _MODELS[:1] if session.is_dry else _MODELS:
        with session.attempt(way=name), session.device.deterministic_kernels():
            _verify(session, name)


def _verify(session: Session, name: str) -> None:
    start = time.monotonic()
    # A GPU hands out 512 bytes at a time: activations have to be much larger.
    scale = 1 if session.is_dry else 8
    model, batch, loss = steps.on(torch.device(session.device.kind), getattr(steps, name)(scale))
    full = plimsoll.plan(model, batch, strategy="full", loss=loss)
    budget_bytes = (full.floor_bytes + full.baseline_peak_bytes) // 2
    plan = plimsoll.plan(model, batch, budget=budget_bytes, loss=loss)
    receipt = plimsoll.verify(model, batch, plan, loss=loss, steps=2)
    session.write(
        way=name,
        verdict=str(receipt.verdict),
        is_bit_equal=receipt.is_bit_equal,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        peak_bytes={"allocated": receipt.measured_peak_bytes},
        engines=sorted({str(region.engine) for region in receipt.regions}),
        took_seconds=time.monotonic() - start,
    )
