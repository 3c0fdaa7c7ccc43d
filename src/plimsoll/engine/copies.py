"""Tells a managed module from its copies, so that a copy runs its own weights, and a model's own calls from others.

What stands in for ``forward`` lies in the module's instance dictionary, and whoever copies that dictionary
(``copy.copy``, the replicas of ``nn.DataParallel``) copies it too. It is the same object in both, so it asks for whom it
is called: ``nn.Module.__call__`` has that module as ``self``.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy
from torch.utils._pytree import tree_leaves

from plimsoll.tracing.refusals import refuse_compiler, refused_script
from plimsoll.tracing.torch_internals import is_being_traced

# Private names, seen in torch 2.9 to 2.15: what runs ``self.forward`` inside of a module's call. With hooks it is a
# function inside of ``_call_impl``; under torch.jit.trace it is ``_slow_forward``.
_CALLS = frozenset(
    {
        nn.Module._call_impl.__code__,
        nn.Module._slow_forward.__code__,
        *(part for part in nn.Module._call_impl.__code__.co_consts if isinstance(part, types.CodeType)),
    }
)
_WRAPPED = nn.Module._wrapped_call_impl.__code__
"""What calls that, where the module has no hooks."""


def calling_module(stand_in: object) -> nn.Module | None:
    """The module whose call has led to the caller of this function, which is its forward; ``None`` where that is called by
    its name.
    """
    try:
        frame = sys._getframe(3)
    except ValueError:  # it is called by its name, at the top of a script
        return None
    if frame.f_code is not _WRAPPED:  # which has the fewest locals, and every look makes a dictionary of all of them
        frame = sys._getframe(2)
        if frame.f_code not in _CALLS:
            return None
    found = frame.f_locals.get("self")
    return found if isinstance(found, nn.Module) and found.__dict__.get("forward") is stand_in else None


class CopiedForward:
    """Stands in a deep copy, or in a loaded module, where the stand-in was: runs the plain forward of its class.

    It takes itself out at its first call, so that copies of the copy do not find it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.__self__ = module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        plain: Callable[..., Any] = types.MethodType(type(self.__self__).forward, self.__self__)
        return plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        module = calling_module(self) or self.__self__
        if module.__dict__.get("forward") is self:
            del module.__dict__["forward"]
        return type(module).forward(module, *args, **kwargs)


class ModelHook:
    """Runs something when the model is called to compute; not when it is traced.

    Copies and pickles of the model get a hook that does nothing. Shallow copies share the hook: it runs for those that
    share the submodules too.
    """

    def __init__(self, model: nn.Module | None = None, run: Callable[..., None] | None = None) -> None:
        self._model = model
        self._run = run

    def __call__(self, caller: nn.Module, *arguments: Any) -> None:
        if self._model is None or self._run is None or caller._modules is not self._model._modules:
            return
        if torch.compiler.is_compiling():
            refuse_compiler(caller)
        elif not is_being_traced() and not any(isinstance(leaf, Proxy) for leaf in tree_leaves(arguments)):
            self._run(caller, *arguments)

    @property
    def runner(self) -> object:
        """The object whose method it runs, if it is a method."""
        return self._run.__self__ if isinstance(self._run, types.MethodType) else None

    @property
    def __name__(self) -> str:
        """What torch.jit.script asks of a hook before it looks for its source, which there is none of."""
        raise refused_script()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        return ModelHook()

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        return (ModelHook, ())
