"""Call a model in a training step: make arguments from a batch and a scalar loss from an output, and track which module
runs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from plimsoll.errors import InvalidBatch, InvalidLoss, InvalidOption

Loss = Callable[[Any], torch.Tensor]
Context = Callable[[], contextlib.AbstractContextManager[object]]
"""A function that returns a new context manager before each step. The step runs inside it."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call: a pair of a tuple of positional arguments and a dictionary of keyword arguments."""


def split_batch(batch: Any) -> Call:
    """Return the arguments for the model's call, made from a batch. A tensor becomes the only argument, a tuple the positional
    arguments, and a mapping the keyword arguments.

    Raises:
        InvalidBatch: the batch is of another type.
    """
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    raise InvalidBatch(
        f"The batch has the type {type(batch).__name__}, which cannot be passed to the model.",
        why="a tensor is passed as one argument, a tuple as positional arguments, a dict as keyword arguments",
        next="pass a tensor, a tuple or a dict",
    )


def check_devices(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``InvalidBatch`` if a tensor of the batch is on another device than all parameters. Scalars are accepted."""
    homes = {parameter.device for parameter in model.parameters()}
    for tensor in call_tensors(args, kwargs):
        if tensor.device not in homes and tensor.dim() > 0:
            raise InvalidBatch(
                f"The batch is on {tensor.device}, but the model is on {', '.join(sorted(map(str, homes)))}.",
                why=f"its tensor of shape {tuple(tensor.shape)} is not on the device of the parameters",
                next=f"move the batch: batch.to({str(next(iter(homes)))!r})",
            )


def check_context(context: object) -> None:
    """Raise ``InvalidOption`` if this is a context object instead of a function, because each step needs a new context."""
    if not callable(context):
        raise InvalidOption(
            f"context= has the type {type(context).__name__}, which cannot be called.",
            why="every step enters a new context, because many contexts cannot be entered twice",
            next="pass a function that makes the context, such as context=lambda: ..., or the class itself, such as "
            "context=torch.autograd.graph.save_on_cpu",
        )


def scalar_loss(output: Any, loss: Loss | None) -> torch.Tensor:
    """Return the scalar to call backward on. It is ``loss(output)`` if there is a loss function, else ``output.loss`` if the
    output has a loss, else the output itself.

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


def unwrapped(loss: Loss | None) -> Any:
    """Return the user's loss, which Plimsoll may have wrapped to explain its errors."""
    return getattr(loss, "__wrapped__", loss)


def own_loss(output: Any) -> Any:
    """Return what a model's output holds under ``loss``, as a key or an attribute, or ``None`` if it does not have such an
    entry.
    """
    return output["loss"] if isinstance(output, Mapping) and "loss" in output else _given_by(output, "loss")


def name_of(function: Any) -> str:
    """Return the qualified name of a function. Other callables (an ``nn.Module``, a partial) are named by their class."""
    return _given_by(function, "__qualname__") or type(function).__qualname__


def _given_by(value: Any, attribute: str) -> Any:
    """Return an attribute of an object of the user, or ``None`` if reading the attribute fails.

    An object's ``__getattr__`` may raise any exception to say that the attribute does not exist.
    """
    try:
        return getattr(value, attribute, None)
    except Exception:  # noqa: BLE001 - code of the user's, which says in its own way that nothing is there
        return None


@contextlib.contextmanager
def after_autocast(device_type: str) -> Iterator[None]:
    """Return a context manager for backward after a forward under autocast. In its block autocast is off, as after the block
    ``with torch.autocast(...)``.

    Autocast's cache of casts is cleared.
    """
    torch.clear_autocast_cache()
    with torch.autocast(device_type, enabled=False):
        yield


def refuse_foreign_graph(loss: torch.Tensor, first_node: int, *, has_met_threads: bool = False) -> None:
    """Raise an error if backward from this loss would continue into a graph that existed before the forward, because backward
    would free what that graph saved. Also raise an error if another thread made a part of the graph, because its operations
    were not recorded.

    ``first_node`` is the value of `sequence_number` before the forward. Each thread counts its own nodes, so
    ``has_met_threads`` says whether modules ran in another thread.

    Raises:
        InvalidBatch: the loss depends on an earlier graph that holds tensors for its backward, or on the graph of another
            thread.
    """
    for node in graph_nodes([loss]):
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


def graph_nodes(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the nodes of the autograd graph that ends in these tensors, each once."""
    left: list[Any] = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left.extend(following for following, _ in node.next_functions)


def call_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among a call's arguments in a fixed order. Keyword arguments are sorted by name."""
    tree = (args, {name: kwargs[name] for name in sorted(kwargs)})
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def count_items(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, str]:
    """Return the size of a batch and its unit: the number of tokens for token ids, else the number of examples."""
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
    """Tracks which submodule of a model is running, by temporary forward hooks.

    ``path`` is the name of the running module, relative to the root given to `watch` (``""`` in the root itself). A module that
    has several names in the model keeps the first name. Each thread has its own stack, because other threads may call the same
    modules at the same time.
    """

    def __init__(
        self, threads: set[int] | None = None
    ) -> None:  # called in every thread, with the arguments of the first
        self._stack: list[str] = []
        self._threads = set[int]() if threads is None else threads
        """The ids of all threads that ran modules. The caller can pass a set, which is then filled."""

    @property
    def has_met_threads(self) -> bool:
        """Whether modules have run in other threads than this one."""
        return not self._threads <= {threading.get_ident()}

    @property
    def path(self) -> str:
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def watch(self, root: nn.Module, prefix: str = "") -> Iterator[None]:
        """Return a context manager that follows the modules below ``root`` until its block ends.

        All hooks are removed at the end, also after an error. ``prefix`` is put in front of the modules' names.
        """
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
