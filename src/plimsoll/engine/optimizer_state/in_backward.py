"""Steps each parameter as soon as backward has completed its gradient, by the user's own optimizer, and frees the gradient.

A hook on each parameter runs the optimizer's own code for this parameter alone. The loop's later ``optimizer.step()`` skips the
parameters that were stepped, because their gradient is missing then, and steps all others.

*Watched first.* The loop decides whether this is exact: nothing may need all gradients at once. So the first steps run as
usual, with watched gradients (see `WatchedGradient`), and `reason` says what the loop does that forbids stepping in backward.

*Guarded later.* A stepped parameter's ``grad`` is a stand-in whose values cannot be read (see `SteppedGradient`). Before each
``optimizer.step()``, the values of the groups, and the versions of the stepped parameters, are compared with those in backward.
If a loop begins to do what was not seen before, an error says so.

Known weaknesses: code that reads weights between backward and ``optimizer.step()`` without calling the model sees stepped
weights. Writes through ``.data`` in that time are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from plimsoll.engine.copies import ModelHook
from plimsoll.engine.optimizer_state.narrowed import narrowed, step_without_hooks
from plimsoll.errors import InvalidOption, PlanMismatch
from plimsoll.tracing.stepped_gradients import NEXT, SteppedGradient, WatchedGradient
from plimsoll.tracing.torch_internals import current_graph_task

_ENOUGH_STEPS = 1
"""The number of whole steps that are watched before a loop is trusted not to use gradients after backward. If gradients still
exist in the next forward, one more step is watched: it shows whether the loop clears them before backward.
"""


class StepsInBackward:
    """Watches the steps of an optimizer, and then steps parameters in backward.

    Args:
        model: the model. A call of it between backward and ``optimizer.step()`` would see stepped parameters.
        optimizer: the optimizer. It must step each parameter by itself (see ``by_parameter``).
        parameters: the parameters to step in backward, by name.

    Raises:
        InvalidOption: other code has replaced ``optimizer.step``.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> steps = StepsInBackward(layer, optimizer, dict(layer.named_parameters()))
        >>> for _ in range(3):
        ...     if steps.has_watched:
        ...         steps.start()
        ...     layer(torch.ones(2)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> steps.is_stepping, steps.reason
        (True, '')
        >>> steps.remove()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        own = vars(optimizer).get("step")
        if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
            raise InvalidOption(
                f"{type(optimizer).__name__} cannot step in backward: other code has replaced optimizer.step.",
                why=f"the step must run for single parameters, and {own!r:.80} would run it as a whole",
                next="leave 'step-in-backward' out of allow=",
            )
        self._optimizer = weakref.ref(optimizer)
        self.on_ready: Callable[[], None] = lambda: None
        """Called before each forward while the loop is watched, once enough steps were."""
        self.reason = ""
        """What the loop does that forbids stepping in backward; empty if nothing was seen."""
        self.is_stepping = False
        """True if parameters are stepped in backward. False while the loop is watched."""
        self._watched_steps = 0
        self._pending: dict[torch.Tensor, int] = {}
        """The parameters whose gradient came since the last ``optimizer.step()``, with their version counters."""
        self._task = -1
        """The number of the backward that brought these gradients."""
        self._values: list[dict[str, Any]] = []
        """The values of the parameter groups in that backward."""
        self._known: set[torch.Tensor] = set()
        """The parameters that had state in the optimizer before this backward."""
        self._group_of: dict[torch.Tensor, int] = {}
        """The position of the group of each parameter that the optimizer holds."""
        self._stand_ins: dict[torch.Tensor, torch.Tensor] = {}
        self._parameters = {each: name for name, each in parameters.items()}
        self._hooks: list[Any] = [each.register_post_accumulate_grad_hook(self._completed) for each in self._parameters]
        self._others: list[Any] = [
            model.register_forward_pre_hook(ModelHook(model, self._before_forward), prepend=True),
            optimizer.register_step_pre_hook(self._step_begins),
            optimizer.register_step_post_hook(self._step_ended),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]

    # What others may ask

    @property
    def has_watched(self) -> bool:
        """True if enough was watched to decide, and the next backward has not begun."""
        is_late = any(each.grad is not None for each in self._parameters)
        return bool(self.reason or self._watched_steps >= _ENOUGH_STEPS + is_late) and not self._pending

    def start(self) -> None:
        """From the next backward on, step parameters there. Gradients that exist now are freed: the loop was seen to clear them
        before backward, and if it does not, the stand-ins in their places raise an error.
        """
        self._stand_ins = {each: SteppedGradient.like(each) for each in self._parameters}
        for parameter, stand_in in self._stand_ins.items():
            if parameter.grad is not None:
                parameter.grad = stand_in
        self.is_stepping = True

    def remove(self) -> None:
        """Stop stepping and watching. Calling it twice does no harm."""
        for hook in (*self._hooks, *self._others):
            hook.remove()
        self._hooks, self._others = [], []
        self._unwatch()
        self._take_stand_ins()
        self.is_stepping = False

    # Backward

    def _completed(self, parameter: torch.Tensor) -> None:
        """Hook of a parameter whose gradient is complete."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        task = current_graph_task()
        if not self._pending:
            self._task, self._values, self._known = task, _values_of(optimizer), set(optimizer.state)
            # Once for each backward: a loop may add groups.
            self._group_of = {each: at for at, group in enumerate(optimizer.param_groups) for each in group["params"]}
        if self.is_stepping:
            if not self._step_now(parameter, optimizer, task):
                return
        elif not self.reason:
            self._watch(parameter, task)
        self._pending[parameter] = parameter._version

    def _step_now(self, parameter: torch.Tensor, optimizer: Optimizer, task: int) -> bool:
        """Step a parameter and free its gradient. Return False if the optimizer does not hold the parameter any more, or if
        other code has taken the gradient: then ``optimizer.step()`` would not step the parameter either.
        """
        if task != self._task or parameter in self._pending:
            self._refuse("A second backward runs before optimizer.step().", "gradients cannot accumulate")
        own = self._group_of.get(parameter)
        if own is None or parameter.grad is None:
            return False
        chosen = [[parameter] if at == own else [] for at in range(len(optimizer.param_groups))]
        with narrowed(optimizer, chosen), torch.enable_grad():
            step_without_hooks(optimizer)(optimizer)
        parameter.grad = self._stand_ins[parameter]
        return True

    def _watch(self, parameter: torch.Tensor, task: int) -> None:
        gradient = parameter.grad
        if task != self._task or parameter in self._pending or isinstance(gradient, WatchedGradient):
            self._note("gradients of several backward passes accumulate before optimizer.step()")
        elif gradient is None:
            self._note("other code takes gradients away while backward runs")
        elif gradient.requires_grad:
            self._note("gradients have a graph of their own (create_graph=True)")
        elif gradient.layout is not torch.strided:
            self._note("a gradient is sparse")
        else:
            parameter.grad = WatchedGradient.of(gradient, self._note_use)

    def _note(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _note_use(self, function: str) -> None:
        self._note(
            f"the loop uses gradients after backward ({function}), as clipping, scaling, logging of norms and "
            "zero_grad(set_to_none=False) do"
        )

    # The loop

    def _before_forward(self, *_: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if self._pending:
            what = "The model is called between backward and optimizer.step()"
            if self.is_stepping:
                self._refuse(
                    f"{what}, or optimizer.step() is left out.", "this call would see parameters of the next step"
                )
            self._note("the model is called between backward and optimizer.step(), or gradients accumulate")
            self._pending.clear()
        hooks: Any = optimizer._optimizer_step_pre_hooks  # an OrderedDict, seen in torch 2.9 to 2.15
        # The last hook before the step: hooks of the loop may read gradients.
        hooks.move_to_end(self._others[1].id)
        if not self.is_stepping and self.has_watched:
            self.on_ready()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Hook before a step. A closure runs backward within the step, so what has to be done before the step follows it."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._before_step(optimizer)
            return None

        def closed() -> Any:
            result = closure()
            self._before_step(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closed}
        return (args[0], closed, *args[2:]), kwargs

    def _before_step(self, optimizer: Optimizer) -> None:
        changed = self._pending and not _are_same(self._values, _values_of(optimizer))
        written = next((each for each, version in self._pending.items() if each._version != version), None)
        if not self.is_stepping:
            if changed:
                self._note("values of parameter groups change between backward and optimizer.step()")
            if written is not None:
                self._note("parameters change between backward and optimizer.step()")
            if getattr(optimizer, "grad_scale", None) is not None:
                self._note("a GradScaler scales gradients")
            if self._pending and any(
                each.grad is not None and not isinstance(each.grad, WatchedGradient) for each in self._pending
            ):
                self._note("the loop replaces gradients after backward")
            self._unwatch()
            return
        if changed:
            self._refuse(
                "Values of the optimizer's parameter groups (such as the learning rate) changed after backward.",
                "the parameters were stepped with the values that the groups had in backward",
            )
        if written is not None:
            self._refuse(
                f"{self._parameters[written]} was written between backward and optimizer.step().",
                "the optimizer has stepped it already, before this write",
            )
        for parameter, stand_in in self._stand_ins.items():
            if parameter in self._pending:
                if parameter.grad is not stand_in:
                    self._refuse(
                        f"The gradient of {self._parameters[parameter]} was removed or replaced after backward.",
                        "the optimizer has stepped the parameter already, with the gradient of backward",
                    )
                parameter.grad = None
            elif parameter.grad is stand_in:
                self._refuse(
                    f"optimizer.step() would use an old gradient of {self._parameters[parameter]} again.",
                    "that gradient was freed in the backward that it came from; zero_grad() was not called since",
                )

    def _step_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_stepping:
            for parameter in self._pending:
                if parameter.grad is None:
                    parameter.grad = self._stand_ins[parameter]
            if len(optimizer.state) != len(self._known):
                self._order_states(optimizer)
        elif self._pending:
            self._watched_steps += 1
            for parameter in self._pending:  # a loop may read gradients until it clears them
                if type(parameter.grad) is torch.Tensor and not self.reason:
                    parameter.grad = WatchedGradient.of(parameter.grad, self._note_use)
        self._pending.clear()

    def _loaded(self, optimizer: Optimizer) -> None:
        if self._pending and self.is_stepping:
            self._refuse(
                "load_state_dict() was called between backward and optimizer.step().",
                "the parameters were stepped with the state from before",
            )

    def _order_states(self, optimizer: Optimizer) -> None:
        """Put the new entries of the optimizer's state into the order of its groups, as a whole step makes them."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state and parameter not in self._known:
                    optimizer.state[parameter] = optimizer.state.pop(parameter)

    def _unwatch(self) -> None:
        for parameter in self._parameters:
            if isinstance(parameter.grad, WatchedGradient):
                parameter.grad = parameter.grad.plain()

    def _take_stand_ins(self) -> None:
        for parameter, stand_in in self._stand_ins.items():
            if parameter.grad is stand_in:
                parameter.grad = None

    def _refuse(self, found: str, why: str) -> NoReturn:
        raise PlanMismatch(found, why=f"the plan steps parameters in backward: {why}", next=NEXT)


def _values_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the values of each parameter group other than its parameters. A tensor is given with its version counter."""
    return [
        {
            key: (value, value._version) if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _are_same(one: Any, other: Any) -> bool:
    """Return True if two values of groups are equal, and tensors in them the same object."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return one is other or bool(one == other)
