"""Runs real steps with each method: seconds, the gradient's error, and held-out losses of training with the method."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from plimsoll.analysis.probe.keeping import put_weights, seed_everything, take_weights
from plimsoll.analysis.probe.step import Blocks, Trainer
from plimsoll.artifacts.traffic import UNCOMPRESSED
from plimsoll.distributed.comm_cost.metering import REPETITIONS, Metering
from plimsoll.distributed.comm_cost.timed_step import time_call, time_step, wrap
from plimsoll.distributed.gradient_compression.compress import compress_gradients
from plimsoll.distributed.gradient_compression.shards import OwnReduceScatter
from plimsoll.tracing.fsdp2 import reshard, scattering
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.recorder.calling import scalar_loss


class SilentScatter(OwnReduceScatter):
    """A reduce-scatter without communication: every rank keeps its own row, which is finite and has the right shape."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> dist.Work | None:
        """Copy this rank's row to the output."""
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()].view_as(output_tensor))
        return None


_WARM_STEPS = 1
_TIMED_STEPS = 2
"""Timed steps in each turn of a method; a turn starts with new connections."""


_STEPS_FOR_PARTS = 32
"""Forwards and backwards for timing buckets and the effect of transfers on a step; the same for any number of methods."""
_OTHER_STEPS = 4


@dataclass(frozen=True, slots=True)
class GradientError:
    """How far the first compressed gradient is from the uncompressed one: ‖Δg‖ / ‖g‖, and the angle's cosine."""

    relative: float
    cosine: float


def planned_steps(metering: Metering) -> int:
    """The maximum number of steps: for the parts of a step, for rounds of all methods, and for validation."""
    methods, validated = len(metering.methods), metering.orders * metering.validate_steps
    rounds = metering.measure_rounds * (_WARM_STEPS + _TIMED_STEPS + 1)
    return _OTHER_STEPS + (0 if metering.units else _STEPS_FOR_PARTS) + methods * (1 + rounds + validated)


class Parallel:
    """The model in DDP, or already sharded, and real exchanges of its gradients with any method."""

    def __init__(self, metering: Metering) -> None:
        self._metering = metering
        self._wrapped = metering.model if metering.units else wrap(metering.model, metering.bucket_bytes)
        self._start = take_weights(metering.model)
        for _ in range(_WARM_STEPS + 1):
            self._time()

    def measured_rounds(self) -> tuple[dict[str, list[float]], list[float]]:
        """Seconds of forward and backward with each method, in turns, and of a step without exchange after each turn.

        Each turn gives one figure, the slowest rank's.
        """
        metering, rounds = self._metering, self._metering.measure_rounds
        alone: list[float] = []
        found: dict[str, list[float]] = {method: [] for method in metering.methods}
        for number in range(rounds):
            first = number % len(metering.methods)
            for method in (*metering.methods[first:], *metering.methods[:first]):
                metering.report(f"round {number + 1} of {rounds}: {method}", number / rounds)
                with self._sending(method):
                    for _ in range(_WARM_STEPS):
                        self._time()
                    seconds = [self._time() for _ in range(_TIMED_STEPS)]
                found[method].append(statistics.median(metering.slowest([seconds])[0]))
                alone.append(metering.slowest([[self._time_alone()]])[0][0])
        return found, alone

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that a rank sends per step with every method."""
        found = {}
        for method in self._metering.methods:
            with compress_gradients(self._wrapped, method, seed=self._metering.seed) as handle:
                found[method] = handle.step_bytes
        return found

    def optimizer_seconds(self) -> float:
        """Seconds of an optimizer's step after its state exists; the weights are restored."""
        metering = self._metering
        self._time()
        optimizer = self._optimizer()
        taken = [time_call(optimizer.step, metering.device) for _ in range(REPETITIONS + 1)]
        put_weights(metering.model, self._start)
        return statistics.median(metering.slowest([taken[1:]])[0])

    def gradient_errors(self) -> dict[str, GradientError]:
        """Compare the first gradient of every method with the uncompressed one, for the same batch and random state."""
        found = {}
        exact = self._gradient(UNCOMPRESSED)
        for method in self._metering.methods:
            if method != UNCOMPRESSED:
                found[method] = _compare(self._metering, exact, self._gradient(method))
        return found

    def held_out_losses(self, method: str, order: int) -> list[float | None]:
        """Train from the start and evaluate; return the losses of all held-out batches, the same on all ranks."""
        metering, world = self._metering, self._metering.world
        place = world.ranks.index(world.rank)
        put_weights(metering.model, self._start)
        optimizer = self._optimizer()
        trainer = Trainer(metering.model, metering.loss, Blocks(metering.model, ()))
        picks = torch.randperm(len(metering.calls), generator=torch.Generator().manual_seed(metering.seed + order))
        seed_everything(metering.seed + 1000 * order + place)
        with self._sending(method):
            for number in range(metering.validate_steps):
                metering.report(f"{method}, order {order + 1}: step {number + 1}", number / metering.validate_steps)
                optimizer.zero_grad(set_to_none=True)
                call = trainer.own(metering.calls[int(picks[number % len(picks)])])
                scalar_loss(self._wrapped(*call.args, **call.kwargs), metering.loss).backward()
                optimizer.step()
        share = list(metering.held_out[place :: world.size])
        if len(share) * world.size < len(metering.held_out):
            share.append(metering.held_out[0])  # its loss is ignored; all ranks must join when parameters are gathered
        losses = trainer.evaluate(share)
        reshard(metering.model)
        put_weights(metering.model, self._start)
        told = metering.ask_all(losses)  # rank i has the batches i, i + size, …
        return [told[i % world.size][i // world.size] for i in range(len(metering.held_out))]

    def agreed(self, methods: Sequence[str]) -> list[str]:
        """Return the first rank's methods on all ranks: they will train with each of them together."""
        named: list[str] = self._metering.ask_all(list(methods))[0]
        return named

    def _optimizer(self) -> torch.optim.Optimizer:
        metering = self._metering
        return metering.make_optimizer([each for each in metering.model.parameters() if each.requires_grad])

    def _gradient(self, method: str) -> list[torch.Tensor]:
        with self._sending(method):
            seed_everything(self._metering.seed)
            self._time()
        return [
            part.detach().to("cpu", torch.float64)
            for parameter in self._metering.model.parameters()
            if parameter.grad is not None
            for part in dense_parts(parameter.grad)
        ]

    def _time_alone(self) -> float:
        metering = self._metering
        silent = scattering(metering.model, SilentScatter()) if metering.units else contextlib.nullcontext()
        with silent:
            return time_step(metering.model, metering.backward, metering.device)

    def _time(self) -> float:
        return time_step(self._wrapped, self._metering.backward, self._metering.device)

    @contextlib.contextmanager
    def _sending(self, method: str) -> Iterator[None]:
        if method == UNCOMPRESSED:
            yield
            return
        with compress_gradients(self._wrapped, method, seed=self._metering.seed):
            yield


def _compare(metering: Metering, exact: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> GradientError:
    """Compare the parts of all ranks together. If all ranks have the same whole gradients, the result is the same."""
    sums = (
        sum(float(one.square().sum()) for one in exact),
        sum(float(one.square().sum()) for one in other),
        sum(float((one - two).square().sum()) for one, two in zip(exact, other, strict=True)),
        sum(float((one * two).sum()) for one, two in zip(exact, other, strict=True)),
    )
    square, other_square, apart, product = (math.fsum(each) for each in zip(*metering.ask_all(sums), strict=True))
    norm = math.sqrt(square)
    return GradientError(
        relative=math.sqrt(apart) / norm if norm else 0.0,
        cosine=product / (norm * math.sqrt(other_square)) if norm and other_square else 0.0,
    )
