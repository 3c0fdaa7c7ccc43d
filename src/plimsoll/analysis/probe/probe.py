"""``plimsoll.probe``: trains with and without a plan, and makes the verdict that says whether the plan harms training."""

from __future__ import annotations

import math
import statistics
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from plimsoll.analysis.probe.arms import Arms, Job
from plimsoll.analysis.probe.evidence import BASELINE, PLAN, ArmLog, ProbeEvidence
from plimsoll.analysis.probe.keeping import RunDirectory, SeenData, trainable_copy
from plimsoll.analysis.probe.rules import Findings, ProbeSettings, judge, stop_here, window_of
from plimsoll.analysis.probe.statistics import first_step_at
from plimsoll.analysis.probe.step import (
    Blocks,
    MakeOptimizer,
    Trainer,
    check_trainable,
    describe_optimizer,
    make_one,
    optimizer_settings,
)
from plimsoll.analysis.probe.stream import Call, Stream, checksum, read_data
from plimsoll.analysis.verify.evidence import versions
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.receipt import finite
from plimsoll.artifacts.verdict import ArmSummary, Curves, Ruling, Verdict
from plimsoll.errors import InvalidProbe, PlanNotUsable
from plimsoll.session.manage import (
    check_plan,
    refuse_optimizer_decisions,
    refuse_other_device,
    refuse_other_model,
    refuse_other_signature,
)
from plimsoll.session.rendezvous.world import refuse_several_ranks
from plimsoll.session.task import check_model, compiled_by, compiled_units, explained_loss, refuse_profiler, units_of
from plimsoll.tracing.recorder.calling import Loss, count_items
from plimsoll.tracing.recorder.fingerprint import fingerprint, signature
from plimsoll.units import check_count

_MOST_EXPONENT = 700.0
"""The largest exponent that is passed to ``math.exp``, which overflows a little above this number."""


def probe(
    model: nn.Module,
    batches: Any,
    plan: Plan,
    *,
    steps: int = 1000,
    loss: Loss | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    held_out: Iterable[Any] | int | None = None,
    target_loss: float | None = None,
    seed: int = 0,
    run: str | Path | None = None,
    chunk_steps: int = 20,
    early: bool = True,
    data: str = "",
    progress: Progress | None = None,
) -> Verdict:
    """Train with and without the plan, and judge whether the plan harms training.

    Both arms, ``baseline`` and ``plan``, start from the model's present weights and see the same batches with the same random
    numbers. They use the same model object alternately, a chunk of steps at a time. The state of the inactive arm is stored
    in the run directory. The model, its gradients and buffers and the random state are restored, also after an error or
    Ctrl-C.

    Args:
        model: on its device, in its training mode.
        batches: an iterable of batches (a loader, a list) that can be iterated again; or one batch (a tensor, a tuple, a
            dict), which both arms then overfit.
        plan: the plan to judge.
        steps: steps that each arm takes, at least one.
        loss: as for ``plimsoll.plan``.
        optimizer: a function that makes an optimizer from an iterable of parameters; it is called once per arm. By default
            AdamW.
        held_out: batches for evaluation, or the number of batches at the end of each pass through ``batches`` to set apart.
            By default a tenth of the batches, at most 8, if their number is known.
        target_loss: a loss: the verdict reports the steps and seconds until it is reached. By default the baseline's own final
            loss.
        seed: the seed of everything random, such as the order of batches and the dropout masks.
        run: a directory that stores the run. After an interruption, the same call continues there and returns the result of
            an uninterrupted run. By default a temporary directory.
        chunk_steps: steps that one arm takes before the other arm continues. State of the model or the loss that is neither a
            parameter nor a buffer, such as a counter in an attribute, begins anew in each chunk.
        early: whether to stop as soon as the answer is clear.
        data: a description of the batches, for the verdict.
        progress: a function that is called with a text that shows the losses of both arms, and the share of the work that is
            done.

    Returns:
        A verdict with the rule that decided it and the figures behind it. Its exit code is 0 if training may rely on the
        plan.

    Raises:
        InvalidOption: ``steps``, ``chunk_steps`` or ``seed`` is not a valid count.
        InvalidProbe: ``batches`` is empty or too short to hold some out, or the target loss is not finite.
        ProbeRunMismatch: the run directory belongs to another probe, or the data has changed.
        ProbeRunUnusable: the run directory cannot be read or written.
        PlanMismatch: the plan was made for another model, step or kind of device.
        PlanNotUsable: the plan cannot be applied; its status says why.

    Example:
        >>> import torch, plimsoll
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)])
        >>> loss = lambda output: output.square().mean()
        >>> plan = plimsoll.plan(model, torch.randn(4, 8), loss=loss, strategy="full")
        >>> batches = [torch.randn(4, 8) for _ in range(6)]
        >>> plimsoll.probe(model, batches, plan, steps=4, loss=loss).ruling
        <Ruling.IDENTICAL: 'IDENTICAL'>

    Source: docs/probe.md defines every figure and rule. Known weakness: each arm is one run with one seed, so the spread
    between seeds is not known.
    """
    report = progress or silent
    check_model(model)
    refuse_several_ranks(model, "probe")
    check_trainable(model)
    check_plan(plan)
    refuse_optimizer_decisions(plan, "probe")
    refuse_other_model(model, plan)
    refuse_other_device(model, plan)
    refuse_profiler(model)
    if not plan.status.is_usable:
        raise PlanNotUsable(
            f"This plan is {plan.status}.", why=plan.status.advice, next="plan again with a larger budget"
        )
    settings = _settings(steps, chunk_steps, seed, target_loss, is_early=early)
    loss = explained_loss(loss)
    report("reading the data", 0.0)
    stream, evaluated = read_data(batches, held_out, seed)
    about = _about(model, stream, evaluated, plan, loss, optimizer, data)
    with tempfile.TemporaryDirectory(prefix="plimsoll-probe-") as temporary:
        directory = RunDirectory(Path(temporary) / "run" if run is None else Path(run))
        job = Job(
            trainer=Trainer(model, loss, Blocks(model, [region.name for region in plan.regions])),
            plan=plan,
            make_optimizer=optimizer,
            stream=stream,
            held_out=evaluated,
            settings=settings,
            directory=directory,
            report=report,
        )
        directory.claim(_identity(job, about))
        verdict = directory.verdict()
        if verdict is None:
            verdict = _verdict(job, *_run(job), about)
            directory.finish(verdict, SeenData(batches=stream.drawn, checksum=stream.checksum))
        else:
            seen = directory.seen()
            report(f"this run was already finished: passing over the data of {seen.batches} steps", 0.0)
            stream.skip(seen.batches)
            stream.check(seen.checksum)
            report("showing its verdict", 1.0)
    return verdict


def _settings(steps: int, chunk_steps: int, seed: int, target_loss: float | None, *, is_early: bool) -> ProbeSettings:
    for name, value, least in (("steps", steps, 1), ("chunk_steps", chunk_steps, 1), ("seed", seed, 0)):
        check_count(name, value, least=least)
    if target_loss is not None and not math.isfinite(target_loss):
        raise InvalidProbe(
            f"target_loss={target_loss} is a loss that training cannot reach.",
            why="it is not finite",
            next="give a finite number, or leave it out to use the baseline's final loss",
        )
    return ProbeSettings(steps=steps, chunk_steps=chunk_steps, seed=seed, target_loss=target_loss, is_early=is_early)


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """Data: the description of a probe's run that the verdict shows.

    ``items`` is the unit, such as tokens; ``items_per_step`` is how many one batch has.
    """

    signature: str
    optimizer: str
    optimizer_settings: tuple[str, ...]
    data: str
    items: str
    items_per_step: int
    notes: tuple[str, ...]


def _about(
    model: nn.Module,
    stream: Stream,
    held_out: list[Call],
    plan: Plan,
    loss: Loss | None,
    optimizer: MakeOptimizer,
    data: str,
) -> _About:
    first = stream.first()
    found = signature(model, first.args, first.kwargs, loss=loss)
    refuse_other_signature(found, plan)
    items_per_step, items = count_items(first.args, first.kwargs)
    made = make_one(model, optimizer)
    notes: tuple[str, ...] = ()
    if stream.is_fixed and not held_out:
        notes = (
            "both runs overfit the only batch, and held-out perplexity is not measured: the verdict is only about gradients "
            "and this batch's loss",
        )
    elif not held_out:
        notes = (
            "held-out data was not given, so perplexity is not measured: the verdict is based on the training loss",
        )
    return _About(
        signature=found,
        optimizer=describe_optimizer(made),
        optimizer_settings=optimizer_settings(made),
        data=data or stream.description,
        items=items,
        items_per_step=items_per_step,
        notes=notes,
    )


def _identity(job: Job, about: _About) -> dict[str, str]:
    """Return what identifies a probe's run, to check that a run directory belongs to it.

    The mapping has, for each part that determines the run's result, the part's name and its text or checksum.
    """
    model, plan = job.trainer.model, job.plan
    weights = 0
    for tensor in (*model.parameters(), *model.buffers()):
        weights = checksum(Call((tensor,), {}), weights)
    held_out_code = 0
    for call in job.held_out:
        held_out_code = checksum(call, held_out_code)
    decided = [
        (region.name, region.call, region.is_boundary_dropped, sorted(region.dropped), sorted(region.packed.items()))
        for region in plan.regions
    ]
    return {
        "model": fingerprint(model),
        "weights": f"{weights:08x}",
        "plan": f"{plan.strategy} {_code((decided, plan.link, plan.in_flight, plan.tiles, plan.compiled, plan.max_error))}",
        "step": about.signature,
        "settings": msgspec.json.encode(job.settings).decode(),
        "optimizer": f"{about.optimizer} {_code(about.optimizer_settings)}",
        "held-out data": f"{len(job.held_out)} batches {held_out_code:08x}",
        "device": str(job.trainer.device),
        "torch": str(torch.__version__),
    }


def _code(decided: object) -> str:
    """Return a checksum of an object's text, as text."""
    return f"{zlib.crc32(repr(decided).encode()):08x}"


def _run(job: Job) -> tuple[ProbeEvidence, Findings]:
    """Train without and with the plan in turns, until the rules give a clear answer or all steps are taken.

    Return the logs and the outcomes of the rules.
    """
    settings = job.settings
    model = job.trainer.model
    with compiled_units(units_of(model, compiled_by(job.plan, model))), trainable_copy(model) as original:
        arms = Arms(job, original)
        while True:
            evidence = ProbeEvidence(*arms.logs, job.trainer.blocks.names)
            findings = stop_here(evidence, settings)
            if findings is None and arms.steps >= settings.steps:
                findings = judge(evidence, settings)
            if findings is not None:
                job.report("done", 1.0)
                return evidence, findings
            arms.advance()


def _verdict(job: Job, evidence: ProbeEvidence, findings: Findings, about: _About) -> Verdict:
    plan, settings = job.plan, job.settings
    window = window_of(evidence.steps)
    target = settings.target_loss
    if target is None and len(evidence.baseline.losses):
        target = finite(float(np.mean(evidence.baseline.losses[-window:])))
    logs = {BASELINE: evidence.baseline_log, PLAN: evidence.plan_log}
    baseline, managed = (_arm(name, log, target, window, about) for name, log in logs.items())
    losses, norms = (
        [tuple(getattr(record, figure) for record in log.steps) for log in logs.values()]
        for figure in ("loss", "gradient_norm")
    )
    return Verdict(
        ruling=findings.ruling,
        decided_by=findings.decided_by,
        reason=findings.reason,
        missing=findings.missing if findings.ruling is Ruling.UNDECIDED else (),
        model=type(job.trainer.model).__name__,
        fingerprint=plan.fingerprint,
        signature=about.signature,
        device=str(job.trainer.device),
        strategy=plan.strategy,
        is_lossless=plan.is_lossless,
        optimizer=about.optimizer,
        data=about.data,
        versions={**versions(), "threads": str(torch.get_num_threads())},
        seed=settings.seed,
        steps=evidence.steps,
        planned_steps=settings.steps,
        confidence=1 - settings.error_to_clear,
        rules=findings.rules,
        baseline=baseline,
        plan=managed,
        target_loss=target,
        window=window,
        items=about.items,
        delay=findings.delay,
        held_out_difference=findings.held_out_difference,
        comparisons=findings.comparisons,
        gradients=findings.gradients,
        curves=Curves(baseline_losses=losses[0], plan_losses=losses[1], baseline_norms=norms[0], plan_norms=norms[1]),
        notes=(*about.notes, *_notes(evidence, findings, plan, settings)),
    )


def _arm(name: str, log: ArmLog, target: float | None, window: int, about: _About) -> ArmSummary:
    losses = np.asarray([record.loss for record in log.steps if record.loss is not None], dtype=np.float64)
    seconds = [record.seconds for record in log.steps if record.seconds is not None]
    peaks = [record.peak_bytes for record in log.steps if record.peak_bytes is not None]
    step_seconds = statistics.median(seconds) if seconds else None
    steps = None if target is None else first_step_at(losses, target, window)
    held_out = None
    if log.held_out and None not in log.held_out[-1].losses:
        held_out = statistics.fmean(loss for loss in log.held_out[-1].losses if loss is not None)
    return ArmSummary(
        name=name,
        final_loss=finite(float(losses[-window:].mean())) if len(losses) else None,
        held_out_loss=held_out,
        perplexity=None if held_out is None or held_out > _MOST_EXPONENT else math.exp(held_out),
        steps_to_target=steps,
        seconds_to_target=None if steps is None or step_seconds is None else steps * step_seconds,
        measured_step_seconds=step_seconds,
        items_per_second=about.items_per_step / step_seconds if step_seconds else None,
        measured_peak_bytes=max(peaks, default=None),
    )


def _notes(evidence: ProbeEvidence, findings: Findings, plan: Plan, settings: ProbeSettings) -> tuple[str, ...]:
    notes = []
    if evidence.steps < settings.steps:
        notes.append(f"stopped after {evidence.steps} of {settings.steps} steps: the answer was clear")
    largest = max((each.largest_error for each in findings.gradients[:1]), default=0.0)
    if plan.max_error is not None and largest > plan.max_error:
        notes.append(
            f"at equal parameters the gradient error was up to {largest:.2%}, although max_error= allowed "
            f"{plan.max_error:.2%}: the error was measured only with the weights that the plan was made with"
        )
    # Compiled kernels are fused in other ways under a plan, so they may round differently.
    if plan.is_lossless and not plan.compiled and not evidence.is_identical and evidence.is_finite:
        notes.append(
            "the plan is lossless, but the two runs are not equal bit for bit: either the model is not deterministic, or "
            "the plan is wrong; run `plimsoll verify` to find out which"
        )
    return tuple(notes)
