"""Store the structure of modules and restore it later: class, attributes, parts and hooks, and attributes of parameters.

A model may register a hook in its first call and note that in a flag (transformers does so to collect hidden states). If a
trial step (run only to plan or verify) has set both the hook and the flag, both are restored. If only the flag were restored,
the next call would register the hook a second time.

Two things are not restored. The first are hooks of Plimsoll and of libraries that shard models: their owners note in another
place that these hooks exist, and remove them. The second is ``forward``, which plans exchange: see ``KeptForwards``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from plimsoll.tracing.fsdp2 import sharded_parameters
from plimsoll.tracing.recorder.contents import put_back_entries
from plimsoll.tracing.recorder.storages import is_plain
from plimsoll.tracing.zero import is_gathered_by_zero

EXCHANGED = frozenset({"forward", "_compiled_call_impl", "training"})
"""Names of attributes that trial steps exchange. The code that exchanges them restores them too."""
_MEMBERS = ("_parameters", "_buffers", "_modules")
_OF_MODULES = frozenset({*vars(nn.Module()), *EXCHANGED} - {"_non_persistent_buffers_set"})
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and name not in _MEMBERS)
_COMPANIONS = ("_with_kwargs", "_always_called")
"""Suffixes of the names of tables that say how the hooks in another table are called (seen in torch 2.9 to 2.13)."""
_WHERE_STEPS_ARE_TAKEN = "_post_accumulate_grad_hooks"
_OF_PARAMETERS = ("_backward_hooks", _WHERE_STEPS_ARE_TAKEN)
"""Names of the attributes where tensors hold their hooks: a dict or ``None`` (seen in torch 2.9 to 2.13)."""
_KEEP_ACCOUNT = ("plimsoll.", "torch.distributed.", "deepspeed.")


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that the user's code has set on a module.

    Submodules, parameters, buffers and hooks are left out.
    """
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


def held_by(module: nn.Module) -> list[Any]:
    """Return what the user's code has given to a module: the values of its attributes and its hooks.

    The attributes and the hooks of its parameters count too. Submodules are left out.
    """
    held = [*attributes_of(module).values()]
    tables = (getattr(module, name) for name in _HOOKS)
    held += [hook for table in tables if isinstance(table, dict) for hook in table.values()]
    for parameter in module._parameters.values():
        if parameter is not None:
            held += vars(parameter).values()
            held += [hook for _, table in _tables_of(parameter) for hook in (table or {}).values()]
    return held


class KeptModules:
    """Stores the current structure of a model. `put_back` restores it, with the same objects in the same order.

    ``exchanged`` are names of attributes that other code restores.
    """

    def __init__(self, model: nn.Module, exchanged: frozenset[str] = EXCHANGED) -> None:
        modules = list(model.modules())
        self._exchanged = exchanged
        self._classes = [(module, type(module)) for module in modules]
        self._attributes = [(vars(module), _without(vars(module), exchanged)) for module in modules]
        # FSDP2 and ZeRO-3 exchange parameters in every step and track which ones are in place.
        is_sharded = bool(sharded_parameters(model)) or any(map(is_gathered_by_zero, model.parameters()))
        self._added = [(table, frozenset(table)) for module in modules if is_sharded for table in (module._parameters,)]
        self._members = [
            (table, dict(table))
            for module in modules
            for table in (getattr(module, name) for name in _MEMBERS if not (is_sharded and name == "_parameters"))
            if isinstance(table, dict)  # TorchScript modules hold theirs in C++, where nothing can be added
        ]
        self._hooks = [
            {name: (getattr(module, name), dict(getattr(module, name))) for name in _HOOKS} for module in modules
        ]
        parameters = [each for each in model.parameters() if is_plain(each) and not is_gathered_by_zero(each)]
        self._marks = [(vars(parameter), dict(vars(parameter))) for parameter in parameters]
        self._of_parameters = [
            (each, name, table, dict(table or {})) for each in parameters for name, table in _tables_of(each)
        ]

    def put_back(self) -> None:
        """Restore the classes, attributes, parts and hooks that the modules had when this object was made."""
        for module, kind in self._classes:
            if type(module) is not kind:
                module.__class__ = kind
        for held, attributes in self._attributes:
            put_back_entries(held, attributes, self._exchanged)
        for parameters, names in self._added:
            for name in parameters.keys() - names:
                del parameters[name]
        for members, kept in self._members:
            _put_back_unless_same(members, kept)
        for tables in self._hooks:
            for name, (table, hooks) in tables.items():
                if not (table or hooks):  # nearly every table
                    continue
                main = next((name.removesuffix(end) for end in _COMPANIONS if name.endswith(end)), name)
                wanted = _hooks_to_be(table, hooks) if main == name else _within(tables[main][0], table, hooks)
                _put_back_unless_same(table, wanted)
        for held, marks in self._marks:
            put_back_entries(held, marks)
        for parameter, name, known, hooks in self._of_parameters:
            found: dict[int, Any] | None = getattr(parameter, name)
            wanted = _hooks_to_be(found or {}, hooks)
            if name == _WHERE_STEPS_ARE_TAKEN:  # ``untouched`` removes these inside its block and restores them
                wanted = {key: hook for key, hook in wanted.items() if key in (found or {})}
            if found is not known and not (known is None and wanted):
                setattr(parameter, name, known)
                found = known
            if found is not None:
                _put_back_unless_same(found, wanted)


class KeptForwards:
    """Remembers which modules have an instance attribute ``forward``, and its value. `put_back` restores these attributes."""

    def __init__(self, model: nn.Module) -> None:
        self._found = [(vars(module), vars(module).get("forward")) for module in model.modules()]

    def put_back(self) -> None:
        """Restore the same ``forward`` attributes, and remove ``forward`` from modules that did not have it."""
        for attributes, forward in self._found:
            if forward is not None:
                attributes["forward"] = forward
            else:
                attributes.pop("forward", None)


def _tables_of(parameter: torch.Tensor) -> Iterator[tuple[str, dict[int, Any] | None]]:
    for name in _OF_PARAMETERS:
        yield name, getattr(parameter, name)


def _without(held: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in held.items() if name not in names}


def _put_back_unless_same(table: dict[Any, Any], wanted: Mapping[Any, Any]) -> None:
    """Make a dictionary hold the entries of ``wanted`` in the same order, unless it does so already.

    It is changed in place, because handles of hooks refer to it. Writes are avoided, because compiled code checks for them.
    """
    if list(table) != list(wanted) or any(table[key] is not value for key, value in wanted.items()):
        table.clear()
        table.update(wanted)


def _hooks_to_be(now: Mapping[int, Any], kept: Mapping[int, Any]) -> dict[int, Any]:
    """Return the hooks that a table shall have after a trial step, as a mapping from id to hook.

    They are the hooks that were there before (``kept``). Two kinds of changes since then stay: hooks that their owners
    (libraries that keep a list of their hooks) have removed or added.
    """
    if now.keys() == kept.keys():
        return dict(kept)
    before: dict[int, Any] = {}
    after: dict[int, Any] = {}
    has_met = not kept
    for key, hook in now.items():
        has_met = has_met or key in kept
        if key not in kept and _keeps_account(hook):
            (after if has_met else before)[key] = hook
    stays = {key: hook for key, hook in kept.items() if key in now or not _keeps_account(hook)}
    return {**before, **stays, **after}


def _within(hooks: Mapping[int, Any], now: Mapping[int, Any], kept: Mapping[int, Any]) -> dict[int, Any]:
    """Return the entries of a table that says how hooks are called, but only for the hooks that exist (the keys of
    ``hooks``).
    """
    return {key: value for key, value in {**kept, **now, **kept}.items() if key in hooks}


def _keeps_account(hook: Any) -> bool:
    """Return True if the hook belongs to a library that itself keeps a list of its hooks and removes them."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.".startswith(_KEEP_ACCOUNT)
