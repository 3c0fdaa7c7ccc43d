"""Keep and recompute what a plan of Plimsoll decided, with torch alone: a policy of selective activation checkpointing.

    import policy                # this file, whatever its name is
    undo = policy.apply(model)   # before the first training step; undo() restores the model

Every planned region runs under ``torch.utils.checkpoint``. Ops that the policy does not know (other kernels, a changed model)
are recomputed: that costs time, but never memory or correct gradients. Not for compiled models.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

PLAN = ""
SAVED: tuple[dict[str, tuple[int, ...]], ...] = ()
"""Ops to save, as ``module::op#occurrence``, each with the indices of the outputs that the plan keeps."""
REGIONS: dict[str, dict[int, int]] = {}
"""Maps a module's path and the number of its call within one forward of the model to an index into ``SAVED``."""

_ATTENTION = re.compile(r"^_scaled_dot_product_(flash|efficient|cudnn|fused)_attention(_for_cpu|_overrideable)?$")
"""Matches the names of fused attention kernels. All of them are given one name, so that a plan from another device fits."""
_Place = tuple[nn.Module, str]
_SMALL = 0.05
"""A share of bytes. All outputs of an op are saved together or not at all. An op is saved if the outputs that the plan does not
keep add at most this share to the bytes that it keeps.
"""


def apply(model: nn.Module) -> Callable[[], None]:
    """Checkpoint each planned region of ``model`` as the plan says. Return a function that restores the model."""
    handles: list[Any] = []
    regions = [_Region(model.get_submodule(path), calls, handles) for path, calls in REGIONS.items()]

    def begin(module: nn.Module, args: Any) -> None:
        for region in regions:
            region.count = 0

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for region in regions:
            vars(region.module).pop("forward", None)

    handles.append(model.register_forward_pre_hook(begin, prepend=True))
    return undo


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
        self._forward = module.forward
        for path, inner in module.named_modules():
            if path:
                enter = functools.partial(self.running.enter, path)
                handles.append(inner.register_forward_pre_hook(enter, prepend=True))
                handles.append(inner.register_forward_hook(self.running.leave, always_call=True))
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        call = self.count
        self.count += 1
        if call not in self._calls:
            return self._forward(*args, **kwargs)
        make = functools.partial(self._contexts, SAVED[self._calls[call]])
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=make, **kwargs)

    def _contexts(self, saved: Mapping[str, tuple[int, ...]]) -> tuple[AbstractContextManager[None], _Again]:
        policy = _Policy(self.running, saved)
        first, again = create_selective_checkpoint_contexts(policy)
        buffers: dict[_Place, torch.Tensor] = {}
        return _first(first, self, policy, buffers), _Again(again, buffers)


class _Running(threading.local):
    """The paths of the submodules that are running, the innermost one last, separately for each thread."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def enter(self, path: str, module: nn.Module, args: Any) -> None:
        self.paths.append(path)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del self.paths[-1:]


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
        is_writing = any(each.alias_info is not None and each.alias_info.is_write for each in op._schema.arguments)
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


@contextmanager
def _first(
    inner: AbstractContextManager[Any], region: _Region, policy: _Policy, buffers: dict[_Place, torch.Tensor]
) -> Iterator[None]:
    """A context around the forward of a region (a checkpointed module). It stores the contents that buffers had before forward
    wrote to them.
    """
    before: dict[_Place, tuple[torch.Tensor, torch.Tensor, int]] = {}
    for owner in region.module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            before[owner, name] = (buffer, buffer.clone(), buffer._version)
    region.running.paths.clear()
    try:
        with inner:
            yield
    finally:
        for (owner, name), (buffer, copy, version) in before.items():
            is_same = owner.get_buffer(name) is buffer and buffer._version == version
            if not is_same or policy.has_batch_norm:  # batch norm writes without changing the version
                buffers[owner, name] = copy


class _Again:
    """A context around the second run of a region.

    The region reads and writes copies of the buffers, with their earlier contents.
    """

    def __init__(self, inner: AbstractContextManager[Any], buffers: dict[_Place, torch.Tensor]) -> None:
        self._inner = inner
        self._buffers = buffers
        self._now: dict[_Place, torch.Tensor] = {}

    def __enter__(self) -> None:
        for (owner, name), copy in self._buffers.items():
            self._now[owner, name] = owner.get_buffer(name)
            setattr(owner, name, copy)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for (owner, name), buffer in self._now.items():
            setattr(owner, name, buffer)
        self._now.clear()


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
