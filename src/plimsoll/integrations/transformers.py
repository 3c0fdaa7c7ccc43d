"""Train under a budget with Hugging Face's ``Trainer`` and its subclasses, including TRL's trainers.

    from plimsoll.integrations.transformers import PlimsollCallback

    trainer = Trainer(..., callbacks=[PlimsollCallback(budget="20GiB")])

Callbacks receive the trained model. They do not receive the module that is called (``DistributedDataParallel`` around the
model), and they are not called when a step fails. So this callback looks up the trainer that calls it, and wraps the trainer's
``training_step``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from plimsoll.errors import BudgetBelowFloor, InvalidOption, RankFailed
from plimsoll.integrations.budgeted import BudgetedTraining, Framework, calling
from plimsoll.session.attachment import Attachment

_LOG = logging.get_logger("transformers.plimsoll")
_TRIED = Framework("transformers", oldest="4.56", newest="5.24")
_OFFLOADING = "maybe_activation_offload_context"
"""The attribute of TRL's trainers that holds the context that offloads activations in a step (seen in TRL 1.16)."""


class PlimsollCallback(TrainerCallback):
    """Keeps each training step of a ``Trainer`` within a memory budget, from the first step on.

    If activation checkpointing or offloading was set, the callback switches it off during training, and on again afterwards.
    Planned and measured figures are in the trainer's log next to each loss.

    Args:
        budget: as for ``plimsoll.attach``.
        options: the other options of ``plimsoll.attach``, except the optimizer.

    Raises:
        UnsupportedFramework: transformers is older or newer than the tested versions.
        InvalidOption: the trainer has two of these callbacks, or two trainers use one callback at once. This is raised when
            training begins.
        BudgetBelowFloor: the budget is too small. This is raised in the first training step, before anything has changed.
            With ``auto_find_batch_size=True`` the trainer then takes a smaller batch, as it does when a step runs out of
            memory.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[PlimsollCallback(budget="20GiB")])  # doctest: +SKIP
    """

    def __init__(self, budget: int | str, **options: Any) -> None:
        self._training = BudgetedTraining(_TRIED, budget, options, _LOG)

    @property
    def handle(self) -> Attachment | None:
        """The result of ``plimsoll.attach`` for the most recent training, or ``None`` before the first one."""
        return self._training.handle

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the budget to the module that the trainer calls, when training begins."""
        trainer, *around = _calling_trainers()
        self._training.claim(trainer, is_free=self._training.owner not in around)
        _refuse(trainer)
        offloads = not isinstance(vars(trainer).get(_OFFLOADING, contextlib.nullcontext()), contextlib.nullcontext)
        self._training.begin(
            trainer.model_wrapped,
            trainer.optimizer,
            beside=_modules_of(trainer),
            taken_over=int(offloads),
            takes_compiled=True,
        )
        replaced = functools.partial(self._training.replace, trainer)
        if offloads:
            replaced(_OFFLOADING, contextlib.nullcontext())
        replaced("log", functools.partial(self._log, trainer.log))
        replaced("training_step", functools.partial(self._step, trainer.training_step, args))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore trainer and model after training has ended."""
        self._training.end()

    def remove(self) -> None:
        """Restore trainer and model after a training that ended with an error between two training steps.

        The trainer reports neither an interrupt nor an error of the data, of evaluation or of the optimizer to its callbacks.
        An error inside of a training step, and the next training with this callback, restore them as well.
        """
        self._training.end()

    def _log(self, log: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        log({**logs, **self._training.figures()} if "loss" in logs else logs, *args, **kwargs)

    def _step(
        self, step: Callable[..., torch.Tensor], arguments: TrainingArguments, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        try:
            return step(*args, **kwargs)
        except (BudgetBelowFloor, RankFailed) as error:
            self._training.end()
            # On ranks other than the tightest one, the error about the budget is the cause of RankFailed.
            if isinstance(error, BudgetBelowFloor):
                self._training.name_beside(error)
            elif not isinstance(error.__cause__, BudgetBelowFloor):
                raise
            _LOG.error("Plimsoll: %s", error.found)  # the traceback has the rest
            if not arguments.auto_find_batch_size:
                raise
            # accelerate looks for " out of memory." and tries again with less (seen in accelerate 1.15).
            raise torch.OutOfMemoryError(f"Under its budget the step is out of memory. {error}") from error
        except BaseException:
            self._training.end()
            raise


def _calling_trainers() -> list[Trainer]:
    """Return the trainers in the call stack, the innermost first. A trainer passes its callbacks everything except itself."""
    if found := list(calling(Trainer)):
        return found
    raise InvalidOption(
        "PlimsollCallback was called outside a Trainer.",
        why="it needs the trainer that calls it, to find the trained module",
        next="pass it as Trainer(..., callbacks=[PlimsollCallback(budget)]); in other loops use plimsoll.attach",
    )


def _modules_of(trainer: Trainer) -> Iterator[nn.Module]:
    """Yield the modules in a trainer's attributes, and in lists, tuples and dictionaries there (not deeper: a data set may be
    a list of millions of samples).
    """
    for value in vars(trainer).values():
        found = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from (each for each in found if isinstance(each, nn.Module))


def _refuse(trainer: Trainer) -> None:
    given = sum(isinstance(callback, PlimsollCallback) for callback in trainer.callback_handler.callbacks)
    if given > 1:
        raise InvalidOption(
            f"This trainer has {given} PlimsollCallbacks.",
            why="each of them would plan for the same bytes",
            next="keep only one: trainer.remove_callback(PlimsollCallback)",
        )
