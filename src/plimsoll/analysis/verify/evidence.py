"""What is seen of a training step without a plan, and how far another run of it is from that.

Gradients and buffers are compared after one step, losses over consecutive ones, and a curve of losses with the optimizer. The
gradient can also be held against the loss itself. The gradient ``g`` claims that the loss at ``θ + h·g/‖g‖`` grows by
``h·‖g‖``; losses at shifted parameters, under the same random numbers, show whether it does. A gradient made with another
dropout mask than the loss's own fails this by its very size. It judges one direction only, and only where the loss is smooth
and precise enough at that scale: below float32 rounding alone is more than the slope's change.

Source: for the slope, the central difference with one Richardson step; its error is judged by the difference of two step
lengths, and by the precision of the parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from plimsoll.analysis.verify.intermediates import Found, collect_intermediates, mismatches
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.receipt import Intermediate, Mismatch, Receipt, Slope, finite
from plimsoll.artifacts.store import from_json
from plimsoll.errors import InvalidModel
from plimsoll.session.agreement import Agreement
from plimsoll.session.step_snapshot import KeptContents
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import TrainingStep, copies, relative_error
from plimsoll.tracing.compiled.units import Unit, in_place
from plimsoll.tracing.meters.timing import Timing, time_in_turns
from plimsoll.tracing.recorder.calling import Loss

T = TypeVar("T", Receipt, Comparison)

_RATE = 1e-2
"""Of plain gradient descent, for those who name no optimizer: its steps have length rate · ‖gradient‖."""
_FUSIONS = 10.0
"""So many times what fusing at all does to a gradient, fusing otherwise may do."""
_LAST_DIGITS = 4.0
"""Where fusing does nothing, the relative error that fusing otherwise may cause, in units of the precision."""
_CASTS = 4.0
"""So many times what rounding at every op does to a gradient, another choice of where to round may do."""
_LENGTHS = (0.02, 0.01)
"""Step lengths as shares of the loss that the gradient claims them to change."""


class Pausable(Protocol):
    """What saves memory from ``resume`` until ``pause``, such as a plan's handle."""

    def resume(self) -> None:
        """Put it to work."""

    def pause(self) -> None:
        """Stop it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """What is compared besides gradients, buffers, peak and seconds.

    ``intermediates`` are patterns of module names; ``curve_steps`` training steps with the optimizer are compared.
    """

    intermediates: Sequence[str] = ()
    curve_steps: int = 0
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of the unmanaged model: its gradients and buffers after one step, and how far it is from itself."""

    loss: float
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor | None]
    spread: dict[str, float | None]
    intermediates: Found = field(default_factory=dict)
    curve: tuple[float | None, ...] = ()

    @property
    def is_deterministic(self) -> bool:
        return not self.spread


@dataclass(frozen=True, slots=True)
class Apart:
    """How far the step that was just run is from the evidence."""

    gradients: tuple[Mismatch, ...]
    buffers: tuple[Mismatch, ...]
    error: float

    @property
    def is_within_spread(self) -> bool:
        """Whether the unmanaged model differs from itself by as much, tensor by tensor."""
        return all(mismatch.is_within_spread for mismatch in (*self.gradients, *self.buffers))

    def worst(self, other: Apart) -> Apart:
        """Of two runs, the one in which each tensor was further off."""
        return Apart(
            _merged(self.gradients, other.gradients),
            _merged(self.buffers, other.buffers),
            max(self.error, other.error),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was seen of the step that saves memory: with a plan at work, or with the model's own checkpointing."""

    peak_bytes: int
    apart: Apart
    faults: tuple[Fault, ...]
    compared_tensors: int
    intermediates: tuple[Intermediate, ...]
    curve: tuple[float | None, ...]
    losses: tuple[float | None, ...]


def read_measurable(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    *,
    compile: bool | Mapping[str, Any] | None,  # noqa: A002 - torch's word
) -> TrainingTask:
    """The task of a step that is to be measured.

    Raises:
        InvalidModel: the model is on the meta device. Others as for ``TrainingTask.read``.
    """
    task = TrainingTask.read(model, batch, loss=loss, optimizer=optimizer, compile=compile)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidModel(
            f"{type(model).__name__} is on the meta device.",
            why="its parameters have no memory, so no step can run and nothing can be measured",
            next="plimsoll.plan works on the meta device; verify, compare and diagnose on the device itself",
        )
    return task


def collect_evidence(step: TrainingStep, depth: Depth) -> Evidence:
    """Run the unmanaged step twice from the same state; a third time where intermediates are asked for."""
    loss = step.run()
    gradients, buffers = copies(step.gradients()), copies(step.buffers())
    step.run()
    apart = [*mismatches(gradients, step.gradients(), {}), *mismatches(buffers, step.buffers(), {})]
    spread = {mismatch.name: mismatch.max_absolute_difference for mismatch in apart}
    return Evidence(loss, gradients, buffers, spread, run_intermediates(step, depth), run_curve(step, depth))


def compare_with(evidence: Evidence, step: TrainingStep) -> Apart:
    """Hold the gradients and buffers of the step's last run against the evidence."""
    return Apart(
        mismatches(evidence.gradients, step.gradients(), evidence.spread),
        mismatches(evidence.buffers, step.buffers(), evidence.spread),
        relative_error(evidence.gradients, step.gradients()),
    )


def compiled_rounding(step: TrainingStep, units: Sequence[Unit], gradients: Mapping[str, torch.Tensor | None]) -> float:
    """The relative error of the gradient that other fusions may make: ten times what lies between the compiled step, whose
    ``gradients`` these are, and the uncompiled one, or a few units of the last digit where that is nothing. Never more than
    half the digits, which is taken where the two draw other random numbers.
    """
    with in_place(units, lambda _: None):
        step.run()
    half = half_the_digits(step.model)
    return min(max(_FUSIONS * relative_error(gradients, step.gradients()), _LAST_DIGITS * half**2), half)


@dataclass(frozen=True, slots=True)
class KeptCasts:
    """What is left of a difference once all values of half precision are rounded where an op leaves them.

    Inductor computes these in 32 bits and rounds them where they go through memory. So what a kernel reads is rounded or
    not by where the graph is cut and which ops are fused, as under autocast a saved ``tanh`` and one that is made again.
    With ``emulate_precision_casts`` neither matters.
    """

    error: float
    """The relative error of the managed gradient."""
    tolerance: float
    """That error which other fusions may make still."""
    moved: float
    """How far keeping the casts moves the gradient of the unmanaged step."""

    @property
    def note(self) -> str:
        """What was found, and what is allowed for it."""
        apart = f"{self.error:.1e} apart" if self.error else "equal bit for bit"
        return (
            f"with each value rounded to 16 bits where an op leaves it (emulate_precision_casts), both gradients are {apart}: "
            f"they differ by where kernels round. That moves the unmanaged gradient by {self.moved:.1e}; a plan may move it "
            f"{_CASTS:.0f} times as far"
        )

    @property
    def allowed(self) -> float:
        """The error that where kernels round may make; 0: it does not explain what differs."""
        return _CASTS * self.moved if self.error <= self.tolerance else 0.0


def keep_casts(
    step: TrainingStep, units: Sequence[Unit], managed: Callable[[], AbstractContextManager[object]]
) -> KeptCasts:
    """Compile the unmanaged and the managed step anew with their casts kept, and compare their gradients."""

    def kept(unit: Unit) -> Callable[..., Any]:
        call = dataclasses.replace(unit.call, options={**unit.call.options, "emulate_precision_casts": True})
        return functools.partial(call.compile(), unit.module)

    step.run()
    plain = copies(step.gradients())
    with in_place(units, kept):
        step.run()
        gradients = copies(step.gradients())
        with managed():
            step.run()
        error = relative_error(gradients, step.gradients())
        tolerance = compiled_rounding(step, units, gradients)
    return KeptCasts(error, tolerance, relative_error(plain, gradients))


def torch_errs(
    step: TrainingStep, units: Sequence[Unit], managed: Callable[[], AbstractContextManager[object]]
) -> float:
    """The relative error of torch's default partition beside the uncompiled step, where the managed gradient has none but
    rounding; else 0.

    Its backward may read a buffer that forward has changed since; that of the uncompiled step reads what was saved.
    """
    with in_place(units, lambda _: None):
        step.run()
        gradients = copies(step.gradients())
    step.run()
    unmanaged = relative_error(gradients, step.gradients())
    with managed():
        step.run()
        error = relative_error(gradients, step.gradients())
    return unmanaged if error <= half_the_digits(step.model) < unmanaged else 0.0


def run_intermediates(step: TrainingStep, depth: Depth) -> Found:
    """What the named modules make in one run of the step; nothing where none are named."""
    if not depth.intermediates:
        return {}
    with collect_intermediates(step.model, depth.intermediates) as found:
        step.run()
    return found


def managed_run(step: TrainingStep, handle: Pausable) -> Callable[[], None]:
    """The step under a plan that is paused before and after it."""

    def run() -> None:
        handle.resume()
        try:
            step.run()
        finally:
            handle.pause()

    return run


def consecutive_losses(step: TrainingStep, count: int) -> tuple[float | None, ...]:
    """The losses of consecutive runs: the random state goes on, so dropout draws anew each time."""
    step.rewind()
    return tuple(finite(step.go_on()) for _ in range(count))


def time_both(
    step: TrainingStep, plain: Callable[[], AbstractContextManager[object]], rounds: int
) -> tuple[Timing, Timing]:
    """Paired, interleaved seconds of the step under ``plain``, and of the step as it is."""

    def run_plain() -> None:
        with plain():
            step.run()

    timings = time_in_turns({"plain": run_plain, "ours": step.run}, device=step.device, rounds=rounds)
    return timings["plain"], timings["ours"]


def of_all_ranks(agreement: Agreement, what: str, mine: T) -> list[T]:
    """What every rank measured, in the order of the ranks."""
    texts = zip(agreement.all_of(what, to_json(mine), str), agreement.ranks, strict=True)
    return [cast("T", from_json(text, source=f"{what} of rank {rank}")) for text, rank in texts]


def make_receipt(
    step: TrainingStep, evidence: Evidence, seen: Observed, timings: tuple[Timing, Timing], **claims: Any
) -> Receipt:
    """The receipt for what was observed beside the evidence.

    Args:
        step: that was run.
        evidence: of the step without what is verified.
        seen: of the step with it.
        timings: of both, the unmanaged one first.
        claims: the receipt's other fields: what was verified, and what it claims.
    """
    baseline, ours = timings
    return Receipt(
        device=str(step.device),
        versions=versions(),
        steps=len(seen.losses),
        compared_gradients=sum(gradient is not None for gradient in evidence.gradients.values()),
        gradient_mismatches=seen.apart.gradients,
        compared_buffers=len(evidence.buffers),
        buffer_mismatches=seen.apart.buffers,
        gradient_error=finite(seen.apart.error),
        faults=seen.faults,
        compared_tensors=seen.compared_tensors,
        intermediates=seen.intermediates,
        is_deterministic=evidence.is_deterministic,
        plan_losses=seen.losses,
        baseline_curve=evidence.curve,
        plan_curve=seen.curve,
        measured_baseline_seconds=baseline.median_seconds,
        measured_baseline_spread_seconds=baseline.spread_seconds,
        measured_seconds=ours.median_seconds,
        measured_spread_seconds=ours.spread_seconds,
        **claims,
    )


def half_the_digits(model: nn.Module) -> float:
    """Half the digits of the least precise parameter: what kernels compiled anew may do to a gradient by rounding."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point}
    return math.sqrt(max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0))


def versions() -> dict[str, str]:
    """What the figures were measured with."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "machine": platform.machine()}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def _merged(first: tuple[Mismatch, ...], second: tuple[Mismatch, ...]) -> tuple[Mismatch, ...]:
    """Each tensor once, with the run in which it was further off."""
    worst: dict[str, Mismatch] = {}
    for mismatch in (*first, *second):
        known = worst.get(mismatch.name)
        if known is None or _distance(mismatch) > _distance(known):
            worst[mismatch.name] = mismatch
    return tuple(worst.values())


def _distance(mismatch: Mismatch) -> float:
    """How far off a tensor is; one that is missing, or not finite, is further off than any other."""
    return math.inf if mismatch.max_absolute_difference is None else mismatch.max_absolute_difference


def run_curve(step: TrainingStep, depth: Depth) -> tuple[float | None, ...]:
    """Losses of consecutive training steps on the step's batch; nothing where no curve is asked for.

    The curve begins at the step's random state and buffers; random numbers go on from step to step. Without an optimizer it is
    gradient descent at a rate of 0.01. Parameters (the optimizer's own, of a loss, too), the optimizer's state and its
    settings are bit for bit what they were when it returns.
    """
    if depth.curve_steps <= 0:
        return ()
    optimizer = {} if depth.optimizer is None else vars(depth.optimizer)
    with _restored(*step.model.parameters(), optimizer):
        used = depth.optimizer or torch.optim.SGD([p for p in step.model.parameters() if p.requires_grad], lr=_RATE)
        step.rewind()
        losses = []
        for _ in range(depth.curve_steps):
            losses.append(finite(step.go_on()))
            used.step()
        return tuple(losses)


@contextlib.contextmanager
def _restored(*things: Any) -> Iterator[None]:
    """Tensors, and what lies in containers, may be written inside; afterwards they are bit for bit what they were."""
    kept = KeptContents(things)
    try:
        yield
    finally:
        with torch.no_grad():
            kept.put_back()


def measure_slope(step: TrainingStep, gradients: Mapping[str, torch.Tensor | None]) -> Slope | None:
    """Slope of the loss along the gradient; ``None`` where the gradient is nothing, or no number.

    Args:
        step: run forward four times; its parameters are put back bit for bit.
        gradients: by parameter name, each of its parameter's shape.
    """
    norm = math.sqrt(sum(float(g.detach().double().square().sum()) for g in gradients.values() if g is not None))
    if not math.isfinite(norm) or norm == 0.0:
        return None
    scale = max(abs(step.forward_loss()), 1e-12) / norm
    slopes = [_central_difference(step, gradients, norm, share * scale) for share in _LENGTHS]
    if not all(map(math.isfinite, slopes)):
        return None
    coarse, fine = slopes
    # The least precise dtype rounds by this share: two equally rounded slopes would look exact.
    precision = max(torch.finfo(g.dtype).eps for g in gradients.values() if g is not None)
    rounding = norm * precision / _LENGTHS[-1]
    return Slope(expected=norm, measured=fine + (fine - coarse) / 3, measured_error=max(abs(fine - coarse), rounding))


def _central_difference(
    step: TrainingStep, gradients: Mapping[str, torch.Tensor | None], norm: float, length: float
) -> float:
    losses = []
    for sign in (1.0, -1.0):
        with _shifted(step, gradients, sign * length / norm):
            losses.append(step.forward_loss())
    return (losses[0] - losses[1]) / (2 * length)


@contextlib.contextmanager
def _shifted(step: TrainingStep, gradients: Mapping[str, torch.Tensor | None], factor: float) -> Iterator[None]:
    """Parameters moved along the gradient, and put back bit for bit."""
    named = step.model.named_parameters()
    moved = {parameter: found for name, parameter in named if (found := gradients.get(name)) is not None}
    with _restored(*moved):
        with torch.no_grad():
            for parameter, gradient in moved.items():
                parameter.add_(gradient.to(parameter.dtype), alpha=factor)
        yield
