"""Restore a model and a batch after a trial step, which must leave nothing behind: gradients, buffers, flags, random state.

Planning, attaching and verifying run such steps on the user's own model.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from plimsoll.errors import PlimsollError
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.fsdp2 import KeptShards, every_parameter
from plimsoll.tracing.local_tensors import gradient_of, local_of, parts_of_sparse, version_of
from plimsoll.tracing.recorder.calling import Loss, output_tensors, unwrapped
from plimsoll.tracing.recorder.contents import KeptValues, is_holder, lent, with_contents
from plimsoll.tracing.recorder.foreign_leaves import gradients_aside
from plimsoll.tracing.recorder.kept_classes import KeptClasses
from plimsoll.tracing.recorder.kept_modules import KeptForwards, KeptModules, held_by
from plimsoll.tracing.recorder.storages import Geometry, is_plain, same_contents
from plimsoll.tracing.torch_internals import parametrized_tensors, preserving_versions, without_torch_function
from plimsoll.tracing.zero import KeptGathering, is_gathered_by_zero

_OF_8_BITS = "bitsandbytes.autograd._functions"
_UNREAD = {"MatMul8bitLt": {"tensors": (None,) * 3, "tensor_states": (None,) * 2}, "MatMul8bitFp": {"A": None}}
"""A mapping from the name of an 8-bit product of bitsandbytes to the attributes that it stores on ``ctx``, with empty values to
put in their place.

If the weight is frozen, the product does not read them.
"""


@contextlib.contextmanager
def untouched(model: nn.Module, written: Collection[str] = ()) -> Iterator[None]:
    """Return a context manager that restores gradients, modules with everything that they hold, and random states at its end.

    A model under ``fully_shard`` is made ready for its next step, even if this step failed. Hooks on parameters (an optimizer
    that steps in backward) and reductions that are not torch's own do not run in the block. Existing gradients are replaced by
    zeros of their shape inside the block, so that accumulating into them has its usual cost, and are never written. Parameters
    are restored if the step is known to write them (``written``, by name), or if it replaces their ``data``.
    """
    parameters = every_parameter(model)
    generators, state = RandomState(), KeptState(model)
    named = dict(inner_module(model).named_parameters())
    copies = [
        (local_of(named[name].detach()), local_of(named[name].detach()).clone()) for name in written if name in named
    ]
    aliases = [(each, each.data) for each in parameters if is_plain(each) and not is_gathered_by_zero(each)]
    shards, gathering = KeptShards(model), KeptGathering(inner_module(model))
    flags = [(module, module.training) for module in model.modules()]
    forwards = KeptForwards(model)
    with gradients_aside(parameters, gathering.hooks):
        try:
            state.lend_iterators()
            yield
        except PlimsollError as error:
            # Before 2.13 torch.utils.checkpoint frees its hooks only together with the frame that failed.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            shards.put_back()
            gathering.put_back()
            for module, flag in flags:
                module.training = flag
            forwards.put_back()
            state.put_back()
            for parameter, data in aliases:
                if parameter.data_ptr() != data.data_ptr() or Geometry.of(parameter) != Geometry.of(data):
                    parameter.data = data
            for local, copy in copies:
                # Through `.data`: a graph that waits for its backward must not take this for a write.
                local.data.copy_(copy)
            generators.put_back()
            # Otherwise the user's call would find weights that autocast cast in the block, and run other ops than later calls.
            torch.clear_autocast_cache()


class RandomState:
    """Remembers the states of the random generators of Python, numpy and torch (for CUDA, of all devices that are in use).
    `put_back` restores them.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=True)
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back(self) -> None:
        """Restore the states that the generators had when this object was made."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def is_current(self) -> bool:
        """Return True if no generator has drawn a number since this object was made."""
        now = RandomState()
        return self.is_current_on_host() and all(map(torch.equal, (now._torch, *now._cuda), (self._torch, *self._cuda)))

    def is_current_on_host(self) -> bool:
        """Return True if the generators of Python and numpy have not been used since this object was made."""
        numpy: Any = np.random.get_state(legacy=True)
        is_same = all(np.array_equal(one, other) for one, other in zip(numpy, self._numpy, strict=True))
        return is_same and random.getstate() == self._python


class KeptMemory:
    """Remembers which memory a tensor has: its storage, shape, strides and offset. `put_back` restores these, and not the
    numbers.

    A step may resize a buffer (torch's observers of channels do so in their first call), or give it other memory by ``.data``
    or ``set_``.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = local_of(tensor)
        self._alias = self._tensor.data if is_plain(self._tensor) else None
        self._bytes = 0 if self._alias is None else self._alias.untyped_storage().nbytes()

    def put_back(self) -> None:
        """Give the tensor the memory that it had when this object was made."""
        tensor, alias = self._tensor, self._alias
        if alias is None:
            return
        storage = alias.untyped_storage()
        if storage.nbytes() < self._bytes:
            storage.resize_(self._bytes)
        has_moved = tensor.untyped_storage()._cdata != storage._cdata
        if has_moved or Geometry.of(tensor) != Geometry.of(alias):
            tensor.data = alias


class KeptTensors:
    """Remembers copies of the contents of tensors. `put_back` writes the copies back into those tensors that were written
    since.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    ) -> None:
        self._kept = [(tensor, KeptMemory(tensor), copy(tensor.detach()), version_of(tensor)) for tensor in tensors]

    def put_back(self) -> None:
        """Write the numbers back into the tensors that were written since this object was made."""
        with torch.no_grad():
            for tensor, memory, copy, version in self._kept:
                memory.put_back()
                # Compare contents too: batch norm writes without bumping the version counter.
                if version_of(tensor) != version or not (
                    tensor.is_meta or same_contents(local_of(tensor), local_of(copy).to(tensor.device))
                ):
                    local = local_of(tensor)
                    # A graph that waits for its backward may have saved the tensor, as batch norm saves its averages. Writing
                    # back what the graph knows must not look like a new value.
                    with preserving_versions((local,)):
                        local.copy_(local_of(copy))


class KeptState:
    """Remembers the state of a model's modules, and restores it later: classes, attributes, parts, hooks, buffers.

    The state is restored even if a step replaces these objects, and additions (a cache, a counter, a lazily made part or hook)
    are removed. If an attribute or a hook is or holds a list, a set, a dictionary, a deque, an array, a random generator or an
    object of the user's class, its contents are restored too, with the tensors and containers inside. A module in there, such
    as a teacher in a list, is restored like the model's own modules, with its parameters and their gradients.

    ``copy`` decides where copies of tensors are stored.
    """

    def __init__(self, model: nn.Module, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
        own = list(model.modules())
        trained = set(map(id, model.parameters()))
        hidden, self._classes, values = _reached([value for module in own for value in held_by(module)], own, trained)
        self._modules = (KeptModules(model), KeptModules(nn.ModuleList(hidden), frozenset()))
        self._parametrized = dict(parametrized_tensors())
        self._tables = [vars(module) for module in (*own, *hidden)]
        self._contents = KeptValues([*values.values(), *own, *hidden])
        parameters = [each for module in hidden for each in module._parameters.values() if each is not None]
        # A hand-written backward may add to the gradients of tensors that are attributes and not parameters.
        parameters += [each for key, each in values.items() if key not in trained and _is_trained(each)]
        self._gradients = [(parameter, gradient_of(parameter)) for parameter in parameters]
        weights = set().union(*(_memory_of(each) for each in model.parameters() if is_plain(each)))
        buffers = [each for module in (*own, *hidden) for each in module._buffers.values() if each is not None]
        gradients = (gradient for _, gradient in self._gradients if gradient is not None)
        candidates = {id(each): each for each in (*values.values(), *parameters, *gradients)}
        tensors = {
            key: each for key, each in candidates.items() if _is_kept(each) and weights.isdisjoint(_memory_of(each))
        }
        self._tensors = KeptTensors(({id(buffer): buffer for buffer in buffers} | tensors).values(), copy)

    def put_back(self) -> None:
        """Restore the same tensors and attributes with their contents. Tensors that were not written since are not touched."""
        parametrized_tensors().clear()
        parametrized_tensors().update(self._parametrized)
        for modules in self._modules:
            modules.put_back()
        for classes in self._classes:
            classes.put_back()
        self._contents.put_back()
        for parameter, gradient in self._gradients:
            if gradient_of(parameter) is not gradient:
                parameter.grad = gradient
        self._tensors.put_back()

    def lend_iterators(self) -> None:
        """Replace the iterators that the model holds, so that a trial step (run only to plan or verify) cannot advance them.
        `put_back` restores the originals.
        """
        # A weight that `parametrize.cached` keeps from a trial step would belong to the trial's graph.
        parametrized_tensors().clear()
        self._contents.lend(*self._tables)


class Unread:
    """Makes 8-bit products of bitsandbytes free tensors that they would hold for backward although it does not read them, until
    `put_back`.

    These products store their input on ``ctx`` (seen in 0.50), where hooks on saved tensors do not see the input. They read the
    input only for the gradient of the weight, which a frozen weight does not have.
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
        """Restore the forwards of these products. If other code has wrapped the forward that this object had set, that forward
        stays but only passes calls on.
        """
        for (function, original, _), forward in zip(self._found, self._forwards, strict=True):
            if function.forward is forward:
                function.forward = staticmethod(original)
        self._found, self._forwards = [], []


@contextlib.contextmanager
def forwards_kept(model: nn.Module) -> Iterator[None]:
    """Return a context manager. At its end, each module has the attribute ``forward`` that it had at the beginning.

    A trainer redirects ``forward`` for one call, and this one call must be the user's.
    """
    forwards = KeptForwards(model)
    try:
        yield
    finally:
        forwards.put_back()


@contextlib.contextmanager
def arguments_kept(call: Any) -> Iterator[None]:
    """Return a context manager that restores what objects among a call's arguments hold, such as a cache that forward extends.

    Attributes of objects are restored, with lists, dictionaries and other containers in them, to any depth, and the numbers of
    tensors in them. A tensor that is itself an argument is not restored: see ``private_copy``.
    """
    leaves = tree_leaves(call)
    arguments = set(map(id, leaves))
    modules, _, values = _reached((*leaves, call), (), set())  # the call too: leaves are not the keys of dictionaries
    structure = KeptModules(nn.ModuleList(modules), frozenset())
    kept = KeptValues([*values.values(), *modules])
    # Forward does not write to parameters of other modules, nor to those that an optimizer trains: copies would be large.
    beside = arguments | {id(each) for module in modules for each in module.parameters()} | _optimized(values.values())
    found = [each for key, each in values.items() if key not in beside]
    gradients = [(each, each.grad) for each in found if _is_trained(each)]
    buffers = (each for module in modules for each in module._buffers.values() if each is not None)
    written = (*filter(_is_kept, found), *buffers, *(gradient for _, gradient in gradients if gradient is not None))
    tensors = KeptTensors({id(each): each for each in written}.values())
    try:
        kept.lend()
        yield
    finally:
        structure.put_back()
        kept.put_back()
        for leaf, gradient in gradients:
            leaf.grad = gradient
        tensors.put_back()


@contextlib.contextmanager
def optimizers_kept() -> Iterator[None]:
    """Return a context manager that undoes the steps of optimizers in its block, wherever these optimizers are held.

    A block that trains itself steps in forward (Forward-Forward, a probe that is trained along). Its state is copied only when
    such a step comes: copies of all state would be as large as two models.
    """
    kept: dict[Optimizer, tuple[KeptValues, KeptTensors]] = {}

    def keep(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in kept:
            values = with_contents([optimizer.state, optimizer.param_groups]).values()
            kept[optimizer] = KeptValues(values), KeptTensors(filter(_is_kept, values))

    hook = register_optimizer_step_pre_hook(keep)
    try:
        yield
    finally:
        hook.remove()
        for contents, tensors in kept.values():
            contents.put_back()
            tensors.put_back()


@contextlib.contextmanager
def side_effects_kept(call: Any, loss: Loss | None = None) -> Iterator[None]:
    """Return a context manager for a trial step that undoes what the step changes outside of the model: the contents of objects
    among a call's arguments and of the loss, and the steps of optimizers.
    """
    with optimizers_kept(), arguments_kept((call, unwrapped(loss))):
        yield


def _optimized(values: Iterable[Any]) -> set[int]:
    """Return the ``id`` of the parameters of all optimizers among the values."""
    optimizers = [each for each in values if isinstance(each, Optimizer) and "param_groups" in vars(each)]
    return {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}


def returned_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors that a model returned.

    If pytrees show no tensors, look into objects of the user's classes too (a dataclass).
    """
    if tensors := output_tensors(output):
        return tensors
    values = with_contents(tree_leaves(output), attributes_as_well=True).values()
    return [value for value in values if isinstance(value, torch.Tensor)]


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad


def _is_kept(value: Any) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor that a module itself holds, such as a metric's state. Tensors that forward made are excluded."""
    return (
        isinstance(value, torch.Tensor)
        and (is_plain(value) or len(parts_of_sparse(value)) > 0)
        and value.grad_fn is None
        and not value.is_inference()
    )


def _reached(
    held: Iterable[Any], known: Iterable[nn.Module], trained: Collection[int]
) -> tuple[list[nn.Module], list[KeptClasses], dict[int, Any]]:
    """Follow attributes and containers from the objects ``held``, to any depth. Return the ``nn.Module``s that are found
    (without ``known`` ones), the attributes of the user's classes that are found, and all values, by ``id``.

    An optimizer's state is among the values if it trains none of the parameters ``trained`` (their ``id``).
    """
    modules: list[nn.Module] = []
    classes: list[KeptClasses] = []
    values: dict[int, Any] = {}
    seen, pending = {id(module) for module in known}, list(known)
    held = list(held)
    while True:
        found = with_contents(held, attributes_as_well=True)
        classes.append(KeptClasses([*pending, *(value for value in found.values() if is_holder(value))]))
        found |= with_contents(classes[-1].values, attributes_as_well=True)
        for value in list(found.values()):
            if isinstance(value, Optimizer) and "param_groups" in vars(value):
                own = {id(parameter) for group in value.param_groups for parameter in group["params"]}
                if own.isdisjoint(trained):
                    found |= with_contents([value.state, value.param_groups])
                else:  # the groups' own entries, such as the learning rate: weights of another model would be copied
                    found |= {id(each): each for each in (value.param_groups, *value.param_groups)}
        values |= found
        inner = (each for value in found.values() if isinstance(value, nn.Module) for each in value.modules())
        pending = list({id(each): each for each in inner if id(each) not in seen}.values())
        if not pending:
            return modules, classes, values
        modules += pending
        seen.update(map(id, pending))
        held = [value for module in pending for value in held_by(module)]


def _memory_of(tensor: torch.Tensor) -> set[int]:
    """Return the addresses of the storages behind a tensor.

    A sparse tensor has one for each of its indices and for its values.
    """
    return {part.untyped_storage()._cdata for part in parts_of_sparse(tensor) or (tensor,)}


def private_copy(batch: Any) -> Any:
    """Return a copy of the batch with its own storages, so that a model may write to its inputs. Shared storages stay shared.

    A step may advance iterators of the copy, because they are replaced. A tensor keeps its class (torchvision's ``Image``,
    MONAI's ``MetaTensor``), and gets copies of its attributes.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta or not tensor.is_leaf:
            return tensor
        if parts_of_sparse(tensor):
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if not is_plain(tensor):
            return tensor
        source = tensor.untyped_storage()
        if source._cdata not in storages:
            storages[source._cdata] = source.clone()
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        fresh.set_(storages[source._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
        kind = type(tensor)
        if kind not in (torch.Tensor, nn.Parameter):
            with without_torch_function():
                fresh = fresh.as_subclass(kind)
        if attributes := vars(tensor):
            vars(fresh).update(private_copy(attributes))
        return fresh.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, copy, lent(batch))
