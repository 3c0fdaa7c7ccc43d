"""A case and a way to call its model in; memory, gradients and evidence of one training step out."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.models import Case
from plimsoll.session.training_step import relative_error
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes
from plimsoll.tracing.meters.timing import Interval, Timing, median_interval

Forward = Callable[..., Any]
_SEED = 1234


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes of one step of forward and backward that starts without gradients.

    ``activation_*`` leave out parameters, buffers, batch and, on the CPU, gradients (CUDA's counters cannot tell them apart:
    there they are in). ``total_peak_bytes`` counts everything, which is what a Plimsoll budget bounds.
    """

    activation_resident_bytes: int
    activation_peak_bytes: int
    total_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a step left behind, in the order of the model's parameters and buffers."""

    gradients: tuple[torch.Tensor, ...]
    buffers: tuple[torch.Tensor, ...]

    def on(self, device: torch.device | str) -> Evidence:
        """The same on a device: what is kept waits in host memory."""
        moved = ([each.to(device) for each in some] for some in (self.gradients, self.buffers))
        return Evidence(*map(tuple, moved))


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to train a case, on a copy of its model that shares its parameters, with what its first two steps showed.

    ``evidence`` of both steps is kept of the baseline alone; the others were compared with it, and with themselves it would
    be as many gradients as there are variants.
    """

    name: str
    case: Case
    forward: Forward
    first: StepMemory
    steady: StepMemory
    gradients_equal: bool = True
    buffers_equal: bool = True
    gradient_error: float = 0.0
    """The larger of both steps' relative errors of the gradient, against the baseline's."""
    evidence: tuple[Evidence, ...] = ()

    @property
    def is_bit_equal(self) -> bool:
        return self.gradients_equal and self.buffers_equal

    def step(self) -> None:
        run_step(self.case, self.forward)
        self.case.model.zero_grad(set_to_none=True)


def run_step(case: Case, forward: Forward, meter: PeakMeter | None = None) -> float:
    """One forward and backward, and the loss as a number; gradients stay on the model.

    The model's output is held until backward ends, as in the usual loop (and as plans assume), for every variant alike.
    """
    output = forward(**case.batch)
    loss = case.loss(output)
    if meter is not None:
        meter.mark("backward")
    loss.backward()
    return loss.item()


def measure_step(case: Case, forward: Forward) -> tuple[StepMemory, Evidence]:
    """One step under the peak meter, from a fixed seed and without gradients at the start; no gradients are left."""
    case.model.zero_grad(set_to_none=True)
    torch.manual_seed(_SEED)
    gc.collect()
    with PeakMeter(case.device) as meter:
        run_step(case, forward, meter)
    gradients = [each.grad for each in case.model.parameters() if each.grad is not None]
    on_cpu = case.device.type == "cpu"
    memory = StepMemory(
        activation_resident_bytes=meter.window("start").resident_bytes,
        activation_peak_bytes=meter.peak_bytes_without(gradients) if on_cpu else meter.peak_bytes,
        total_peak_bytes=meter.peak_bytes + fixed_bytes(case),
    )
    evidence = Evidence(
        gradients=tuple(each.detach().clone() for each in gradients),
        buffers=tuple(each.detach().clone() for each in case.model.buffers()),
    )
    case.model.zero_grad(set_to_none=True)
    return memory, evidence


def fixed_bytes(case: Case) -> int:
    """Parameters, buffers and the batch: there before the step and after it."""
    batch = [each for each in case.batch.values() if isinstance(each, torch.Tensor)]
    return storage_bytes([*case.model.parameters(), *case.model.buffers(), *batch], case.device)


def prepare(
    stack: contextlib.ExitStack,
    name: str,
    case: Case,
    apply: Callable[[Any], AbstractContextManager[Forward]],
    baseline: Variant | None = None,
) -> Variant:
    """Apply one way to train to a copy of the case's model until ``stack`` closes, and measure its first two steps.

    Gradients and buffers of both are compared with those of ``baseline``, bit for bit; without one this is the baseline.
    """
    shared = {id(parameter): parameter for parameter in case.model.parameters()}  # no step of ours writes them
    copied = dataclasses.replace(case, model=copy.deepcopy(case.model, shared))
    forward = stack.enter_context(apply(copied.model))
    memory: list[StepMemory] = []
    evidence: list[Evidence] = []
    verdicts: list[tuple[bool, bool, float]] = []
    for index in range(2):
        measured, mine = measure_step(copied, forward)
        memory.append(measured)
        if baseline is None:
            evidence.append(mine.on("cpu"))
        else:
            verdicts.append(_held_against(mine, baseline.evidence[index].on(case.device)))
        del mine
    return Variant(
        name=name,
        case=copied,
        forward=forward,
        first=memory[0],
        steady=memory[1],
        gradients_equal=all(each[0] for each in verdicts),
        buffers_equal=all(each[1] for each in verdicts),
        gradient_error=max((each[2] for each in verdicts), default=0.0),
        evidence=tuple(evidence),
    )


def gradient_distance(one: Variant, other: Variant) -> float:
    """The larger of both steps' relative errors of one baseline's gradient against another's."""
    return max(_held_against(a, b)[2] for a, b in zip(one.evidence, other.evidence, strict=True))


def _held_against(mine: Evidence, theirs: Evidence) -> tuple[bool, bool, float]:
    """Whether gradients and buffers are equal bit for bit, and the relative error of the gradient."""
    are_equal = bits_equal(mine.gradients, theirs.gradients)
    error = 0.0 if are_equal else _error(mine.gradients, theirs.gradients)
    return are_equal, bits_equal(mine.buffers, theirs.buffers), error


def _error(mine: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> float:
    return relative_error(
        {str(i): each for i, each in enumerate(theirs)}, {str(i): each for i, each in enumerate(mine)}
    )


def bits_equal(mine: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> bool:
    """Whether all tensors are the same bit for bit; a NaN equals the same NaN."""
    return len(mine) == len(theirs) and all(map(_same_bits, mine, theirs))


def _same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    return torch.equal(mine.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8))


def paired_difference_seconds(ours: Timing, theirs: Timing) -> Interval:
    """The median over rounds of our seconds less theirs, with its 95% interval."""
    return median_interval([a - b for a, b in zip(ours.seconds, theirs.seconds, strict=True)])
