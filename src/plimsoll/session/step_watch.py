"""Follows the training steps of a model through its calls: where a step begins and ends, what is new about it, and its peak.

A step begins with the first call that leaves a graph waiting for its backward. It ends with the next call that finds no graph
waiting. On a CPU, metering needs torch's profiler, so only steps with something new are metered: shapes that no metered step
covers, existing gradients, more forwards before one backward. Whether a forward ran more operations than earlier ones (layers
that are dropped at random) is known only afterwards. Then all following steps are metered until one runs as much. On CUDA the
allocator's peak counter is read after every backward and never reset.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.engine.apply import Handle
from plimsoll.engine.capturing import is_capturing
from plimsoll.engine.copies import ModelHook
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.batch_shapes import Shapes, covers, shapes_and_masks_of, shapes_of, shown, standing_in
from plimsoll.session.calibration import (
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    Carried,
    MeasuredStep,
    OptimizerWatch,
    Taken,
    beside_bytes,
    planned_state_bytes,
    taken_bytes,
    unseen_bytes,
)
from plimsoll.session.held_by_loop import HeldByLoop
from plimsoll.session.step_levels import StepLevels, is_more
from plimsoll.tracing.ddp import is_without_reduction
from plimsoll.tracing.fsdp2 import every_gradient, every_parameter, holds_gradients_back
from plimsoll.tracing.meters.memory import RisingPeak
from plimsoll.tracing.open_graphs import OpenGraphs, is_in_backward
from plimsoll.tracing.recorder.fingerprint import AUTOCAST
from plimsoll.tracing.torch_internals import peek_functorch, sequence_number, times_compiled
from plimsoll.units import budget_text, format_bytes

_LOG = logging.getLogger(__name__)
_MOST_TRIES = 3
_ENOUGH = 6
"""If tensors in lists vary in size, this many metered calls that bound a call are enough to skip metering it."""
_RARELY = 32
"""Meter at least every 32nd step, even if nothing about it is new. A metered step takes 3 to 4% longer than others; a step of a
few milliseconds, half as long again.
"""
_MORE = 1.01
"""A forward runs more than another if it makes more than 1.01 times as many autograd nodes."""
_MOST_WAITED = 16
"""Meter at most this many steps while waiting for one that runs as much as the largest."""
_TENSOR = re.compile(r"\b([a-z]+[0-9]*\w*)\[([0-9]+(?:x[0-9]+)*)?\]")


class Situation(NamedTuple):
    """What determines the peak of a training step under a given plan, if it is known before the step."""

    shapes: Shapes
    accumulates: bool = False
    in_flight: int = 1
    reduces: bool = True
    """False if gradients wait after their backward for a later reduction."""
    thawed: frozenset[int] = frozenset()
    """Parameters that were frozen when the plan was made and are trained now, as indices into the frozen ones."""

    def is_within(self, other: Situation) -> bool:
        """True if ``other`` needs at least as much memory."""
        return covers(other.shapes, self.shapes) and self.is_alike(other)

    def is_alike(self, other: Situation) -> bool:
        """True if ``other`` needs at least as much memory, ignoring batch shapes."""
        return (
            self.accumulates <= other.accumulates
            and self.in_flight <= other.in_flight
            and self.reduces is other.reduces
            and self.thawed <= other.thawed
        )

    @property
    def turn(self) -> tuple[bool, bool]:
        """Which micro-batch of a step this is (first, middle or last), as ``(accumulates, reduces)``."""
        return self.accumulates, self.reduces

    def differences(self, known: Iterable[Situation]) -> str:
        """Describe what is new compared with the ``known`` situations."""
        known = tuple(known)
        found = []
        if not any(covers(other.shapes, self.shapes) for other in known):
            before = " or ".join(dict.fromkeys(other.shown for other in known)) or "none"
            found.append(f"its batch is {self.shown}, and the plan was made for {before}")
        if not any(self.in_flight <= other.in_flight for other in known):
            found.append(f"{self.in_flight} forwards of the model wait for one backward")
        if self.accumulates and not any(other.accumulates for other in known):
            found.append("gradients of an earlier backward are there already")
        if not any(self.reduces is other.reduces for other in known):
            found.append("it reduces gradients that waited" if self.reduces else "its gradients wait to be reduced")
        if not any(self.thawed <= other.thawed for other in known):
            found.append(f"{len(self.thawed)} of its parameters were frozen before")
        return "; ".join(found)

    @property
    def shown(self) -> str:
        """``i64[2x512], i64[2x512]``."""
        return shown(self.shapes)


def planned_situation(signature: str, in_flight: int) -> Situation:
    """Return the situation that a plan was made for, parsed from the signature of its step."""
    found = _TENSOR.findall(signature)
    shapes = tuple((kind, tuple(int(size) for size in sizes.split("x") if size)) for kind, sizes in found)
    shapes += tuple((part, ()) for part in signature.split("; ") if part.startswith(AUTOCAST))
    return Situation(shapes, "accumulating" in signature, in_flight)


class MeteredSituations:
    """The situations of the steps that were metered under the current plan."""

    def __init__(self, known: Iterable[Situation] = ()) -> None:
        self._known = list(known)
        self._seen = set(self._known)
        self._tries: Counter[Situation] = Counter()
        self._current: Situation | None = None
        self._due: set[tuple[bool, bool]] = set()
        self._metered_nodes = self._most_nodes = self._waits = 0
        self._pause, self._unmetered = 1, 0
        """Meter a sample after `_pause` steps that were not metered; `_unmetered` counts those steps."""
        self.is_sample = False
        """Whether the step that began last is metered although nothing about it is new."""
        self.has_run_more = False
        """Whether the last metered step had a known shape and a forward that ran more than in all metered steps before."""

    def expect(self) -> None:
        """Meter the next step of every micro-batch kind, even in known situations: the plan has not run before."""
        self._due = {situation.turn for situation in (*self._known, *self._seen)}

    def begin(self, situation: Situation) -> bool:
        """Return True if a step that begins in this situation should be metered.

        Known situations are sampled: no reading between forwards and backwards shows what the loop makes and frees there. After
        three failed attempts, return False.
        """
        self._current = None
        self.is_sample = False
        is_known = (
            situation in self._seen or any(map(situation.is_within, self._known)) or self._have_standing_in(situation)
        )
        is_due = situation.turn in self._due or self._waits > 0
        self.is_sample = is_known and not is_due and self._unmetered >= self._pause
        if (is_known and not is_due and not self.is_sample) or self._tries[situation] == _MOST_TRIES:
            self._seen.add(situation)
            self._unmetered += 1
            self.is_sample = False
            return False
        if self.is_sample:
            self._pause = min(_RARELY - 1, 2 * self._pause + 1)
        self._unmetered = 0
        self._waits = max(0, self._waits - 1)
        self._tries[situation] += 1
        self._current = situation
        return True

    def _have_standing_in(self, situation: Situation) -> bool:
        """True if enough steps were metered to bound a step whose lists hold tensors of other sizes."""
        alike = [each.shapes for each in self._known if situation.is_alike(each)]
        return len(alike) >= _ENOUGH and len(standing_in(alike, situation.shapes)) >= _ENOUGH

    def ran(self, nodes: int) -> None:
        """Note that a step has ended, with ``nodes`` autograd nodes in its largest forward.

        If no metered step has made as many, the following steps are metered until one does.
        """
        if nodes > _MORE * self._most_nodes:
            self._most_nodes, self._waits = nodes, _MOST_WAITED
        if self._most_nodes <= _MORE * self._metered_nodes:
            self._waits = 0

    def know(self, situation: Situation) -> None:
        """Treat the situation as known: the user was warned about it already."""
        self._known.append(situation)

    def ended(self, nodes: int, in_flight: int) -> str:
        """Return what was new about the step that began last. The step is over and its peak is known.

        Args:
            nodes: the autograd nodes of its largest forward.
            in_flight: how many forwards waited at once.
        """
        before, self._metered_nodes = self._metered_nodes, max(self._metered_nodes, nodes)
        self.has_run_more = False
        if self._current is None:
            return "nothing about the step is new: something else has come onto the device, or the model has changed"
        self._due.discard(self._current.turn)
        self._tries.pop(self._current, None)
        current = self._current._replace(in_flight=max(in_flight, self._current.in_flight))
        cause = current.differences(self._known) if self._known else ""
        self._known.append(current)
        return cause or self._run_more(nodes, before) or "it takes more than was predicted"

    def estimated(self, nodes: int, cause: str) -> str:
        """Return the cause for a step that was not metered and whose estimated peak exceeds its limit."""
        more = self._run_more(nodes, self._metered_nodes)
        return f"{more or cause}; the step was not measured, and this is an estimate"

    def _run_more(self, nodes: int, before: int) -> str:
        self.has_run_more = 0 < _MORE * before < nodes
        if not self.has_run_more:
            return ""
        return f"its forward has run more than in the steps before ({nodes} autograd nodes, not {before})"


def is_watched(module: nn.Module) -> bool:
    """True if the calls of this very module are followed already."""
    hooks = module._forward_pre_hooks.values()  # seen in torch 2.9 to 2.15
    return any(isinstance(hook, ModelHook) and isinstance(hook.runner, StepWatch) for hook in hooks)


class _PatientHook(ModelHook):
    """A model hook that allows the model to be compiled: it does nothing while dynamo traces.

    This is safe because a plan that keeps everything only watches.
    """

    def __call__(self, caller: nn.Module, *arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(caller, *arguments)


class StepWatch:
    """Hooks on a model that find where its training steps begin and end.

    ``before_call`` runs before every training call, with its arguments and situation. ``after_step`` runs when a step is over.
    Then ``measured`` is its measurement, or None if ``meter`` was not called or the measurement did not complete.
    """

    def __init__(
        self,
        model: nn.Module,
        before_call: Callable[[tuple[Any, ...], dict[str, Any], Situation], None],
        after_step: Callable[[], None],
        hook: type[ModelHook] = ModelHook,
        shapes: Callable[[tuple[Any, ...], dict[str, Any]], Shapes] = shapes_and_masks_of,
    ) -> None:
        self._model = model
        self._trained: list[weakref.ref[nn.Parameter]] = []
        """Weak: ``load_state_dict(assign=True)`` exchanges parameters, and the old ones must be freed then."""
        self.note_frozen()
        self.device = next((parameter.device for parameter in self._trained_now()), torch.device("cpu"))
        self._before_call = before_call
        self._after_step = after_step
        self._shapes_of = shapes
        self.is_looking_away = False
        self.graphs = OpenGraphs(self._backward_ended, self._backward_begins)
        self.levels = StepLevels(self.device)
        self.held = HeldByLoop(model, self.device)
        self._version = 0
        self._has_raised = False
        """Whether a forward has raised. The traceback may keep tensors alive that the forward made."""
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """The arguments of the running training call if it is the first of its step, else None."""
        self._larger = self._late = ""
        """What a region reported about the measured step (`_larger`), and about a step that was too far along to measure
        (`_late`).
        """
        self.is_reordered = False
        """Whether regions ran in an order that no earlier step had. The owner resets it."""
        self._made_bytes = 0
        """Bytes that forward had added when the measurement began."""
        self.running: MeasuredStep | None = None
        self.measured: MeasuredStep | None = None
        self.rising = RisingPeak(self.device)
        self.risen_bytes = 0
        """The step's peak on CUDA if it exceeds all earlier peaks, without other memory on the device; else 0."""
        self.beside_bytes: int | None = None
        self.peak_bytes = 0
        """The highest peak of any step that `taken_by` has returned."""
        self.rest_bytes = 0
        """The step's peak from its last backward to the next forward; 0 if that was not measured."""
        self._said_rest_bytes = 0
        self.in_flight = 1
        """How many forwards the last step ran before one backward."""
        self.nodes = self._first_node = self._last_node = self._compiled_before = 0
        """The most autograd nodes that one forward of the step made. Forwards that compiled something are not counted, because
        compiling makes nodes too.
        """
        self._watch = OptimizerWatch(())
        self._watch.remove()
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(hook(model, self._before), with_kwargs=True, prepend=True),
            model.register_forward_hook(hook(model, self._after), always_call=True),
        ]

    def note_frozen(self) -> None:
        """Take the parameters that are frozen now for those that may be thawed."""
        frozen = (parameter for parameter in every_parameter(self._model) if not parameter.requires_grad)
        self._frozen = list(map(weakref.ref, frozen))

    def _trained_now(self) -> list[nn.Parameter]:
        """The trained parameters. Look them up again if one of them was freed."""
        found = [parameter for reference in self._trained if (parameter := reference()) is not None]
        if not found or len(found) < len(self._trained):
            found = [parameter for parameter in every_parameter(self._model) if parameter.requires_grad]
            self._trained = list(map(weakref.ref, found))
        return found

    def remove(self) -> None:
        """Remove the hooks. Calling it twice does no harm."""
        self.stop()
        self._watch.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def is_between_steps(self) -> bool:
        """Whether no graph of this model waits for a backward."""
        return not len(self.graphs)

    def meter(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        carried: Carried | None = None,
        *,
        with_optimizer: bool = False,
    ) -> None:
        """Measure the step that the coming call begins, until the next step or (if not ``with_optimizer``) the optimizer's
        step.

        ``carried`` is what the loop carries between steps. The measurement cannot end within backward: when backward returns,
        torch restores the state of profilers from before it.
        """
        if carried is None and self.held.bytes:
            carried = self.held.carried
        self.measured, self.running = None, MeasuredStep(self._model, args, kwargs, carried)
        self.running.static_bytes += self.held.hidden_bytes
        comes = None if with_optimizer else self._optimizer_comes
        self._watch = OptimizerWatch(self._trained_now(), (), comes, comes)

    def stop(self) -> None:
        """End the measurement if one is running."""
        step, self.running = self.running, None
        if step is not None:
            step.has_trained |= self.graphs.has_backward
            self.measured = step if step.end() else None
            if self.measured is not None:
                rest_bytes = step.optimizer_peak_bytes
                self.rest_bytes = rest_bytes + self._watch.bytes_before if rest_bytes else 0

    def drop(self) -> None:
        """End the measurement if one is running, and discard it."""
        if self.running is not None:
            self.running.has_failed = True
        self.stop()

    def forget(self) -> None:
        """Forget the step: it has failed and starts again."""
        self.drop()
        self.graphs.begin()

    def meter_if_new(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation, situations: MeteredSituations
    ) -> None:
        """Measure the step that the coming call begins if its situation is new. Does nothing on a GPU, whose counter always
        runs.
        """
        if self.is_between_steps and situations.begin(situation) and self.device.type == "cpu":
            self.meter(args, kwargs, with_optimizer=situations.is_sample)

    def larger_call(self, text: str, /, *, is_reordered: bool) -> None:
        """Measure the step from here on, because a region is about to run its largest call so far or in a new order.

        ``text`` describes which. If forward has already added much, the step is not measured: the meter does not see when
        tensors made before it starts are freed. Then the next step is measured.
        """
        self.is_reordered |= is_reordered and not self._is_blind
        is_first = self._call is not None and self.running is None and not self._is_blind
        if not is_first or self.device.type != "cpu":
            return
        if not self.levels.is_early():
            self._late = self._late or text
            return
        made_bytes = self.levels.above_begin()
        assert self._call is not None
        self.meter(*self._call)
        if self.running is not None:
            self.running.static_bytes += made_bytes
            self._larger, self._made_bytes = text, made_bytes

    def taken_by(self, state_bytes: int, situations: MeteredSituations, limit_bytes: int) -> tuple[int, str]:
        """Return the peak of the step that is over, up to its last backward, and the cause if it is unusual.

        ``state_bytes`` of optimizer state are included. The peak is 0 if the step was not measured and its estimated peak is
        within ``limit_bytes``. If the loop has exceeded ``limit_bytes`` after backward, warn: no plan can change that.
        """
        self._warn_of_rest(limit_bytes)
        step, self.measured = self.measured, None
        risen_bytes, self.risen_bytes = self.risen_bytes, 0
        late, self._late = self._late, ""
        larger, self._larger = self._larger, late
        made_bytes, self._made_bytes = self._made_bytes, 0
        state_bytes = max(state_bytes, self.held.state_bytes)
        peak_bytes = risen_bytes if step is None else step.step_peak_bytes + state_bytes
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        cause = ""
        if peak_bytes:
            cause = situations.ended(self.nodes, self.in_flight)
            if larger and step is not None:
                cause = larger
        if step is not None:
            self.levels.learn(step.static_bytes - made_bytes)
        elif not peak_bytes:
            estimated_bytes = self.levels.estimated_peak_bytes(state_bytes)
            if estimated_bytes or self.levels.has_new_loss or late:
                situations.expect()
            if estimated_bytes > limit_bytes:
                peak_bytes, cause = estimated_bytes, situations.estimated(self.nodes, self.levels.cause)
        situations.ran(self.nodes)
        return peak_bytes, cause

    def _warn_of_rest(self, limit_bytes: int) -> None:
        rest_bytes, self.rest_bytes = self.rest_bytes, 0
        if rest_bytes > limit_bytes and is_more(rest_bytes, self._said_rest_bytes):
            self._said_rest_bytes = rest_bytes
            warn_of_overrun(
                rest_bytes,
                limit_bytes,
                "that was after its last backward, where no activations are left: parameters, gradients, the optimizer's step, "
                "and what the training loop makes or holds there",
                f"no plan changes that: free tensors of the loop earlier, or {budget_text(rest_bytes)}",
            )

    def end_step(self) -> None:
        """End the step: the optimizer has stepped, or no graph waits any more. What follows belongs to the next step."""
        was_running = self.running is not None
        self.stop()
        self.graphs.abandon()
        has_trained = self.graphs.has_backward
        risen_bytes = self.rising.risen_to() - (self.beside_bytes or 0)
        if has_trained and risen_bytes > self.risen_bytes:
            self.rest_bytes = risen_bytes
        if has_trained:
            self.in_flight = self.graphs.most
        self.graphs.begin()
        if has_trained or (was_running and self.measured is not None):
            self._after_step()
        self.nodes = 0

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Ignore all calls of the model inside the block: they are ours, not the user's."""
        self.is_looking_away = True
        try:
            yield
        finally:
            self.is_looking_away = False

    def _optimizer_comes(self) -> None:
        if self.is_between_steps and not is_in_backward():
            self.end_step()

    @property
    def _is_blind(self) -> bool:
        return self.is_looking_away or is_in_backward() or peek_functorch() is not None

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_blind:
            return
        if not self.is_between_steps and self.graphs.has_backward and self._versions() != self._version:
            self.graphs.abandon()  # an optimizer has stepped since, so these graphs belong to a step that failed
        if self.is_between_steps:
            self.end_step()
            self._watch.remove()
        if torch.is_grad_enabled() and module.training:
            accumulates = bool(every_gradient(self._model))
            waiting = len(self.graphs)
            if waiting:
                self._note(FORWARD)
            else:
                self._begin_rising(args, kwargs)
                reading = self._look_at_loop(args, kwargs, accumulates=accumulates)
            in_flight = waiting + 1 if waiting else self.in_flight
            reduces = not (holds_gradients_back(self._model) or is_without_reduction(self._model))
            thawed = frozenset(
                at
                for at, reference in enumerate(self._frozen)
                if (parameter := reference()) is not None and parameter.requires_grad
            )
            shapes = self._shapes_of(args, kwargs)
            self._before_call(args, kwargs, Situation(shapes, accumulates, in_flight, reduces, thawed))
            self._first_node, self._compiled_before = sequence_number(), times_compiled()
            if not waiting:
                self._call = (args, kwargs)
                self.held.planned(self.levels.begin() - reading)

    def _look_at_loop(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, accumulates: bool) -> int:
        """Find what the loop holds when a step begins. Return the allocated bytes, or 0 if they cannot be read."""
        self._version = self._versions()
        left, self._has_raised = self.graphs.has_left or self._has_raised, False
        reading, peak_bytes = self.levels.read(), self.levels.expected_peak_bytes
        self.held.begin(reading, args, kwargs, accumulates=accumulates, leaves_graph=left, peak_bytes=peak_bytes)
        return reading or 0

    def _versions(self) -> int:
        """A number that changes when an optimizer steps."""
        return sum(parameter._version for parameter in self._trained_now())

    def _begin_rising(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        allocated_bytes = self.rising.begin()
        # Measuring other memory on the device synchronizes it, which a CUDA graph capture forbids.
        if allocated_bytes and self.beside_bytes is None and not is_capturing(self.device.type):
            self.beside_bytes = beside_bytes(self._model, args, kwargs, allocated_bytes)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_blind:
            return
        self._call = None
        if output is None:  # it raised
            self._has_raised = True
            if self.running is not None:
                self.running.has_failed = True
        if torch.is_grad_enabled() and module.training:
            if times_compiled() == self._compiled_before:
                self.nodes = max(self.nodes, sequence_number() - self._first_node)
            self.graphs.note(output)
            self.levels.forward_ended()
            self._last_node = sequence_number()
            self._note(LOSS)

    def _note(self, part: str) -> None:
        if self.running is not None:
            self.running.note(part)

    def _backward_begins(self) -> None:
        self.levels.backward_begins(sequence_number() - self._last_node)
        self._note(BACKWARD)

    def _backward_ended(self) -> None:
        self.levels.backward_ended()
        self._note(OPTIMIZER)
        self.risen_bytes = max(0, self.rising.risen_to() - (self.beside_bytes or 0))


def taken_beside(
    measured: MeasuredStep | None, watch: OptimizerWatch, plan: Plan, recording_bytes: int
) -> tuple[Taken, int]:
    """Return what the measured step took under a plan, and by how many bytes later steps will exceed the plan's prediction."""
    if measured is not None:
        return taken_bytes(measured, watch, plan, recording_bytes), unseen_bytes(measured, watch, plan)
    warn("the first steps could not be measured (failed, or under a profiler); the plan relies on its trace alone")
    return Taken(), max(0, watch.bytes_after - planned_state_bytes(plan))


class BudgetWatch:
    """Warns once if training under an applied plan exceeds its budget, in a step that the plan was not made for.

    The first step is always measured: a batch of the planned shape may still lead to larger sizes inside the model.
    """

    def __init__(self, model: nn.Module, handle: Handle, plan: Plan, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._said_bytes = 0
        self._state_bytes = planned_state_bytes(plan)
        self._metered = MeteredSituations([planned_situation(plan.signature, plan.in_flight)])
        self._metered.expect()
        self._held_bytes = 0
        self._steps = StepWatch(model, self._before_call, self._after_step, _PatientHook, shapes_of)
        handle.on_larger_calls(self._steps.larger_call)

    @property
    def peak_bytes(self) -> int:
        """The highest measured peak of any step; 0 until a step was measured."""
        return self._steps.peak_bytes

    def remove(self) -> None:
        """Remove the watch from the model."""
        self._steps.end_step()
        self._steps.remove()

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        held = self._steps.held
        held_bytes = held.bytes + held.batch_bytes + max(self._state_bytes, held.state_bytes)
        if is_more(held_bytes, self._held_bytes):
            self._held_bytes = held_bytes
            self._metered.expect()
        self._steps.meter_if_new(args, kwargs, situation, self._metered)

    def _after_step(self) -> None:
        peak_bytes, cause = self._steps.taken_by(self._state_bytes, self._metered, self._budget_bytes)
        levels = self._steps.levels
        levels.expected_peak_bytes = max(levels.expected_peak_bytes, peak_bytes)
        if peak_bytes > self._budget_bytes and is_more(peak_bytes, self._said_bytes):
            self._said_bytes = peak_bytes
            warn_of_overrun(
                peak_bytes,
                self._budget_bytes,
                cause,
                "plan for such steps (where gradients accumulate: when the first micro-batch has gone backward, so that what "
                "waits is counted), or use plimsoll.attach, which plans for them itself",
            )


def warn(text: str) -> None:
    """Warn about a training step. The warning points near the call of the model."""
    warnings.warn(f"plimsoll: {text}", stacklevel=7)


def warn_of_larger(situation: Situation) -> None:
    """Warn that this rank's batch is larger than the batches that the plan is for."""
    found = f"the batch of this rank ({situation.shown}) is larger than those before it, or masked otherwise, and not so on all"
    advice = "Pad batches to the same shape, or train on every rank's largest one first"
    warn(f"{found} ranks alike: the plan at work stays, and may take more than the budget. {advice}")


def warn_of_unknown(shapes: Shapes) -> None:
    """Warn that the peak of a batch is unknown, because the ranks do not all meet a new shape in this call."""
    warn(
        f"nothing tells what a batch of {Situation(shapes).shown} takes: its shape does not follow from those traced so far, "
        "and not all ranks meet a new one in this call. Such batches run at the lowest peak, and may take more than the "
        "budget. Train on some of them on all ranks in the first steps"
    )


def warn_of_waiting(waiting: int, planned: int, *, is_planned: bool) -> None:
    """Warn that more forwards wait for one backward than planned, and say whether the next steps are planned for that."""
    then = ", and the next ones are planned for that" if is_planned else ""
    found = f"{waiting} forwards of the model wait for one backward"
    warn(f"{found}, not {planned} as planned: this step may take more than the budget{then}")


def warn_of_state(new_bytes: int) -> None:
    """Warn that the plan does not count some state of this rank's optimizer."""
    state = f"the optimizer of this rank has stepped ({format_bytes(new_bytes)} of new state), and not on all ranks"
    warn(f"{state}: the plan at work stays, and does not count that. Pass optimizer= to plimsoll.attach")


def warn_of_overrun(peak_bytes: int, budget_bytes: int, cause: str, next_: str) -> None:
    """Warn that a step exceeded its budget; say why and what happens next."""
    warn(
        f"a training step took {format_bytes(peak_bytes)}, {format_bytes(peak_bytes - budget_bytes)} more than the "
        f"budget {format_bytes(budget_bytes)}.\n  why   {cause}\n  next  {next_}"
    )


def log_planning_overrun(peak_bytes: int, budget_bytes: int, why: str, next_: str) -> None:
    """Log that a call exceeded the budget because plans were made in it. Later calls keep to the budget."""
    # A log line and not a warning: the device had room, and the user has nothing to do.
    _LOG.warning(
        "plimsoll: the training call that made the plan took up to %s, %s more than the budget %s.\n  why   %s\n"
        "  next  later calls run under a plan for the budget; %s",
        *map(format_bytes, (peak_bytes, peak_bytes - budget_bytes, budget_bytes)),
        why,
        next_,
    )


def warn_of_floor(error: BudgetBelowFloor, why: str) -> None:
    """Warn that no plan fits any more, and say what runs instead."""
    warn(f"{error.found}\n  why   {why}; {error.why}\n  next  {error.next}; until then the lowest peak is at work")


def warn_of_unseen(model: nn.Module) -> None:
    """Warn that an optimizer steps the model's parameters but its forward was never called in training mode."""
    children = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    warn(
        f"an optimizer has trained {type(model).__name__}, and attach has seen no training call of it: nothing is "
        "managed.\n  why   attach plans in the forward of the module itself; the training loop calls something else, or this "
        f"module in evaluation mode\n  next  attach to the module that is called, such as .{[*children, 'module'][0]}"
    )
