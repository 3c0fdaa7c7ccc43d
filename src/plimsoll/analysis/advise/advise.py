"""``plimsoll.advise``: traces a step, plans candidates, asks the compiler, checks the evidence, and recommends a method."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from plimsoll.analysis.advise.candidates import CandidateMaker
from plimsoll.analysis.advise.checklist import StepEvidence, check_all, find_failures
from plimsoll.analysis.advise.choosing import Wish, choose, recommend
from plimsoll.analysis.advise.compiler_capture import ask_compiler
from plimsoll.analysis.advise.compiler_coverage import find_hazards, judge_coverage
from plimsoll.analysis.advise.memory import LITTLE, find_bottleneck, measure_layers
from plimsoll.analysis.verify.evidence import versions
from plimsoll.artifacts.advice import Advice, Capture
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.store import load_any
from plimsoll.artifacts.trace import Trace
from plimsoll.artifacts.verdict import Verdict
from plimsoll.errors import PlanFileError, PlanMismatch
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_none
from plimsoll.planning.what_if import peak_with_chunked_loss
from plimsoll.session.compiled import refuse_uncompilable, trace_compiled
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.rendezvous.world import refuse_several_ranks
from plimsoll.session.step_planner import trace_and_cost
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.meters.memory import free_bytes
from plimsoll.tracing.recorder.calling import Loss, count_items
from plimsoll.tracing.recorder.fingerprint import fingerprint
from plimsoll.units import format_bytes

_ALL = ("recompute", "compress", "offload")
_COMPILE_SECONDS = 60.0
_WRITERS = {Receipt.KIND: "plimsoll verify", Verdict.KIND: "plimsoll probe"}
Measured = TypeVar("Measured", Receipt, Verdict)
_UNTOLD = (
    "copies between host and device, pinned memory, streams and collectives inside the step cannot be told from its ops; "
    "torch.cuda.graph on the device itself is the test"
)


def advise(
    model: nn.Module,
    batch: Any,
    budget: int | str | None = None,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: Sequence[str] | None = None,
    device_profile: str | None = None,
    allow: Collection[str] | str = _ALL,
    max_error: float | str = 0.0,
    host_budget: int | str | None = None,
    link: str | None = None,
    receipt: Receipt | str | Path | None = None,
    verdict: Verdict | str | Path | None = None,
    compile_seconds: float = _COMPILE_SECONDS,
    target: str = "TARGET",
    progress: Progress | None = None,
) -> Advice:
    """Find out whether memory is the bottleneck, which part of it, and which plan helps; give the numbers for each.

    The step is traced and timed, candidate plans are made (and not run), and torch.compile's front end is asked once what
    it captures. Items of the checklist pass only on evidence: the trace, a receipt, a verdict. Model, gradients, buffers,
    optimizer and random state are restored. Functions that torch.compile compiled before will compile again.

    Args:
        model: as for ``plimsoll.plan``.
        batch: as for ``plimsoll.plan``.
        budget: bytes, or text with a unit. ``None`` means the device's memory minus 8%; on a CPU it means no limit, and the
            knee of the frontier is recommended.
        loss: as for ``plimsoll.plan``.
        optimizer: as for ``plimsoll.plan``; without it, the optimizer's state and its step are not counted.
        regions: as for ``plimsoll.plan``.
        device_profile: advise for a device from the catalogue that is not in this machine. Then only recomputation is
            planned, and nothing is run.
        allow: what plans may do.
        max_error: the relative error of the gradient that is tolerated (``0.01`` or ``"1%"``).
        host_budget: bytes that offloaded values may occupy.
        link: ``host`` or ``disk``.
        receipt: a receipt of this model and batch, or the path of its file.
        verdict: a verdict of this model, or the path of its file.
        compile_seconds: time limit for torch.compile's front end; 0 skips it.
        target: the step's name in the advice's commands.
        progress: called with the stage and the share done.

    Returns:
        Advice, which can be printed and saved.

    Raises:
        PlanMismatch: the receipt or the verdict is of another model or batch. The message shows both fingerprints.
        PlanFileError: the file contains another artifact. Further errors as for ``plimsoll.plan``.

    Example:
        >>> import torch, plimsoll
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
        >>> found = plimsoll.advise(model, torch.randn(32, 64), "1GiB", loss=torch.sum, compile_seconds=0)
        >>> found.recommendation.headline
        'do nothing: the step fits as it is'

    Known weakness: candidates are predicted, not measured. Trust a receipt's measurements more.
    """
    report = progress or silent
    refuse_several_ranks(model, "advise")
    task = TrainingTask.read(model, batch, loss=loss, optimizer=optimizer)
    limit = Budget.read(budget)
    options = PlanOptions.read(
        regions=regions,
        device_profile=device_profile,
        allow="recompute" if task.units and allow == _ALL else allow,
        max_error=max_error,
        host_budget=host_budget,
        link=link,
    )
    found_receipt, found_verdict = _read(receipt, Receipt), _read(verdict, Verdict)
    _refuse_other(fingerprint(model), found_receipt, found_verdict)
    if task.units:
        refuse_uncompilable(options, "auto")
    trace_as_trained = trace_compiled if task.units else trace_and_cost
    traced, costs = trace_as_trained(task, options, part_of(report, 0.0, 0.3))
    _refuse_other_step(traced, found_receipt)
    job = _Job(task, traced, costs)
    budget_bytes = _budget_bytes(limit, costs, traced)
    wish = Wish(
        budget_bytes=budget_bytes,
        budget_text=budget if isinstance(budget, str) else "" if budget_bytes is None else f"{budget_bytes}B",
        max_error=options.max_error,
        target=target,
        device_profile=device_profile or "",
        options=_words(options.regions, host_budget, link),
    )
    advice = job.advise(wish, options, (found_receipt, found_verdict), compile_seconds, part_of(report, 0.3, 1.0))
    report("done", 1.0)
    return advice


@dataclass(frozen=True, slots=True)
class _Job:
    """The traced step that the advice is about."""

    task: TrainingTask
    trace: Trace
    costs: Costs

    def advise(
        self,
        wish: Wish,
        options: PlanOptions,
        handed: tuple[Receipt | None, Verdict | None],
        compile_seconds: float,
        report: Progress,
    ) -> Advice:
        trace, costs = self.trace, self.costs
        if trace.is_fake:
            options = PlanOptions()
        maker = CandidateMaker(self.task, trace, costs, options, wish, part_of(report, 0.0, 0.7))
        maker.make()
        made, unmanaged = maker.made, maker.made[0].plan
        judged = choose(made, wish, maker.knee_bytes)
        index = StepIndex(trace, costs)
        chunked_bytes = peak_with_chunked_loss(run_choices(index, choose_none(index, "")))
        bottleneck = find_bottleneck(trace, unmanaged, chunked_peak_bytes=chunked_bytes)
        layers = measure_layers(trace, costs, unmanaged)
        capture = self._ask(unmanaged, compile_seconds, part_of(report, 0.7, 1.0))
        items, items_name = count_items(*self.task.call())
        evidence = StepEvidence(
            trace=trace,
            costs=costs,
            bottleneck=bottleneck,
            layers=layers,
            made=made,
            candidates=judged,
            receipt=handed[0],
            verdict=handed[1],
            items=items,
            items_name=items_name,
            target=wish.target,
        )
        return Advice(
            model=trace.model,
            fingerprint=trace.fingerprint,
            signature=trace.signature,
            device=trace.device,
            cost_source=costs.source.value,
            budget_bytes=wish.budget_bytes,
            max_error=wish.max_error,
            versions=versions(),
            baseline_seconds=unmanaged.baseline_seconds,
            recommendation=recommend(made, judged, bottleneck, wish, little=LITTLE),
            bottleneck=bottleneck,
            layers=layers,
            candidates=judged,
            compiler=judge_coverage(trace, costs, capture),
            hazards=find_hazards(trace),
            hazards_note=_UNTOLD,
            checklist=check_all(evidence),
            failure_modes=find_failures(evidence),
            notes=_notes(trace, has_optimizer=self.task.optimizer is not None),
        )

    def _ask(self, unmanaged: Plan, limit_seconds: float, report: Progress) -> Capture:
        """Ask torch.compile what it captures. This runs the unmanaged step, so it is skipped if the step does not fit."""
        if self.trace.is_fake:
            return Capture(is_asked=False, failure="the step cannot run here: it was traced with fake tensors")
        if self.task.units:
            return Capture(is_asked=False, failure="the step is compiled already, and planned as it is compiled")
        if limit_seconds <= 0:
            return Capture(is_asked=False, failure="it was not asked")
        device = next(self.task.model.parameters()).device
        needed, free = unmanaged.baseline_peak_bytes, free_bytes(device)
        if 0 < free < needed:
            return Capture(
                is_asked=False,
                failure=f"it runs the step without a plan, which takes {format_bytes(needed)}; {format_bytes(free)} are free",
            )
        task = self.task
        return ask_compiler(task.model, *task.call(), loss=task.loss, limit_seconds=limit_seconds, progress=report)


def _budget_bytes(budget: Budget, costs: Costs, trace: Trace) -> int | None:
    """The budget in bytes. By default an accelerator's memory; no limit on a CPU, whose memory other programs use too."""
    is_accelerator = not trace.device.lower().startswith("cpu")
    if budget == Budget() and is_accelerator and costs.memory_bytes is not None:
        budget = Budget(is_auto=True)
    return budget.bytes_on(costs)


def _words(regions: Sequence[str] | None, host_budget: int | str | None, link: str | None) -> tuple[str, ...]:
    """Options for the command line to plan under the same limits."""
    words = [f"--regions {shlex.quote(pattern)}" for pattern in regions or ()]
    if host_budget is not None:
        words.append(f"--host-budget {host_budget}{'B' if isinstance(host_budget, int) else ''}")
    if link is not None:
        words.append(f"--link {link}")
    return tuple(words)


def _notes(trace: Trace, *, has_optimizer: bool) -> tuple[str, ...]:
    notes = list(trace.notes)
    if not has_optimizer:
        notes.append("No optimizer was given: its state and its step are not counted.")
    if trace.is_fake:
        notes.append("Traced with fake tensors: seconds are a roofline's, compression and offloading were not planned.")
    return tuple(notes)


def _read(given: Measured | str | Path | None, type_: type[Measured]) -> Measured | None:
    """Return the receipt or verdict, and load it if a path was passed.

    Raises:
        PlanFileError: the file or the object is another artifact.
    """
    found = load_any(given) if isinstance(given, str | Path) else given
    if found is None or isinstance(found, type_):
        return found
    name = str(given) if isinstance(given, str | Path) else f"A {type(given).__name__}"
    command = _WRITERS[type_.KIND]
    raise PlanFileError(
        f"{name} is no {type_.KIND}.",
        why=f"the checklist takes what `{command}` measured from it",
        next=f"{command} TARGET --output {type_.KIND}.json writes one",
    )


def _refuse_other(own: str, receipt: Receipt | None, verdict: Verdict | None) -> None:
    """Refuse evidence about another model.

    Raises:
        PlanMismatch: the fingerprints differ; the message shows both.
    """
    for kind, found in (("receipt", receipt), ("verdict", verdict)):
        if found is not None and found.fingerprint != own:
            raise PlanMismatch(
                f"This {kind} is of another model: {found.fingerprint}, not {own}.",
                why="classes, names, shapes or dtypes of modules, parameters or buffers differ",
                next=f"give the {kind} of this model, or leave it out",
            )


def _refuse_other_step(trace: Trace, receipt: Receipt | None) -> None:
    """Refuse a receipt of another batch, because its seconds and bytes do not apply to this step.

    Raises:
        PlanMismatch: the signatures differ; the message shows both.
    """
    if receipt is not None and receipt.signature != trace.signature:
        raise PlanMismatch(
            f"This receipt is of another step: {receipt.signature}",
            why=f"this one is {trace.signature}",
            next="advise on the batch that was verified, or verify this one",
        )
