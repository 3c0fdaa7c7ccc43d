"""Attaches a budget to a program that does not know of it: to each model that an optimizer trains, when it is first called.

``plimsoll run`` uses it. Until then ``torch.nn.Module.__call__`` is replaced by a function that looks at each outermost call.
It is restored when a model has the budget, and when the block ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from plimsoll.session.attach import attach
from plimsoll.session.attachment import Attachment
from plimsoll.session.messages import warn
from plimsoll.tracing.meters.memory import instances_of, storage_bytes

_MOST = 0.5
"""A called module gets the budget only if it has at least this share of the bytes of all parameters that an optimizer trains.

The loop may call a smaller part of the model by itself. A budget for that part alone would not bound the training.
"""


class AttachOnCall:
    """A context manager. Inside its block, ``budget`` is attached to the first module that is called to train and that an
    optimizer trains.

    Example:
        >>> with AttachOnCall("8GiB", {}) as found:  # doctest: +SKIP
        ...     main()
        >>> found.handle.plan  # doctest: +SKIP
    """

    def __init__(self, budget: int | str, options: Mapping[str, Any]) -> None:
        """Create it. ``options`` are those of ``plimsoll.attach``."""
        self.handle: Attachment | None = None
        """The handle of the attached model, or None if no trained model was called."""
        self._budget, self._options = budget, options
        self._undo = contextlib.ExitStack()
        self._depth = 0

    def __enter__(self) -> AttachOnCall:
        original = nn.Module.__call__

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self._inside(module):
                return original(module, *args, **kwargs)

        self._undo.callback(setattr, nn.Module, "__call__", original)
        nn.Module.__call__ = watched  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()
        if self.handle is not None:
            self.handle.remove()

    @contextlib.contextmanager
    def _inside(self, module: nn.Module) -> Iterator[None]:
        if not self._depth and self.handle is None and module.training and torch.is_grad_enabled():
            self._look_at(module)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _look_at(self, module: nn.Module) -> None:
        """Attach the budget to a module that is about to be called, if an optimizer trains most of its parameters in it."""
        own = {id(parameter) for parameter in module.parameters()}
        for optimizer in instances_of(torch.optim.Optimizer) if own else ():
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            inside = [parameter for parameter in trained if id(parameter) in own]
            trained_bytes, inside_bytes = storage_bytes(trained), storage_bytes(inside)
            if inside and inside_bytes >= _MOST * trained_bytes:
                if inside_bytes < trained_bytes:
                    warn(
                        f"the budget is for {type(module).__name__}, which the program calls first. The optimizer also trains "
                        "parameters outside of it, and the memory of their training is not planned. Call plimsoll.attach in "
                        "the program to choose the module"
                    )
                self._undo.close()  # later calls are not watched
                self.handle = attach(module, self._budget, optimizer=_own(optimizer), **self._options)
                return


def _own(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer if its class belongs to torch, else None. An optimizer of another library may only wrap the real
    optimizer, so ``attach`` finds the real one and measures its state.
    """
    return optimizer if type(optimizer).__module__.startswith("torch.") else None
