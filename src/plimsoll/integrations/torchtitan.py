"""Train under a budget with torchtitan: an activation checkpointing policy whose ``memory_budget`` is in bytes.

    from plimsoll.integrations.torchtitan import BudgetAC

    config.activation_checkpoint = BudgetAC.Config(memory_budget="70GiB")

torchtitan applies a policy to a model before the model is sharded, and before the model has weights and an optimizer. So the
policy looks up the trainer that calls it, and applies the budget in that trainer's first step, to the finished model. This file
can be imported without torchtitan: it looks up its base class only when ``BudgetAC`` is used.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from plimsoll.errors import InvalidOption
from plimsoll.integrations.budgeted import BudgetedTraining, Framework, calling
from plimsoll.session.attachment import Attachment

_TRIED = Framework("torchtitan", oldest="0.3", newest="0.3")


class _Budgeted:
    """Keeps each training step of a torchtitan trainer within a memory budget, in place of torchtitan's own policies.

    ``BudgetAC.Config`` takes ``memory_budget``, as bytes or as text ("70GiB"), and ``options``: the other options of
    ``plimsoll.attach``, except the optimizer.

    Raises:
        UnsupportedFramework: torchtitan is older or newer than the tested versions.
        InvalidOption: the policy is applied outside of a trainer; or, in the first step, the trainer runs a pipeline.
        BudgetBelowFloor: the budget is too small. This is raised in the first step, before anything has changed.

    Example:
        >>> policy = BudgetAC.Config(memory_budget="70GiB", options={"allow": ("recompute", "offload")})  # doctest: +SKIP
    """

    def __init__(self, config: Any, dump_folder: str = "") -> None:
        self.config, self.dump_folder = config, dump_folder
        # torchtitan logs to the root logger.
        self._training = BudgetedTraining(_TRIED, config.memory_budget, config.options, logging.getLogger())

    @property
    def handle(self) -> Attachment | None:
        """The result of ``plimsoll.attach``, or ``None`` before the first step."""
        return self._training.handle

    def apply(self, model: nn.Module) -> None:
        """Wrap the training step of the trainer that applies this policy, so that the first step applies the budget."""
        trainer = _calling_trainer()
        self._training.replace(trainer, "train_step", functools.partial(self._step, trainer, trainer.train_step))
        self._training.replace(trainer, "close", functools.partial(self._close, trainer.close))

    def _step(self, trainer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.handle is None:
            if trainer.parallel_dims.pp_enabled:
                raise InvalidOption(
                    "BudgetAC does not support pipeline parallelism.",
                    why="every stage holds several micro-batches at once, and only the schedule knows how many",
                    next="call plimsoll.distributed.attach_schedule(trainer.pp_schedule, budget) before trainer.train()",
                )
            [model], optimizers = trainer.model_parts, trainer.optimizers.optimizers
            self._training.begin(model, optimizers[0] if len(optimizers) == 1 else None)
        try:
            return step(*args, **kwargs)
        except BaseException:
            self._training.end()
            raise

    def _close(self, close: Callable[[], None]) -> None:
        self._training.end()
        close()


def __getattr__(name: str) -> Any:
    if name == "BudgetAC":
        return _policy()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _policy() -> type:
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

    config = dataclasses.make_dataclass(
        "Config",
        [("memory_budget", int | str), ("options", dict[str, Any], dataclasses.field(default_factory=dict))],
        bases=(ActivationCheckpointing.Config,),
        namespace={"__module__": __name__, "__qualname__": "BudgetAC.Config"},
        kw_only=True,
        slots=True,
    )
    attributes = {"__module__": __name__, "__doc__": _Budgeted.__doc__, "Config": config}
    return type("BudgetAC", (_Budgeted, ActivationCheckpointing), attributes)


def _calling_trainer() -> Any:
    """Return the nearest trainer in the call stack. It is looked up there because torchtitan passes a policy only the model.

    Raises:
        InvalidOption: the policy is applied outside of a trainer.
    """
    from torchtitan.trainer import Trainer

    if (found := next(calling(Trainer), None)) is not None:
        return found
    raise InvalidOption(
        "BudgetAC was applied outside a torchtitan Trainer.",
        why="it needs the trainer that calls it, to find the trained model and its optimizer",
        next="set it in the trainer's configuration: activation_checkpoint=BudgetAC.Config(memory_budget=...)",
    )
