"""What a stage works with: its device, its time, its lines; and ways to train one model, measured side by side."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import plimsoll
from benchmarks.gpu_session.devices import Device
from benchmarks.gpu_session.lines import RESULTS, Lines
from benchmarks.measure import bits_equal
from benchmarks.models import Case, build
from benchmarks.peers import NONE, Apply, Peer, none
from plimsoll.session.training_step import relative_error
from plimsoll.tracing.meters.memory import storage_bytes

_SEED = 1234


class Session:
    """One running stage: it writes lines, and asks whether there is time for the next measurement."""

    def __init__(self, stage: str, device: Device, folder: Path, limit_seconds: float) -> None:
        self.stage, self.device, self.folder = stage, device, folder
        self._lines = Lines(folder / RESULTS)
        self._start = time.monotonic()
        self._end = self._start + limit_seconds

    @property
    def is_dry(self) -> bool:
        return self.device.kind == "cpu"

    def write(self, **fields: Any) -> None:
        elapsed = round(time.monotonic() - self._start, 2)
        self._lines.write(stage=self.stage, elapsed_seconds=elapsed, **fields)

    def has(self, seconds: float) -> bool:
        """Whether that much time is left to this stage."""
        return time.monotonic() + seconds < self._end

    def case(self, family: str) -> Case:
        """The model at the size of this device."""
        return build(family, "dry" if self.is_dry else "h100")

    def rounds(self, wanted: int) -> int:
        """Timed steps per way; a dry run takes one."""
        return 1 if self.is_dry else wanted

    @contextlib.contextmanager
    def attempt(self, **about: Any) -> Iterator[None]:
        """Write an error of the block as a line of ``about``, free its memory, and continue after the block."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - out of memory, a compiler, a library, us: the rest is to be measured
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.write(
                **about,
                error=f"{type(error).__name__}: {error}"[:600],
                at=f"{where.filename.rpartition('/')[2]}:{where.lineno}",
            )
            traceback.clear_frames(error.__traceback__)
        else:
            return
        gc.collect()
        self.device.release()


@dataclasses.dataclass(slots=True)
class Way:
    """One way to train a case, on a copy of its model that shares the parameters."""

    name: str
    case: Case
    forward: Callable[..., Any]

    def run(self) -> None:
        """Forward and backward. The output is held until backward ends, as in the usual loop and as plans assume."""
        output = self.forward(**self.case.batch)
        self.case.loss(output).backward()
        del output

    def step(self) -> None:
        self.run()
        self.case.model.zero_grad(set_to_none=True)

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters, buffers and the batch."""
        batch = [each for each in self.case.batch.values() if isinstance(each, torch.Tensor)]
        return storage_bytes([*self.case.model.parameters(), *self.case.model.buffers(), *batch])


class Bench:
    """Ways to train one case. Each is measured when it is added (peak, bits, time) and stays applied until the bench closes.

    The first way is the baseline: gradients are compared with its gradients, and every other way is timed in turns with it.
    Where it does not fit on the device, the first way that fits takes its place for the gradients, and ways are timed alone.
    """

    def __init__(self, session: Session, case: Case, *, rounds: int, table: str = "", baseline: Peer = NONE) -> None:
        self.session, self.case = session, case
        self.baseline: Way | None = None
        self.peaks: dict[str, int] = {}
        """Allocated bytes of every way that could be measured."""
        self._rounds, self._table, self._first = session.rounds(rounds), table, baseline
        self._ways: dict[str, Way] = {}
        self._expected: tuple[torch.Tensor, ...] | None = None
        self._expected_of = ""
        self._longest_seconds = 0.0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        self.add(self._first)
        self.baseline = self._ways.get(self._first.name)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, way: str, **fields: Any) -> None:
        self.session.write(table=self._table, way=way, **fields)

    def add(self, peer: Peer, **about: Any) -> int | None:
        """Measure one way; its allocated peak in bytes, or None where it could not be measured (a line says why)."""
        lack = peer.missing(next(self.case.model.parameters()).device)
        if lack or not self.session.has(1.2 * self._longest_seconds):
            self.write(peer.name, skipped=f"it needs {lack}" if lack else "no time was left", **about)
            return None
        start = time.monotonic()
        with self.session.attempt(table=self._table, way=peer.name, **about):
            self._measure(self._applied(peer), **about)
        self._longest_seconds = max(self._longest_seconds, time.monotonic() - start)
        self.case.model.zero_grad(set_to_none=True)
        return self.peaks.get(peer.name)

    def add_plan(
        self, name: str, budget_bytes: int | None, *, around: Apply = none.apply, **options: Any
    ) -> int | None:
        """Measure Plimsoll under a budget, or with ``strategy=``. ``around`` changes the model before it is planned."""
        return self.add(
            Peer(name, partial(self._planned, name, budget_bytes, around, options)), budget_bytes=budget_bytes
        )

    def time_together(self, rounds: int) -> None:
        """Time all ways in turns, in one series."""
        rounds = self.session.rounds(rounds)
        if len(self._ways) > 1 and self.session.has(0 if self.session.is_dry else self._longest_seconds):
            self.session.write(table=self._table, together=self._in_turns(self._ways, rounds))

    def _applied(self, peer: Peer) -> Way:
        shared = {id(parameter): parameter for parameter in self.case.model.parameters()}  # no step writes them
        copied = dataclasses.replace(self.case, model=copy.deepcopy(self.case.model, shared))
        with contextlib.ExitStack() as stack:
            way = Way(peer.name, copied, stack.enter_context(peer.apply(copied.model)))
            way.step()  # compiles, pins host memory, records
            self._stack.enter_context(stack.pop_all())
        return way

    @contextlib.contextmanager
    def _planned(
        self, name: str, budget_bytes: int | None, around: Apply, options: dict[str, Any], model: nn.Module
    ) -> Iterator[nn.Module]:
        with around(model):
            start = time.monotonic()
            plan = plimsoll.plan(model, self.case.batch, budget_bytes, loss=self.case.loss, **options)
            self.write(
                name,
                predicted_peak_bytes=plan.predicted_peak_bytes,
                predicted_ratio=plan.predicted_seconds / plan.baseline_seconds,
                offloaded_bytes=plan.offloaded_bytes,
                status=str(plan.status),
                plan_seconds=time.monotonic() - start,
            )
            with plimsoll.apply(model, plan):
                yield model

    def _measure(self, way: Way, **about: Any) -> None:
        peaks = self.session.device.peaks(self._seeded(way), way.held_bytes)
        way.case.model.zero_grad(set_to_none=True)
        self.write(way.name, peak_bytes=peaks, **about)
        with self.session.attempt(
            table=self._table, way=way.name
        ):  # an op may refuse deterministic mode; time it anyway
            self._compare(way)
        timed = {each.name: each for each in (self.baseline, way) if each is not None}
        self.write(way.name, seconds=self._in_turns(timed, self._rounds))
        self._ways[way.name] = way
        self.peaks[way.name] = peaks["allocated"]

    def _seeded(self, way: Way) -> Callable[[], None]:
        way.case.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.manual_seed(_SEED)
        return way.run

    def _compare(self, way: Way) -> None:
        """Write whether this way's gradients have the bits of the first way's; of the first, whether it repeats its own."""
        if self._expected is None:
            # They wait in host memory: on the device they would count into the other ways' peaks.
            self._expected = tuple(each.to("cpu", copy=True) for each in self._gradients(way))
            self._expected_of = way.name
        found = self._gradients(way)
        differing, squares, total = 0, 0.0, 0.0
        for mine, theirs in zip(found, (each.to(found[0].device) for each in self._expected), strict=True):
            size = float(theirs.double().norm()) ** 2
            total += size
            if not bits_equal((mine,), (theirs,)):
                differing += 1
                squares += (
                    size * relative_error({"": theirs}, {"": mine}) ** 2 if size else float(mine.double().norm()) ** 2
                )
        way.case.model.zero_grad(set_to_none=True)
        self.write(
            way.name,
            bits={
                "compared_with": self._expected_of,
                "tensors": len(found),
                "differing_tensors": differing,
                "relative_error": (squares / total) ** 0.5 if total else squares**0.5,
            },
        )

    def _gradients(self, way: Way) -> list[torch.Tensor]:
        with self.session.device.deterministic_kernels():
            self._seeded(way)()
        return [each.grad for each in way.case.model.parameters() if each.grad is not None]

    def _in_turns(self, ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
        """Seconds of every way, round by round; entries of one round belong together.

        The first round is not counted: the step before was deterministic, and a plan records a call under other flags anew.
        """
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        gc.collect()
        gc.disable()  # a collection within a step would be counted as the step's time
        try:
            for turn in range(rounds + 1):
                for name in ways if turn % 2 == 0 else reversed(ways):
                    seconds[name].append(self.session.device.seconds(ways[name].step))
        finally:
            gc.enable()
        return {name: each[1:] for name, each in seconds.items()}
