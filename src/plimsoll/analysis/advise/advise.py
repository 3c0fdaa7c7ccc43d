"""``plimsoll.advise``: traces a step, plans candidates, asks the compiler, checks the evidence, and recommends a method."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plimsoll.analysis.advise.candidates import CandidateMaker
from plimsoll.analysis.advise.checklist import StepEvidence, check_all, find_failures
from plimsoll.analysis.advise.choosing import Wish, choose, describe, recommend
from plimsoll.analysis.advise.compiler_capture import ask_compiler
from plimsoll.analysis.advise.compiler_coverage import find_hazards, judge_coverage
from plimsoll.analysis.advise.memory import find_bottleneck, measure_layers
from plimsoll.analysis.explain.changes import Changes, ExplainedStep, PeakSubject
from plimsoll.analysis.verify.evidence import versions
from plimsoll.artifacts.advice import Advice, Capture
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.store import of_kind
from plimsoll.artifacts.trace import Trace, runs_gpu_kernels
from plimsoll.artifacts.verdict import Verdict
from plimsoll.errors import PlanMismatch
from plimsoll.planning.step import StepIndex
from plimsoll.session.compiled import refuse_uncompilable, trace_compiled
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.rendezvous.world import refuse_several_ranks
from plimsoll.session.step_planner import trace_and_cost
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.meters.memory import free_bytes
from plimsoll.tracing.recorder.calling import Loss, count_items
from plimsoll.tracing.recorder.fingerprint import fingerprint
from plimsoll.units import format_bytes, parse_bytes

_ALL = ("recompute", "compress", "offload")
_COMPILE_SECONDS = 60.0


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

    The step is traced and timed. Candidate plans are made, but not run. torch.compile's front end is asked once which part of
    the step it would capture. An item of the checklist passes only on evidence: the trace, a receipt (the result of
    ``plimsoll.verify``) or a verdict (the result of ``plimsoll.probe``). Model, gradients, buffers, optimizer and random state
    are restored. Functions that torch.compile compiled before will compile again.

    Args:
        model: as for ``plimsoll.plan``.
        batch: as for ``plimsoll.plan``.
        budget: the most bytes that the step may use, as an int or as text with a unit. ``None`` means the device's memory minus
            8%. On a CPU ``None`` means no limit; then the plan at the knee of the frontier (the curve of least time against
            peak) is recommended.
        loss: as for ``plimsoll.plan``.
        optimizer: as for ``plimsoll.plan``; without it, the optimizer's state and its step are not counted.
        regions: as for ``plimsoll.plan``.
        device_profile: advise for a device from the catalogue that is not in this machine. Then only recomputation is planned,
            and nothing is run.
        allow: what plans may do: any of ``recompute``, ``compress`` and ``offload``.
        max_error: the relative error of the gradient that plans may cause (``0.01`` or ``"1%"``).
        host_budget: bytes that offloaded values may occupy.
        link: where offloaded values go: ``host`` (the host's memory) or ``disk``.
        receipt: a receipt of this model and batch, as ``plimsoll.verify`` makes it, or the path of its file.
        verdict: a verdict about this model, as ``plimsoll.probe`` makes it, or the path of its file.
        compile_seconds: time limit for torch.compile's front end; 0 skips it.
        target: the name of the step in the commands that the advice recommends.
        progress: a function that is called with the name of the current stage and the share of the work that is done.

    Returns:
        An ``Advice``: the recommendation, the bottleneck, the candidate plans, the compiler's coverage and the checklist. It
        can be printed and saved.

    Raises:
        PlanMismatch: the receipt or the verdict is of another model or batch. The message shows both fingerprints.
        PlanFileError: the file contains another artifact. Further errors as for ``plimsoll.plan``.

    Example:
        >>> import torch, plimsoll
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
        >>> found = plimsoll.advise(model, torch.randn(32, 64), "1GiB", loss=torch.sum, compile_seconds=0)
        >>> found.recommendation.headline
        'do nothing: the step fits without a plan'

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
    options.refuse_tiles("The plans that advise compares")
    found_receipt = None if receipt is None else of_kind(receipt, Receipt)
    found_verdict = None if verdict is None else of_kind(verdict, Verdict)
    for kind, given in (("receipt", found_receipt), ("verdict", found_verdict)):
        if given is not None:
            _refuse_other(f"{kind} is of another model", given.fingerprint, fingerprint(model))
    if task.units:
        refuse_uncompilable(options, "auto")
    trace_as_trained = trace_compiled if task.units else trace_and_cost
    trace, costs = trace_as_trained(task, options, part_of(report, 0.0, 0.3))
    for kind, given in (("receipt", found_receipt), ("verdict", found_verdict)):
        if given is not None:
            _refuse_other(f"{kind} is of another step", given.signature, trace.signature)
    budget_bytes = _budget_bytes(limit, costs, trace)
    plans = CandidateMaker(task, trace, costs, PlanOptions() if trace.is_fake else options, part_of(report, 0.3, 0.8))
    budget_text = plans.knee_text() if budget_bytes is None else f"{budget_bytes}B"
    wish = Wish(
        limit_bytes=parse_bytes(budget_text) if budget_bytes is None else budget_bytes,
        limit_text=budget if isinstance(budget, str) else budget_text,
        is_budget=budget_bytes is not None,
        max_error=options.max_error,
        target=target,
        options=_words(device_profile, options.regions),
        offload_options=_offload_words(host_budget, link),
    )
    made = plans.make(wish)
    chosen = choose(made, wish)
    changes = Changes(
        ExplainedStep(task=task, regions=options.regions, device=None, context=contextlib.nullcontext),
        PeakSubject(trace),
    )
    bottleneck = find_bottleneck(trace, plans.unmanaged, changes.of_loss_and_optimizer())
    layers = measure_layers(trace, costs, plans.unmanaged)
    capture = _ask(task, trace, plans.unmanaged, compile_seconds, part_of(report, 0.8, 1.0))
    items, items_name = count_items(*task.call())
    evidence = StepEvidence(
        index=StepIndex(trace, costs),
        bottleneck=bottleneck,
        layers=layers,
        made=made,
        chosen=chosen,
        receipt=found_receipt,
        verdict=found_verdict,
        items=items,
        items_name=items_name,
        target=target,
        again=_command(wish, options, has_budget=budget is not None),
    )
    advice = Advice(
        model=trace.model,
        fingerprint=trace.fingerprint,
        signature=trace.signature,
        device=trace.device,
        cost_source=costs.source.value,
        budget_bytes=budget_bytes,
        max_error=options.max_error,
        versions=versions(),
        baseline_seconds=plans.unmanaged.baseline_seconds,
        recommendation=recommend(made, chosen, bottleneck, wish),
        bottleneck=bottleneck,
        layers=layers,
        candidates=describe(made, chosen, wish),
        compiler=judge_coverage(trace, costs, capture),
        hazards=find_hazards(trace),
        checklist=check_all(evidence),
        failure_modes=find_failures(evidence),
        notes=_notes(trace, has_optimizer=optimizer is not None),
    )
    report("done", 1.0)
    return advice


def _ask(task: TrainingTask, trace: Trace, unmanaged: Plan, limit_seconds: float, report: Progress) -> Capture:
    """Ask torch.compile which part of the step it would capture, and return its answer.

    This runs the step without a plan, so torch.compile is not asked if that step does not fit.
    """
    needed, device = unmanaged.baseline_peak_bytes, next(task.model.parameters()).device
    obstacle = ""
    if trace.is_fake:
        obstacle = "the step cannot run here: it was traced with fake tensors"
    elif task.units:
        obstacle = "the step is compiled already, and its compiled form is planned"
    elif limit_seconds <= 0:
        obstacle = "it was not asked"
    elif 0 < (free := free_bytes(device)) < needed:
        obstacle = f"it runs the step without a plan, which takes {format_bytes(needed)}; {format_bytes(free)} are free"
    if obstacle:
        return Capture(is_asked=False, failure=obstacle)
    return ask_compiler(
        task.model,
        *task.call(),
        loss=task.loss,
        written=trace.written,
        limit_seconds=limit_seconds,
        progress=report,
    )


def _budget_bytes(budget: Budget, costs: Costs, trace: Trace) -> int | None:
    """Return the budget in bytes, or ``None`` for no limit.

    Without a given budget, return an accelerator's memory; on a CPU return no limit, because other programs use its memory too.
    """
    if budget == Budget() and runs_gpu_kernels(trace.device) and costs.memory_bytes is not None:
        budget = Budget(is_auto=True)
    return budget.bytes_on(costs)


def _command(wish: Wish, options: PlanOptions, *, has_budget: bool) -> str:
    """Return the command that asks for the same advice."""
    words = [f"plimsoll advise {wish.target}"]
    words += [f"--budget {shlex.quote(wish.limit_text)}"] if has_budget else []
    words += [f"--allow {','.join(options.allow)}"] if options.allow != _ALL else []
    words += [f"--max-error {options.max_error:g}"] if options.max_error else []
    return " ".join([*words, *wish.options, *wish.offload_options])


def _words(device_profile: str | None, regions: Sequence[str] | None) -> tuple[str, ...]:
    """Return options for the command ``plimsoll plan`` that set the same device and regions as this advice."""
    words = [] if device_profile is None else [f"--device-profile {shlex.quote(device_profile)}"]
    return (*words, *(f"--regions {shlex.quote(pattern)}" for pattern in regions or ()))


def _offload_words(host_budget: int | str | None, link: str | None) -> tuple[str, ...]:
    """Return options for the command ``plimsoll plan`` that set the same limits for offloaded values as this advice."""
    words = []
    if host_budget is not None:
        text = f"{host_budget}B" if isinstance(host_budget, int) else host_budget
        words.append(f"--host-budget {shlex.quote(text)}")
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


def _refuse_other(what: str, found: str, own: str) -> None:
    """Raise if a receipt (the result of ``plimsoll.verify``) or a verdict is about another model or another batch.

    Raises:
        PlanMismatch: the fingerprints or the signatures differ; the message shows both.
    """
    if found != own:
        raise PlanMismatch(
            f"This {what}: {found}, not {own}.",
            why="what was measured on another model or batch says nothing about this one",
            next="measure this model and batch, or leave it out",
        )
