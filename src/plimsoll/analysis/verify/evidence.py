"""Records a training step without a plan as reference, and measures how far other runs of the step are from it.

Gradients and buffers are compared after one step, losses over consecutive steps, and a curve of losses over steps with the
optimizer. The gradient can also be compared with the loss itself: the gradient ``g`` claims that the loss at ``θ + h·g/‖g‖``
grows by ``h·‖g‖``. Losses at shifted parameters, with the same random numbers, show whether it does. A gradient that was made
with another dropout mask than its loss fails this check, because its norm is wrong. The check covers one direction only. It
needs a loss that is smooth and precise enough at that scale: below float32, rounding alone exceeds the change of the loss.

Source: for the slope, the central difference with one Richardson step. Its error is estimated from the difference of two step
lengths, and from the precision of the parameters.
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
"""The learning rate of plain gradient descent, which is used when no optimizer is passed."""
_FUSIONS = 10.0
"""The tolerance for other fusions, as a multiple of the gradient error of the compiled against the uncompiled step."""
_LAST_DIGITS = 4.0
"""The least tolerance for other fusions, in units of the machine epsilon: it applies if compiling changes no gradient."""
_CASTS = 4.0
"""The tolerance for rounding at other places, as a multiple of the gradient's change when every op rounds."""
_LENGTHS = (0.02, 0.01)
"""Step lengths of the slope check: by the gradient, each changes the loss by this share of the loss."""


class Pausable(Protocol):
    """An object that saves memory from ``resume`` until ``pause``, such as a plan's handle."""

    def resume(self) -> None:
        """Start to save memory."""

    def pause(self) -> None:
        """Stop to save memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Which further comparisons to make, in addition to gradients, buffers, peak and seconds.

    ``intermediates`` are patterns of module names. ``curve_steps`` is how many training steps the compared loss curves have.
    """

    intermediates: Sequence[str] = ()
    curve_steps: int = 0
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The reference: the unmanaged model's loss, gradients and buffers after one step, and its spread between two runs.

    ``spread`` holds the largest absolute difference of each tensor that differed between the two runs.
    """

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
    """The difference between the last run and the evidence, tensor by tensor; ``error`` is the gradient's relative error."""

    gradients: tuple[Mismatch, ...]
    buffers: tuple[Mismatch, ...]
    error: float

    @property
    def is_within_spread(self) -> bool:
        """Whether every tensor differs by no more than it did between two unmanaged runs."""
        return all(mismatch.is_within_spread for mismatch in (*self.gradients, *self.buffers))

    def worst(self, other: Apart) -> Apart:
        """Combine two runs: keep the larger difference of each tensor."""
        return Apart(
            _merged(self.gradients, other.gradients),
            _merged(self.buffers, other.buffers),
            max(self.error, other.error),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Measurements of the step that saves memory, with a plan applied or with the model's own checkpointing."""

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
    """Read the training task, and raise if its step cannot be measured.

    Raises:
        InvalidModel: the model is on the meta device. Further errors as for ``TrainingTask.read``.
    """
    task = TrainingTask.read(model, batch, loss=loss, optimizer=optimizer, compile=compile)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidModel(
            f"{type(model).__name__} is on the meta device.",
            why="its parameters have no memory, so no step can run and nothing can be measured",
            next="plan on the meta device, but verify, compare and diagnose on the real device",
        )
    return task


def collect_evidence(step: TrainingStep, depth: Depth) -> Evidence:
    """Run the unmanaged step twice from the same state, and once more if intermediates are requested."""
    loss = step.run()
    gradients, buffers = copies(step.gradients()), copies(step.buffers())
    step.run()
    apart = [*mismatches(gradients, step.gradients(), {}), *mismatches(buffers, step.buffers(), {})]
    spread = {mismatch.name: mismatch.max_absolute_difference for mismatch in apart}
    return Evidence(loss, gradients, buffers, spread, run_intermediates(step, depth), run_curve(step, depth))


def compare_with(evidence: Evidence, step: TrainingStep) -> Apart:
    """Compare the gradients and buffers of the step's last run with the evidence."""
    return Apart(
        mismatches(evidence.gradients, step.gradients(), evidence.spread),
        mismatches(evidence.buffers, step.buffers(), evidence.spread),
        relative_error(evidence.gradients, step.gradients()),
    )


def compiled_rounding(step: TrainingStep, units: Sequence[Unit], gradients: Mapping[str, torch.Tensor | None]) -> float:
    """The relative gradient error that is tolerated because torch.compile may fuse ops differently.

    It is ten times the error of the compiled step, whose ``gradients`` are given, against the uncompiled step, but at least
    four times the machine epsilon and at most the square root of the epsilon. The upper bound applies where the compiled and
    the uncompiled step draw different random numbers.
    """
    with in_place(units, lambda _: None):
        step.run()
    half = half_the_digits(step.model)
    return min(max(_FUSIONS * relative_error(gradients, step.gradients()), _LAST_DIGITS * half**2), half)


@dataclass(frozen=True, slots=True)
class KeptCasts:
    """The gradient difference that remains when every op rounds its half-precision result.

    Inductor computes half-precision values in 32 bits and rounds them only when it writes them to memory. So the place where
    the graph is cut, and the ops that are fused, decide whether a kernel reads a rounded value. For example, under autocast a
    saved ``tanh`` is rounded and a recomputed ``tanh`` is not. With ``emulate_precision_casts`` every op rounds, so cuts and
    fusions do not matter.
    """

    error: float
    """The relative error of the managed gradient against the unmanaged gradient, both with the casts kept."""
    tolerance: float
    """The error that other fusions may still cause with the casts kept."""
    moved: float
    """The relative change of the unmanaged gradient when the casts are kept."""

    @property
    def note(self) -> str:
        """The result and the tolerance that follows from it, as a note of the receipt."""
        apart = f"{self.error:.1e} apart" if self.error else "equal bit for bit"
        return (
            f"if each op rounds its output to 16 bits (emulate_precision_casts), both gradients are {apart}: they differ only "
            f"because kernels round at other places. That rounding changes the unmanaged gradient by {self.moved:.1e}, and a "
            f"plan may change it by {_CASTS:.0f} times as much"
        )

    @property
    def allowed(self) -> float:
        """The gradient error to tolerate because kernels round at other places; 0 if rounding does not explain the error."""
        return _CASTS * self.moved if self.error <= self.tolerance else 0.0


def keep_casts(
    step: TrainingStep, units: Sequence[Unit], managed: Callable[[], AbstractContextManager[object]]
) -> KeptCasts:
    """Compile the unmanaged and the managed step again with their casts kept, and compare their gradients."""

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
    """Return the gradient error of torch's own compiled step if that step is wrong and the managed step is right, else 0.

    Both are compared with the uncompiled step; right means an error of at most half the digits. Backward of the compiled step
    may read a buffer that forward has changed in the meantime. Backward of the uncompiled step reads the saved value.
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
    """Run the step once and return the outputs of the named modules; without names, run nothing and return ``{}``."""
    if not depth.intermediates:
        return {}
    with collect_intermediates(step.model, depth.intermediates) as found:
        step.run()
    return found


def managed_run(step: TrainingStep, handle: Pausable) -> Callable[[], None]:
    """A function that runs the step with the plan resumed, and pauses the plan afterwards."""

    def run() -> None:
        handle.resume()
        try:
            step.run()
        finally:
            handle.pause()

    return run


def consecutive_losses(step: TrainingStep, count: int) -> tuple[float | None, ...]:
    """The losses of consecutive runs. The random state is not reset in between, so each run draws other dropout masks."""
    step.rewind()
    return tuple(finite(step.go_on()) for _ in range(count))


def time_both(
    step: TrainingStep, plain: Callable[[], AbstractContextManager[object]], rounds: int
) -> tuple[Timing, Timing]:
    """Time the step under ``plain`` and the step without it, in interleaved pairs."""

    def run_plain() -> None:
        with plain():
            step.run()

    timings = time_in_turns({"plain": run_plain, "ours": step.run}, device=step.device, rounds=rounds)
    return timings["plain"], timings["ours"]


def of_all_ranks(agreement: Agreement, what: str, mine: T) -> list[T]:
    """Collect every rank's receipt or comparison, in the order of the ranks."""
    texts = zip(agreement.all_of(what, to_json(mine), str), agreement.ranks, strict=True)
    return [cast("T", from_json(text, source=f"{what} of rank {rank}")) for text, rank in texts]


def make_receipt(
    step: TrainingStep, evidence: Evidence, seen: Observed, timings: tuple[Timing, Timing], **claims: Any
) -> Receipt:
    """Make the receipt that compares the observed step with the evidence.

    Args:
        step: the step that was run.
        evidence: of the unmanaged step.
        seen: of the step that saves memory.
        timings: of both, the unmanaged step first.
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
    """The square root of the least precise parameter's machine epsilon.

    It bounds the relative gradient error that recompiled kernels may cause by rounding.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point}
    return math.sqrt(max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0))


def versions() -> dict[str, str]:
    """Versions of Python and torch, the machine and the GPU, as a receipt names them."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "machine": platform.machine()}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def _merged(first: tuple[Mismatch, ...], second: tuple[Mismatch, ...]) -> tuple[Mismatch, ...]:
    """Each tensor once, with its larger difference of the two runs."""
    worst: dict[str, Mismatch] = {}
    for mismatch in (*first, *second):
        known = worst.get(mismatch.name)
        if known is None or _distance(mismatch) > _distance(known):
            worst[mismatch.name] = mismatch
    return tuple(worst.values())


def _distance(mismatch: Mismatch) -> float:
    """The tensor's largest absolute difference; infinite if the tensor is missing or the difference is not finite."""
    return math.inf if mismatch.max_absolute_difference is None else mismatch.max_absolute_difference


def run_curve(step: TrainingStep, depth: Depth) -> tuple[float | None, ...]:
    """Losses of consecutive training steps on the step's batch; empty if no curve is requested.

    The curve begins at the step's random state and buffers. The random state is not reset between its steps. Without an
    optimizer, plain gradient descent at a rate of 0.01 is used. Afterwards the parameters, the optimizer's other parameters
    (a loss may have some), its state and its settings are restored bit for bit.
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
    """Restore tensors and the contents of containers bit for bit when the block ends."""
    kept = KeptContents(things)
    try:
        yield
    finally:
        with torch.no_grad():
            kept.put_back()


def measure_slope(step: TrainingStep, gradients: Mapping[str, torch.Tensor | None]) -> Slope | None:
    """Measure the slope of the loss along the gradient; ``None`` if the gradient is zero, or anything is not finite.

    Args:
        step: run forward five times; its parameters are restored bit for bit.
        gradients: by parameter name, each in its parameter's shape.
    """
    norm = math.sqrt(sum(float(g.detach().double().square().sum()) for g in gradients.values() if g is not None))
    if not math.isfinite(norm) or norm == 0.0:
        return None
    scale = max(abs(step.forward_loss()), 1e-12) / norm
    slopes = [_central_difference(step, gradients, norm, share * scale) for share in _LENGTHS]
    if not all(map(math.isfinite, slopes)):
        return None
    coarse, fine = slopes
    # Two slopes that are rounded equally would look exact, so the least precise dtype's rounding bounds the error from below.
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
    """Move the parameters along the gradient inside the block, and restore them bit for bit."""
    named = step.model.named_parameters()
    moved = {parameter: found for name, parameter in named if (found := gradients.get(name)) is not None}
    with _restored(*moved):
        with torch.no_grad():
            for parameter, gradient in moved.items():
                parameter.add_(gradient.to(parameter.dtype), alpha=factor)
        yield
