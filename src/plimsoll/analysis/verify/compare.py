"""Measures several strategies side by side on one model and batch: the verb ``compare``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from plimsoll.analysis.verify.evidence import (
    Apart,
    Depth,
    Evidence,
    collect_evidence,
    compare_with,
    compiled_rounding,
    managed_run,
    of_all_ranks,
    read_measurable,
    versions,
)
from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.receipt import finite
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidStrategy
from plimsoll.planning.costing.roofline import is_product
from plimsoll.planning.strategies import CHECKPOINT, MEMORY_BUDGET, SELECTIVE, is_torchs_own
from plimsoll.session.agreement import Agreement, agreement_for, described
from plimsoll.session.compiled import compiled_planner
from plimsoll.session.manage import manage
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.rendezvous.exchange import TIMEOUT_SECONDS
from plimsoll.session.step_planner import StepPlanner, eager_planner
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.compiled.units import Unit, install, split_regions
from plimsoll.tracing.meters.timing import Timing, paired_ratio, time_in_turns
from plimsoll.tracing.recorder.calling import Loss
from plimsoll.tracing.recorder.untouched import untouched
from plimsoll.units import check_count

BASELINE = ""
"""The key under which the times of the step without a plan are stored."""
STRATEGIES = ("none", "full", "every:2", "sqrt", "selective:attention")
"""The strategies that are compared by default, for an eager model."""
_BESIDE = "compared with the same model compiled under torch's default partition"
_SHARES = ("0.7", "0.5", "0.3", "0")
COMPILED_STRATEGIES = ("none", "full", *(f"{MEMORY_BUDGET}:{share}" for share in _SHARES), CHECKPOINT, SELECTIVE)
"""The strategies that are compared by default, for a compiled model."""


@dataclass(frozen=True, slots=True)
class PlanMeasurement:
    """Data: what was measured under one strategy: its peak in bytes, and how its gradients and buffers differ.

    They are compared with the step without a plan.
    """

    peak_bytes: int
    apart: Apart


def compare(
    model: nn.Module,
    batch: Any,
    strategies: Sequence[str] | str | None = None,
    *,
    budget: int | str | None = None,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: Sequence[str] | None = None,
    steps: int = 5,
    allow: Collection[str] | str = ("recompute",),
    max_error: float | str = 0.0,
    host_budget: int | str | None = None,
    overrides: Sequence[str] = (),
    link: str | None = None,
    compile: bool | Mapping[str, Any] | None = None,  # noqa: A002 - torch's word
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
) -> Comparison:
    """Measure the peak, the step time and the gradients of several strategies on one model and batch.

    The step times are paired: in each round, every strategy and the step without a plan run once.

    Args:
        model: as for ``plimsoll.plan``.
        batch: as for ``plimsoll.plan``.
        strategies: names as in ``plimsoll.plan``. For a compiled model also torch's own methods: ``memory-budget:SHARE``, where
            each graph may save that share of its bytes (``memory-budget:0.5``); ``checkpoint``, which puts every compiled
            region in ``torch.utils.checkpoint``; and ``checkpoint:selective``, which also saves the results of matrix products,
            convolutions and attention. By default a fixed set, and ``auto`` if there is a budget.
        budget: the memory budget of the strategy ``auto``; other strategies do not use it.
        loss: as for ``plimsoll.plan``.
        optimizer: as for ``plimsoll.plan``.
        regions: as for ``plimsoll.plan``.
        steps: timed rounds; every strategy runs once per round.
        allow: what ``auto`` may do. This, ``max_error``, ``host_budget``, ``overrides`` and ``link`` are as for
            ``plimsoll.plan``.
        max_error: the relative error of the gradient that ``auto`` may cause.
        host_budget: bytes that offloaded values may occupy.
        overrides: rules ``PATTERN=DECISION`` that fix the decision for all values whose name matches, as for ``plimsoll.plan``.
        link: where offloaded values go: ``host`` (the host's memory) or ``disk``.
        compile: compare inside torch.compile, as for ``plimsoll.plan``.
        ranks: as for ``plimsoll.plan``; all ranks get the same comparison, with the largest peaks and the slowest times.
        timeout_seconds: as for ``plimsoll.plan``.
        progress: a function that is called with the name of the current stage and the share of the work that is done.

    Returns:
        A comparison with one row per strategy. A strategy that does not fit has a row with its status. For a compiled model,
        the baseline is the same model compiled under torch.compile's default partition.

    Raises:
        InvalidStrategy: a strategy is unknown. Further errors as for ``plimsoll.plan``.
    """
    report = progress or silent
    with agreement_for(model, "compare", ranks=ranks, timeout_seconds=timeout_seconds) as agreement:
        task = read_measurable(model, batch, loss, optimizer, compile=compile)
        check_count("steps", steps, least=1)
        limit = Budget.read(budget)
        names = _named(strategies, task, has_budget=budget is not None)
        own = _read_own(names) if task.units else {}
        options = PlanOptions.read(
            strategies=[each for each in names if each not in own],
            regions=regions,
            allow=allow,
            max_error=max_error,
            host_budget=host_budget,
            overrides=overrides,
            link=link,
        )
        options.refuse_tiles("Compared strategies")
        options.refuse_unknown(task.model)
        asked = described(steps=steps, has_budget=budget is not None)
        agreement.same("what to compare", task.facts() | options.facts() | asked)
        task = agreement.patient(task)
        with task.compiled():
            planner_of = compiled_planner if task.units else eager_planner
            planner = planner_of(agreement, task, options, limit, part_of(report, 0.0, 0.35))
            plans = _plan_all(planner, task.step(), part_of(report, 0.35, 0.5))
            managers = plans | {name: of(task, options.regions) for name, of in own.items()}
            with agreement.stepping(), untouched(model, planner.trace.written):
                measured = _measure(task, planner.trace, managers, steps, part_of(report, 0.5, 1.0))
        found = Comparison(
            model=planner.trace.model,
            signature=planner.trace.signature,
            device=str(task.step().device),
            versions=versions(),
            steps=steps,
            baseline_peak_bytes=measured.baseline_peak_bytes,
            measured_baseline_seconds=measured.timings[BASELINE].median_seconds,
            rows=tuple(measured.row(name, plans.get(name)) for name in names),
            notes=(_BESIDE,) if task.units else (),
        )
        report("done", 1.0)
        return _merged(agreement, found)


def _named(strategies: Sequence[str] | str | None, task: TrainingTask, *, has_budget: bool) -> tuple[str, ...]:
    """Return the names of the strategies to compare, without duplicates.

    If none are requested, return a fixed set, and ``auto`` if there is a budget.
    """
    if strategies is None:
        strategies = (*(COMPILED_STRATEGIES if task.units else STRATEGIES), *(["auto"] if has_budget else []))
    return (strategies,) if isinstance(strategies, str) else tuple(dict.fromkeys(strategies))


def _plan_all(planner: StepPlanner, step: TrainingStep, report: Progress) -> dict[str, Plan]:
    """Return a mapping from each strategy to its plan. Only ``auto`` gets the budget."""
    planner.try_forms(lambda: step, report)
    plans: dict[str, Plan] = {}
    for name in planner.options.strategies:
        report(f"planning {name}", 0.8)
        budget_bytes = planner.budget_bytes if name == "auto" else None
        plans[name] = planner.solve(budget_bytes, name, raise_below_floor=False)
    return plans


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Data: all measurements of a comparison of strategies.

    It has the peak in bytes of the step without a plan, each strategy's peak and gradients, and the times of all.
    """

    baseline_peak_bytes: int
    by_name: dict[str, PlanMeasurement]
    refused: dict[str, str]
    """The strategies that torch cannot compile for this model, each with the reason. Only torch's own strategies can be among
    them.
    """
    timings: dict[str, Timing]
    rounding: float
    """The relative gradient error that other kernel fusions may cause.

    It is 0 for an eager model, where the same kernels run.
    """

    def row(self, name: str, plan: Plan | None) -> ComparisonRow:
        """Return one strategy's row of the comparison: its measurements, and the predictions of its plan if it has one."""
        row = ComparisonRow(strategy=name, note=self.refused.get(name, "")) if plan is None else _predicted(name, plan)
        measured = self.by_name.get(name)
        if measured is None:
            return row
        ratio = paired_ratio(self.timings[name], self.timings[BASELINE])
        is_equal, error = measured.apart.is_within_spread, finite(measured.apart.error)
        return msgspec.structs.replace(
            row,
            measured_peak_bytes=measured.peak_bytes,
            measured_seconds=self.timings[name].median_seconds,
            measured_ratio=ratio.median,
            measured_ratio_low=ratio.low,
            measured_ratio_high=ratio.high,
            is_bit_equal=is_equal,
            is_rounding=not is_equal and error is not None and error <= self.rounding,
            gradient_error=None if row.is_lossless and (is_equal or not self.rounding) else error,
        )


def _predicted(name: str, plan: Plan) -> ComparisonRow:
    return ComparisonRow(
        strategy=name,
        status=plan.status,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_seconds=plan.predicted_seconds,
        is_lossless=plan.is_lossless,
        note="" if plan.status.is_usable else plan.status.advice,
    )


def _measure(
    task: TrainingTask,
    trace: Trace,
    managers: Mapping[str, Plan | TorchsOwn],
    rounds: int,
    report: Progress,
) -> _Measured:
    """Run the step under every strategy that can be applied, then time all of them in interleaved rounds.

    The step without a plan is timed too. Return the peaks, gradients and times. Peaks count all of the optimizer's state, also
    what the optimizer has not made yet.
    """
    step = task.step(written=trace.written)
    usable = {name: each for name, each in managers.items() if not isinstance(each, Plan) or each.status.is_usable}
    absent_bytes = step.absent_state_bytes(trace.state_bytes)
    report("running the unmanaged step", 0.0)
    evidence = collect_evidence(step, Depth())
    baseline_peak_bytes = step.measure_peak().peak_bytes + absent_bytes
    measured: dict[str, PlanMeasurement] = {}
    refused: dict[str, str] = {}
    runs: dict[str, Callable[[], object]] = {BASELINE: step.run}
    with contextlib.ExitStack() as stack:
        for position, (name, manager) in enumerate(usable.items()):
            report(f"running {name}", 0.1 + 0.4 * position / len(usable))
            handle = manager.resumed() if isinstance(manager, TorchsOwn) else manage(task.model, manager)
            stack.callback(handle.remove)
            if task.units:
                try:
                    step.run()  # compile now: memory that the compiler allocates must not count in the step's peak
                except torch._dynamo.exc.TorchDynamoException as error:
                    if not isinstance(manager, TorchsOwn):
                        raise
                    # For example, checkpoints inside a graph that DDP's reducer cuts into pieces.
                    refused[name] = f"torch cannot compile it: {str(error).strip().partition(chr(10))[0]}"
                    handle.remove()
                    continue
            measured[name] = _run_twice(step, evidence, absent_bytes)
            handle.pause()
            runs[name] = managed_run(step, handle)
        report("timing in turns", 0.5)
        timings = time_in_turns(runs, device=step.device, rounds=rounds)
    rounding = compiled_rounding(step, task.units, evidence.gradients) if task.units else 0.0
    step.clear_gradients()
    return _Measured(
        baseline_peak_bytes=baseline_peak_bytes, by_name=measured, refused=refused, timings=timings, rounding=rounding
    )


def _run_twice(step: TrainingStep, evidence: Evidence, absent_bytes: int) -> PlanMeasurement:
    """Run two steps under a plan and compare both with the step without a plan. Ops are recorded during the first step.

    Return the larger peak of the two, and for each tensor the larger of its two differences from the step without a plan.
    """
    recording_bytes = step.measure_peak().peak_bytes
    apart = compare_with(evidence, step)
    steady_bytes = step.measure_peak().peak_bytes
    return PlanMeasurement(max(recording_bytes, steady_bytes + absent_bytes), apart.worst(compare_with(evidence, step)))


def _merged(agreement: Agreement, comparison: Comparison) -> Comparison:
    """Merge the comparisons of all ranks into one.

    For each strategy it has the largest peak, the seconds of the slowest rank and the largest error. A strategy counts as
    bit-equal only if it is bit-equal on all ranks that measured it.
    """
    if agreement.size == 1:
        return comparison
    told = of_all_ranks(agreement, "comparisons", comparison)
    seconds = [each.measured_baseline_seconds for each in told if each.measured_baseline_seconds is not None]
    return msgspec.structs.replace(
        told[0],
        baseline_peak_bytes=max(each.baseline_peak_bytes for each in told),
        measured_baseline_seconds=max(seconds, default=None),
        rows=tuple(merged_row(rows) for rows in zip(*(each.rows for each in told), strict=True)),
        notes=(
            *told[0].notes,
            f"figures are the worst of {agreement.size} ranks: the largest peaks, and the seconds of the slowest rank",
        ),
    )


def merged_row(rows: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return one strategy's row for all ranks. One rank whose gradients are wrong makes the row wrong.

    Example:
        >>> wrong = ComparisonRow(strategy="full", measured_seconds=1.0, is_bit_equal=False)
        >>> rounded = ComparisonRow(strategy="full", measured_seconds=2.0, is_bit_equal=False, is_rounding=True)
        >>> merged_row([wrong, rounded]).is_wrong
        True
    """
    slowest = max(rows, key=lambda row: row.measured_seconds or 0.0)
    peaks = [row.measured_peak_bytes for row in rows if row.measured_peak_bytes is not None]
    errors = [row.gradient_error for row in rows if row.gradient_error is not None]
    equal = [row.is_bit_equal for row in rows if row.is_bit_equal is not None]
    return msgspec.structs.replace(
        slowest,
        measured_peak_bytes=max(peaks, default=None),
        gradient_error=max(errors, default=None),
        is_bit_equal=all(equal) if equal else None,
        is_rounding=any(row.is_rounding for row in rows)
        and all(row.is_bit_equal is not False or row.is_rounding for row in rows),
    )


def _read_own(strategies: Iterable[str]) -> dict[str, Callable[[TrainingTask, tuple[str, ...] | None], TorchsOwn]]:
    """Return, for each requested strategy that torch itself implements, a function that sets it up.

    The planner makes the other strategies.

    Raises:
        InvalidStrategy: the memory budget's share is not a number from 0 to 1.
    """
    found: dict[str, Callable[..., TorchsOwn]] = {}
    for strategy in filter(is_torchs_own, strategies):
        if strategy in (CHECKPOINT, SELECTIVE):
            found[strategy] = functools.partial(_checkpointed, is_selective=strategy == SELECTIVE)
            continue
        share = -1.0
        with contextlib.suppress(ValueError):
            share = float(strategy.partition(":")[2])
        if not 0 <= share <= 1:
            raise InvalidStrategy(
                f"{strategy!r} is not a strategy.",
                why="torch's memory budget is a share, from 0 to 1, of the bytes that each graph saves",
                next=f"write {MEMORY_BUDGET}:0.5, or another share",
            )
        found[strategy] = functools.partial(_budgeted, share=share)
    return found


class TorchsOwn:
    """Switches one of torch's own ways to save memory on (``resume``) and off (``pause``), for a compiled model.

    The units are the parts of the model that torch.compile compiled.
    """

    def __init__(
        self, calls: Mapping[Unit, Callable[..., Any]], forwards: Mapping[nn.Module, Callable[..., Any]]
    ) -> None:
        """Store what ``resume`` installs and ``pause`` removes.

        ``calls`` replace the calls of units (parts of the model that torch.compile compiled); ``forwards`` replace the forward
        of modules inside the units.
        """
        self._calls, self._forwards = calls, forwards
        self._put_back: list[Callable[[], None]] = []

    def resumed(self) -> TorchsOwn:
        """Switch torch's way to save memory on, and return this object."""
        self.resume()
        return self

    def resume(self) -> None:
        """Switch torch's way to save memory on: install the replaced calls of units (parts that torch.compile compiled) and
        forwards of modules.
        """
        self._put_back = [install(unit, call) for unit, call in self._calls.items()]
        for module, forward in self._forwards.items():
            self._put_back.append(_with_forward(module, forward))

    def remove(self) -> None:
        """Do the same as ``pause``. A plan's handle has this method too, so both can be used alike."""
        self.pause()

    def pause(self) -> None:
        """Switch torch's way to save memory off: put back the user's compiled calls and the modules' own forwards."""
        while self._put_back:
            self._put_back.pop()()


def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    before = module.__dict__.get("forward")
    module.forward = forward

    def put_back() -> None:
        del module.forward
        if before is not None:
            module.forward = before

    return put_back


def _budgeted(task: TrainingTask, _: tuple[str, ...] | None, *, share: float) -> TorchsOwn:
    """Compile every unit (part that torch.compile compiled) of the model under torch's memory budget, and return the object
    that switches it on and off.

    The process-wide setting does not change.

    Private to torch, seen in torch 2.9 to 2.15: ``torch._functorch.config.activation_memory_budget``, which torch reads when it
    partitions a graph.
    """
    compiled = {unit.call.key: unit.call.compile(backend=_backend(unit.call.options, share)) for unit in task.units}
    return TorchsOwn({unit: functools.partial(compiled[unit.call.key], unit.module) for unit in task.units}, {})


def _backend(options: Any, share: float) -> Callable[..., Any]:
    """Return an inductor backend that compiles under its own memory budget.

    The autograd cache is off, because its key ignores this budget.
    """
    from torch._inductor.compile_fx import compile_fx  # takes seconds to import

    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        settings = {"activation_memory_budget": share, "enable_autograd_cache": False}
        with torch._functorch.config.patch(settings):
            return compile_fx(graph, list(inputs), config_patches=dict(options))

    return backend


def _checkpointed(task: TrainingTask, patterns: tuple[str, ...] | None, *, is_selective: bool) -> TorchsOwn:
    """Return an object that puts every region (a module that the plan decides about) in ``torch.utils.checkpoint``, inside the
    compiled unit that contains it.

    Equal blocks share one compilation.
    """
    from plimsoll.engine.compiled.partitioner import with_seeds_saved  # imports inductor, which takes seconds

    contexts = functools.partial(create_selective_checkpoint_contexts, _saves_products)
    words: dict[str, Any] = {"use_reentrant": False, **({"context_fn": contexts} if is_selective else {})}
    compiled = {unit.call.key: unit.call.compile(**with_seeds_saved()) for unit in task.units}
    held, _ = split_regions(task.model, task.units, patterns)
    calls: dict[Unit, Callable[..., Any]] = {}
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for unit in task.units:
        module = _Checkpointed(unit.module, words) if held[unit.path] == (unit.path,) else unit.module
        calls[unit] = functools.partial(compiled[unit.call.key], module)
        for region in filter(None, map(unit.local, held[unit.path])):
            inner = unit.module.get_submodule(region)
            forwards[inner] = functools.partial(checkpoint, inner.forward, **words)
    return TorchsOwn(calls, forwards)


class _Checkpointed(nn.Module):
    """A module that replaces another one: it runs it, with its hooks, under ``torch.utils.checkpoint``."""

    def __init__(self, module: nn.Module, words: Mapping[str, Any]) -> None:
        super().__init__()
        self.module, self.words = module, dict(words)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.module._call_impl, *args, **self.words, **kwargs)


def _saves_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_saved = is_product(op.overloadpacket.__name__)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
