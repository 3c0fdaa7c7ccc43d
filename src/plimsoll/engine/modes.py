"""The torch modes that are active around a region (a module that the plan decides about): which they are, and how Plimsoll's
own mode sees the calls that they make.

A ``TorchFunctionMode`` may replace a call by other calls. Modes form a stack: torch asks the last mode first, and that mode's
calls go to the mode below. So `LowestMode` enters below all others and sees the calls that they make.
(``torch.set_default_device`` enters its mode in the same way.)

A ``TorchDispatchMode`` may replace an operation by others. A recording shows this: recipes do not repeat an operation that
gives other bits without the mode (see ``verifying``). Steady calls do not show it: if a mode changes after the recording, only
samples find the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from plimsoll.tracing.torch_internals import (
    are_overrides_on,
    count_dispatch_modes,
    count_function_modes,
    dispatch_mode_at,
    function_mode_at,
    pop_function_mode,
    push_function_mode,
)

_OBSERVERS = ("torch", "plimsoll")
"""Names of packages whose dispatch modes do not change numbers: such modes count, log and record."""

_PLAIN = (torch.Tensor, nn.Parameter)

Modes = tuple[type, ...]


def modes_around() -> Modes | None:
    """Return the types of all active function modes, and of the active dispatch modes from outside of torch.

    Return ``None`` if none of them is active. A recording is used only for calls under the same modes.
    """
    if not (count_function_modes() or count_dispatch_modes()):
        return None
    functions = [type(function_mode_at(place)) for place in range(count_function_modes())]
    return (*functions, *_foreign_dispatch_modes()) or None


def _foreign_dispatch_modes() -> list[type]:
    found = [type(dispatch_mode_at(place)) for place in range(count_dispatch_modes())]
    return [kind for kind in found if kind.__module__.partition(".")[0] not in _OBSERVERS]


def may_change_numbers() -> bool:
    """Return whether a dispatch mode is active that may replace ops by others, so that results may differ."""
    return bool(count_dispatch_modes()) and bool(_foreign_dispatch_modes())


class LowestMode(TorchFunctionMode):
    """Base class of function modes that enter below all other active modes.

    Such a mode sees the torch calls that the other modes make, and the calls that tensor subclasses of the user make.
    """

    def call(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        """Call a torch function that this mode has intercepted, and return the result.

        If one of ``types`` (tensor subclasses) overrides the function, the mode also sees the calls that the override makes.
        """
        kinds = (
            [kind for kind in types if kind not in _PLAIN] if types else ()
        )  # for an attribute, types has the type of any tensor
        if kinds and are_overrides_on():
            with self:
                for kind in kinds:
                    result = kind.__torch_function__(func, types, args, kwargs or {})
                    if result is not NotImplemented:
                        return result
        return func(*args, **kwargs) if kwargs else func(*args)

    def __enter__(self) -> Any:
        above = [pop_function_mode() for _ in range(count_function_modes())]
        push_function_mode(self)
        for mode in reversed(above):
            push_function_mode(mode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        others = [mode for _ in range(count_function_modes()) if (mode := pop_function_mode()) is not self]
        for mode in reversed(others):
            push_function_mode(mode)
