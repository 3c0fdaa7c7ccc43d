"""Trains a probe's two arms (without and with the plan) in turns, a chunk of steps at a time, on one model, and logs them.

After every chunk, the arm's state is written to the run directory and the other arm's state is read. So only one arm's state is
in memory at a time, and an interrupted run continues after its last whole chunk. The result of a chunk depends only on the
state at its start, the batches and the seed. So an interrupted run gives the same numbers as an uninterrupted run. State that
cannot be stored, such as a counter in an attribute of the model or of the loss, begins anew in each chunk.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from plimsoll.analysis.probe.evidence import ARMS, BASELINE, PLAN, ArmLog, HeldOutRecord, StepRecord
from plimsoll.analysis.probe.keeping import (
    ArmState,
    ModuleState,
    RunDirectory,
    Weights,
    put_optimizer,
    put_weights,
    seed_everything,
    take_optimizer,
    take_weights,
)
from plimsoll.analysis.probe.rules import ProbeSettings
from plimsoll.analysis.probe.step import MakeOptimizer, Trainer
from plimsoll.analysis.probe.stream import Call, Stream
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress
from plimsoll.engine.apply import Handle
from plimsoll.session.manage import manage
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.recorder.calling import unwrapped
from plimsoll.tracing.recorder.untouched import (
    KeptState,
    KeptTensors,
    RandomState,
    arguments_kept,
    side_effects_kept,
)

_COMPARED = 1
"""The position, within a chunk of training steps, of the step that compares gradients. Plimsoll records ops in the step
before.
"""
_LEAST_STEPS_TO_MEASURE = 3
"""The peak is measured only in chunks with at least this many steps: one records, one compares gradients, one must remain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Data: the inputs of a probe: model and trainer, plan, batches, settings, run directory and progress report."""

    trainer: Trainer
    plan: Plan
    make_optimizer: MakeOptimizer
    stream: Stream
    held_out: Sequence[Call]
    settings: ProbeSettings
    directory: RunDirectory
    report: Progress


class Arms:
    """Trains both arms (the same training without and with the plan), a chunk of steps at a time, and holds their logs.

    If the run directory has an interrupted run, that run is continued.

    Args:
        job: the inputs of the probe.
        original: the weights that both arms start from.
    """

    def __init__(self, job: Job, original: Weights) -> None:
        self._job = job
        self._original = original
        self._state = ModuleState(job.trainer.model)
        self._logs = {arm: ArmLog() for arm in ARMS}
        self._checksums: dict[tuple[str, int], int] = {}
        for arm in ARMS:
            state = job.directory.load(arm)
            if state is not None:
                self._logs[arm] = state.log
                if state.log.is_finite:
                    self._checksums[arm, self._steps_of(arm)] = state.data_checksum
                job.directory.write_log(arm, state.log)
        if self.is_finite:
            if self.steps:
                job.report(f"passing over the data of {self.steps} steps", 0.0)
            job.stream.skip(self.steps)
            self._check_data()

    @property
    def steps(self) -> int:
        """The number of training steps that each arm (the training without or with the plan) has taken so far."""
        return min(self._steps_of(arm) for arm in ARMS)

    def _steps_of(self, arm: str) -> int:
        return len(self._logs[arm].steps)

    @property
    def is_finite(self) -> bool:
        """Whether all losses and gradients so far are finite, in the training without the plan and in that with it."""
        return all(log.is_finite for log in self._logs.values())

    @property
    def logs(self) -> tuple[ArmLog, ArmLog]:
        """The logs of the two training runs: without the plan, then with the plan."""
        return self._logs[BASELINE], self._logs[PLAN]

    def advance(self) -> None:
        """Run the next chunk of steps without the plan, then with it.

        An arm (one of the two) that had finished this chunk before an interruption is skipped.
        """
        settings = self._job.settings
        start = self.steps
        calls = self._job.stream.draw(min(settings.chunk_steps, settings.steps - start))
        for arm in ARMS:
            if self._steps_of(arm) == start and self.is_finite:
                self._run_chunk(arm, start, calls)
        self._check_data()

    def _check_data(self) -> None:
        """Raise if the batches of a resumed run differ from the batches that were trained on before the interruption."""
        stream = self._job.stream
        for arm in ARMS:
            known = self._checksums.get((arm, stream.drawn))
            if known is not None:
                stream.check(known)

    def _run_chunk(self, arm: str, start: int, calls: Sequence[Call]) -> None:
        """Run one chunk of one arm, and save the arm's state. Objects in the batches and in the loss are restored."""
        given = (
            [(call.args, call.kwargs) for call in (*calls, *self._job.held_out)],
            unwrapped(self._job.trainer.loss),
        )
        with arguments_kept(given):
            self._run_steps(arm, start, calls)

    def _run_steps(self, arm: str, start: int, calls: Sequence[Call]) -> None:
        job = self._job
        model = job.trainer.model
        optimizer = self._enter(arm)
        seed_everything(zlib.crc32(f"{job.settings.seed}/{start}".encode()))
        fresh = ArmLog()
        with contextlib.nullcontext() if arm == BASELINE else manage(model, job.plan) as managed:
            for step, call in enumerate(calls, start):
                fresh.steps.append(self._step(step, call, optimizer, fresh, managed, (start, len(calls))))
                self._show(arm, fresh)
                if not fresh.is_finite:
                    break
        stop = start + len(calls)
        if fresh.is_finite and job.held_out and stop in job.settings.looks:
            fresh.held_out.append(HeldOutRecord(steps=stop, losses=job.trainer.evaluate(job.held_out)))
        known = self._logs[arm]
        log = ArmLog(
            steps=known.steps + fresh.steps,
            gradients=known.gradients + fresh.gradients,
            held_out=known.held_out + fresh.held_out,
        )
        state = ArmState(
            **msgspec.structs.asdict(take_weights(model)),
            optimizer=take_optimizer(optimizer),
            log=log,
            data_checksum=job.stream.checksum,
        )
        job.directory.save(arm, state)
        self._logs[arm] = log  # only after saving: an interrupted chunk is repeated as a whole
        for parameter in model.parameters():
            parameter.grad = None

    def _step(
        self,
        step: int,
        call: Call,
        optimizer: torch.optim.Optimizer,
        fresh: ArmLog,
        managed: Handle | None,
        chunk: tuple[int, int],
    ) -> StepRecord:
        """Run and record one training step of a chunk.

        In the first step of a chunk Plimsoll records ops, and in the second step gradients are compared. The peak is measured
        only in the last step of the first chunk and of the last chunk, because on a CPU measuring takes seconds.
        """
        start, count = chunk
        trainer, offset = self._job.trainer, step - start
        is_end = offset == count - 1 and count >= _LEAST_STEPS_TO_MEASURE
        if is_end and (start == 0 or step + 1 == self._job.settings.steps):
            return trainer.measured_step(step, call, optimizer)
        if managed is not None and offset == min(_COMPARED, count - 1):
            reference = self._reference(call, managed)

            def watch() -> None:
                found = self._job.trainer.blocks.compare(step, reference)
                if found is not None:
                    fresh.gradients.append(found)

            record = trainer.step(step, call, optimizer, watch)
        else:
            record = trainer.step(step, call, optimizer)
        # The first step of a chunk records, so its time is not typical and is dropped, for both arms alike.
        return record if offset else msgspec.structs.replace(record, seconds=None)

    def _reference(self, call: Call, managed: Handle) -> list[list[torch.Tensor | None]]:
        """Return the gradients of one step without the plan, to compare the plan's gradients with.

        The model's state, parameters that its forward writes, objects in the batch and in the loss, and the random state are
        restored afterwards.
        """
        trainer = self._job.trainer
        random, state = RandomState(), KeptState(trainer.model)
        named = dict(trainer.model.named_parameters())
        written = KeptTensors(
            part for name in self._job.plan.written if name in named for part in dense_parts(named[name])
        )
        state.lend_iterators()
        with managed.paused(), side_effects_kept((call.args, call.kwargs), trainer.loss):
            trainer.backward(trainer.own(call))
        gradients = trainer.blocks.take_gradients()
        state.put_back()
        written.put_back()
        random.put_back()
        return gradients

    def _enter(self, arm: str) -> torch.optim.Optimizer:
        """Load the weights of one training run (without or with the plan) into the model, and return that run's optimizer."""
        model = self._job.trainer.model
        state = self._job.directory.load(arm) if self._steps_of(arm) else None
        self._state.put_back()
        put_weights(model, state or self._original)
        optimizer = self._job.make_optimizer([p for p in model.parameters() if p.requires_grad])
        if state is not None:
            put_optimizer(optimizer, state.optimizer)
        return optimizer

    def _show(self, arm: str, fresh: ArmLog) -> None:
        steps = self._job.settings.steps
        losses = []
        for name in ARMS:
            shown = (fresh if name == arm else self._logs[name]).steps
            loss = shown[-1].loss if shown else None
            losses.append(f"{name} {'–' if loss is None else f'{loss:.4f}'}")
        done = fresh.steps[-1].step + 1 if fresh.steps else 0
        share = (done + self._steps_of(PLAN if arm == BASELINE else BASELINE)) / (2 * steps)
        self._job.report(f"step {done} of {steps}, loss {', '.join(losses)}", min(share, 1.0))
