"""Trains under a budget inside a training framework: the code that all PyTorch integrations share.

An integration finds the trained model and reports when training begins and ends. This module does the rest: it refuses untested
versions, switches the framework's own checkpointing off, makes figures for the framework's log, and restores
everything afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import nn

# The module is private by its name alone; seen in torch 2.9 to 2.15.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from plimsoll.errors import BudgetBelowFloor, InvalidModel, InvalidOption, UnsupportedFramework
from plimsoll.session.attach import attach
from plimsoll.session.attachment import Attachment
from plimsoll.session.options import Budget
from plimsoll.tracing.meters.memory import storage_bytes
from plimsoll.tracing.zero import engine_of, inside_engine
from plimsoll.units import format_bytes, parse_budget

_LOGGED = (
    "plimsoll/budget_bytes",
    "plimsoll/unmanaged_peak_bytes",
    "plimsoll/planned_peak_bytes",
    "plimsoll/measured_peak_bytes",
    "plimsoll/planned_overhead_percent",
)
"""Names of those figures of ``handle.metrics()`` that a trainer's log shows next to each loss. The other figures are redundant,
or are constants (blocks) that are logged once.
"""
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
"""Names of attributes on modules of transformers, diffusers and timm. If such an attribute is true, the module checkpoints its
activations.
"""
_OF_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"
"""The name of the module that has DeepSpeed's function ``checkpoint``, which models call.

The section ``activation_checkpointing`` of DeepSpeed's configuration sets this function up (seen in DeepSpeed 0.19).
"""


def calling(kind: type) -> Iterator[Any]:
    """Yield the objects of class ``kind`` whose methods are running now, found in the call stack, the nearest caller first.

    A hook uses this to find its trainer, because some frameworks do not pass the trainer to their hooks.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), kind):
            yield found
        frame = frame.f_back


@dataclass(frozen=True, slots=True)
class Framework:
    """Data: a training framework by the name of its distribution, with the oldest and the newest version that were tested."""

    name: str
    oldest: str
    newest: str

    def check(self) -> None:
        """Raise an error if the installed version is older than the tested versions, or from a later major release.

        Before version 1.0, a later minor release counts as a later major release.

        Raises:
            UnsupportedFramework: the version is outside this range, or cannot be determined.
        """
        found = self._found()
        release = self._release(found)
        is_newer = _line(release) > _line(self._release(self.newest))
        if not is_newer and release >= self._release(self.oldest):
            return
        raise UnsupportedFramework(
            f"{self.name} {found} is {'newer' if is_newer else 'older'} than the versions that this integration supports.",
            why=f"it changes the framework's training loop and was tried with {self.name} {self.oldest} to {self.newest}",
            next=f"install such a version, or call plimsoll.attach(model, budget) before the training loop of {self.name}",
        )

    def _release(self, version: str) -> tuple[int, ...]:
        """Return the three numbers of a version such as ``5``, ``v0.19.0rc1`` or ``2.6.6.dev0+abc``. Missing ones are 0."""
        matched = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
        if matched is None:
            raise self._unknown(f"{version!r} is not a version number")
        return tuple([*map(int, matched[1].split(".")), 0, 0][:3])

    def _unknown(self, why: str) -> UnsupportedFramework:
        return UnsupportedFramework(
            f"The version of {self.name} cannot be determined.",
            why=f"{why}; this integration was tried with {self.oldest} to {self.newest}",
            next=f"install {self.name} with pip, or call plimsoll.attach(model, budget) before its training loop",
        )

    def _found(self) -> str:
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError as error:  # run from its sources, or copied without its metadata
            module = sys.modules.get(self.name.replace("-", "_"))
            if module is not None and "__version__" in vars(module):
                return str(vars(module)["__version__"])
            raise self._unknown("its package metadata is missing") from error


def _line(release: tuple[int, ...]) -> tuple[int, int]:
    """Return the part of a version number that changes when the interface may change: the major version, and before 1.0 also
    the minor version.
    """
    major, minor, *_ = release
    return major, 0 if major else minor


class BudgetedTraining:
    """Applies one budget when a training begins, and removes it when the training ends, for any number of trainings."""

    def __init__(
        self, framework: Framework, budget: int | str, options: Mapping[str, Any], log: logging.Logger
    ) -> None:
        """Check the framework's version, the budget and the options. No training is changed yet.

        ``options`` are those of ``plimsoll.attach``. ``log`` is the framework's logger.
        """
        framework.check()
        # Raises TypeError for an unknown option, and for the optimizer, which the framework has.
        inspect.signature(attach).bind(None, budget, optimizer=None, **options)
        Budget.required(budget)
        self.handle: Attachment | None = None
        self._budget = budget
        self._options = options
        self._log = log
        self._undo, self._undo_work = contextlib.ExitStack(), contextlib.ExitStack()
        self.is_at_work = False
        self._beside_bytes = 0
        self._owner: Callable[[], object] = _nobody

    @property
    def owner(self) -> object:
        """The trainer or module that has claimed this object's budget, or ``None``.

        A claim ends with the training, or when the owner is deleted.
        """
        return self._owner()

    def claim(self, owner: object, *, is_free: bool) -> None:
        """Claim the budget for a trainer, or for a module that is being set up. One budget serves one owner at a time.

        Remains of an earlier failed training are removed first.

        Raises:
            InvalidOption: another owner has the budget, and ``is_free`` is False.
        """
        if self.owner not in (None, owner) and not is_free:
            raise InvalidOption(
                f"This PlimsollCallback is still used by another {type(owner).__name__}.",
                why="a budget manages one model at a time, so the other model would silently lose its budget",
                next="create a callback for each trainer, with its share of the budget; in Fabric, call "
                "plimsoll.attach(model, share) after fabric.setup instead",
            )
        self.end()
        self._owner = weakref.ref(owner)

    def begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        beside: Iterable[nn.Module] = (),
        taken_over: int = 0,
        takes_compiled: bool = False,
    ) -> None:
        """Apply the budget to ``model``, the module that the framework calls, when a training begins.

        ``beside`` are other modules of the framework, such as a reference model; their bytes are subtracted from the budget,
        because the step does not include them. ``taken_over`` is how many memory-saving features of the framework the
        integration has already switched off. With ``takes_compiled``, models that torch.compile compiled are planned too.
        """
        taken_over += switch_off(model, self._undo_work)
        if taken_over:
            self._log.warning(
                "Plimsoll: the budget replaces the activation checkpointing or offloading that was set (in %s places). "
                "That is switched off as long as the budget is active",
                taken_over,
            )
        self._beside_bytes = 0 if self._budget == "auto" else _bytes_beside(model, beside)
        if self._beside_bytes:
            self._log.warning(
                "Plimsoll: other models (not the trained model) use %s of the budget",
                format_bytes(self._beside_bytes),
            )
        try:
            budget = self._budget_beside() if self._beside_bytes else self._budget
            handle = attach(model, budget, optimizer=_inner(optimizer), **self._options)
            if handle.is_compiled and not takes_compiled:
                handle.remove()
                raise _compiled(model)
            handle.measures_before_refusing = False
            self.handle = handle
        except BaseException:
            self.pause()
            raise
        self._undo_work.callback(self.handle.remove)
        self.is_at_work = True

    def _budget_beside(self) -> int:
        """Return the budget in bytes minus the bytes of other models on the device, such as a reference model."""
        budget_bytes = parse_budget(self._budget)
        if budget_bytes > self._beside_bytes:
            return budget_bytes - self._beside_bytes
        raise BudgetBelowFloor(
            f"budget {format_bytes(budget_bytes)} is used up by other models, which hold {format_bytes(self._beside_bytes)}.",
            why="the trainer keeps them on the device of the trained model during every step",
            next=f"set a budget of more than {self._beside_bytes} bytes, or move these models to another device",
        )

    def name_beside(self, error: BudgetBelowFloor) -> None:
        """Add a note to an error about a too small budget: the floor in the error (the smallest reachable peak) does not
        include the bytes of other models.
        """
        if self._beside_bytes:
            error.why = f"{error.why}; other models hold {format_bytes(self._beside_bytes)} in addition"
            error.next = f"{error.next}; add {self._beside_bytes} bytes for the other models to each budget named here"

    def pause(self) -> None:
        """Take the budget off the model until training begins again. A second call does nothing."""
        self._undo_work.close()
        self.is_at_work = False

    def replace(self, owner: object, name: str, value: object) -> None:
        """Set an attribute on the framework's object itself. When training ends, the old attribute comes back."""
        own = vars(owner)
        if name in own:
            self.on_end(own.__setitem__, name, own[name])
        else:
            self.on_end(own.pop, name, None)
        own[name] = value

    def on_end(self, undo: Callable[..., object], *args: Any) -> None:
        """Remember a function to call when training ends. ``args`` are its arguments."""
        self._undo.callback(undo, *args)

    def end(self) -> None:
        """Restore everything after training has ended or failed. A second call does nothing."""
        self.pause()
        self._undo.close()
        self._owner = _nobody

    def figures(self) -> dict[str, float]:
        """Return those figures of ``handle.metrics()`` that belong in the framework's own log, by name. The bytes of other
        models are added to the peaks.

        The result is empty before the plan exists.
        """
        metrics = {} if self.handle is None else self.handle.metrics()
        found = {name: value for name, value in metrics.items() if name in _LOGGED}
        # A peak of 0 was not measured yet.
        return {
            name: value + self._beside_bytes if name.endswith("_bytes") and value else value
            for name, value in found.items()
        }


def _nobody() -> None:
    """Return ``None``. Used in place of a weak reference to the owner while no trainer has claimed the budget."""


def _bytes_beside(model: nn.Module, others: Iterable[nn.Module]) -> int:
    """Return the bytes of other modules on the model's device, without tensors that are also the model's."""
    own = [*model.parameters(), *model.buffers()]
    both = [*own, *(tensor for other in others for tensor in (*other.parameters(), *other.buffers()))]
    device = own[0].device if own else None
    return storage_bytes(both, device) - storage_bytes(own, device)


def _inner(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Return the innermost optimizer inside a framework's wrappers.

    A wrapper has a ``step`` with other arguments, and DeepSpeed wraps twice.
    """
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def _compiled(model: nn.Module) -> InvalidModel:
    return InvalidModel(
        f"{type(model).__name__} is compiled by torch.compile.",
        why="this integration supports only eager models",
        next="train it uncompiled, or call plimsoll.attach(model, budget) yourself, which plans compiled models",
    )


def switch_off(model: nn.Module, undo: contextlib.ExitStack) -> int:
    """Switch activation checkpointing off, so that each layer runs once. Closing ``undo`` switches it on again.

    A budget decides for each saved activation. A layer that runs again as a whole leaves nothing to decide. Frameworks keep the
    switch in a flag on modules, in torch's wrapper modules (FSDP plugins), or in a function that models call (DeepSpeed).

    Returns:
        The number of layers that were checkpointed or offloaded.
    """
    count = 0
    for module in model.modules():
        for flag in _FLAGS:
            if vars(module).get(flag) is True:
                undo.callback(setattr, module, flag, True)
                setattr(module, flag, False)
                count += 1
        if isinstance(module, ActivationWrapper) and "forward" not in vars(module):
            undo.callback(vars(module).pop, "forward", None)
            vars(module)["forward"] = next(module.children())
            count += 1
    own: Any = sys.modules.get(_OF_DEEPSPEED)
    if own is not None and engine_of(inside_engine(model)) is not None:
        for name in ("checkpoint", "non_reentrant_checkpoint"):
            undo.callback(setattr, own, name, getattr(own, name))
            setattr(own, name, _run_once)
        count += int(own.is_configured())
    return count


def _run_once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function once, without checkpointing.

    It replaces DeepSpeed's ``checkpoint``, and like that, it returns a single result without its tuple.
    """
    made = function(*args, **kwargs)
    return made[0] if isinstance(made, tuple | list) and len(made) == 1 else made
