"""Plans beside themselves as exported policies of selective activation checkpointing: peak and seconds of both.

    PYTHONPATH=src:tests/support python -m benchmarks.sac_policies

Peaks are counted from outside (`metering.py`); seconds are the process's CPU time per step on one thread, medians.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import plimsoll
import zoo
from benchmarks.machine import versions
from benchmarks.page import format_table
from metering import LiveStorages
from plimsoll.tracing.meters.timing import one_thread

_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 128},
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_positions": 128},
}
_SHARES = (0.75, 0.5, 0.25, 0.05)
"""Budgets between the peak of the strategy full (0) and the unmanaged one (1)."""


def run(
    make: Callable[[], nn.Module], batch: dict[str, torch.Tensor], manage: Callable[[nn.Module], Any]
) -> tuple[int, float]:
    """Peak bytes and median seconds of a managed step, in runs of their own."""
    with LiveStorages() as meter:
        model = make()
        own = {name: tensor.clone() for name, tensor in batch.items()}
        manage(model)
        meter.watch(model)
        _steps(model, own, 3)
    model = make()
    manage(model)
    return meter.peaks[-1], statistics.median(_steps(model, batch, 18)[5:])


def _steps(model: nn.Module, batch: dict[str, torch.Tensor], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        began = time.process_time()
        model(**batch)["loss"].backward()
        model.zero_grad()
        seconds.append(time.process_time() - began)
    return seconds


def _policy(path: Path) -> Callable[[nn.Module], Any]:
    spec = importlib.util.spec_from_file_location("policy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda model: module.apply(model)


def main() -> int:
    """Print the table."""
    rows = []
    for name, sizes in _MODELS.items():

        def make(name: str = name, sizes: dict[str, Any] = sizes) -> nn.Module:
            return zoo.build(name, **sizes)

        batch = zoo.words(4, 128)
        full = plimsoll.plan(make(), batch, strategy="full")
        peak_bytes, seconds = run(make, batch, lambda model: None)
        for share in _SHARES:
            room = share * (full.baseline_peak_bytes - full.predicted_peak_bytes)
            plan = plimsoll.plan(make(), batch, budget=int(full.predicted_peak_bytes + room))
            with tempfile.TemporaryDirectory() as folder:
                plan.export("sac", Path(folder) / "policy.py")
                policy = _policy(Path(folder) / "policy.py")
            found = [run(make, batch, lambda model, it=plan: plimsoll.apply(model, it)), run(make, batch, policy)]
            shown = [f"{peak / plan.predicted_peak_bytes:.2f}" for peak, _ in found]
            rows.append(
                [
                    name,
                    f"{plan.predicted_peak_bytes / peak_bytes:.2f}",
                    *shown,
                    *[f"{each / seconds:.2f}" for _, each in found],
                ]
            )
    head = ("model", "planned peak / unmanaged", "peak: plan", "peak: policy", "step: plan", "step: policy")
    print("\n".join(format_table(head, rows)), versions(), sep="\n\n")
    return 0


if __name__ == "__main__":
    with one_thread():
        sys.exit(main())
