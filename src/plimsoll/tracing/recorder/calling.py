"""How Plimsoll calls a model: arguments from a batch, a scalar loss from an output, and which module is running."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from plimsoll.errors import InvalidBatch, InvalidLoss, InvalidOption

Loss = Callable[[Any], torch.Tensor]
Context = Callable[[], contextlib.AbstractContextManager[object]]
"""Returns a new context before every step, to run the step in."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def split_batch(batch: Any) -> Call:
    """Positional and keyword arguments: a tensor is one argument, a tuple is positional, a mapping is keywords.

    Raises:
        InvalidBatch: anything else.
    """
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    raise InvalidBatch(
        f"The batch is a {type(batch).__name__}, which cannot be passed to the model.",
        why="a tensor is passed as one argument, a tuple as positional arguments, a dict as keyword arguments",
        next="pass a tensor, a tuple or a dict",
    )


def check_devices(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a batch if one of its tensors is on another device than all parameters."""
    homes = {parameter.device for parameter in model.parameters()}
    for tensor in call_tensors(args, kwargs):
        if tensor.device not in homes and tensor.dim() > 0:
            raise InvalidBatch(
                f"The batch is on {tensor.device}, but the model is on {', '.join(sorted(map(str, homes)))}.",
                why=f"its tensor of shape {tuple(tensor.shape)} is not on the device of the parameters",
                next=f"move the batch: batch.to({str(next(iter(homes)))!r})",
            )


def check_context(context: object) -> None:
    """Refuse a context object: every step needs a new context."""
    if not callable(context):
        raise InvalidOption(
            f"context= is a {type(context).__name__}, which cannot be called.",
            why="every step enters a new context, because many contexts cannot be entered twice",
            next="pass a function that makes the context, such as context=lambda: ..., or the class itself, such as "
            "context=torch.autograd.graph.save_on_cpu",
        )


def scalar_loss(output: Any, loss: Loss | None) -> torch.Tensor:
    """Return the scalar to call backward on: ``loss(output)``, else ``output.loss``, else the output itself.

    Raises:
        InvalidLoss: the loss is not a scalar, or does not depend on parameters.
    """
    if loss is not None:
        value = loss(output)
        origin = "loss= returned"
    else:
        own = own_loss(output)
        value = output if own is None else own
        origin = "the model returned"
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InvalidLoss(
            f"The step does not have a scalar loss: {origin} {shape}.",
            why="backward starts from a single number",
            next="pass loss=lambda output: ..., or put labels into the batch",
        )
    if not value.requires_grad:
        raise InvalidLoss(
            "The loss does not depend on any parameter.",
            why="it does not require a gradient: the model is frozen, or grad mode is off",
            next="unfreeze parameters, and call Plimsoll outside torch.no_grad()",
        )
    return value


def own_loss(output: Any) -> Any:
    """What a model's output holds under ``loss``, as a key or an attribute; ``None`` if it holds nothing there."""
    return output["loss"] if isinstance(output, Mapping) and "loss" in output else _given_by(output, "loss")


def name_of(function: Any) -> str:
    """The qualified name of a function. Other callables (an ``nn.Module``, a partial) are named by their class."""
    return _given_by(function, "__qualname__") or type(function).__qualname__


def _given_by(value: Any, attribute: str) -> Any:
    """An attribute of a user's object, ``None`` if it has none: its ``__getattr__`` may say so by raising anything."""
    try:
        return getattr(value, attribute, None)
    except Exception:  # noqa: BLE001 - code of the user's, which says in its own way that nothing is there
        return None


@contextlib.contextmanager
def after_autocast(device_type: str) -> Iterator[None]:
    """Run backward as in a loop that has left ``with torch.autocast(...)`` before it, with autocast's cache of casts
    cleared.
    """
    torch.clear_autocast_cache()
    with torch.autocast(device_type, enabled=False):
        yield


def refuse_foreign_graph(loss: torch.Tensor, first_node: int, *, has_met_threads: bool = False) -> None:
    """Refuse a loss whose backward continues into a graph from before the forward: it would free what that graph saved. Also
    refuse a graph that another thread made, because its operations were not recorded.

    ``first_node`` is the value of `sequence_number` before the forward. Each thread counts its own nodes, so
    ``has_met_threads`` says whether modules ran in another thread.

    Raises:
        InvalidBatch: the loss depends on an earlier graph that holds tensors for its backward, or on another thread's.
    """
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < first_node and any(name.startswith("_raw_saved") for name in dir(node)):
            if has_met_threads:
                raise InvalidBatch(
                    f"The step runs modules in other threads: one of these threads created {node.name()}.",
                    why="torch's hooks and modes apply to one thread, so a plan would not see what other threads save",
                    next="run the branches one after the other, or manage a part of the model that runs in one thread",
                )
            raise InvalidBatch(
                f"Backward reaches {node.name()} in the graph of an earlier call or of another thread.",
                why="planning runs backward once more, which would free tensors that your own backward needs in that graph",
                next="detach tensors that one call passes to the next (a cache, a hidden state), run everything in one thread, "
                "or attach to a module whose forward makes both graphs",
            )
        left.extend(following for following, _ in node.next_functions)


def call_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call in a fixed order (keywords sorted by name)."""
    tree = (args, {name: kwargs[name] for name in sorted(kwargs)})
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def count_items(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, str]:
    """Count the tokens of a batch of token ids, else the examples."""
    ids = kwargs.get("input_ids")
    if isinstance(ids, torch.Tensor):
        return ids.numel(), "tokens"
    first = next((tensor for tensor in call_tensors(args, kwargs) if tensor.dim()), None)
    if first is None:
        return 1, "examples"
    is_ids = first.dim() == 2 and not first.is_floating_point()
    return (first.numel(), "tokens") if is_ids else (first.shape[0], "examples")


def output_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors that a module returned, in a fixed order."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def flat_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of an op's arguments or results, which are nested in lists and tuples only."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [tensor for item in tree for tensor in flat_tensors(item)]
    return []


class ModuleStack(threading.local):
    """Tracks which submodule of ``root`` is running, by temporary forward hooks.

    ``path`` is relative to ``root`` (``""`` in the root itself). A module that is reachable under several names keeps its
    first. Every thread has its own stack, because other threads may call the same modules at the same time.
    """

    def __init__(
        self, threads: set[int] | None = None
    ) -> None:  # called in every thread, with the arguments of the first
        self._stack: list[str] = []
        self._threads = set[int]() if threads is None else threads
        """Every thread that ran modules, if the caller passes a set."""

    @property
    def has_met_threads(self) -> bool:
        """Whether modules have run in other threads as well."""
        return not self._threads <= {threading.get_ident()}

    @property
    def path(self) -> str:
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def watch(self, root: nn.Module, prefix: str = "") -> Iterator[None]:
        """Follow the modules below ``root`` until the block ends. Every hook is removed, also after an error."""
        handles: list[Any] = []
        depth = len(self._stack)
        self._stack.append(prefix)
        try:
            for name, module in root.named_modules():
                # torch refuses hooks on scripted modules. Their ops are attributed to the enclosing module.
                if name and not isinstance(module, torch.jit.ScriptModule):
                    path = f"{prefix}.{name}" if prefix else name
                    handles.append(
                        module.register_forward_pre_hook(functools.partial(self._entering, path), prepend=True)
                    )
                    handles.append(module.register_forward_hook(self._leaving, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            del self._stack[depth:]

    def _entering(self, path: str, module: nn.Module, args: Any) -> None:
        self._threads.add(threading.get_ident())
        self._stack.append(path)

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        del self._stack[-1:]
