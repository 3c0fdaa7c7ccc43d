"""A model, batches and the ranks that train it in; whether compressing its gradients pays here, out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from plimsoll.artifacts.traffic import UNCOMPRESSED, MethodTraffic, Traffic, Validation
from plimsoll.artifacts.verdict import Estimate
from plimsoll.errors import InvalidOption
from plimsoll.gradient_compression.method import parse_method
from plimsoll.measuring.timing import median_interval
from plimsoll.pipeline.probing import check_trainable, describe_optimizer
from plimsoll.pipeline.request import check_count, check_model, explained_loss
from plimsoll.pipeline.traffic_metering import Measured, Metering, meter_traffic
from plimsoll.pipeline.traffic_training import GradientError, Parallel, Training
from plimsoll.probing import statistics
from plimsoll.probing.arms import MakeOptimizer
from plimsoll.probing.keeping import trainable_copy
from plimsoll.probing.step import Blocks, Trainer
from plimsoll.probing.stream import Call, Stream, held_out_calls
from plimsoll.ranks.exchange import together
from plimsoll.ranks.world import World, current_world
from plimsoll.recording.calling import Loss, scalar_loss
from plimsoll.recording.fingerprint import fingerprint
from plimsoll.recording.untouched import untouched
from plimsoll.traffic import forecast, judging, validating
from plimsoll.verification.evidence import versions

METHODS = ("powersgd:4", "topk:1%", "randomk:1%", "sign", "int8")
"""What is looked at unless told otherwise."""

_REPETITIONS = 7
_LEAST_ROUNDS = 3
"""Of measured steps: what fewer rounds save has no interval, and the prediction decides."""
_ERROR = 0.05
"""Of the intervals of held-out differences."""
_TOPIC = "gradient traffic: checks"
_PATIENCE_SECONDS = 300.0


def advise_compression(
    model: nn.Module,
    batches: Any,
    *,
    methods: Sequence[str] = METHODS,
    loss: Loss | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    measure_rounds: int = 5,
    validate_steps: int = 0,
    orders: int = 2,
    held_out: Iterable[Any] | int | None = None,
    bucket_bytes: int | None = None,
    seed: int = 0,
    data: str = "",
    progress: Callable[[str, float], None] | None = None,
) -> Traffic:
    """Say whether compressing gradients pays here: from the measured link, step and methods, and from held-out loss.

    Every rank calls it alike, with the model as it is before ``DistributedDataParallel``. It measures when each bucket of
    gradients is full, what each method does to it, and what the link takes; predicts every step from that; measures the
    steps where asked; and trains with and without, where asked. Model, gradients, buffers and random state are left as
    they were on every rank.

    Args:
        model: on its device, in the mode in which it trains, the same on all ranks.
        batches: anything that yields batches, the same on all ranks (they share them out), or one batch.
        methods: as for ``compress_gradients``.
        loss: as for ``plimsoll.plan``.
        optimizer: makes the optimizer from an iterable of parameters.
        measure_rounds: rounds in which every method takes real steps; with fewer than three the prediction decides.
        validate_steps: steps of training with every method that is not refused for its time, and without; 0 for none.
        orders: orders of the data that each is trained in.
        held_out: as for ``plimsoll.probe``.
        bucket_bytes: of torch's wrapper; ``None`` for its default.
        seed: of everything random.
        data: what the batches are, in words.
        progress: told the stage and the share of it that is done.

    Returns:
        The figures of every method and a ruling; the same on all ranks.

    Raises:
        InvalidOption: one rank only, an unknown method, or validation without held-out data.
        InvalidModel: nothing to train.
        RankFailed: another rank cannot begin.

    Example:
        >>> traffic = advise_compression(model, batches, validate_steps=200)  # doctest: +SKIP
        >>> print(traffic.ruling, traffic.best)  # doctest: +SKIP

    Source: docs/gradient-compression.md defines every figure. Known weakness: the prediction takes buckets one after the
    other; NCCL and gloo may send two at a time.
    """
    world = _world()
    report = progress or (lambda stage, share: None)
    loss = explained_loss(loss)
    with together(world, _TOPIC, timeout_seconds=_PATIENCE_SECONDS):
        for name, count in (("measure_rounds", measure_rounds), ("validate_steps", validate_steps)):
            check_count(name, count, least=0)
        check_count("orders", orders, least=1)
        check_model(model)
        check_trainable(model)
        names = _names(methods)
        report("reading the data", 0.0)
        stream, evaluated = _read_data(batches, held_out, seed, validate_steps)
        calls = _own_calls(stream, world, max(1, validate_steps))
        described = describe_optimizer(model, optimizer)
        with untouched(model):
            _backward(model, calls[0], loss)(model)
    training = Training(
        calls=calls, held_out=evaluated, loss=loss, make_optimizer=optimizer, steps=validate_steps, orders=orders
    )
    with trainable_copy(model):
        metering = make_metering(world, model, training, names, bucket_bytes=bucket_bytes, seed=seed, report=report)
        found = _measure(metering, training, measure_rounds)
    return found.traffic(optimizer=described, data=data or stream.description, bucket_bytes=bucket_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything that was measured, and what follows from it."""

    metering: Metering
    training: Training
    measured: Measured
    errors: dict[str, GradientError]
    rounds: dict[str, list[float]]
    validations: dict[str, Validation]

    def traffic(self, *, optimizer: str, data: str, bucket_bytes: int | None) -> Traffic:
        """The whole artifact."""
        metering, job = self.metering, self.measured.job
        methods = tuple(self._method(program) for program in self.measured.programs)
        ruling, reason, best, missing = judging.judge_all(methods)
        return Traffic(
            ruling=ruling,
            reason=reason,
            missing=missing,
            best=best,
            model=type(metering.model).__name__,
            fingerprint=fingerprint(metering.model),
            device=str(metering.device),
            backend=str(dist.get_backend()),
            ranks=metering.world.size,
            gradient_bytes=self.measured.gradient_bytes,
            bucket_bytes=max(each.gradient_bytes for each in job.step.buckets)
            if bucket_bytes is None
            else bucket_bytes,
            optimizer=optimizer,
            data=data,
            seed=metering.seed,
            versions={**versions(), "threads": str(torch.get_num_threads())},
            hidden_share=forecast.hidden_share(job, self.measured.programs[0]),
            links=tuple(job.links.values()),
            step=job.step,
            methods=methods,
            notes=self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        training = self.training
        if not training.steps:
            return (
                "saving time is not all: what a method does to training shows on held-out data only (--validate STEPS)",
            )
        if not self.validations:
            return ("no method saves time here, so none was trained with",)
        return (
            f"validation took {training.steps} steps, in {training.orders} orders of the data: what a method does to a "
            "long training is not known from that",
        )

    def saved(self, method: str) -> Estimate:
        measured = self._measured_saved(method)
        return self._predicted_saved(method) if measured is None else measured

    def _predicted_saved(self, method: str) -> Estimate:
        programs = {program.method: program for program in self.measured.programs}
        return forecast.predict_saved(self.measured.job, programs[method], programs[UNCOMPRESSED])

    def _measured_saved(self, method: str) -> Estimate | None:
        optimizer_seconds = self.measured.job.step.measured_optimizer_seconds
        pairs = zip(self.rounds[UNCOMPRESSED], self.rounds[method], strict=True)
        shares = [(without - with_method) / (without + optimizer_seconds) for without, with_method in pairs]
        return _interval(shares) if len(shares) >= _LEAST_ROUNDS else None

    def _method(self, program: forecast.MethodProgram) -> MethodTraffic:
        job, baseline = self.measured.job, self.measured.programs[0]
        timeline = job.timeline(program)
        error: GradientError | None = self.errors.get(program.method)
        validation = self.validations.get(program.method)
        ruling, reason = judging.judge_method(program.method, self.saved(program.method), validation)
        optimizer_seconds = job.step.measured_optimizer_seconds
        return MethodTraffic(
            method=program.method,
            wire_bytes=program.wire_bytes(job.ranks),
            transfers=len(program.transfers),
            measured_local_seconds=timeline.local_seconds,
            transfer_seconds=timeline.transfer_seconds,
            exposed_seconds=timeline.exposed_seconds,
            predicted_step_seconds=forecast.predict_step(job, program),
            predicted_saved_share=self._predicted_saved(program.method),
            measured_step_seconds=_interval([each + optimizer_seconds for each in self.rounds[program.method]]),
            measured_saved_share=self._measured_saved(program.method),
            break_even_bytes_per_second=forecast.break_even_bandwidth(job, program, baseline),
            break_even_hidden_share=forecast.break_even_hidden_share(job, program, baseline),
            gradient_error=None if error is None else error.relative,
            gradient_cosine=None if error is None else error.cosine,
            validation=validation,
            ruling=ruling,
            reason=reason,
        )


def _measure(metering: Metering, training: Training, rounds: int) -> Found:
    """Measure the parts, then whole steps, then training. The model's weights are another's meanwhile."""
    measured = meter_traffic(metering)
    parallel = Parallel(metering)
    measured = measured.with_optimizer(parallel.optimizer_seconds(training.make_optimizer, metering.repetitions))
    errors = parallel.gradient_errors()
    steps, alone = parallel.measured_rounds(rounds)
    if alone:
        measured = measured.when_alone_takes(median(alone))
    found = Found(metering=metering, training=training, measured=measured, errors=errors, rounds=steps, validations={})
    return replace(found, validations=validate_methods(found, parallel)) if training.steps else found


def validate_methods(found: Found, parallel: Parallel) -> dict[str, Validation]:
    """Of the methods that may save time: validating the others would change nothing."""
    training = found.training
    wanted = [
        method
        for method in found.metering.methods
        if method != UNCOMPRESSED and found.saved(method).high >= judging.LEAST_SAVED_SHARE
    ]
    if not wanted:
        return {}
    orders = range(training.orders)
    baseline = [parallel.held_out_losses(training, UNCOMPRESSED, order) for order in orders]
    validations = {}
    for method in wanted:
        losses = [parallel.held_out_losses(training, method, order) for order in orders]
        differences = validating.differences(baseline, losses)
        validations[method] = validating.validate(baseline, losses, _mean(differences), training.steps)
    return validations


def _world() -> World:
    if not dist.is_available():
        raise InvalidOption(
            "This torch has no torch.distributed.",
            why="ranks exchange gradients through it",
            next="install a build of torch with distributed support",
        )
    world = current_world()
    if world is None:
        raise InvalidOption(
            "There is one rank only: no gradients are exchanged, so there is nothing to compress.",
            why="torch.distributed is not initialised, or has a single process",
            next="start several: torchrun --nproc-per-node 2 -m plimsoll compress-gradients TARGET",
        )
    return world


def _names(methods: Sequence[str]) -> tuple[str, ...]:
    """Every method once by its full name, the uncompressed one first."""
    given = [methods] if isinstance(methods, str) else list(methods)
    names = [str(parse_method(method)) for method in given]
    others = dict.fromkeys(name for name in names if name != UNCOMPRESSED)
    if not others:
        raise InvalidOption(
            "methods= names no method of compression.",
            why="there is nothing to hold against sending gradients as they are",
            next=f"name some of {', '.join(METHODS)}, or leave it out",
        )
    return (UNCOMPRESSED, *others)


def _read_data(
    batches: Any, held_out: Iterable[Any] | int | None, seed: int, validate_steps: int
) -> tuple[Stream, list[Call]]:
    if held_out is None or isinstance(held_out, int):
        stream = Stream(batches, set_apart=held_out, seed=seed)
        evaluated = stream.held_out()
    else:
        stream, evaluated = Stream(batches, set_apart=0, seed=seed), held_out_calls(held_out)
    if validate_steps and not evaluated:
        raise InvalidOption(
            f"validate_steps={validate_steps}, and no held-out data.",
            why="what compression does to training shows on data that was not trained on",
            next="give a list of batches (a tenth of it is set apart) or held_out=, or leave validation out",
        )
    return stream, evaluated


def _own_calls(stream: Stream, world: World, steps: int) -> list[Call]:
    """This rank's batches: of every so many drawn, its own."""
    place = world.ranks.index(world.rank)
    return [stream.draw(world.size)[place] for _ in range(steps)]


def make_metering(
    world: World,
    model: nn.Module,
    training: Training,
    methods: tuple[str, ...],
    *,
    bucket_bytes: int | None = None,
    seed: int = 0,
    report: Callable[[str, float], None] = lambda stage, share: None,
) -> Metering:
    """What is measured: the step of the first batch, with each method.

    Args:
        world: the ranks.
        model: without its wrapper.
        training: whose first batch and loss make the step.
        methods: full names, the uncompressed one first.
        bucket_bytes: of torch's wrapper.
        seed: of everything random.
        report: told the stage and the share done.
    """
    return Metering(
        world=world,
        model=model,
        backward=_backward(model, training.calls[0], training.loss),
        methods=methods,
        bucket_bytes=bucket_bytes,
        repetitions=_REPETITIONS,
        seed=seed,
        report=report,
    )


def _backward(model: nn.Module, call: Call, loss: Loss | None) -> Callable[[nn.Module], None]:
    """Forward, loss and backward of a batch, which is moved to the model's device."""
    call = Trainer(model, loss, Blocks(model, ())).own(call)

    def backward(module: nn.Module) -> None:
        scalar_loss(module(*call.args, **call.kwargs), loss).backward()

    return backward


def _interval(samples: Sequence[float]) -> Estimate | None:
    if not samples:
        return None
    found = median_interval(list(samples))
    return Estimate(value=found.median, low=found.low, high=found.high)


def _mean(differences: Sequence[float] | None) -> Estimate | None:
    mean = None if differences is None else statistics.mean_of_samples(np.asarray(differences, dtype=np.float64))
    if mean is None:
        return None
    low, high = mean.interval(_ERROR)
    return Estimate(value=mean.value, low=low, high=high)
