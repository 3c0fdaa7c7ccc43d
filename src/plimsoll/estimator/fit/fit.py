"""``plimsoll.fit``: chooses micro-batch, accumulation and plan together for the highest throughput under a budget."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.costs import Basis, Costs, CostSource
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.fit import Fit, FitPoint
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.receipt import Claim
from plimsoll.artifacts.trace import Category
from plimsoll.errors import BudgetBelowFloor, InvalidBudget, InvalidOption
from plimsoll.estimator.estimate import estimate
from plimsoll.estimator.estimate_job import ROOFLINE_ERROR
from plimsoll.estimator.fit.changes import find_changes
from plimsoll.estimator.fit.search import MOST_SOLVES, Search, Shape, Space
from plimsoll.estimator.fit.single_device import (
    Accumulation,
    FitTraining,
    MicroBatches,
    SingleDevice,
    described,
)
from plimsoll.estimator.targets.target import TargetOptions, load_target
from plimsoll.session.manage import manage
from plimsoll.session.options import Budget, PlanOptions, check_text
from plimsoll.session.rendezvous.world import refuse_several_ranks
from plimsoll.session.task import check_model, explained_loss, refuse_profiler
from plimsoll.session.training_step import gradients_as_if
from plimsoll.session.trial import confirmed, run_trial
from plimsoll.tracing.meters.timing import time_in_turns
from plimsoll.tracing.recorder.calling import Loss
from plimsoll.tracing.recorder.untouched import untouched
from plimsoll.units import check_count, format_bytes

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

MOST_BATCH = 1024
_MEASURED_ERROR = 0.1
"""The usual relative error of a step's predicted seconds, if the step's ops were timed one by one."""
_ROUNDS = 5
_SETTLINGS = 4


@overload
def fit(
    model: nn.Module | str,
    batch: Any = None,
    budget: int | str | None = None,
    *,
    sequences: Sequence[int] | int | None = None,
    global_batch: int | None = None,
    accumulation: int = 1,
    most_batch: int = MOST_BATCH,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    regions: Sequence[str] | None = None,
    device_profile: str | None = None,
    most_solves: int = MOST_SOLVES,
    progress: Progress | None = None,
) -> Fit: ...


@overload
def fit(
    model: nn.Module | str,
    batch: Any = None,
    budget: int | str | None = None,
    *,
    sequences: Sequence[int] | int | None = None,
    global_batch: int | None = None,
    accumulation: int = 1,
    optimizer: str | None = None,
    regions: Sequence[str] | None = None,
    loss: Loss | None = None,
    device_profile: str | None = None,
    layout: str,
    techniques: str = "",
    precision: str | None = None,
    strategy: str | None = None,
    progress: Progress | None = None,
) -> Estimate: ...


def fit(
    model: nn.Module | str,
    batch: Any = None,
    budget: int | str | None = None,
    *,
    sequences: Sequence[int] | int | None = None,
    global_batch: int | None = None,
    accumulation: int = 1,
    most_batch: int = MOST_BATCH,
    loss: Loss | None = None,
    optimizer: OptimizerLike | str | None = None,
    regions: Sequence[str] | None = None,
    device_profile: str | None = None,
    layout: str = "",
    techniques: str = "",
    precision: str | None = None,
    strategy: str | None = None,
    most_solves: int = MOST_SOLVES,
    progress: Progress | None = None,
) -> Fit | Estimate:
    """Choose micro-batch and plan together for the most tokens (or examples) per second under a budget.

    A larger micro-batch spreads fixed costs over more tokens; recomputation makes room for it but costs time. This function
    computes point by point which effect wins. The step is traced at a few sizes; the bytes at other sizes are derived from
    these exactly. The best point is then traced itself and solved; if the device is available, its plan is run once and
    measured.

    Model, gradients, buffers, optimizer and random state are restored.

    Args:
        model: as for ``plimsoll.plan``, or a target by name: a catalogue name, a ``config.json``, ``package.module:function``.
        batch: a sample, whose examples are repeated or left out as needed; or a function from (examples, sequence) to a batch.
            A target by name brings its own batch.
        budget: as for ``plimsoll.plan``; ``"auto"`` if the device's memory is known.
        sequences: sequence lengths to choose from, in tokens per example; by default the sample's own length.
        global_batch: examples per optimizer step; micro-batches are then its divisors, and accumulation follows from them.
        accumulation: micro-batches per optimizer step, if ``global_batch`` is not given.
        most_batch: the largest micro-batch to consider.
        loss: as for ``plimsoll.plan``.
        optimizer: as for ``plimsoll.plan``, or its class; with ``layout`` a name (``"adamw"``, the default, or ``"none"``).
        regions: as for ``plimsoll.plan``.
        device_profile: plan for a device from the catalogue that is not in this machine.
        layout: for several devices: ``"ranks=64"``, plus any degrees that are fixed (``"ranks=64,tp=8,sp"``). Layout,
            micro-batch and plans are chosen together, for ``global_batch`` examples per step; needs a ``device_profile``.
        techniques: with ``layout``, other things that the run does, as for ``plimsoll.estimate``: ``"lora=16,loss=fused"``.
        precision: with ``layout``, as for ``plimsoll.estimate``: ``"bf16-mixed"``.
        strategy: with ``layout``, as for ``plimsoll.estimate``: ``"full"`` in place of a plan.
        most_solves: the largest number of plans that may be solved, over all sequences together.
        progress: a function that is called with the name of the current stage and the share of the work that is done.

    Returns:
        A ``Fit``: the best point (micro-batch and sequence) with its plan, and all points that were evaluated. If nothing fits,
        it says what would change that. With ``layout``, an ``Estimate`` of the fastest layout: its ``layouts`` are the
        runners-up, and its stages have the plans.

    Raises:
        InvalidBudget: the budget is missing, or its unit is not clear.
        InvalidOption: sizes are invalid, or contradict each other. Other errors as for ``plimsoll.plan``.

    Example:
        >>> import torch, plimsoll
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
        >>> found = plimsoll.fit(
        ...     model, torch.ones(8, 64), "1MiB", loss=torch.sum, device_profile="H100-SXM", most_batch=64
        ... )
        >>> found.best_point.micro_batch
        64

    Known weakness: without the device, seconds come from a roofline.
    """
    report = progress or silent
    started = time.monotonic()
    check_text("layout", layout)
    check_text("techniques", techniques)
    estimated = {"techniques": techniques, "precision": precision, "strategy": strategy}
    if not layout and any(estimated.values()):
        name, value = next((name, value) for name, value in estimated.items() if value)
        raise InvalidOption(
            f"{name}={value!r} needs layout=.",
            why="it is estimated, and without a layout the step itself is traced",
            next='add layout="ranks=1" for one device, with global_batch= and device_profile=',
        )
    if layout or isinstance(optimizer, str):
        named = "adamw" if optimizer is None else optimizer
        searched = _LayoutFit(
            layout, budget, global_batch, device_profile, named, techniques, precision, strategy, loss
        )
        searched.check(
            batch,
            accumulation=(accumulation, 1),
            regions=(regions, None),
            most_batch=(most_batch, MOST_BATCH),
            most_solves=(most_solves, MOST_SOLVES),
        )
        return searched.run(model, batch, _sequences(sequences), report)
    if isinstance(model, str):
        model, batch, loss = _loaded(model, batch, loss, _sequences(sequences), is_meta=device_profile is not None)
    check_model(model)
    refuse_several_ranks(model, "fit")
    if callable(optimizer):  # a class, or a function that makes one
        optimizer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    check_model(model, optimizer)
    refuse_profiler(model)
    training = FitTraining(
        model=model,
        batches=MicroBatches(batch, _sequences(sequences)),
        loss=explained_loss(loss),
        optimizer=optimizer,
        options=PlanOptions.read(regions=regions, device_profile=device_profile),
    )
    space, count = _space(training, global_batch, accumulation, most_batch)
    check_count("most_solves", most_solves, least=1)
    if budget is None:
        raise InvalidBudget(
            "budget= is missing.",
            why="without a limit, the largest micro-batch without a plan is always best",
            next='pass budget="70GiB", or budget="auto" for the memory of the device',
        )
    limit = Budget.read(budget)
    job = _Job(training, count, report)
    found = job.fit(limit, space, most_solves)
    report("done", 1.0)
    return msgspec.structs.replace(found, total_seconds=time.monotonic() - started)


class _LayoutFit(NamedTuple):
    """The arguments of a fit that searches over layouts as well, as data. ``estimate`` performs the search."""

    layout: str
    budget: int | str | None
    global_batch: int | None
    device: str | None
    optimizer: object
    techniques: str = ""
    precision: str | None = None
    strategy: str | None = None
    loss: Loss | None = None

    def check(self, batch: Any, **without_effect: tuple[object, object]) -> None:
        """Refuse options without effect on layouts, and an optimizer that is given by name without a layout.

        ``without_effect`` maps names of options to their value and their default.
        """
        if not self.layout:
            raise InvalidOption(
                f"optimizer={self.optimizer!r} needs layout=.",
                why="without a layout, the optimizer itself is traced, and a name is not enough",
                next="pass the optimizer or its class, or add layout=",
            )
        given = {name: value for name, (value, default) in without_effect.items() if value != default}
        if given:
            what = " and ".join(f"{name}={value}" for name, value in given.items())
            raise InvalidOption(
                f"{what} cannot be combined with layout={self.layout!r}.",
                why="the search of layouts chooses micro-batches and their number itself, and the estimate finds the blocks",
                next=f"leave out {' and '.join(f'{name}=' for name in given)}",
            )
        if callable(batch) and not isinstance(batch, torch.Tensor | nn.Module):
            raise InvalidOption(
                f"A function as batch= cannot be combined with layout={self.layout!r}.",
                why="layouts are compared for the micro-batch that a model comes with",
                next="pass a batch, such as the function's result for one micro-batch",
            )

    def run(self, target: nn.Module | str, batch: Any, sequences: Sequence[int] | None, report: Progress) -> Estimate:
        """Search the layouts for each sequence length.

        Return the estimate of the fastest layout for the length with the most tokens per second.
        """
        if self.global_batch is None or self.device is None or not isinstance(self.optimizer, str):
            raise InvalidOption(
                f"layout={self.layout!r} cannot be used with global_batch={self.global_batch}, device_profile={self.device}, "
                f"optimizer={self.optimizer!r}.",
                why="layouts are compared by the seconds of one step over the global batch, estimated for a device profile",
                next='pass all three: global_batch=512, device_profile="H100-SXM", optimizer="adamw"',
            )
        words = [word for word in self.layout.split(",") if not word.strip().startswith("samples=")]
        found = [
            estimate(
                target,
                batch,
                device=self.device,
                sequence=sequence,
                optimizer=self.optimizer,
                layout=",".join([*words, f"samples={self.global_batch}"]),
                budget=self.budget,
                techniques=self.techniques,
                precision=self.precision,
                strategy=self.strategy,
                loss=self.loss,
                progress=report,
            )
            for sequence in sequences or (None,)
        ]
        return max(found, key=lambda each: (each.does_fit is not False, each.throughput.tokens_per_second or 0.0))


class _Job:
    """Runs one fit: searches for the best micro-batch, solves the plan for it and measures that plan."""

    def __init__(self, training: FitTraining, accumulation: Accumulation, report: Progress) -> None:
        self._training = training
        self._accumulation = accumulation
        self._report = report
        self._reported = 0

    def fit(self, budget: Budget, space: Space, most_solves: int) -> Fit:
        """Search the micro-batches, trace the best one at its own size, and measure its plan if the device is available. Return
        the result.
        """
        device = SingleDevice(self._training, self._accumulation, 0, self._stage)
        smallest = Shape(space.ladder()[0], space.sequences[0])
        first, costs = device.traced(smallest)
        budget_bytes = budget.bytes_on(costs)
        assert budget_bytes is not None, "a budget was given"
        device.budget_bytes = budget_bytes
        search = Search(space, device, device.budget_bytes, most_solves)
        search.run()
        best = self._settled(search, device)
        measured, plan = None, None
        if best is not None:
            shape = Shape(best.micro_batch, best.sequence)
            plan = device.plans[shape]
            if not self._training.is_elsewhere:
                plan, measured = self._measured(device, shape, plan)
                best = described(best, plan)
                search.found[shape] = best
        points = search.points()
        return Fit(
            model=first.model,
            fingerprint=first.fingerprint,
            device=first.device,
            cost_source=costs.source,
            cost_device=costs.device,
            budget_bytes=device.budget_bytes,
            items_name=self._training.batches.items_name,
            global_batch=self._accumulation.global_batch,
            points=points,
            best=None if best is None else points.index(best),
            plan=plan,
            measured=measured,
            changes=() if best is not None else find_changes(self._training, device, points[0]),
            seconds_basis=Basis.MODELLED,
            seconds_error=_seconds_error(measured, costs),
            traces=device.traces,
            solves=device.solves,
            notes=tuple(_notes(device, points, measured)),
        )

    def _settled(self, search: Search, device: SingleDevice) -> FitPoint | None:
        """Trace the best point at its own size, and return it. Return ``None`` if no point fits.

        Before this trace, the point's figures are predictions. The trace may change them, so that another point is the best;
        then that one is traced.
        """
        for _ in range(_SETTLINGS):
            best = search.best()
            if best is None:
                return None
            shape = Shape(best.micro_batch, best.sequence)
            settled = device.settle(shape)
            search.found[shape] = settled
            if search.best() is settled:
                return settled
        settled_points = [point for point in search.found.values() if point.is_traced and point.does_fit]
        return max(settled_points, key=lambda point: point.items_per_second, default=None)

    def _measured(self, device: SingleDevice, shape: Shape, plan: Plan) -> tuple[Plan, Claim]:
        """Run the best point's plan on the device. Return the plan, and the claim with its predicted and measured peak and
        seconds. If a first run exceeds the budget, the plan is solved again.
        """
        training = self._training
        accumulates = self._accumulation.of(shape.batch) > 1
        with gradients_as_if(training.model, are_there=True) if accumulates else contextlib.nullcontext():
            step = training.task(shape).step()
            bounded = msgspec.structs.replace(plan, budget_bytes=device.budget_bytes)
            try:
                plan = confirmed(
                    bounded,
                    functools.partial(run_trial, step),
                    lambda excess_bytes, scale: device.resolve(shape, excess_bytes),
                    max_error=plan.max_error,
                    progress=lambda stage, share: self._stage(stage),
                )
            except BudgetBelowFloor:
                plan = bounded
            self._stage("measuring the best point")
            with untouched(training.model, plan.written), manage(training.model, plan):
                recording, steady = step.measure_peak(), step.measure_peak()
                timing = time_in_turns({"best": step.run}, device=step.device, rounds=_ROUNDS)["best"]
        absent_bytes = step.absent_state_bytes(plan.classes.get(Category.OPTIMIZER_STATE, 0))
        peak_bytes = max(recording.peak_bytes, steady.peak_bytes + absent_bytes)
        optimizer = device.optimizer_seconds(shape)
        return plan, Claim(
            predicted_peak_bytes=plan.predicted_peak_bytes,
            measured_peak_bytes=peak_bytes,
            predicted_seconds=plan.predicted_seconds - optimizer,
            measured_seconds=timing.median_seconds,
            measured_spread_seconds=timing.spread_seconds,
        )

    def _stage(self, stage: str) -> None:
        """Report a stage. The number of stages is not known in advance, so the reported share of finished work approaches 1
        without reaching it.
        """
        self._reported += 1
        self._report(stage, 1.0 - 0.93**self._reported)


def _loaded(
    target: str, batch: Any, loss: Loss | None, sequences: tuple[int, ...] | None, *, is_meta: bool
) -> tuple[nn.Module, Any, Loss | None]:
    """Load a target (a model with its batch) that is given by name, and return its model, batch and loss.

    Raises:
        InvalidOption: a batch or a loss was given as well.
        InvalidTarget: it cannot be loaded.
    """
    if batch is not None or loss is not None:
        raise InvalidOption(
            f"{'batch=' if batch is not None else 'loss='} cannot be combined with the target {target!r}.",
            why="a target given by name has its own batch and loss",
            next="leave it out, or pass the model itself",
        )
    longest = None if sequences is None or ":" in target else max(sequences)
    found = load_target(target, TargetOptions(sequence=longest, is_meta=is_meta))
    return found.model, found.batch, found.loss


def _notes(device: SingleDevice, points: Sequence[FitPoint], measured: Claim | None) -> Iterator[str]:
    """Yield notes for the user: how the points (micro-batches with their sequences) were predicted, and whether the best plan
    exceeded the budget when it ran.
    """
    predicted = [Shape(point.micro_batch, point.sequence) for point in points if not point.is_traced]
    inexact_bytes = max(map(device.inexact_bytes, predicted), default=0)
    if inexact_bytes:
        yield (
            f"Up to {format_bytes(inexact_bytes)} of a predicted point's tensors are estimates, because their sizes "
            "do not follow from micro-batch and sequence."
        )
    for shape, why in device.strays().items():
        yield f"The trace at {shape} is not used for predictions, because its step runs other ops ({why})."
    over_bytes = 0 if measured is None else measured.measured_peak_bytes - device.budget_bytes
    if over_bytes > 0:
        over = format_bytes(over_bytes)
        yield f"The best plan was run once and exceeds the budget by {over}; no plan was found that fits. Lower the budget."


def _seconds_error(measured: Claim | None, costs: Costs) -> float:
    """Return the relative error of predicted seconds: the error at the best point (a micro-batch and sequence) if that was
    measured, otherwise the usual error.
    """
    if measured is None:
        return _MEASURED_ERROR if costs.source is CostSource.MEASURED else ROOFLINE_ERROR
    return max(abs(measured.seconds_error), measured.measured_spread_seconds / measured.measured_seconds)


def _sequences(sequences: Sequence[int] | int | None) -> tuple[int, ...] | None:
    """Return the sequence lengths to choose from, without duplicates and in ascending order.

    ``None`` means the sample's own length.
    """
    if sequences is None:
        return None
    given = (sequences,) if isinstance(sequences, int) else tuple(sequences)
    for sequence in given:
        check_count("sequences", sequence, least=1)
    if not given:
        raise InvalidOption(
            "sequences= is empty.",
            why="it must contain at least one sequence length",
            next="leave sequences= out to use the length of the sample, or list some lengths",
        )
    return tuple(sorted(set(given)))


def _space(
    training: FitTraining, global_batch: int | None, accumulation: int, most_batch: int
) -> tuple[Space, Accumulation]:
    """Return the micro-batches and sequences that the search may choose, and the rule that says how many micro-batches make a
    step.
    """
    check_count("most_batch", most_batch, least=1)
    check_count("accumulation", accumulation, least=1)
    if global_batch is None:
        return Space(sequences=training.batches.sequences, most_batch=most_batch), Accumulation(count=accumulation)
    check_count("global_batch", global_batch, least=1)
    if accumulation != 1:
        raise InvalidOption(
            f"global_batch={global_batch} and accumulation={accumulation} contradict each other.",
            why="with a global batch, the micro-batch determines the accumulation",
            next="pass only one of them",
        )
    allowed = tuple(size for size in range(1, min(global_batch, most_batch) + 1) if global_batch % size == 0)
    space = Space(sequences=training.batches.sequences, most_batch=most_batch, allowed=allowed)
    return space, Accumulation(global_batch=global_batch)
