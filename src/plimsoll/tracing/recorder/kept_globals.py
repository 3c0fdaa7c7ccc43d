"""Store what a model's code reaches by name outside of the model, and restore it later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from plimsoll.tracing.recorder.contents import is_of_user
from plimsoll.tracing.recorder.untouched import arguments_kept


@contextlib.contextmanager
def globals_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context manager that restores the global variables and the closures that methods of modules name.

    The contents of containers, objects, tensors and modules in them are restored too. Functions that the methods call by name
    count as well, if they are in the same file.
    """
    functions = _functions_of(modules)
    variables = [
        (function.__globals__, name, function.__globals__[name])
        for function in functions
        for name in function.__code__.co_names
        if name in function.__globals__ and not isinstance(function.__globals__[name], ModuleType | FunctionType | type)
    ]
    held = SimpleNamespace(values=[*functions, *(value for _, _, value in variables)])
    with arguments_kept(held):
        try:
            yield
        finally:
            for table, name, value in variables:
                if table.get(name) is not value:
                    table[name] = value


def _functions_of(modules: Iterable[nn.Module]) -> list[FunctionType]:
    """Return the methods of the classes of modules, and the functions of the same file that they call by name."""
    kinds = {base: None for module in modules for base in type(module).__mro__ if is_of_user(base)}
    waiting = [value for kind in kinds for value in vars(kind).values() if isinstance(value, FunctionType)]
    found: dict[Any, FunctionType] = {}
    while waiting:
        function = waiting.pop()
        if function.__code__ not in found:
            found[function.__code__] = function
            named = (function.__globals__.get(name) for name in function.__code__.co_names)
            waiting += [
                value for value in named if isinstance(value, FunctionType) and value.__module__ == function.__module__
            ]
    return list(found.values())
