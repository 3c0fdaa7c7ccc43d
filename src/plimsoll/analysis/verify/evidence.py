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
from plimsoll.tracing.local_tensors import as_reals
from plimsoll.tracing.meters.timing import Timing, time_in_turns
from plimsoll.tracing.recorder.calling import Loss

T = TypeVar("T", Receipt, Comparison)

_RATE = 1e-2
"""The learning rate of plain gradient descent, which is used when no optimizer is passed."""
_FUSIONS = 10.0
"""The gradient error that other kernel fusions may cause, as a multiple of the error of the compiled step against the
uncompiled step.
"""
_LAST_DIGITS = 4.0
"""The least gradient error that is tolerated for other kernel fusions, in units of the machine epsilon.

It applies if compiling did not change the gradient.
"""
_CASTS = 4.0
"""The gradient error that rounding at other places may cause, as a multiple of the gradient's change when every op rounds its
result.
"""
_LENGTHS = (0.02, 0.01)
"""The two step lengths of the check that compares the gradient with the slope of the loss.

Each is chosen so that, by the gradient, the loss changes by this share of itself.
"""


class Pausable(Protocol):
    """The interface of an object that saves memory from ``resume`` until ``pause``, such as a plan's handle."""

    def resume(self) -> None:
        """Begin to save memory in the steps that follow."""

    def pause(self) -> None:
        """Stop to save memory: the steps that follow keep everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Options: which comparisons to make in addition to gradients, buffers, peak and seconds.

    ``intermediates`` are patterns of module names. ``curve_steps`` is how many training steps the compared loss curves have.
    """

    intermediates: Sequence[str] = ()
    curve_steps: int = 0
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Data: the reference for other runs of the step: loss, gradients and buffers after one step without a plan.

    Two such runs are made. ``spread`` maps the name of each tensor that differed between the two runs to its largest absolute
    difference.
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
    """Data: how far a run's gradients and buffers are from the step without a plan, tensor by tensor.

    ``error`` is the relative error of the whole gradient.
    """

    gradients: tuple[Mismatch, ...]
    buffers: tuple[Mismatch, ...]
    error: float

    @property
    def is_within_spread(self) -> bool:
        """Whether each tensor differs from the reference by at most as much as two runs without a plan differed."""
        return all(mismatch.is_within_spread for mismatch in (*self.gradients, *self.buffers))

    def worst(self, other: Apart) -> Apart:
        """Return the differences of two runs in one: for each tensor, the larger difference."""
        return Apart(
            _merged(self.gradients, other.gradients),
            _merged(self.buffers, other.buffers),
            max(self.error, other.error),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Data: what was measured while the step saved memory, through a plan or through the model's own checkpointing."""

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
    """Return model, batch, loss and optimizer as a training task. Raise if its step cannot be measured.

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
    """Make the reference that other runs are compared with: run the step twice without a plan, from the same state.

    If module outputs are requested, the step runs once more. If a loss curve is requested, its training steps are run too.
    """
    loss = step.run()
    gradients, buffers = copies(step.gradients()), copies(step.buffers())
    step.run()
    apart = [*mismatches(gradients, step.gradients(), {}), *mismatches(buffers, step.buffers(), {})]
    spread = {mismatch.name: mismatch.max_absolute_difference for mismatch in apart}
    return Evidence(loss, gradients, buffers, spread, run_intermediates(step, depth), run_curve(step, depth))


def compare_with(evidence: Evidence, step: TrainingStep) -> Apart:
    """Return how far the gradients and buffers of the step's last run are from the reference."""
    return Apart(
        mismatches(evidence.gradients, step.gradients(), evidence.spread),
        mismatches(evidence.buffers, step.buffers(), evidence.spread),
        relative_error(evidence.gradients, step.gradients()),
    )


def compiled_rounding(step: TrainingStep, units: Sequence[Unit], gradients: Mapping[str, torch.Tensor | None]) -> float:
    """Return the relative gradient error that is tolerated because torch.compile may fuse ops differently.

    It is ten times the error of the compiled step, whose ``gradients`` are given, against the uncompiled step. It is at least
    four times the machine epsilon and at most the square root of the epsilon. The upper bound applies where the compiled and
    the uncompiled step draw different random numbers.
    """
    with in_place(units, lambda _: None):
        step.run()
    half = half_the_digits(step.model)
    return min(max(_FUSIONS * relative_error(gradients, step.gradients()), _LAST_DIGITS * half**2), half)


@dataclass(frozen=True, slots=True)
class KeptCasts:
    """The gradient difference that remains when every op rounds its half-precision result, as data.

    Inductor computes half-precision values in 32 bits and rounds them only when it writes them to memory. So the place where
    the graph is cut, and the ops that are fused, decide whether a kernel reads a rounded value. For example, under autocast a
    saved ``tanh`` is rounded and a recomputed ``tanh`` is not. With ``emulate_precision_casts`` every op rounds (its cast is
    kept), so cuts and fusions do not matter.
    """

    error: float
    """The relative error of the gradient of the step that saves memory against the gradient without a plan, if every op rounds
    its result in both.
    """
    tolerance: float
    """The relative gradient error that other fusions may still cause when every op rounds its result."""
    moved: float
    """The relative change of the gradient without a plan that comes from rounding every op's result."""

    @property
    def note(self) -> str:
        """Return a sentence for the receipt (the evidence for a plan): the errors that were measured, and the tolerance that
        follows from them.
        """
        apart = f"{self.error:.1e} apart" if self.error else "equal bit for bit"
        return (
            f"if each op rounds its output to 16 bits (emulate_precision_casts), both gradients are {apart}: they differ only "
            f"because kernels round at other places. That rounding changes the unmanaged gradient by {self.moved:.1e}, and a "
            f"plan may change it by {_CASTS:.0f} times as much"
        )

    @property
    def allowed(self) -> float:
        """The relative gradient error that is tolerated because kernels may round at other places.

        It is 0 if rounding does not explain the error.
        """
        return _CASTS * self.moved if self.error <= self.tolerance else 0.0


def keep_casts(
    step: TrainingStep, units: Sequence[Unit], managed: Callable[[], AbstractContextManager[object]]
) -> KeptCasts:
    """Compile the unmanaged and the managed step again so that every op rounds its half-precision result, and compare their
    gradients.
    """

    def kept(unit: Unit) -> Callable[..., Any]:
        # With this option kernels round where eager ops do, so cuts and fusions do not matter (docs/compiled.md).
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
    """Return the gradient error of torch's own compiled step without a plan if that step is wrong; else 0.

    The compiled step counts as wrong only if the managed step is right. Both are compared with the uncompiled step. A step is
    right if its error is at most the square root of the machine epsilon (half of the digits). Backward of the compiled step may
    read a buffer that forward has changed in the meantime. Backward of the uncompiled step reads the saved value.
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
    """Run the step once and return the outputs of the modules that ``depth`` names, with their gradients.

    If it names none, run nothing and return ``{}``.
    """
    if not depth.intermediates:
        return {}
    with collect_intermediates(step.model, depth.intermediates) as found:
        step.run()
    return found


def managed_run(step: TrainingStep, handle: Pausable) -> Callable[[], None]:
    """Return a function that runs the step once with the plan: it resumes the plan, runs the step and pauses the plan."""

    def run() -> None:
        handle.resume()
        try:
            step.run()
        finally:
            handle.pause()

    return run


def consecutive_losses(step: TrainingStep, count: int) -> tuple[float | None, ...]:
    """Run the step ``count`` times and return the losses; a loss that is not finite is ``None``.

    The random state is not reset in between, so each run draws other dropout masks.
    """
    step.rewind()
    return tuple(finite(step.go_on()) for _ in range(count))


def time_both(
    step: TrainingStep, plain: Callable[[], AbstractContextManager[object]], rounds: int
) -> tuple[Timing, Timing]:
    """Time the step inside the context ``plain`` (without saving memory) and outside it, in interleaved pairs.

    Return the two timings in this order.
    """

    def run_plain() -> None:
        with plain():
            step.run()

    timings = time_in_turns({"plain": run_plain, "ours": step.run}, device=step.device, rounds=rounds)
    return timings["plain"], timings["ours"]


def of_all_ranks(agreement: Agreement, what: str, mine: T) -> list[T]:
    """Return a list with each rank's receipt (the evidence for a plan) or comparison, in the order of the ranks. ``mine`` is
    this rank's.
    """
    texts = zip(agreement.all_of(what, to_json(mine), str), agreement.ranks, strict=True)
    return [cast("T", from_json(text, source=f"{what} of rank {rank}")) for text, rank in texts]


def make_receipt(
    step: TrainingStep, evidence: Evidence, seen: Observed, timings: tuple[Timing, Timing], **claims: Any
) -> Receipt:
    """Make the receipt (the evidence for a plan) that compares the observed step with the reference.

    Args:
        step: the step that was run.
        evidence: the reference: the step without a plan.
        seen: the measurements of the step that saves memory.
        timings: of the step without a plan and of the step that saves memory, in this order.
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
    """Return the square root of the largest machine epsilon among the parameters' dtypes.

    It bounds the relative gradient error that recompiled kernels may cause by rounding.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point}
    return math.sqrt(max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0))


def versions() -> dict[str, str]:
    """Return a mapping for a receipt (the evidence for a plan): the versions of Python and torch, the machine's architecture
    and the GPU's name.
    """
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "machine": platform.machine()}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def _merged(first: tuple[Mismatch, ...], second: tuple[Mismatch, ...]) -> tuple[Mismatch, ...]:
    """Return the tensors that differ from the reference in at least one of two runs, each with the larger difference."""
    worst: dict[str, Mismatch] = {}
    for mismatch in (*first, *second):
        known = worst.get(mismatch.name)
        if known is None or _distance(mismatch) > _distance(known):
            worst[mismatch.name] = mismatch
    return tuple(worst.values())


def _distance(mismatch: Mismatch) -> float:
    """Return the largest absolute difference that a compared tensor shows between two runs.

    It is infinite if the tensor is missing or the difference is not finite.
    """
    return math.inf if mismatch.max_absolute_difference is None else mismatch.max_absolute_difference


def run_curve(step: TrainingStep, depth: Depth) -> tuple[float | None, ...]:
    """Return the losses of consecutive training steps, all on the same batch. The result is empty if no curve is requested.

    The curve begins at the step's random state and buffers. The random state is not reset between the curve's steps. Without an
    optimizer, plain gradient descent at a rate of 0.01 is used. Afterwards the model's parameters, the optimizer's other
    parameters (a loss may have some), the optimizer's state and its settings are restored bit for bit.
    """
    if depth.curve_steps <= 0:
        return ()
    # A wrapper such as accelerate's has state and settings only as properties, which read those of another optimizer.
    held = (
        () if depth.optimizer is None else (vars(depth.optimizer), depth.optimizer.state, depth.optimizer.param_groups)
    )
    with _restored(*step.model.parameters(), *held):
        used = depth.optimizer or torch.optim.SGD([p for p in step.model.parameters() if p.requires_grad], lr=_RATE)
        step.rewind()
        losses = []
        for _ in range(depth.curve_steps):
            losses.append(finite(step.go_on()))
            used.step()
        return tuple(losses)


@contextlib.contextmanager
def _restored(*things: Any) -> Iterator[None]:
    """A context that restores tensors, and the contents of containers such as dicts, bit for bit when the block ends."""
    kept = KeptContents(things)
    try:
        yield
    finally:
        with torch.no_grad():
            kept.put_back()


def measure_slope(step: TrainingStep, gradients: Mapping[str, torch.Tensor | None]) -> Slope | None:
    """Measure how fast the loss grows along the gradient.

    Parameters that the step writes are left out: they are restored before each forward, so they cannot be shifted. Return
    ``None`` if the gradient is zero, or if any number is not finite.

    Args:
        step: the training step. Its forward runs five times, and its parameters are restored bit for bit.
        gradients: a mapping from parameter name to gradient, each in its parameter's shape.
    """
    gradients = {name: gradient for name, gradient in gradients.items() if name not in step.written}
    present = (as_reals(gradient.detach()) for gradient in gradients.values() if gradient is not None)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in present))
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
    """A context inside which ``factor`` times the gradient is added to the parameters. They are restored bit for bit."""
    named = step.model.named_parameters()
    moved = {parameter: found for name, parameter in named if (found := gradients.get(name)) is not None}
    with _restored(*moved):
        with torch.no_grad():
            for parameter, gradient in moved.items():
                parameter.add_(gradient.to(parameter.dtype), alpha=factor)
        yield
