"""Follows the training steps of a model by its calls: where a step begins and ends, what is new about it, and its peak.

A step begins with the first call that makes an autograd graph. It ends before the next call that begins after
backward. On a CPU only some steps are metered (see ``situations``); in every step, the allocated bytes are read at four moments
(see ``step_levels``). On CUDA the allocator's peak counter is read after every backward and never reset.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from plimsoll.engine.capturing import is_capturing
from plimsoll.engine.copies import ModelHook
from plimsoll.session.batch_shapes import Shapes, shapes_and_masks_of, shapes_of
from plimsoll.session.carried import Carried
from plimsoll.session.held_by_loop import HeldByLoop
from plimsoll.session.measured_step import (
    AFTER_BACKWARD,
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    MeasuredStep,
    beside_bytes,
)
from plimsoll.session.messages import log_recurrence, warn_of_overrun
from plimsoll.session.optimizer_watch import OptimizerWatch, optimized_parameters
from plimsoll.session.part_calls import PartCalls
from plimsoll.session.risen_rest import RisenRest
from plimsoll.session.said_overruns import SaidOverruns
from plimsoll.session.situations import MeteredSituations, Situation
from plimsoll.session.step_levels import StepLevels, is_more
from plimsoll.tracing.ddp import inner_module, is_without_reduction
from plimsoll.tracing.fsdp2 import every_parameter, holds_gradients_back, waiting_gradients
from plimsoll.tracing.local_tensors import gradient_of
from plimsoll.tracing.meters.memory import RisingPeak
from plimsoll.tracing.open_graphs import OpenGraphs, is_in_backward
from plimsoll.tracing.torch_internals import peek_functorch, sequence_number, times_compiled
from plimsoll.tracing.zero import optimizer_inside
from plimsoll.units import budget_text

_MOST_SEARCHING = 0.01
"""Samples are measured only while searches for tensors of the loop have taken at most this share of its time. With 1.5 million
objects in the process, a search takes 0.15 s.
"""


def is_watched(module: nn.Module) -> bool:
    """Return True if a ``StepWatch`` already follows the calls of this module itself (not of a module around it)."""
    return bool(list(_watches(module)))


def watchers(module: nn.Module) -> list[object]:
    """Return the objects that follow the calls of this module through a ``StepWatch``."""
    return [watch.owner for watch in _watches(module)]


def _watches(module: nn.Module) -> Iterator[StepWatch]:
    for hook in module._forward_pre_hooks.values():  # seen in torch 2.9 to 2.15
        if isinstance(hook, ModelHook) and isinstance(hook.runner, StepWatch):
            yield hook.runner


class StepWatch:
    """Follows a model's training steps through hooks: finds where steps begin and end, and measures some of them.

    ``before_call`` runs before every training call, with its arguments and situation (shapes, gradients, waiting forwards).
    ``before_parts`` runs before a step that does not call the model but parts of it, with the first part's name, arguments and
    situation. ``after_step`` runs when a step is over. Then ``measured`` is its measurement, or None if ``meter`` was not
    called or the measurement did not complete.
    """

    def __init__(
        self,
        model: nn.Module,
        before_call: Callable[[tuple[Any, ...], dict[str, Any], Situation], None],
        after_step: Callable[[], None],
        before_parts: Callable[[str, tuple[Any, ...], dict[str, Any], Situation], None] = lambda *_: None,
        hook: type[ModelHook] = ModelHook,
        shapes: Callable[[tuple[Any, ...], dict[str, Any]], Shapes] = shapes_and_masks_of,
    ) -> None:
        self._model = model
        self.note_frozen()
        # A trained parameter first: frozen ones may be kept elsewhere. All may be frozen now.
        parameters = sorted(every_parameter(model), key=lambda each: not each.requires_grad)
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self._before_call, self._before_parts = before_call, before_parts
        self._after_step = after_step
        self._shapes_of = shapes
        self.is_looking_away = False
        self.graphs = OpenGraphs(self._backward_ended, self._backward_begins)
        self.levels = StepLevels(self.device)
        self.held = HeldByLoop(model, self.device)
        self._begun = time.monotonic()
        self._versions: dict[int, int] = {}
        self.follows_update = False
        """Whether parameters were written between the beginning of the last step and of the running one."""
        self._expected_error: BaseException | None = None
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """The arguments of the running training call if it is the first of its step, else None."""
        self._larger = self._late = ""
        """A text from a region (managed module) that the measured step runs a larger call than before, or "".

        ``_late`` is such a text about a step that had gone too far to be measured.
        """
        self.is_reordered = False
        """True if regions ran in an order that no earlier step had. The owner of the watch resets it."""
        self._made_bytes = 0
        """If the measurement began within a forward: the bytes that this forward had added before, else 0."""
        self.running: MeasuredStep | None = None
        self.measured: MeasuredStep | None = None
        self.was_blocked = False
        """True if the last measurement did not begin, because another managed model was measured."""
        self.rising = RisingPeak(self.device)
        self.risen_bytes = 0
        """On CUDA, the step's peak in bytes, without memory of other things on the device, if it exceeds all earlier peaks.
        Otherwise 0.
        """
        self._rest = RisenRest(model, self.rising) if self.device.type == "cuda" else None
        self.beside_bytes: int | None = None
        self.peak_bytes = 0
        """The highest peak of any step that `take_peak` has returned."""
        self.rest_bytes = 0
        """The step's peak in bytes from its last backward to the next forward. It is 0 if that was not measured."""
        self._said_rest = SaidOverruns()
        self.in_flight = 1
        """How many forwards of the last step waited at once for one backward."""
        self.nodes = self._first_node = self._last_node = self._compiled_before = 0
        """The most autograd nodes that one forward of the step made. Forwards that compile something are not counted: compiling
        makes nodes too, and up to 16 later steps were measured in wait for as many nodes.
        """
        self._watch = OptimizerWatch(())
        self._watch.remove()
        self._running_calls = 0
        """How many calls of the model run now. It is more than 1 if the model calls itself."""
        self.parts = PartCalls(
            self._parts_begin, lambda: self._running_calls > 0 or self._is_blind, lambda: not self.is_between_steps
        )
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(hook(model, self._before), with_kwargs=True, prepend=True),
            model.register_forward_hook(hook(model, self._after), always_call=True),  # also after a forward that raises
        ]

    @property
    def owner(self) -> object:
        """The object whose method runs before each training call."""
        return self._before_call.__self__ if isinstance(self._before_call, MethodType) else None

    def note_frozen(self) -> None:
        """Remember the parameters that are frozen now, to notice when one of them is trained."""
        # Not by reference: `load_state_dict(assign=True)` exchanges parameters, and a strong reference kept the old weights
        # alive. `torch.utils.swap_tensors` refuses parameters that have weak references.
        self._frozen = frozenset(id(each) for each in every_parameter(self._model) if not each.requires_grad)

    def remove(self) -> None:
        """Remove the hooks. Calling it twice does no harm."""
        self.stop()
        self.parts.remove()
        for each in (self._watch, self._rest):
            if each is not None:
                each.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def watch_parts(self, parts: Mapping[str, nn.Module]) -> None:
        """Follow steps too that call these parts of the model (modules by name), and not the model itself."""
        self.parts.watch(parts)

    @property
    def is_between_steps(self) -> bool:
        """True if no autograd graph of this model waits for a backward."""
        return not len(self.graphs)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the step has allocated since it began, if forwards of it wait for a backward, else 0. A trace that runs
        now needs its memory in addition.
        """
        return 0 if self.is_between_steps else max(0, self.levels.above_begin())

    def meter(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        carried: Carried | None = None,
        *,
        with_optimizer: bool = False,
    ) -> None:
        """Measure the memory of the step that begins with the next call. The measurement ends when the next step begins, or, if
        not ``with_optimizer``, before the optimizer steps.

        ``carried`` finds what the loop carries between steps. The measurement cannot end within backward: when backward
        returns, torch restores the profiler's state from before backward.
        """
        held_bytes = 0
        if carried is None and self._must_search:
            carried = self.held.carried
        elif carried is None:
            held_bytes = self.held.bytes  # too few for a search of tensors that the step may free
        self.measured, self.running = None, MeasuredStep(self._model, args, kwargs, carried)
        self.running.static_bytes += held_bytes
        if with_optimizer:
            before, after, others = self._optimizer_begins, self._optimizer_ended, self._other_optimizer_begins
            self._watch = OptimizerWatch(optimized_parameters(self._model), (), before, after, others)
        else:
            ours = optimized_parameters(self._model)
            self._watch = OptimizerWatch(ours, (), self._optimizer_comes, self._optimizer_comes)

    @property
    def _must_search(self) -> bool:
        """Whether the training loop holds more bytes than noise. A measurement must then search for these tensors, because the
        step may free them. Each search looks at all objects of the process.
        """
        return is_more(self.held.bytes, 0, self.levels.expected_peak_bytes)

    def stop(self) -> None:
        """End the measurement if one is running, and keep its result."""
        step, self.running = self.running, None
        if step is not None:
            step.has_trained |= self.graphs.has_backward or self.parts.has_backward
            self.was_blocked = step.is_blocked
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
        """Forget the running step, because it failed and is run again from its beginning."""
        self.drop()
        self.graphs.begin()
        self.parts.end_step()
        self._running_calls = 0  # after KeyboardInterrupt, torch does not run the hook that counts the call's end

    def meter_if_new(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation, situations: MeteredSituations
    ) -> None:
        """Measure the step that begins with the next call if no step in this situation (shapes, gradients, waiting forwards)
        was measured. On a GPU do nothing, because its counter always runs.
        """
        if not self.is_between_steps:
            return
        searched_seconds = self.held.carried.seconds if self._must_search else 0.0
        may_sample = searched_seconds <= _MOST_SEARCHING * (time.monotonic() - self._begun)
        if situations.begin(situation, may_sample=may_sample) and self.device.type == "cpu":
            self.meter(args, kwargs, with_optimizer=situations.is_sample)

    def raise_unless_it_fails(self, error: BaseException) -> None:
        """Let the coming call raise ``error`` at its end, unless the call raises an error of its own."""
        self._expected_error = error

    def larger_call(self, text: str, /, *, is_reordered: bool) -> None:
        """Measure the step from here on. A region reports that it is about to run its largest call so far, or that regions run
        in a new order.

        ``text`` says which. If forward has already added much, measure the next step instead: the meter does not see when
        tensors are freed that were made before it started.
        """
        # In a step without a call of the model, the order says nothing about its forward.
        self.is_reordered |= is_reordered and not self._is_blind and not self.parts.first
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

    def take_peak(self, state_bytes: int, situations: MeteredSituations, limit_bytes: int) -> tuple[int, str]:
        """Return the peak of the step that is over, up to its last backward, and the cause if it is unusual.

        The peak includes ``state_bytes`` of optimizer state. It is 0 if the step was not measured and its estimated peak is
        within ``limit_bytes``. If the loop exceeded ``limit_bytes`` after backward, warn here: no plan can change that.
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
            if self.parts.first:
                cause = self.called_parts
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

    @property
    def called_parts(self) -> str:
        """A clause for warnings: which part the loop has called instead of the model."""
        name = type(inner_module(self._model)).__name__
        return (
            f"the step called {self.parts.first!r} of {name} and not {name} itself (model.forward(batch) or another method of "
            "the model does that), so its batch is unknown"
        )

    def _warn_of_rest(self, limit_bytes: int) -> None:
        rest_bytes, self.rest_bytes = self.rest_bytes, 0
        if rest_bytes <= limit_bytes:
            return
        cause = (
            "this peak came after its last backward, when no activations are left: it consists of parameters, gradients, the "
            "optimizer's step, and tensors that the training loop makes or holds"
        )
        if self._said_rest.is_new(rest_bytes):
            next_ = f"plans cannot lower this peak: free tensors of the loop earlier, or set {budget_text(rest_bytes)}"
            warn_of_overrun(rest_bytes, limit_bytes, cause, next_)
        elif self._said_rest.is_logged():
            log_recurrence(rest_bytes, limit_bytes, self._said_rest.recurrences, cause)

    def end_step(self) -> None:
        """End the step, because an optimizer has stepped, or because no graph waits any more when the next call begins."""
        was_running = self.running is not None
        self.stop()
        self.graphs.abandon()
        has_trained = self.graphs.has_backward or self.parts.has_backward
        if self._rest is not None and has_trained:
            rest_bytes = self._rest.end() - (self.beside_bytes or 0)
            if rest_bytes > self.risen_bytes:
                self.rest_bytes = rest_bytes
        if self.graphs.has_backward:
            self.in_flight = self.graphs.most
        self.graphs.begin()
        if has_trained or (was_running and self.measured is not None):
            self._after_step()
        self.parts.end_step()
        self.nodes = 0

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Ignore all calls of the model inside the block: they are ours, not the user's."""
        self.is_looking_away = True
        try:
            yield
        finally:
            self.is_looking_away = False

    def _optimizer_begins(self) -> None:
        self._note(OPTIMIZER)

    def _optimizer_ended(self) -> None:
        self._note(AFTER_BACKWARD)

    def _other_optimizer_begins(self) -> None:
        # DeepSpeed's optimizer trains this model too, although it holds flat partitions and not the model's parameters.
        if self.running is not None and optimizer_inside(inner_module(self._model)) is None:
            self.running.trains_another = True

    def _optimizer_comes(self) -> None:
        if self.is_between_steps and not is_in_backward():
            self.end_step()

    @property
    def _is_blind(self) -> bool:
        # A forward within backward recomputes something (checkpointing), and a call under a torch.func transform is not a step.
        return self.is_looking_away or is_in_backward() or peek_functorch() is not None

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_blind:
            return
        self._running_calls += 1
        if not self.parts.has_backward:
            if self.parts.first:
                self.drop()  # the parts have only prepared this call, and the step is measured from the call on
            self.parts.model_called()
        if (
            not self.is_between_steps
            and self.graphs.has_backward
            and self._differs_from(_versions(every_parameter(self._model)))
        ):
            self.graphs.abandon()  # an optimizer has stepped since, so these graphs are left from a step that failed
        if self.is_between_steps:
            self.end_step()
            self._watch.remove()
        if torch.is_grad_enabled() and module.training:
            parameters = every_parameter(self._model)
            accumulates = self._accumulates(parameters)
            waiting = len(self.graphs)
            if waiting:
                self._note(FORWARD)
            else:
                self._begin_rising(args, kwargs)
                versions = _versions(parameters)
                self.follows_update = self._differs_from(versions)
                self._versions = versions
                reading = self._look_at_loop(args, kwargs, accumulates=accumulates)
            in_flight = waiting + 1 if waiting else self.in_flight
            thawed = frozenset(
                at for at, each in enumerate(parameters) if each.requires_grad and id(each) in self._frozen
            )
            shapes = self._shapes_of(args, kwargs)
            self._before_call(args, kwargs, Situation(shapes, accumulates, in_flight, self._reduces(), thawed))
            self.held.carried.forget()  # what is asked from now on is asked at another moment
            self._first_node, self._compiled_before = sequence_number(), times_compiled()
            if not waiting:
                self._call = (args, kwargs)
                self.held.planned(self.levels.begin() - reading)

    def _accumulates(self, parameters: list[nn.Parameter]) -> bool:
        has_gradients = any(gradient_of(each) is not None for each in parameters)
        return has_gradients or any(True for _ in waiting_gradients(self._model))

    def _reduces(self) -> bool:
        return not (holds_gradients_back(self._model) or is_without_reduction(self._model))

    def _parts_begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step begins that calls the part ``name`` and not the model."""
        self.end_step()
        self._watch.remove()
        self._begin_rising(args, kwargs)
        self.levels.begin()
        accumulates = self._accumulates(every_parameter(self._model))
        # A part's arguments are not a batch of the model, even if they have its shapes.
        shapes = tuple((f"{name}({kind})", sizes) for kind, sizes in shapes_of(args, kwargs))
        self._before_parts(name, args, kwargs, Situation(shapes, accumulates, 1, self._reduces()))

    def _look_at_loop(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, accumulates: bool) -> int:
        """Find what the training loop holds at the beginning of a step, and store it in ``held``. Return the allocated bytes,
        or 0 if they cannot be read.
        """
        reading, peak_bytes = self.levels.read(), self.levels.expected_peak_bytes
        self.held.begin(reading, args, kwargs, accumulates=accumulates, peak_bytes=peak_bytes)
        return reading or 0

    def _differs_from(self, versions: dict[int, int]) -> bool:
        """Return True if an optimizer has stepped since the step began, so that parameters have other ``versions`` now."""
        return any(versions.get(known, version) != version for known, version in self._versions.items())

    def _begin_rising(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        allocated_bytes = self.rising.begin()
        if self._rest is not None:
            self._rest.begin()
        # Finding other memory on the device waits for the device, which a CUDA graph capture forbids.
        if allocated_bytes and self.beside_bytes is None and not is_capturing(self.device.type):
            self.beside_bytes = beside_bytes(self._model, args, kwargs, allocated_bytes)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_blind:
            return
        self._running_calls = max(0, self._running_calls - 1)
        self._call = None
        expected, self._expected_error = self._expected_error, None
        if expected is not None and output is not None:
            raise expected
        if output is None and self.running is not None:  # it raised
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
        self._note(AFTER_BACKWARD)
        self.risen_bytes = max(0, self.rising.risen_to() - (self.beside_bytes or 0))
        if self._rest is not None:
            self._rest.backward_ended()


def _versions(parameters: list[nn.Parameter]) -> dict[int, int]:
    """Return a mapping from ``id`` to version of the trained parameters. Versions change when an optimizer steps."""
    return {id(each): each._version for each in parameters if each.requires_grad}
