"""Verifies a model that saves memory by its own means, against the same model with these means switched off.

Such means are ``torch.utils.checkpoint`` in both forms, selective checkpointing, offloading contexts and any other saved-tensor
hooks, and torch.compile under an ``activation_memory_budget`` below 1. The reference is the same code without the hooks, or
compiled under a budget of 1, because the user has one model and its wrappers and contexts must run in both steps
(docs/project/design/a-reference-by-switching-off.md).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch._functorch.config
from torch import nn
from torch._dynamo.utils import counters

from plimsoll.analysis.verify.evidence import (
    Depth,
    Evidence,
    Observed,
    collect_evidence,
    compare_with,
    consecutive_losses,
    half_the_digits,
    make_receipt,
    measure_slope,
    run_curve,
    run_intermediates,
    time_both,
)
from plimsoll.analysis.verify.intermediates import compare_intermediates
from plimsoll.analysis.verify.repeated_ops import RepeatedOps
from plimsoll.analysis.verify.saved_tensors import Hook, SavedTensorWatch, switched_off, watched
from plimsoll.artifacts.fault import Cause, Fault
from plimsoll.artifacts.progress import Progress
from plimsoll.artifacts.receipt import OWN, Receipt, Slope
from plimsoll.errors import InvalidModel
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import TrainingStep, copies, relative_error
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.meters.timing import Timing, time_in_turns
from plimsoll.tracing.recorder.calling import Context, ModuleStack
from plimsoll.tracing.recorder.fingerprint import fingerprint
from plimsoll.tracing.recorder.storages import same_contents
from plimsoll.tracing.recorder.untouched import untouched

_MOST_FAULTS = 50


@dataclass(frozen=True, slots=True)
class CompilerBudget:
    """The setting ``activation_memory_budget`` of torch.compile, and how to switch it off.

    A budget below 1 lets the compiler drop activations and recompute them. ``is_compiled`` says that the budget is below 1 and
    that the step runs compiled code, which the budget applies to.
    """

    share: float
    is_compiled: bool

    @classmethod
    def read(cls, step: TrainingStep) -> CompilerBudget:
        """Return the setting as it applies to a step. If it is below 1, the step runs once, to see whether it compiles."""
        share = float(torch._functorch.config.activation_memory_budget)
        return cls(share, is_compiled=share < 1.0 and _is_compiled(step))

    def tolerance(self, model: nn.Module) -> float:
        """Return the relative gradient error that recompiled kernels may cause by rounding.

        It is 0 if the budget does not apply.
        """
        return half_the_digits(model) if self.is_compiled else 0.0

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """A context that keeps everything: without saved-tensor hooks, and compiled under a budget of 1."""
        with switched_off():
            if not self.is_compiled:
                yield
                return
            torch._dynamo.reset()  # so that code is compiled again under the other budget, here and after the block
            try:
                with torch._functorch.config.patch(activation_memory_budget=1.0):
                    yield
            finally:
                torch._dynamo.reset()


def _is_compiled(step: TrainingStep) -> bool:
    """Return whether the step runs code of torch.compile, which a function that the model calls may have compiled too."""
    torch._dynamo.reset()  # so that compiled code is compiled again, and counted
    before = counters["stats"]["unique_graphs"]
    with switched_off():
        step.run()
    return bool(counters["stats"]["unique_graphs"] > before)


def find_written(task: TrainingTask, context: Context) -> tuple[str, ...]:
    """Run the step once with everything kept, and return the names of the parameters that it writes. They are restored.

    With a plan, the plan lists them. During the step, host memory holds a copy of the parameters.
    """
    with untouched(task.model), task.compiled(), switched_off():
        step = task.step(context)
        parameters = [
            (name, part)
            for name, parameter in step.model.named_parameters()
            for part in dense_parts(parameter.detach())
        ]
        copies_on_host = [part.to("cpu", copy=True) for _, part in parameters]
        written = []
        try:
            step.run()
        finally:
            for (name, part), copy in zip(parameters, copies_on_host, strict=True):
                before = copy.to(part.device)
                if not same_contents(part, before):
                    part.copy_(before)
                    written.append(name)
        return tuple(dict.fromkeys(written))


def verify_own(
    step: TrainingStep, signature: str, *, max_error: float, steps: int, depth: Depth, report: Progress
) -> Receipt:
    """Compare a step that saves memory by its own means with the same step when everything is kept, and return the receipt (the
    evidence).

    Args:
        step: the training step, without a plan.
        signature: a text that says what decides the path of the step (shapes and dtypes of the call, training flags, loss), for
            the receipt.
        max_error: the relative error of the gradient that the user accepts.
        steps: timed runs of each side. The losses of the same number of consecutive steps are compared.
        depth: comparisons to make in addition to gradients, buffers, peak and seconds.
        report: called with the stage and the share done.

    Raises:
        InvalidModel: the step does not save memory by any means that could be switched off, or the step fails.
    """
    budget = CompilerBudget.read(step)
    report("running the step with everything kept, twice", 0.0)
    with budget.plain():
        evidence = collect_evidence(step, depth)
        baseline_peak_bytes, baseline_losses = step.measure_peak().peak_bytes, consecutive_losses(step, steps)
    report("running the unchanged step", 0.3)
    seen, used = _observe(step, budget, evidence, steps, depth)
    report("measuring the loss's slope", 0.5)
    slope, notes = _own_slope(step, budget, evidence)
    report("looking for the cause", 0.6)
    tolerance = budget.tolerance(step.model)
    if seen.faults or not (seen.apart.is_within_spread or seen.apart.error <= tolerance > 0):
        if budget.is_compiled:
            faults = _blame_randomness(step, budget) or seen.faults
        else:
            faults = _explained(step, seen.faults)
        seen = replace(seen, faults=faults[:_MOST_FAULTS])
    report("timing both", 0.7)
    timings = _time(step, budget, steps)
    step.clear_gradients()
    return make_receipt(
        step,
        evidence,
        seen,
        timings,
        model=type(step.model).__name__,
        fingerprint=fingerprint(step.model),
        signature=signature,
        strategy=OWN,
        method=_describe(used, budget),
        budget_bytes=None,
        is_lossless=max_error == 0.0,
        max_error=max_error,
        rounding_tolerance=tolerance,
        slope=slope,
        baseline_losses=baseline_losses,
        measured_baseline_peak_bytes=baseline_peak_bytes,
        measured_peak_bytes=seen.peak_bytes,
        notes=notes,
    )


def _own_slope(step: TrainingStep, budget: CompilerBudget, evidence: Evidence) -> tuple[Slope | None, tuple[str, ...]]:
    """Compare the gradient of a step with its own checkpointing with the slope of the loss, and return the slope.

    If the step with everything kept fails this check too, the check cannot judge the checkpointing. Then return a note instead
    of the slope.
    """
    slope = measure_slope(step, copies(step.gradients()))
    if slope is None or not slope.disagrees:
        return slope, ()
    with budget.plain():
        reference = measure_slope(step, evidence.gradients)
    if reference is None or not reference.disagrees:
        return slope, ()
    return None, (
        f"the gradient does not agree with the loss's slope (measured / expected {slope.measured / slope.expected:.4f}), "
        "but neither does it with everything kept: the model stops or replaces gradients on purpose (detach, "
        "straight-through), or its way of saving memory could not be switched off",
    )


def _observe(
    step: TrainingStep, budget: CompilerBudget, evidence: Evidence, steps: int, depth: Depth
) -> tuple[Observed, Counter[str]]:
    """Run a step with its own way to save memory, and return what was measured.

    Also count how often the step entered each kind of saved-tensor hooks.
    """
    watch = SavedTensorWatch(step.model)
    # Module hooks would change what torch.compile compiles. So for compiled models, faults do not name modules.
    with watched(watch.wrap) as used, contextlib.nullcontext() if budget.is_compiled else watch.watch_modules():
        try:
            step.run()
        except Exception as error:  # a model's own hooks may raise anything
            raise _broken(step, error, watch.faults) from error
    if not used and not budget.is_compiled:
        raise _nothing_at_work(step.model)
    apart = compare_with(evidence, step)
    peak_bytes = step.measure_peak().peak_bytes
    apart = apart.worst(compare_with(evidence, step))
    losses = consecutive_losses(step, steps)
    intermediates = compare_intermediates(evidence.intermediates, run_intermediates(step, depth))
    curve = run_curve(step, depth)
    step.run()
    seen = Observed(
        peak_bytes=peak_bytes,
        apart=apart.worst(compare_with(evidence, step)),
        faults=tuple(watch.faults),
        compared_tensors=watch.compared,
        intermediates=intermediates,
        curve=curve,
        losses=losses,
    )
    return seen, used


def _nothing_at_work(model: nn.Module) -> InvalidModel:
    mode = (
        "" if model.training else "; the model is in evaluation mode, and many models checkpoint only in training mode"
    )
    return InvalidModel(
        f"{type(model).__name__} does not save memory by itself, so there is nothing to verify.",
        why="its step did not enter a checkpoint, an offloading context or other saved-tensor hooks, and did not run code of "
        f"torch.compile with torch._functorch.config.activation_memory_budget below 1{mode}",
        next=("" if model.training else "call model.train(); or ")
        + "give a plan, a budget or a strategy to verify; or enable the model's own checkpointing "
        "(model.gradient_checkpointing_enable() in transformers)",
    )


def _broken(step: TrainingStep, error: Exception, faults: Sequence[Fault]) -> InvalidModel:
    """Make the error for a step that fails with its own way to save memory, but runs with everything kept.

    The message names the first wrong tensor.
    """
    found = _explained(step, faults)
    return InvalidModel(
        f"The step of {type(step.model).__name__} fails: {type(error).__name__}: {error}",
        why="with everything kept the step runs, so the model's own checkpointing or hooks break it"
        + (f"; the first wrong tensor: {found[0]}" if found else ""),
        next="fix the checkpointing or the hooks, or switch them off and use a plan",
    )


def _explained(step: TrainingStep, faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Run the step once more and watch every op, which finds causes that saved tensors alone do not show.

    Returns:
        The ops whose recomputation gave another result. If no op differs, the result is ``faults`` without the tensors whose
        memory no op has written.
    """
    stack = ModuleStack()
    ops = RepeatedOps(step.model, stack)
    watch = SavedTensorWatch(step.model, ops.is_unset)

    def wrap(pack: Hook, unpack: Hook) -> tuple[Hook, Hook]:
        return watch.wrap(*ops.wrap(pack, unpack))

    with (
        contextlib.suppress(Exception),  # ops were recorded before a failing step raises, and they suffice
        torch.compiler.set_stance("force_eager"),
        watched(wrap),
        watch.watch_modules(),
        stack.watch(step.model),
        ops,
    ):
        step.run()
    return tuple(ops.faults()) or tuple(fault for fault in faults if (fault.region, fault.value) not in watch.unset)


def _blame_randomness(step: TrainingStep, budget: CompilerBudget) -> tuple[Fault, ...]:
    """Return a fault that blames random numbers, if the step draws some and its gradients agree in evaluation mode.

    Else return nothing.
    """
    if not step.draws_random_numbers():
        return ()
    random = [name for name, module in step.model.named_modules() if "dropout" in type(module).__name__.lower()]
    flags = [(module, module.training) for module in step.model.modules()]
    try:
        step.model.eval()
        with budget.plain():
            step.run()
            expected = copies(step.gradients())
        step.run()
        error = relative_error(expected, step.gradients())
    finally:
        for module, flag in flags:
            module.training = flag
    if error > budget.tolerance(step.model):
        return ()
    return (
        Fault(
            step=1,
            region=random[0] if random else "",
            value="a dropout mask" if random else "random numbers",
            op="dropout, compiled" if random else "compiled",
            cause=Cause.COMPILED_RANDOMNESS,
            elements=0,
            differing_elements=0,
            detail=f"activation_memory_budget is {budget.share:g}; in evaluation mode the gradients agree to {error:.1e}",
        ),
    )


def _describe(used: Counter[str], budget: CompilerBudget) -> str:
    parts = [f"{name} ({count} times a step)" for name, count in used.most_common()]
    if budget.is_compiled:
        parts.append(f"torch.compile under activation_memory_budget {budget.share:g}")
    return " and ".join(parts)


def _time(step: TrainingStep, budget: CompilerBudget, rounds: int) -> tuple[Timing, Timing]:
    """Return the times of two steps: with everything kept, and with the model's own way to save memory.

    They are timed in interleaved pairs. If compiled code would recompile at every switch, they are timed one after the other
    instead.
    """
    if not budget.is_compiled:
        return time_both(step, budget.plain, rounds)
    with budget.plain():
        baseline = time_in_turns({"": step.run}, device=step.device, rounds=rounds)
    ours = time_in_turns({"": step.run}, device=step.device, rounds=rounds)
    return baseline[""], ours[""]
