"""Puts a model and a batch back as they were after a step that does not count: gradients, buffers, flags, random state.

Planning, attaching and verifying run steps on the user's own model. What they leave behind is decided here: nothing.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import traceback
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from plimsoll.errors import PlimsollError
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.fsdp2 import KeptShards, every_parameter
from plimsoll.tracing.local_tensors import local_of
from plimsoll.tracing.recorder.storages import is_plain, same_contents
from plimsoll.tracing.zero import KeptGathering, is_gathered_by_zero

_OF_8_BITS = "bitsandbytes.autograd._functions"
_UNREAD = {"MatMul8bitLt": {"tensors": (None,) * 3, "tensor_states": (None,) * 2}, "MatMul8bitFp": {"A": None}}
"""What such a product keeps on ``ctx`` and does not read where the weight is frozen."""


@contextlib.contextmanager
def untouched(model: nn.Module, written: Collection[str] = ()) -> Iterator[None]:
    """Leave the model as it was: gradients, buffers, attributes, training flags and random states are put back at the end.

    A model under ``fully_shard`` is ready for its next step, also where this one failed on the way. Hooks on parameters (an
    optimizer that steps in backward) and reductions that are not torch's own do not run in the block. Gradients that exist
    are replaced by zeros of their shape while the block runs (so that accumulating into them costs what it will cost), and
    are never written. Of parameters those are put back that are known to be ``written`` by the step, by name, and those to
    which it gives other ``data``.
    """
    parameters = every_parameter(model)
    gradients = [parameter.grad for parameter in parameters]
    generators, state = RandomState(), KeptState(model)
    named = dict(inner_module(model).named_parameters())
    copies = [
        (local_of(named[name].detach()), local_of(named[name].detach()).clone()) for name in written if name in named
    ]
    aliases = [(each, each.data) for each in parameters if is_plain(each) and not is_gathered_by_zero(each)]
    shards, gathering = KeptShards(model), KeptGathering(inner_module(model))
    hooks = [(table, dict(table)) for table in (*filter(None, map(_hooks_of, parameters)), *gathering.hooks)]
    flags = [(module, module.training) for module in model.modules()]
    try:
        for table, _ in hooks:
            table.clear()
        for parameter in parameters:
            parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
        yield
    except PlimsollError as error:
        # Before 2.13 torch.utils.checkpoint lets go of its hooks only when the frame that failed goes.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        shards.put_back()
        gathering.put_back()
        for table, entries in hooks:
            table.update(entries)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for module, flag in flags:
            module.training = flag
        state.put_back()
        for parameter, data in aliases:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        for local, copy in copies:
            local.copy_(copy)
        generators.put_back()
        # The user's call would find weights that autocast has cast in the block, and run other ops than later calls.
        torch.clear_autocast_cache()


def _hooks_of(parameter: torch.Tensor) -> dict[int, Any] | None:
    """What runs when the gradient is complete: torch 2.9 to 2.15 hold it in this dict, which handles know too."""
    found: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return found


class RandomState:
    """The state of Python's, numpy's and torch's generators (of all CUDA devices that are in use)."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=True)
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back(self) -> None:
        """Go on from where the generators were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def is_current(self) -> bool:
        """Whether nobody has drawn since."""
        now = RandomState()
        return (
            now._python == self._python
            and all(np.array_equal(one, other) for one, other in zip(now._numpy, self._numpy, strict=True))
            and all(map(torch.equal, (now._torch, *now._cuda), (self._torch, *self._cuda)))
        )


class KeptState:
    """What a model's buffers and attributes are and hold now, to be put back later: also where a step binds others in their
    places, and what it has added since (a cache, a counter, a lazily made part).

    Of an attribute that is a tensor, a list, a set, a dictionary, a deque, an array or a generator the contents are put back
    too, and so is what lies in it, if it is one of these. What other objects hold inside is theirs. ``copy`` says where copies
    of tensors lie.
    """

    def __init__(self, model: nn.Module, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
        modules = list(model.modules())
        self._attributes = [(vars(module), attributes_of(module)) for module in modules]
        values = with_contents(value for _, kept in self._attributes for value in kept.values())
        in_buffers = {id(buffer) for buffer in model.buffers()}
        within = {str(key): value for key, value in values.items() if _is_kept(value) and key not in in_buffers}
        self._kept = [
            (held, name, tensor, copy(tensor.detach()), tensor._version)
            for held in (*(module._buffers for module in modules), within)
            for name, tensor in held.items()
            if tensor is not None
        ]
        self._names = [
            (held, frozenset(held))
            for module in modules
            for held in (module._parameters, module._buffers, module._modules)
        ]
        self._contents = [(value, contents_of(value)) for value in values.values() if type(value) in REFILLS]

    def put_back(self) -> None:
        """The same tensors and attributes in their places, with the contents that they had; tensors that nobody wrote are
        not touched.
        """
        for members, names in self._names:
            _drop(members, members.keys() - names)
        for held, kept in self._attributes:
            _drop(held, held.keys() - kept.keys() - _OF_MODULES)
            held.update(kept)
        for value, contents in self._contents:
            REFILLS[type(value)](value, contents)
        with torch.no_grad():
            for holder, name, buffer, copy, version in self._kept:
                if holder.get(name) is not buffer:
                    holder[name] = buffer
                # A write that no version counter shows (batch norm's) must not go unnoticed.
                if buffer._version != version or not (
                    buffer.is_meta or same_contents(local_of(buffer), local_of(copy).to(buffer.device))
                ):
                    local_of(buffer).copy_(local_of(copy))


class Unread:
    """Lets bitsandbytes' 8-bit products go of what they keep for the gradient of a frozen weight, until ``put_back``.

    They put their input on ``ctx`` (seen in 0.50), where no hook on saved tensors sees it, and read it for that gradient alone.
    """

    def __init__(self, model: nn.Module) -> None:
        is_used = any(type(parameter).__name__ == "Int8Params" for parameter in model.parameters())
        known = vars(sys.modules[_OF_8_BITS]) if is_used and _OF_8_BITS in sys.modules else {}
        self._found = [(known[name], known[name].forward, kept) for name, kept in _UNREAD.items() if name in known]
        self._forwards = [functools.partial(self._run, original, kept) for _, original, kept in self._found]
        for (function, _, _), forward in zip(self._found, self._forwards, strict=True):
            function.forward = staticmethod(forward)

    def _run(self, original: Any, kept: Any, ctx: Any, *given: Any) -> Any:
        output = original(ctx, *given)
        if self._found and not ctx.needs_input_grad[1]:
            vars(ctx).update(kept)
        return output

    def put_back(self) -> None:
        """Their forwards are as before; where somebody has wrapped ours since, it only steps aside."""
        for (function, original, _), forward in zip(self._found, self._forwards, strict=True):
            if function.forward is forward:
                function.forward = staticmethod(original)
        self._found, self._forwards = [], []


@contextlib.contextmanager
def forwards_kept(model: nn.Module) -> Iterator[None]:
    """Put back every ``forward`` that a call exchanges: a trainer's redirection lasts for one call, and that is the user's."""
    before = [(module.__dict__, module.__dict__.get("forward")) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, forward in before:
            if forward is not None:
                attributes["forward"] = forward
            else:
                attributes.pop("forward", None)


@contextlib.contextmanager
def arguments_kept(call: Any) -> Iterator[None]:
    """Put back what the objects among a call's arguments hold, such as a cache of a class of its own that forward extends.

    Their attributes are put back, and what is in lists, dictionaries and the like in these, through however many such objects.
    Tensors are not copied: what forward writes into one stays.
    """
    values = with_contents(tree_leaves(call), attributes_as_well=True).values()
    attributes = [(vars(value), dict(vars(value))) for value in values if _is_holder(value)]
    contents = [(value, contents_of(value)) for value in values if type(value) in REFILLS]
    try:
        yield
    finally:
        for held, kept in attributes:
            _drop(held, held.keys() - kept.keys())
            held.update(kept)
        for value, before in contents:
            REFILLS[type(value)](value, before)


def held_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors that objects of classes of somebody's own hold, such as a dataclass that a model returns."""
    values = with_contents(tree_leaves(output), attributes_as_well=True).values()
    return [value for value in values if isinstance(value, torch.Tensor)]


def _is_holder(value: Any) -> bool:
    """Whether it is an object of a class of somebody's own that is there to hold something: no tensor, module or function."""
    is_own = not type(value).__module__.startswith(("torch.", "numpy", "builtins"))
    return (
        is_own
        and hasattr(value, "__dict__")
        and not callable(value)
        and not isinstance(value, torch.Tensor | ModuleType)
    )


_OF_MODULES = frozenset({*vars(nn.Module()), "forward", "_compiled_call_impl"} - {"_non_persistent_buffers_set"})
"""What every module has: its parts are put back one by one, and hooks and wrappers by who has put them in."""


def _refill_list(value: list[Any], contents: list[Any]) -> None:
    value[:] = contents


def _refill(value: Any, contents: Any) -> None:
    value.clear()
    value.update(contents)


def _refill_deque(value: deque[Any], contents: deque[Any]) -> None:
    value.clear()
    value.extend(contents)


def _reseed(value: np.random.Generator, contents: Any) -> None:
    value.bit_generator.state = contents


REFILLS: Mapping[type, Callable[[Any, Any], object]] = MappingProxyType(
    {
        list: _refill_list,
        deque: _refill_deque,
        **dict.fromkeys((dict, OrderedDict, defaultdict, Counter, set), _refill),
        torch.Generator: torch.Generator.set_state,
        random.Random: random.Random.setstate,
        np.random.Generator: _reseed,
        np.ndarray: np.copyto,
    }
)
"""How the contents of an attribute are put back, by its very type: what subclasses do on a write is not known."""


def contents_of(value: Any) -> Any:
    """What ``REFILLS`` puts back later."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if isinstance(value, random.Random) else value.copy()


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What somebody has put on the module itself: neither its parts nor hooks."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


def with_contents(values: Iterable[Any], *, attributes_as_well: bool = False) -> dict[int, Any]:
    """Values and what lies in them, in however many lists, tuples, sets and dictionaries, each once, by ``id``; on request also
    in attributes of other objects.
    """
    found: dict[int, Any] = {}
    pending = list(values)
    while pending:
        value = pending.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if isinstance(value, tuple) or type(value) in (list, deque, set):
            pending.extend(value)
        elif isinstance(value, dict) and type(value) in REFILLS:
            pending.extend(value.values())
        elif isinstance(value, UserDict):
            pending.append(value.data)
        if attributes_as_well and _is_holder(value):
            pending.extend(vars(value).values())
    return found


def _is_kept(value: Any) -> bool:
    """Whether it is a tensor of the module's own, as metrics keep their states: no parameter, and nothing that forward made."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, nn.Parameter)
        and is_plain(value)
        and value.grad_fn is None
        and not value.is_inference()
    )


def _drop(held: dict[str, Any], names: Iterable[str]) -> None:
    for name in list(names):
        del held[name]


def private_copy(batch: Any) -> Any:
    """The batch on storages of its own, so that a model may write to its inputs; what shared a storage still does."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if not is_plain(tensor) or tensor.is_meta or not tensor.is_leaf:
            return tensor
        source = tensor.untyped_storage()
        if source._cdata not in storages:
            storages[source._cdata] = source.clone()
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        fresh.set_(storages[source._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
        return fresh.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, copy, batch)
