"""Keep and recompute what a plan of Plimsoll decided, with torch alone: a policy of selective activation checkpointing.

    import policy                # this file, whatever its name is
    undo = policy.apply(model)   # before the first training step; undo() restores the model

Every planned region runs under ``torch.utils.checkpoint``. Ops that the policy does not know (other kernels, a changed model)
are recomputed: that costs time, but never memory or correct gradients. The second run starts from the random states and module
attributes of the first one. If a number that an op gets differs nevertheless, backward raises. Not for compiled models.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

PLAN = ""
SAVED: tuple[dict[str, tuple[int, ...]], ...] = ()
"""Ops to save, as ``module::op#occurrence``, each with the indices of the outputs that the plan keeps."""
REGIONS: dict[str, dict[int, int]] = {}
"""Maps a module's path and the number of its call within one forward of the model to an index into ``SAVED``."""

_ATTENTION = re.compile(r"^_scaled_dot_product_(flash|efficient|cudnn|fused)_attention(_for_cpu|_overrideable)?$")
"""Matches the names of fused attention kernels. All of them are given one name, so that a plan from another device fits."""
_OF_MODULES = vars(nn.Module()).keys() - {"training"}
"""Attributes of every module that are not restored: tables of parameters, buffers, submodules and hooks."""
_SMALL = 0.05
"""A share of bytes. All outputs of an op are saved together or not at all. An op is saved if the outputs that the plan does not
keep add at most this share to the bytes that it keeps.
"""


def apply(model: nn.Module) -> Callable[[], None]:
    """Checkpoint each planned region of ``model`` as the plan says. Return a function that restores the model."""
    handles: list[Any] = []
    regions: list[_Region] = []

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for region in regions:
            vars(region.module).pop("forward", None)

    try:
        for path, calls in REGIONS.items():
            regions.append(_Region(model.get_submodule(path), calls, handles))
        handles.append(model.register_forward_pre_hook(_Begin(regions), prepend=True))
    except BaseException:
        undo()
        raise
    return undo


class _Begin:
    """A hook that counts the calls of all regions from 0 again. A copy of the model has copies of this hook and the regions."""

    def __init__(self, regions: list[_Region]) -> None:
        self._regions = regions

    def __call__(self, module: nn.Module, args: Any) -> None:
        for region in self._regions:
            region.count = 0


class _Region:
    """A wrapper that runs a module under checkpointing, and tracks which of its submodules is running."""

    def __init__(self, module: nn.Module, calls: Mapping[int, int], handles: list[Any]) -> None:
        if "forward" in vars(module):
            raise RuntimeError(
                f"{type(module).__name__}.forward is already replaced: apply the policy only once, before other patches"
            )
        self.module = module
        self.count = 0
        self.running = _Running()
        self._calls = calls
        for path, inner in module.named_modules():
            if path:
                enter = functools.partial(self.running.enter, path)
                handles.append(inner.register_forward_pre_hook(enter, prepend=True))
                handles.append(inner.register_forward_hook(self.running.leave, always_call=True))
        module.forward = self.forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # Not a stored method: a pickled one would be looked up in the unpickled module, and find this region's.
        return type(self.module).forward(self.module, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        call = self.count
        self.count += 1
        if call not in self._calls:
            return self._forward(*args, **kwargs)
        # torch checks that tensors among the positional arguments are not written before the region runs again.
        unchecked = _tensors([[each for each in args if not isinstance(each, torch.Tensor)], kwargs])
        make = functools.partial(self._contexts, SAVED[self._calls[call]], unchecked)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=make, **kwargs)

    def _contexts(
        self, saved: Mapping[str, tuple[int, ...]], inputs: list[torch.Tensor]
    ) -> tuple[AbstractContextManager[None], _Again]:
        policy = _Policy(self.running, saved)
        first, again = create_selective_checkpoint_contexts(policy)
        before = _Before(self.module, inputs)
        numbers = _Numbers(type(self.module).__name__)
        return _first(first, self, policy, before, numbers), _Again(again, before, numbers)


class _Running(threading.local):
    """The paths of the submodules that are running, the innermost one last, separately for each thread."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def enter(self, path: str, module: nn.Module, args: Any) -> None:
        self.paths.append(path)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del self.paths[-1:]

    def __reduce__(self) -> tuple[type[_Running], tuple[()]]:
        return _Running, ()  # copies of the model are not running


class _Policy:
    """Decides in forward which ops are saved, op by op, and repeats these decisions when the region runs again."""

    def __init__(self, running: _Running, saved: Mapping[str, tuple[int, ...]]) -> None:
        self._running = running
        self._wanted = saved
        self._calls: Counter[Any] = Counter()
        self._occurrences: Counter[str] = Counter()
        self._saved: set[Any] = set()
        self.has_batch_norm = False

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        number = self._calls[context.is_recompute, op]
        self._calls[context.is_recompute, op] += 1
        if not context.is_recompute and self._is_saved(op, args, kwargs, context.op_output):
            self._saved.add((op, number))
        return CheckpointPolicy.MUST_SAVE if (op, number) in self._saved else CheckpointPolicy.PREFER_RECOMPUTE

    def _is_saved(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        if not isinstance(op, torch._ops.OpOverload) or op.is_view:
            return False
        space, name = op._schema.name.split("::")
        self.has_batch_norm |= "batch_norm" in name
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors([args, kwargs])}
        outputs = _tensors(output)
        is_writing = any(map(_is_written, op._schema.arguments))
        if not is_writing and all(tensor.untyped_storage().data_ptr() in known for tensor in outputs):
            return False
        path = self._running.paths[-1] if self._running.paths else ""
        called = _ATTENTION.sub("scaled_dot_product_attention", name) if space == "aten" else f"{space}.{name}"
        stem = f"{path}::{called}"
        wanted = self._wanted.get(f"{stem}#{self._occurrences[stem]}", ())
        self._occurrences[stem] += 1
        # Do not save writes (their caller continues with the written tensor), random numbers (later draws would change) or
        # casts (autocast makes some of them only once).
        if not wanted or is_writing or name == "_to_copy" or _draws(op, args, kwargs):
            return False
        sizes = [tensor.untyped_storage().nbytes() for tensor in outputs]
        kept_bytes = sum(size for position, size in enumerate(sizes) if position in wanted)
        return sum(sizes) <= (1 + _SMALL) * kept_bytes


class _Numbers(TorchDispatchMode):
    """Raises an error if an op gets other numbers, texts or flags when the region runs again."""

    def __init__(self, region: str) -> None:
        super().__init__()
        self._region = region
        self._calls: Counter[Any] = Counter()
        self._first: dict[Any, str] = {}
        self._is_again = False

    def begin_again(self) -> None:
        self._calls.clear()
        self._is_again = True

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Autocast makes some casts only once. Wrappers gather parameters in either run, without gradients.
        if isinstance(op, torch._ops.OpOverload) and "_to_copy" not in op._schema.name and torch.is_grad_enabled():
            # A tensor that the op overwrites may hold any number.
            read = [arg for arg, each in zip(args, op._schema.arguments, strict=False) if not _is_written(each)]
            self._check(op, repr([_numbers_in(read), _numbers_in(kwargs)]))
        return op(*args, **kwargs)

    def _check(self, op: Any, numbers: str) -> None:
        place = (op, self._calls[op])
        self._calls[op] += 1
        if not self._is_again:
            self._first[place] = numbers
        elif self._first.get(place, numbers) != numbers:
            raise RuntimeError(
                f"{self._region} computes something else when it runs again in backward: {op} got {self._first[place]} in "
                f"forward, and gets {numbers} now. It reads a Python value that changes, so gradients would be wrong: "
                "remove the region from REGIONS"
            )


class _Before:
    """Random states, and attributes of a region's modules, before forward."""

    def __init__(self, module: nn.Module, inputs: list[torch.Tensor]) -> None:
        self._module = module
        self._inputs = [(each, each._version) for each in inputs if not each.is_inference()]
        self.random = _random_states()
        self.attributes: list[tuple[dict[str, Any], str, Any]] = []
        """Tables of attributes or buffers, each with a name and the value for a second run."""
        self._found: list[Any] = [(*each, _copy(each[2])) for each in self._held()]

    def keep_changed(self, *, is_written: bool) -> None:
        """Keep what a second run needs: attributes and tensors that forward has changed, numbers and texts. Free the rest.

        ``is_written``: assume that forward has written every tensor.
        """
        known = {(id(table), name) for table, name, _, _ in self._found}
        for table, name, value, copied in self._found:
            is_changed = table.get(name, _ABSENT) is not value
            if copied is not None and (is_changed or is_written or value._version != copied[1]):
                self.attributes.append((table, name, copied[0]))
            elif copied is None and (is_changed or isinstance(value, bool | int | float | complex | str)):
                self.attributes.append((table, name, value))
        self.attributes += [(table, name, _ABSENT) for table, name, _ in self._held() if (id(table), name) not in known]
        self._found.clear()

    def check_inputs(self) -> None:
        for tensor, version in self._inputs:
            if tensor._version != version:
                raise RuntimeError(
                    f"an argument of {type(self._module).__name__} was written after the call, so it cannot run again: "
                    f"pass a copy of this {list(tensor.shape)} tensor, or remove the region from REGIONS"
                )

    def _held(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        for owner in self._module.modules():
            yield from ((vars(owner), name, value) for name, value in vars(owner).items() if name not in _OF_MODULES)
            yield from ((owner._buffers, name, value) for name, value in owner._buffers.items())


_ABSENT: Any = object()


def _copy(value: Any) -> tuple[torch.Tensor, int] | None:
    """Return a copy of a tensor that forward may write in place, and the number of writes so far."""
    if not isinstance(value, torch.Tensor) or value.requires_grad or value.is_inference():
        return None
    return value.clone(), value._version


def _random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


@contextmanager
def _first(
    inner: AbstractContextManager[Any], region: _Region, policy: _Policy, before: _Before, numbers: _Numbers
) -> Iterator[None]:
    """A context around the forward of a region (a checkpointed module). It keeps in ``before`` what forward has changed."""
    region.running.paths.clear()
    try:
        with inner, numbers:
            yield
    finally:
        # Batch norm writes its statistics without changing the version.
        before.keep_changed(is_written=policy.has_batch_norm)


class _Again:
    """A context around the second run of a region, which starts from the attributes and random states of the first one.

    It reads and writes copies of the buffers.
    """

    def __init__(self, inner: AbstractContextManager[Any], before: _Before, numbers: _Numbers) -> None:
        self._inner = inner
        self._numbers = numbers
        self._before = before
        self._now: list[tuple[dict[str, Any], str, Any]] = []
        self._random_now: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        self._before.check_inputs()
        self._now = [(table, name, table.get(name, _ABSENT)) for table, name, _ in self._before.attributes]
        self._random_now = _random_states()
        _set(self._before.attributes)
        _set_random_states(self._before.random)
        self._inner.__enter__()
        self._numbers.begin_again()
        self._numbers.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._numbers.__exit__(*error)
        self._inner.__exit__(*error)
        _set(self._now)
        if self._random_now is not None:
            _set_random_states(self._random_now)
        self._now, self._random_now = [], None


def _set(attributes: list[tuple[dict[str, Any], str, Any]]) -> None:
    for table, name, value in attributes:
        if value is _ABSENT:
            table.pop(name, None)
        else:
            table[name] = value


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _numbers_in(tree: Any) -> Any:
    """Return an op's arguments with ``None`` in place of tensors. Torch passes a number to ``x + 2.0`` as a tensor."""
    if isinstance(tree, dict):
        return {name: _numbers_in(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_numbers_in(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return tree.item() if tree.dim() == 0 and type(tree) is torch.Tensor and tree.device.type == "cpu" else None
    return tree


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in an op's arguments or results."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _draws(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an op draws random numbers. Attention without dropout does not draw any."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = {each.name: each.default_value for each in op._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    return given.get("dropout_p") != 0.0
