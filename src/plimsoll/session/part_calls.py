"""Notices training calls of a model's parts that do not happen within a call of the model itself.

A loop may call ``model.forward(batch)``, another method of the model, or its blocks. Torch then runs no hook of the model, but
it runs the hooks of the blocks. A step of such calls begins with the first of them, unless a call of the model waits for its
backward: then the calls belong to that step, for instance to its loss. If a call of the model follows before any backward, the
part has only prepared the batch (an embedding), and the step is the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from plimsoll.engine.copies import ModelHook
from plimsoll.tracing.open_graphs import OpenGraphs
from plimsoll.tracing.refusals import compiled_part


class _PartHook(ModelHook):
    """A hook on a part's calls that does nothing within the model's own calls, and while torch.compile traces the part."""

    def __init__(self, part: nn.Module, run: Callable[..., None], is_quiet: Callable[[], bool]) -> None:
        super().__init__(part, run)
        self._is_quiet = is_quiet

    def __call__(self, caller: nn.Module, *arguments: Any) -> None:
        # The hook runs in every call of every block, so the most frequent reason to do nothing comes first.
        if not torch.compiler.is_compiling() and not self._is_quiet():
            super().__call__(caller, *arguments)


class PartCalls:
    """Follows the calls of a model's parts outside of the model's calls.

    ``begins`` is called before the first such call of a step, with the part's name and the call's arguments. ``is_quiet`` says
    whether calls of parts are ignored now, and ``is_within_step`` whether a call of the model waits for its backward.
    """

    def __init__(
        self,
        begins: Callable[[str, tuple[Any, ...], dict[str, Any]], None],
        is_quiet: Callable[[], bool],
        is_within_step: Callable[[], bool],
    ) -> None:
        self._begins, self._is_quiet, self._is_within_step = begins, is_quiet, is_within_step
        self._graphs = _no_graphs()
        self._hooks: list[Any] = []
        self._names: dict[str, None] = {}
        """The parts that were called in the running step, in the order of their first calls."""
        self._preparing: set[str] = set()
        """Parts that ran before a call of the model in the same step, such as an embedding. They do not begin a step of their
        own.
        """
        self._trained_alone: set[str] = set()
        """Parts that a backward has reached in a step without a call of the model. They always begin a step of their own."""
        self.seen = ""
        """The first part that was ever called outside of the model's own calls, or ""."""

    def watch(self, parts: Mapping[str, nn.Module]) -> None:
        """Follow the calls of these parts, given by name, and no others. Compiled parts are left out."""
        self.remove()
        for name, part in parts.items():
            if not name or compiled_part(part):
                continue
            before = _PartHook(part, self._before(name), self._is_quiet)
            after = _PartHook(part, self._after, self._is_quiet)
            # first, so that a plan which it applies is in force before other hooks of the part run
            self._hooks.append(part.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._hooks.append(part.register_forward_hook(after))

    def remove(self) -> None:
        """Remove the hooks. Calling it twice does no harm."""
        while self._hooks:
            self._hooks.pop().remove()

    @property
    def first(self) -> str:
        """The part that the running step began with, or "" if no part was called outside of the model's calls."""
        return next((name for name in self._names if name not in self._preparing), "")

    @property
    def has_backward(self) -> bool:
        """Whether, in the running step, a backward has reached a call of a part that was made outside of the model's calls."""
        return self._graphs.has_backward

    def model_called(self) -> None:
        """Note that the model itself is called. Calls of parts that still wait for a backward have prepared this call."""
        if len(self._graphs):
            self._preparing.update(self._names.keys() - self._trained_alone)
        self.end_step()

    def end_step(self) -> None:
        """Forget the calls of the running step."""
        if self._names:
            if self._graphs.has_backward:
                self._trained_alone.update(self._names)
                self._preparing -= self._trained_alone
            self._names = {}
            # Another object: graphs of the step that has ended still call back the old one. Otherwise a backward through parts
            # that prepared the last step's batch counted for this step.
            self._graphs = _no_graphs()

    def _before(self, name: str) -> Callable[..., None]:
        def before(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not (torch.is_grad_enabled() and part.training) or self._is_within_step():
                return
            self.seen = self.seen or name
            if self.has_backward and not self.first:
                self.end_step()  # a step of parts that had only prepared calls of the model so far
            # If the first part is called again and nothing waits for a backward, the loop has dropped what it made before.
            is_dropped = name == self.first and not len(self._graphs)
            has_begun = self.first and not self.has_backward and not is_dropped
            if not has_begun and name not in self._preparing:
                self._begins(name, args, kwargs)  # ends the step before
            self._names[name] = None

        return before

    def _after(self, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._names and torch.is_grad_enabled() and part.training and not self._is_within_step():
            self._graphs.note(output)


def _no_graphs() -> OpenGraphs:
    return OpenGraphs(lambda: None, lambda: None)
