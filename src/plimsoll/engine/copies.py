"""Tell a managed module from its copies, so that a copy runs with its own weights.

The function that replaces ``forward`` under a plan is in the module's instance dictionary, and a shallow copy of the module
(``copy.copy``, the replicas of ``nn.DataParallel``) copies that dictionary. Both modules then have the same replacement object.
So the replacement looks up which module it was called for: ``nn.Module.__call__`` has that module as ``self``.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
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

# Private names, seen in torch 2.9 to 2.15: the code that calls ``self.forward`` in a module's call. With hooks it is a function
# inside of ``_call_impl``; under torch.jit.trace it is ``_slow_forward``.
_CALLS = frozenset(
    {
        nn.Module._call_impl.__code__,
        nn.Module._slow_forward.__code__,
        *(part for part in nn.Module._call_impl.__code__.co_consts if isinstance(part, types.CodeType)),
    }
)
_WRAPPED = nn.Module._wrapped_call_impl.__code__
"""The code object of torch's function that calls ``_call_impl`` for a module without hooks."""


def calling_module(stand_in: object) -> nn.Module | None:
    """Return the module whose call is running now: the managed module or a shallow copy of it. Return ``None`` if forward was
    called directly, not through ``nn.Module.__call__``.

    ``stand_in`` is the object that replaces the forward of the module. It must be the caller of this function.
    """
    try:
        frame = sys._getframe(3)
    except ValueError:  # forward was called directly, at the top of a script
        return None
    # try this frame first: it has the fewest locals, and f_locals makes a dictionary of all locals
    if frame.f_code is not _WRAPPED:
        frame = sys._getframe(2)
        if frame.f_code not in _CALLS:
            return None
    found = frame.f_locals.get("self")
    return found if isinstance(found, nn.Module) and found.__dict__.get("forward") is stand_in else None


class CopiedForward:
    """Takes the place of Plimsoll's ``forward`` in a deep copy of a managed module. It runs the plain forward of the module's
    class.

    The object removes itself from the module at its first call, so that copies of the copy do not contain it.
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the plain forward, so that the pickle can be read without Plimsoll."""
        return _forward_of(self.__self__)


class ReplacedForward(abc.ABC):
    """Base class of objects that take the place of a module's ``forward`` while a plan is applied.

    ``install`` puts the object in place, ``remove`` takes it out. Deep copies and pickles of the module get its plain forward,
    because they are not managed.
    """

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module.__dict__.get("forward"), CopiedForward):
            del module.__dict__["forward"]  # a copy of a managed module that was not called yet
        self.module = module
        self.__wrapped__ = module.forward  # so that inspect.signature shows the module's own signature
        self._had_own = "forward" in module.__dict__
        # Look the forward up on the class in every call: the class may get another forward, and the module another class.
        self._original: Callable[..., Any] = module.forward if self._had_own else functools.partial(_run, module)
        self._is_removed = self._is_in_place = False

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward in another way, and return its output."""

    def install(self) -> None:
        """Replace the module's forward by this object. If the user has put a wrapper of their own around it, that wrapper stays
        in place and calls this one.
        """
        if not (self._is_in_place and "forward" in self.module.__dict__):
            self.module.forward = self
        self._is_removed, self._is_in_place = False, True

    def remove(self) -> None:
        """Restore the module's own forward. If the user has put a wrapper of their own around this one, both stay, and this
        wrapper only passes calls through.
        """
        self._is_removed = True
        if self.module.__dict__.get("forward") is self:
            self._leave(self.module)
            self._is_in_place = False

    def _leave(self, module: nn.Module) -> None:
        """Restore the original forward of this module, which is the managed module or a copy of it."""
        if isinstance(self._original, ReplacedForward) and module is not self.module:
            self._original._leave(module)  # also ours: it would compute with the managed module's weights
        elif self._had_own:
            module.forward = self._original
        else:
            del module.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copied module its plain forward, because copies of a module are not managed."""
        if self._had_own:
            return copy.deepcopy(self._original, memo)
        return CopiedForward(memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the module's own forward: a pickled module is not managed, and can be read without Plimsoll."""
        return (copy.copy, (self._original,)) if self._had_own else _forward_of(self.module)


def _forward_of(module: nn.Module) -> tuple[Any, ...]:
    """Return what a pickle stores to get the plain forward of a module's class.

    When ``forward`` is read from the module, its attributes are not set yet, so the method of its class is found.
    """
    return (getattr, (module, "forward"))


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


class ModelHook:
    """A hook that runs a function when the model is called to compute, but not when it is traced.

    Deep copies of the model get a hook that only removes itself, and pickles one that does nothing. Shallow copies share the
    hook, which runs only for copies that also share the submodules.
    """

    def __init__(self, model: nn.Module | None = None, run: Callable[..., None] | None = None) -> None:
        self._model = model
        self._run = run

    def __call__(self, caller: nn.Module, *arguments: Any) -> None:
        if self._model is None or self._run is None:
            _drop(caller, self)
            return
        if caller._modules is not self._model._modules:
            return
        if torch.compiler.is_compiling():
            refuse_compiler(caller)
        elif not is_being_traced() and not any(isinstance(leaf, Proxy) for leaf in tree_leaves(arguments)):
            self._run(caller, *arguments)

    @property
    def runner(self) -> object:
        """The object whose method this hook runs; ``None`` if the hook runs a plain function."""
        return self._run.__self__ if isinstance(self._run, types.MethodType) else None

    @property
    def __name__(self) -> str:
        """Raise Plimsoll's error for torch.jit.script.

        torch.jit.script reads this attribute before it looks for the source of the hook, which has none.
        """
        raise refused_script()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        return ModelHook()

    def __reduce__(self) -> tuple[Any, ...]:
        # A callable of Python's own that takes anything and does nothing, so that the pickle can be read without Plimsoll.
        return (getattr, (contextlib.nullcontext(), "__exit__"))


def _drop(module: nn.Module, hook: ModelHook) -> None:
    """Remove a hook from the tables of a module that was copied together with the hook."""
    before: list[dict[int, Any]] = [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs]
    after: list[dict[int, Any]] = [
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]
    for hooks, *flags in (before, after):
        for key in [key for key, each in hooks.items() if each is hook]:
            for table in (hooks, *flags):
                table.pop(key, None)
