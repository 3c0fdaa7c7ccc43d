"""Measures what the exchange of gradients costs a step with each method, and predicts the step for another link.

All ranks measure together, in rounds, so that a disturbance affects all methods a little. Each method takes real steps. It also
takes steps whose collectives return at once, so the time of its own work (encoding, decoding) does not depend on the link. A
transfer takes latency + bytes that each rank sends / bandwidth (the α-β model).

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005. Known weaknesses:
a backend that changes its algorithm with the size does not follow one line; computation, work on gradients and transfers are
assumed not to slow each other down; backward is assumed to fill buckets of equal size at an even pace.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plimsoll.analysis.probe.keeping import seed_everything
from plimsoll.artifacts.progress import Progress
from plimsoll.artifacts.traffic import UNCOMPRESSED, MethodTraffic
from plimsoll.artifacts.verdict import IntervalEstimate
from plimsoll.distributed.comm_cost.silent_group import SilentGroup
from plimsoll.distributed.gradient_compression.averaging import Averages, SplitGradients
from plimsoll.distributed.gradient_compression.compress import attach_compression
from plimsoll.distributed.gradient_compression.method import CompressionSettings, parse_method
from plimsoll.distributed.gradient_compression.slots import Form, GradientSlot, dense_bytes
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.meters.timing import Marks, median_interval, wait_for_device
from plimsoll.tracing.recorder.foreign_leaves import foreign_leaves_kept

_LINK_BYTES = 2**24
"""The bytes of the transfer that measures the bandwidth. A transfer of one byte measures the latency."""


class SilentAverages(Averages):
    """Averages gradients like ``Averages``, but on a process group whose collectives return at once.

    It counts its calls and measures the seconds of its own work.
    """

    def __init__(self, settings: CompressionSettings, form: Form, ranks: int) -> None:
        super().__init__(settings, form)
        self.group = SilentGroup(ranks)
        self.exchanges, self.local_seconds = 0, 0.0

    def average(self, gradients: SplitGradients, slots: Sequence[GradientSlot], group: dist.ProcessGroup) -> None:
        del group
        device = gradients.mean.device
        wait_for_device(device)
        begin_seconds = time.perf_counter()
        super().average(gradients, slots, self.group)
        wait_for_device(device)
        self.local_seconds += time.perf_counter() - begin_seconds
        self.exchanges += 1


@dataclass(slots=True)
class _Samples:
    """Data: the measurements of one method on this rank.

    Each of the ``rounds`` is [forward, silent step, the method's own work, real step], in seconds. The silent step is forward
    and backward without the method's own work and without transfers.
    """

    rounds: list[list[float]] = field(default_factory=list)
    exchanges: int = 0
    transfers: int = 0
    sent_bytes: int = 0
    gradient: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostMeter:
    """Measures the steps of ``model``, which is under DDP or FSDP2, with each method of gradient compression.

    ``forward`` runs forward and returns the loss of a step. ``ask_all`` sends a message to all ranks, and returns the messages
    of all ranks in their order.
    """

    group: dist.ProcessGroup
    model: nn.Module
    forward: Callable[[], torch.Tensor]
    seed: int
    ask_all: Callable[[str, bytes], Sequence[bytes]]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def measure(
        self, methods: Sequence[str], rounds: int, given_rate: float | None, report: Progress
    ) -> dict[str, Any]:
        """Measure all methods, and predict the seconds of their steps.

        The prediction is for a link of ``given_rate`` bytes per second. If ``given_rate`` is ``None``, it is for the link as
        measured.

        Returns:
            Values for fields of ``Traffic``, by name: medians over rounds of the slowest rank's figures.
        """
        samples = {method: _Samples() for method in methods}
        links = []
        _, step_seconds = self._step()  # DDP rebuilds its buckets after it
        report(f"steps of about {step_seconds:.2g} s, {4 * len(methods)} in each of {rounds} rounds", 0.0)
        for number in range(rounds):
            report(f"round {number + 1} of {rounds}", number / rounds)
            links.append([self._time_link(1), self._time_link(_LINK_BYTES)])
            for method, sample in samples.items():
                self._measure_method(method, sample)
        latency, whole = map(median, zip(*self._slowest(links), strict=True))
        rate = dense_bytes(_LINK_BYTES, torch.uint8, self.group.size(), "mean") / max(whole - latency, 1e-9)
        rows = {method: self._slowest(sample.rounds) for method, sample in samples.items()}
        plain_rows = rows[UNCOMPRESSED]
        forward, silent, *_ = (median(column) for column in zip(*plain_rows, strict=True))
        found: list[MethodTraffic] = []
        for method, sample in samples.items():
            local = median(row[2] for row in rows[method])
            # On a CPU our hook, and gloo's reduce-scatter, block backward; DDP's own all-reduce does not.
            is_plain_ddp = method == UNCOMPRESSED and isinstance(self.model, DistributedDataParallel)
            predicted = predict_step_seconds(
                forward,
                silent,
                local,
                sample.transfers * latency + sample.sent_bytes / (given_rate or rate),
                parts=sample.exchanges if self.device.type != "cpu" or is_plain_ddp else 1,
            )
            saved = [1 - ours[3] / plain[3] for ours, plain in zip(rows[method], plain_rows, strict=True)]
            found.append(
                MethodTraffic(
                    method=method,
                    sent_bytes=sample.sent_bytes,
                    measured_local_seconds=local,
                    predicted_step_seconds=predicted,
                    predicted_saved_share=1 - predicted / (found[0].predicted_step_seconds if found else predicted),
                    measured_step_seconds=_interval([row[3] for row in rows[method]]),
                    measured_saved_share=_interval(saved),
                    gradient_error=self._error(samples[UNCOMPRESSED].gradient, sample.gradient),
                )
            )
        return {
            "exchanges": samples[UNCOMPRESSED].exchanges,
            "measured_forward_seconds": forward,
            "measured_silent_seconds": silent,
            "measured_latency_seconds": latency,
            "measured_bytes_per_second": rate,
            "assumed_bytes_per_second": given_rate,
            "methods": tuple(found),
        }

    def _measure_method(self, method: str, sample: _Samples) -> None:
        settings = CompressionSettings(method=parse_method(method), seed=self.seed)
        made: list[SilentAverages] = []

        def make(settings: CompressionSettings, form: Form) -> SilentAverages:
            made.append(SilentAverages(settings, form, self.group.size()))
            return made[0]

        with attach_compression(self.model, settings, make_averages=make) as handle:
            [averages] = made
            self._step()  # allocates the residuals
            sample.exchanges, sample.transfers = averages.exchanges, averages.group.transfers
            sample.sent_bytes = handle.step_bytes
            before_seconds = averages.local_seconds
            forward_seconds, step_seconds = self._step()
            local_seconds = averages.local_seconds - before_seconds
        with contextlib.nullcontext() if method == UNCOMPRESSED else attach_compression(self.model, settings):
            self._step()
            if not sample.rounds:
                gradients = (each.grad for each in self.model.parameters() if each.grad is not None)
                sample.gradient = [part.detach().cpu().double() for each in gradients for part in dense_parts(each)]
            _, real_seconds = self._step()
        sample.rounds.append([forward_seconds, step_seconds - local_seconds, local_seconds, real_seconds])

    def _step(self) -> tuple[float, float]:
        """Run one step without earlier gradients, on all ranks at once.

        Return the seconds of forward, and of forward and backward.
        """
        self.model.zero_grad(set_to_none=True)
        seed_everything(self.seed)
        self._wait_for_all()
        clock = Marks(self.device)
        clock.mark()
        loss = self.forward()
        clock.mark()
        with foreign_leaves_kept(self.model, loss):
            loss.backward()
        clock.mark()
        forward_seconds, step_seconds = clock.seconds()
        return forward_seconds, step_seconds

    def _time_link(self, payload_bytes: int) -> float:
        payload = torch.zeros(payload_bytes, dtype=torch.uint8, device=self.device)
        self._wait_for_all()
        begin_seconds = time.perf_counter()
        dist.all_reduce(payload, group=self.group)
        wait_for_device(self.device)
        return time.perf_counter() - begin_seconds

    def _wait_for_all(self) -> None:
        wait_for_device(self.device)
        dist.barrier(group=self.group)
        wait_for_device(self.device)

    def _error(self, exact: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
        """Return the relative error of a method's gradient, ‖Δg‖ / ‖g‖. ``exact`` and ``other`` are this rank's parts of the
        gradients; the error is that of all ranks' parts together.
        """
        squares = [float(sum(one.square().sum() for one in exact))]
        squares.append(float(sum((one - two).square().sum() for one, two in zip(exact, other, strict=True))))
        norm, apart = (math.sqrt(math.fsum(each)) for each in zip(*self._tell_all(squares), strict=True))
        return apart / norm if norm else 0.0

    def _slowest(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Exchange the numbers with all ranks, and replace each number by its maximum over ranks. All ranks get the same
        result.
        """
        return [[max(each) for each in zip(*row, strict=True)] for row in zip(*self._tell_all(rows), strict=True)]

    def _tell_all(self, value: object) -> list[Any]:
        return [json.loads(message) for message in self.ask_all("figures", json.dumps(value).encode())]


def predict_step_seconds(
    forward_seconds: float, silent_seconds: float, local_seconds: float, transfer_seconds: float, *, parts: int
) -> float:
    """Predict the seconds of forward, backward and the exchange of gradients.

    Args:
        forward_seconds: of forward.
        silent_seconds: of forward and backward, without an exchange.
        local_seconds: of encoding and decoding; backward is assumed to wait for it.
        transfer_seconds: of all transfers.
        parts: the number of parts whose transfers run in parallel with backward; 1 if backward waits for transfers.

    Returns:
        The predicted seconds. The last part is sent after backward, so its transfer always adds time. The transfers of the
            other parts add only the time that they take longer than backward.

    Example:
        >>> predict_step_seconds(1.0, 3.0, 0.5, 2.0, parts=1)
        5.5
        >>> predict_step_seconds(1.0, 3.0, 0.5, 2.0, parts=4), predict_step_seconds(1.0, 3.0, 0.5, 20.0, parts=4)
        (4.0, 22.0)
    """
    hidden_seconds = (silent_seconds - forward_seconds) * (1 - 1 / parts)
    exposed_seconds = max(transfer_seconds / parts, transfer_seconds - hidden_seconds)
    return silent_seconds + local_seconds + exposed_seconds


def _interval(samples: list[float]) -> IntervalEstimate:
    found = median_interval(samples)
    return IntervalEstimate(value=found.median, low=found.low, high=found.high)
