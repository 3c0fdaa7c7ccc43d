"""Plans steps of models that torch.compile compiles as a whole or in part. Compiled parts are read from their graphs. The rest
is traced eagerly, and the engine (the code that runs plans) manages its regions (managed modules).

Without a plan, the step runs in torch.compile's default partition. If its measured peak is within the budget, the compilation
is not touched. Otherwise a plan is solved on the kernels of the graphs, compiled and run. If the run exceeds the budget, the
plan is solved again, as for eager models. All this is done in inductor's own order of kernels first. If the first plan in that
order exceeds the budget, it is also done in the order of the graph.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import CompiledUnit, Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import BudgetBelowFloor, InvalidModel, InvalidOption
from plimsoll.session.agreement import Agreement
from plimsoll.session.device_costs import measure_engine, measured_costs
from plimsoll.session.forms import Sensed, sense_compiled
from plimsoll.session.manage import manage
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.step_planner import StepPlanner
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import TrainingStep
from plimsoll.session.trial import TrialRun, with_note
from plimsoll.tracing.capture import saved_as_zeros
from plimsoll.tracing.compiled.units import Unit, check_compiler, in_place, split_regions
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.meters.timing import paired_ratio, time_in_turns
from plimsoll.tracing.recorder.untouched import untouched
from plimsoll.tracing.refusals import check_traceable
from plimsoll.tracing.trace import trace as trace_step
from plimsoll.units import format_bytes

_WORTH_COMPILING = 0.25
"""Plans for other shapes differ in peak by at least this share of the distance between the lowest and the unmanaged (without a
plan) peak. Each plan costs a compilation, so the ladder (the plans to choose from) has at most five plans.
"""
_FAR_ABOVE = 1.25
"""Run torch.compile's default partition to see if it fits, unless its predicted peak is above this multiple of the budget. Far
above the budget, the run could only run out of memory.
"""
_STRATEGIES = ("auto", "none", "full")
_ROUNDS = 7
"""The number of timed steps for each of two orders of kernels, to find the faster one."""


def plans_compiled(
    model: nn.Module,
    units: Sequence[Unit],
    options: PlanOptions,
    strategy: str,
    *,
    room: object = None,
    may_take_forms: bool = False,
) -> bool:
    """Return True if the plan decides about the parts that torch.compile compiles, and False if it decides only about eager
    regions.

    If options are given that compiled parts do not support, and some region runs eagerly, warn and return False. Then the plan
    decides about eager regions only, and compiled parts keep all that they save.

    Raises:
        InvalidOption: as for `refuse_uncompilable`, if nothing runs eagerly.
    """
    if not units:
        return False
    is_mixed = bool(split_regions(model, units, options.regions)[1])
    takes_forms = may_take_forms and not is_mixed and all(unit.path for unit in units)
    found = _beyond(options, strategy, room, takes_forms=takes_forms)
    if not found:
        return True
    if not is_mixed:
        refuse_uncompilable(options, strategy, room=room, takes_forms=takes_forms)
    warnings.warn(
        f"plimsoll: compiled parts keep what they save: {found} is supported in eager regions only", stacklevel=3
    )
    return False


def refuse_uncompilable(options: PlanOptions, strategy: str, *, room: object = None, takes_forms: bool = False) -> None:
    """Refuse options that a plan does not support inside torch.compile.

    Raises:
        InvalidOption: decisions other than KEEP and RECOMPUTE, or a device profile.
    """
    if found := _beyond(options, strategy, room, takes_forms=takes_forms):
        raise InvalidOption(
            f"{found} is not supported with torch.compile.",
            why="inside compiled code a plan can only keep or recompute, on this device; in one process, saved values of "
            "blocks that are compiled one by one can also be compressed and offloaded",
            next="leave the option out, compile the blocks one by one, or plan the uncompiled model",
        )


def _beyond(options: PlanOptions, strategy: str, room: object, *, takes_forms: bool) -> str:
    """Return the name of an option that a plan does not support inside torch.compile, or "" if all are supported.

    ``takes_forms``: only compiled blocks run, so values may be compressed or offloaded.
    """
    usual = {"recompute", "compress", "offload"} if takes_forms else {"recompute"}
    return next(
        (
            text
            for text, is_asked in (
                (f"allow={sorted(options.allow)}", not usual.issuperset(options.allow)),
                (f"max_error={options.max_error}", options.wants_lossy and not takes_forms),
                (f"device_profile={options.device_profile!r}", options.device_profile is not None),
                (f"strategy={strategy!r}", strategy not in _STRATEGIES),
                ("room=", room is not None),
            )
            if is_asked
        ),
        "",
    )


def compiled_planner(
    agreement: Agreement,
    task: TrainingTask,
    options: PlanOptions,
    budget: Budget,
    progress: Progress = silent,
    *,
    limit_bytes: int | None = None,
) -> CompiledPlanner:
    """Read the graphs of a step with compiled parts, time them, and return a planner for the step. Errors are those of
    `plimsoll.plan`.

    ``limit_bytes`` is the most that reading and timing may allocate. They keep to it by saving fewer activations, so they may
    exceed a limit that is too small even without them.
    """
    is_alone = agreement.size == 1 and not split_regions(task.model, task.units, options.regions)[1]
    for name in options.strategies:
        refuse_uncompilable(options, name, takes_forms=is_alone and all(unit.path for unit in task.units))
    check_traceable(task.model)
    device = next(task.model.parameters()).device
    if device.type == "meta":
        raise InvalidModel(
            f"{type(task.model).__name__} is on the meta device.",
            why="the compiled model is timed, and its plan is compiled and run once; on the meta device nothing runs",
            next="move the model to the device that trains it, or plan the uncompiled model",
        )
    check_compiler(device)
    with agreement.stepping():
        traced, costs = trace_compiled(task, options, progress, limit_bytes=limit_bytes)
    budget_bytes, parts = budget.bytes_on(costs), planned_parts(task, options.regions)
    return CompiledPlanner(parts, traced, costs, options, budget_bytes, agreement)


def planned_parts(task: TrainingTask, patterns: tuple[str, ...] | None) -> tuple[CompiledUnit, ...]:
    """Return the parts of a task's model that torch.compile compiles, each with the regions in it."""
    held, _ = split_regions(task.model, task.units, patterns)
    return tuple(CompiledUnit(path=path, regions=names, options=task.compile_options) for path, names in held.items())


def trace_compiled(
    task: TrainingTask, options: PlanOptions, progress: Progress = silent, *, limit_bytes: int | None = None
) -> tuple[Trace, Costs]:
    """Return the trace of the step, where compiled parts are shown as kernels, and the seconds of the kernels and of the engine
    (the code that runs plans).

    Raises:
        As `plimsoll.tracing.trace.trace` does.
    """
    traced = _trace(task, options, progress, limit_bytes=limit_bytes)
    runs_eagerly = split_regions(task.model, task.units, options.regions)[1]
    return traced, measured_costs(traced, measure_engine(traced)) if runs_eagerly else measured_costs(traced)


def _trace(
    task: TrainingTask,
    options: PlanOptions,
    progress: Progress = silent,
    *,
    limit_bytes: int | None = None,
    is_timed: bool = True,
) -> Trace:
    """Return the trace of the step, where compiled parts are shown as kernels. If not ``is_timed``, the kernels are not timed.

    Raises:
        As `plimsoll.tracing.trace.trace` does.
    """
    from plimsoll.tracing.compiled.capture import capture  # import inductor only if something is compiled
    from plimsoll.tracing.compiled.step import with_compiled

    held, eager = split_regions(task.model, task.units, options.regions)
    with in_place(task.units, lambda _: None):
        uncompiled = trace_step(
            task.model,
            task.batch,
            loss=task.loss,
            regions={**eager, **{unit.path: unit.module for unit in task.units}},
            optimizer=task.optimizer,
            repeats=3 if is_timed else 0,
            limit_bytes=limit_bytes,
            progress=part_of(progress, 0.0, 0.5),
        )
    progress("reading the compiled graphs", 0.5)
    step = task.step(written=uncompiled.written)
    inner = {unit.path: [unit.local(name) for name in held[unit.path]] for unit in task.units}
    model = inner_module(task.model)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    written = [part for name in (*uncompiled.written, *uncompiled.written_buffers) for part in dense_parts(named[name])]
    # Drop saved activations while the graphs are read, so that this call keeps to the budget. This is not possible if a module
    # runs a transform of torch.func: these raise under hooks on saved tensors, and the trace omits such modules.
    has_hooks = {*eager, *inner} <= {region.name for region in uncompiled.regions}
    holding_nothing = saved_as_zeros(task.model) if has_hooks else contextlib.nullcontext()
    with untouched(task.model, uncompiled.written), holding_nothing:
        captured = capture(task.units, inner, step.run, written)
    progress("timing kernels", 0.9)
    return with_compiled(uncompiled, captured, step.device if is_timed else None)


class CompiledPlanner(StepPlanner):
    """Makes plans of a step with compiled parts. Without a plan the step runs in torch.compile's default partition."""

    def __init__(self, compiled: tuple[CompiledUnit, ...], *planner: Any) -> None:
        """Create a planner. ``planner`` are the arguments that `StepPlanner` takes."""
        super().__init__(*planner)
        self._compiled = tuple(
            msgspec.structs.replace(unit, copied_inputs=_copied_inputs(self.trace, unit)) for unit in compiled
        )
        self._is_in_order = True
        """True if plans are made for kernels in the order of the graph. False if they are made for inductor's own order of
        kernels.
        """
        self._default_bytes = 0
        self._trials: list[tuple[Plan, int]] = []
        """Each plan that was run, together with its measured peak."""
        self.unseen_bytes = 0
        """By how many bytes the measured peak of a trial has exceeded its predicted peak, at most; 0 if none has."""

    def plan(self, strategy: str, step: Callable[[], TrainingStep], progress: Progress = silent) -> Plan:
        """Return the plan for the budget, as ``StepPlanner.plan`` does. Here the default partition is kept if it fits.
        Otherwise the plan is made in inductor's own order of kernels or in the graph's order.

        If the first plan in inductor's own order keeps to the budget, take it. If only a tighter plan does, or no plan, also
        make a plan in the graph's order, and take the faster of the two.
        """
        default = self.solve(None, "none")
        if strategy == "none" or not self._is_far_above_budget(default):
            progress("running the step as torch.compile partitions it", 0.0)
            measured = self.run(step(), default)
            self._default_bytes = measured.peak_bytes
            fits = self.budget_bytes is None or measured.peak_bytes <= self.budget_bytes
            if strategy == "none" or (strategy == "auto" and fits):
                return self._untouched(measured.peak_bytes)
        # Inductor's own order comes first: 34 of 37 measured plans were faster in it, at 0.85 to 0.999 times the time. If the
        # first plan fits, nothing else is compiled (docs/project/design/plans-inside-torch-compile.md).
        free = None if self.budget_bytes is None else self._in_own_order(strategy, step(), part_of(progress, 0.2, 0.5))
        if free is not None and len(self._trials) == 1:
            return free
        own_unseen_bytes, self.unseen_bytes = self.unseen_bytes, 0
        try:
            planned = super().plan(strategy, step, part_of(progress, 0.5, 0.9))
            ordered = self._fitting(planned)
        except self._may_fail:
            if free is None:
                raise
            ordered = None
        if free is None:
            note = "compiled in the order of its graph: in inductor's own order, no plan was found that fits"
            return planned if ordered is None else with_note(ordered, note)
        if ordered is not None:
            share = self._share_of_seconds(step(), free, ordered)
            if share >= 1:
                return with_note(
                    ordered,
                    f"in the order of its graph: in inductor's own order, the step took {share:.3f} times as long",
                )
            free = with_note(free, f"in inductor's own order: {share:.3f} times the time in the order of its graph")
        self.unseen_bytes = own_unseen_bytes
        return free

    @property
    def planning_peak_bytes(self) -> int:
        """The highest peak while the plan was made. A model that is compiled as a whole has one graph, which holds all
        activations while it is read. Graphs of single blocks do not.
        """
        is_one_graph = any(not unit.path for unit in self._compiled)
        return max(self._default_bytes, self.extremes.unmanaged_peak_bytes if is_one_graph else 0)

    @property
    def _may_fail(self) -> tuple[type[BaseException], ...]:
        """The types of errors from one order of kernels that make the planner try the other order.

        With several ranks, out of memory is not among them: the other ranks wait in a collective of that step, and only an
        error that leaves the step releases them.
        """
        return (BudgetBelowFloor,) if self._agreement.size > 1 else (BudgetBelowFloor, torch.OutOfMemoryError)

    def _is_far_above_budget(self, plan: Plan) -> bool:
        """Return True if the prediction alone shows that the plan does not fit. Such a plan is not run, because the run could
        run out of memory.
        """
        if self.budget_bytes is None:
            return False
        return self.ranks.worst_bytes(self.own(plan).predicted_peak_bytes) > _FAR_ABOVE * self.budget_bytes

    def _in_own_order(self, strategy: str, step: TrainingStep, progress: Progress) -> Plan | None:
        """Return the plan in inductor's own order, or ``None`` if no such plan keeps to the budget.

        The order changes which kernels are fused and which buffers are reused. It does not change what is saved.
        """
        self._trials, self.unseen_bytes, self._is_in_order = [], 0, False
        try:
            planned = self._confirmed(self.solve(self.budget_bytes, strategy), strategy, step, progress)
        except self._may_fail:
            return None
        finally:
            self._is_in_order = True
        return self._fitting(planned)

    def _fitting(self, plan: Plan) -> Plan | None:
        """Return the plan with its measured peak as its predicted peak, or ``None`` if that peak is above the budget."""
        taken = (taken_bytes for tried, taken_bytes in reversed(self._trials) if tried.regions == plan.regions)
        taken_bytes = next(taken, None)
        if taken_bytes is None or self.budget_bytes is None or taken_bytes > self.budget_bytes:
            return None
        return msgspec.structs.replace(plan, predicted_peak_bytes=taken_bytes)

    def _share_of_seconds(self, step: TrainingStep, one: Plan, other: Plan) -> float:
        """Return the measured seconds of a step under the plan ``one``, divided by the seconds under the plan ``other``.

        Each rank measures the median over alternating rounds. The result is from the rank where ``one`` gains least.
        """
        with self._agreement.stepping(), untouched(step.model, one.written), manage(step.model, one) as work:

            def under(plan: Plan) -> None:
                work.switch(plan)
                step.run()

            steps = {name: functools.partial(under, plan) for name, plan in (("one", one), ("other", other))}
            first, second = time_in_turns(
                steps, device=step.device, rounds=_ROUNDS, threads=torch.get_num_threads()
            ).values()
        return max(self._agreement.all_of("seconds", paired_ratio(first, second).median, float))

    def solve(self, budget_bytes: int | None, strategy: str = "auto", **how: Any) -> Plan:
        """Solve a plan, as ``StepPlanner.solve`` does. The result also names the compiled units and their order of kernels, and
        has the measured baseline.
        """
        solved = super().solve(budget_bytes, strategy, **how)
        own: dict[str, Any] = {} if self._is_in_order else {"is_in_order": False}
        if strategy == "none":  # the default partition reads changed inputs without copies
            own["copied_inputs"] = ()
        units = tuple(msgspec.structs.replace(unit, **own) for unit in self._compiled)
        baseline_bytes = self._default_bytes or solved.baseline_peak_bytes
        return msgspec.structs.replace(solved, compiled=units, baseline_peak_bytes=baseline_bytes)

    def run(self, step: TrainingStep, plan: Plan, *, unseen_bytes: int = 0) -> TrialRun:
        """Run a plan and return its measurement, as ``StepPlanner.run`` does. Also remember the plan's peak, and by how much it
        exceeded the prediction if that is the most so far.
        """
        told = super().run(step, plan, unseen_bytes=unseen_bytes)
        self._trials.append((plan, told.peak_bytes))
        self.unseen_bytes = max(self.unseen_bytes, self._ran.peak_bytes - self.own(plan).predicted_peak_bytes)
        return told

    def _sense(self, step: TrainingStep) -> Sensed:
        """Measure the forms (compressed or offloaded) that values could be held in, as ``StepPlanner._sense`` does. Here codecs
        are tried on the values that compiled blocks save.
        """
        watched = msgspec.structs.replace(self.extremes.lowest, compiled=self._compiled)
        return sense_compiled(step, self.trace, self.costs, watched, self.options)

    def beside(self, trace: Trace, costs: Costs) -> StepPlanner:
        """Return a planner for another step of the same model, as ``StepPlanner.beside`` does. The new planner has the same
        compiled units.
        """
        return CompiledPlanner(self._compiled, trace, costs, self.options, self.own_budget_bytes)

    def traced(
        self, task: TrainingTask, *, optimizer_is_optional: bool, limit_bytes: int, is_timed: bool
    ) -> tuple[Trace, Costs | None]:
        """Trace another step of the same model, as ``StepPlanner.traced`` does. Here compiled parts are read from their
        graphs.
        """
        if is_timed:
            return trace_compiled(task, self.options, limit_bytes=limit_bytes)
        return _trace(task, self.options, is_timed=False), None

    def rungs(self) -> Iterator[Plan]:
        """Yield plans with falling peaks, as ``StepPlanner.rungs`` does. Only a few plans with clearly different peaks are
        yielded, because each one must be compiled.
        """
        found = list(super().rungs())
        spare_bytes = found[0].predicted_peak_bytes - found[-1].predicted_peak_bytes
        last_bytes = 0
        for plan in found:
            peak_bytes = plan.predicted_peak_bytes
            if not last_bytes or plan is found[-1] or last_bytes - peak_bytes >= _WORTH_COMPILING * spare_bytes:
                last_bytes = peak_bytes
                yield msgspec.structs.replace(plan, compiled=self._compiled)

    def _untouched(self, peak_bytes: int) -> Plan:
        """Return a plan that does not change torch.compile's default partition. Its predicted peak is ``peak_bytes``."""
        solved = self.solve(None, "none")
        note = f"torch.compile's own partition is kept: its measured peak was {format_bytes(peak_bytes)}"
        return msgspec.structs.replace(
            solved, budget_bytes=self.budget_bytes, predicted_peak_bytes=peak_bytes, notes=(*solved.notes, note)
        )


def _copied_inputs(trace: Trace, unit: CompiledUnit) -> tuple[str, ...]:
    """Return the names of a compiled unit's inputs whose copies backward reads in some call of the unit's regions."""
    return tuple(sorted({name for call in trace.regions if call.name in unit.regions for name in call.copied_inputs}))
