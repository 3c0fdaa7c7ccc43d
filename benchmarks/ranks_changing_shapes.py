"""Batches of random length on two ranks under `attach`: peaks, gradients, exchanges, time beside one plan and checkpointing.

    python -m benchmarks.ranks_changing_shapes [--steps 60] [--page benchmarks/results/....md]

Every rank draws lengths of its own. The same training runs unmanaged, under `attach`, under `attach` with one plan for all
ranks (what `allow=` with collectives asks for) and with `torch.utils.checkpoint` around every block: one after the other, and
again in the other order. Seconds are CPU time of both ranks, threads of gloo included. Peaks are allocator events, in a run
of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import plimsoll
from benchmarks.launching import launch
from benchmarks.machine import device_name, page_head, versions
from benchmarks.page import format_table
from benchmarks.peers import checkpointing
from benchmarks.shaped_batches import Stream, streams
from plimsoll.engine import region
from plimsoll.session.rendezvous.exchange import Meeting
from plimsoll.tracing.ddp import bucket_bytes
from plimsoll.tracing.local_tensors import local_of
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes
from plimsoll.units import MIB

_LAYOUTS = ("DDP", "FSDP2")
_HOW = ("unmanaged", "attach", "one plan", "checkpoint")
_SETTLED = 10
"""Steps in which shapes are traced. Of these counts the highest peak that `attach` has measured itself."""
_HEAD = (
    "Llama under", "budget MiB", "unmanaged MiB", "highest step MiB", "steps over", "gradients equal", "recordings per region",
    f"exchanges after step {_SETTLED}", "attach ×", "one plan ×", "checkpoint ×", "attach / one plan", "attach / checkpoint",
)  # fmt: skip


def _stream() -> Stream:
    return next(stream for stream in streams() if stream.name == "Llama")


def _wrapped(model: Any, layout: str) -> nn.Module:
    if layout == "DDP":
        return DistributedDataParallel(model)
    for block in model.model.layers:
        fully_shard(block)
    sharded: nn.Module = fully_shard(model)
    return sharded


class _Run:
    """One training of a rank on its own batches."""

    def __init__(self, layout: str, how: str, batches: list[dict[str, Any]], budget: int) -> None:
        self.seconds: list[float] = []
        self.exchanges: list[int] = []
        self.peaks: list[int] = []
        self.gradients: list[list[Any]] = []
        self._undo = contextlib.ExitStack()
        self.handle: Any = None
        model: Any = _stream().build()
        if how == "checkpoint":
            self._undo.enter_context(checkpointing.apply(model))
        self.model = _wrapped(model, layout)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if how in ("attach", "one plan"):
            allow = ("recompute",) if how == "attach" else ("recompute", "collectives")
            handle = plimsoll.attach(self.model, budget, optimizer=self._optimizer, allow=allow)
            self.handle = self._undo.enter_context(handle)
        self._batches = batches

    def train(self, *, compares: bool = False, measures: bool = False) -> _Run:
        with self._undo:
            for number, batch in enumerate(self._batches):
                torch.manual_seed(number)
                dist.barrier()
                static_bytes = storage_bytes([*self.model.parameters(), *self.model.buffers(), *batch.values()])
                static_bytes += bucket_bytes(self.model)
                meter = PeakMeter("cpu") if measures and number >= _SETTLED else None
                start = time.process_time()
                with (
                    mock.patch.object(Meeting, "arrive", wraps=Meeting.arrive) as arrive,
                    meter or contextlib.nullcontext(),
                ):
                    self.model(**batch)["loss"].backward()
                self.seconds.append(time.process_time() - start)
                self.exchanges.append(arrive.call_count)
                if meter is not None:
                    self.peaks.append(static_bytes + meter.peak_bytes)
                elif measures and number == _SETTLED - 1:
                    self.peaks.append(self.handle.peak_bytes)
                if compares:
                    parameters = self.model.parameters()
                    self.gradients.append([local_of(p.grad).numpy().copy() for p in parameters if p.grad is not None])
                self._optimizer.step()
                self._optimizer.zero_grad()
        return self


def on_a_rank(asked: dict[str, Any]) -> dict[str, Any]:
    """What one rank found."""
    layout, steps = asked["layout"], asked["steps"]
    warnings.simplefilter("ignore")
    stream, draw = _stream(), torch.Generator().manual_seed(7 + dist.get_rank())
    torch.manual_seed(dist.get_rank())
    batches = [stream.batch(*stream.draw(draw)) for _ in range(steps)]
    roomy = plimsoll.plan(_wrapped(stream.build(), layout), stream.batch(512), budget="8GiB")
    budget = round(roomy.floor_bytes + asked["share"] * (roomy.baseline_peak_bytes - roomy.floor_bytes))
    recorded: Counter[str] = Counter()
    record = region.record_call

    def counting(subject: Any, *given: Any) -> Any:
        recorded[subject.name] += 1
        return record(subject, *given)

    expected = _Run(layout, "unmanaged", batches, budget).train(compares=True)
    with mock.patch.object(region, "record_call", counting):
        managed = _Run(layout, "attach", batches, budget).train(compares=True)
    pairs = zip(expected.gradients, managed.gradients, strict=True)
    measured = _Run(layout, "attach", batches, budget).train(measures=True)
    seconds = dict.fromkeys(_HOW, 0.0)
    for how in (*_HOW, *reversed(_HOW)):
        run = _Run(layout, how, batches, budget).train()
        seconds[how] += sum(run.seconds[steps // 2 :])
    return {
        "budget": budget,
        "unmanaged": roomy.baseline_peak_bytes,
        "peaks": measured.peaks,
        "is_equal": all((a == b).all() for one, other in pairs for a, b in zip(one, other, strict=True)),
        "recordings": max(recorded.values()),
        "exchanges": sum(managed.exchanges[_SETTLED:]),
        "seconds": seconds,
    }


def row(layout: str, ranks: list[dict[str, Any]]) -> list[str]:
    """A line of the table: the worst rank, and the time of all."""
    budget, peaks = ranks[0]["budget"], [peak for rank in ranks for peak in rank["peaks"]]
    seconds = {how: sum(rank["seconds"][how] for rank in ranks) for how in _HOW}
    base = seconds["unmanaged"]
    return [
        layout,
        f"{budget / MIB:.1f}",
        f"{ranks[0]['unmanaged'] / MIB:.1f}",
        f"{max(peaks) / MIB:.1f}",
        f"{sum(peak > budget for peak in peaks)} of {len(peaks)}",
        "yes" if all(rank["is_equal"] for rank in ranks) else "NO",
        str(max(rank["recordings"] for rank in ranks)),
        str(sum(rank["exchanges"] for rank in ranks)),
        *(f"{seconds[how] / base:.2f}" for how in _HOW[1:]),
        f"{seconds['attach'] / seconds['one plan']:.2f}",
        f"{seconds['attach'] / seconds['checkpoint']:.2f}",
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks_changing_shapes")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--share", type=float, default=0.4, help="of the way from the floor to the unmanaged peak")
    parser.add_argument("--page", type=Path, help="the file of a page of results")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    rows = []
    for layout in _LAYOUTS:
        asked = {"layout": layout, "steps": options.steps, "share": options.share}
        rows.append(row(layout, launch(2, "benchmarks.ranks_changing_shapes:on_a_rank", asked)))
        print(*zip(_HEAD, rows[-1], strict=True), sep="\n", flush=True)
    if options.page is not None:
        command = f"python -m benchmarks.ranks_changing_shapes --steps {options.steps} --share {options.share}"
        head = page_head(
            "Batches of changing size on two ranks",
            command,
            device=device_name(torch.device("cpu")),
            versions=versions(),
        )
        options.page.write_text("\n".join([*head, *_EXPLAINED, "", *format_table(_HEAD, rows), ""]))
    return 0


_EXPLAINED = (
    "Two processes of torchrun's agent with gloo, lengths of 32 to 512 drawn by each rank for itself. *×*: CPU seconds of both "
    "ranks in forward and backward of the second half of the steps over the unmanaged training's; two runs of each, in turns. "
    "*One plan*: `attach` where all ranks keep one plan for the largest batch. *Highest step*: allocator events on both ranks, "
    f"of every step after the first {_SETTLED}; of those the highest that `attach` has measured, as one step.",
)


if __name__ == "__main__":
    raise SystemExit(main())
