"""Train under a budget with Lightning: ``Trainer`` (of ``lightning`` or ``pytorch_lightning``) and ``Fabric``.

    from plimsoll.integrations.lightning import PlimsollCallback

    trainer = Trainer(..., callbacks=[PlimsollCallback(budget="20GiB")])

Lightning runs ``training_step``, which is not a module's ``forward``: it may call the LightningModule, a part of it or several
parts. So the callback wraps the strategy's training step in a module (`_Step`), because calls of a module can be managed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plimsoll.errors import BudgetBelowFloor, InvalidModel, InvalidOption
from plimsoll.integrations.budgeted import BudgetedTraining, Framework, calling
from plimsoll.session.attachment import Attachment

_NAMES = ("lightning.pytorch", "pytorch_lightning")
"""The two names under which Lightning can be imported. It is one library, but the classes of the two names differ.

The name that is imported is used, else the installed one.
"""
_NAME = next((name for name in _NAMES if name in sys.modules), _NAMES[0] if find_spec("lightning") else _NAMES[1])
_Callback: Any = importlib.import_module(_NAME).Callback
_ITSELF = "lightning_module"
_LOG = logging.getLogger(f"{_NAME}.plimsoll")
_TRIED = Framework(_NAME.partition(".")[0].replace("_", "-"), oldest="2.4", newest="2.6")


class PlimsollCallback(_Callback):
    """Keeps each training step of a ``Trainer`` within a memory budget, from the first step on.

    With ``Fabric``, the callback does this for each step of the module that is set up. Planned and measured figures are logged
    with each step. Everything is restored when training ends.

    Args:
        budget: as for ``plimsoll.attach``.
        options: the other options of ``plimsoll.attach``, except the optimizer.

    Raises:
        UnsupportedFramework: Lightning is older or newer than the tested versions.
        InvalidOption: the trainer has two of these callbacks, or two trainers or modules use one callback at once. This is
            raised when training begins.
        InvalidModel: several modules are optimized by hand. This is raised in the first training step.
        BudgetBelowFloor: the budget is too small. This is raised in the first training step, before anything has changed.
            ``BatchSizeFinder`` then takes a smaller batch, as it does when a step runs out of memory.

    Example:
        >>> trainer = Trainer(callbacks=[PlimsollCallback(budget="20GiB")])  # doctest: +SKIP
    """

    def __init__(self, budget: int | str, **options: Any) -> None:
        self._training = BudgetedTraining(_TRIED, budget, options, _LOG)

    @property
    def handle(self) -> Attachment | None:
        """The result of ``plimsoll.attach`` for the most recent training, or ``None`` before the first one."""
        return self._training.handle

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap the strategy's training step when Lightning prepares to fit, so that its first call applies the budget.

        The trained module is looked up later, when the step is called.
        """
        if stage != "fit":
            return
        _refuse_twins(trainer.callbacks)
        self._training.claim(trainer, is_free=self._training.owner not in list(calling(type(trainer))))
        self._training.replace(trainer.strategy, "training_step", functools.partial(self._step, trainer))
        self._training.replace(pl_module, "log", functools.partial(self._log_once, pl_module.log))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Remove the budget, so that the training's first step applies it anew.

        A batch size finder may have run steps before.
        """
        self._training.pause()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """After each batch: log the planned and measured figures, once the plan exists."""
        if not trainer.barebones:
            pl_module.log_dict(self._training.figures())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore trainer and module after training has ended."""
        self._training.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore trainer and module after training has failed."""
        self._training.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore trainer and module at the end of fitting, even if training never began."""
        if stage == "fit":
            self._training.end()

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Apply the budget to the module that Fabric has set up.

        This is the inner module that Fabric's wrapper calls, so the wrapper's casts run outside of it.
        """
        _refuse_twins(fabric._callbacks)  # seen in Lightning 2.4 to 2.6
        self._training.claim(module, is_free=False)
        self._training.begin(module._forward_module, None)

    def _step(self, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the training step by calling a module that the budget manages. This method replaces the strategy's
        ``training_step``.
        """
        strategy = trainer.strategy
        # Finders of batch sizes and learning rates run the loop without callbacks, once per try.
        is_tried = self not in trainer.callbacks
        if not self._training.is_at_work or (is_tried and trainer.fit_loop.batch_idx == 0):
            self._training.pause()
            optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
            self._training.begin(_managed(strategy), optimizer, takes_compiled=True)
        assert self.handle is not None
        managed = self.handle.model
        try:
            if not isinstance(managed, _Step):
                return type(strategy).training_step(strategy, *args, **kwargs)
            with strategy.precision_plugin.train_step_context():
                return managed(*args, **kwargs)
        except BudgetBelowFloor as error:
            self._training.pause()
            _LOG.error("Plimsoll: %s", error.found)  # the traceback has the rest
            if not is_tried:
                raise
            # Lightning looks for these words (seen in Lightning 2.4 to 2.6).
            raise torch.OutOfMemoryError(
                f"The budget is too small (reported as CUDA out of memory): {error}"
            ) from error

    def _log_once(self, log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Pass on what the training step logs, except in trial runs that measure a plan."""
        if self.handle is None or not self.handle.is_trying:
            log(*args, **kwargs)


class _Step(nn.Module):
    """A module whose forward is a LightningModule's training step. It has the parts of the LightningModule as children, under
    the same names.

    The LightningModule itself is among this module's ``modules()``, so that its attributes are saved and restored. It is not
    among the children, because it may never be called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters, self._buffers = module._parameters, module._buffers
        self._modules = {**module._modules, _ITSELF: module}

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the children of the LightningModule with their names."""
        return self._modules[_ITSELF].named_children()  # type: ignore[union-attr]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's training step."""
        return self._modules[_ITSELF].training_step(*args, **kwargs)  # type: ignore[union-attr, operator]


def _managed(strategy: Any) -> nn.Module:
    """Return the module whose calls are training steps, so that the budget can manage it.

    Raises:
        InvalidModel: such a module does not exist.
    """
    module = strategy.lightning_module
    can_run_again = "dataloader_iter" not in inspect.signature(module.training_step).parameters
    if module.automatic_optimization and can_run_again:
        kind: type[_Step] = type(type(module).__name__, (_Step,), {})
        return strategy.model if isinstance(strategy.model, DistributedDataParallel) else kind(module)
    trained: list[nn.Module] = [
        child for child in module.children() if any(each.requires_grad for each in child.parameters())
    ]
    if len(trained) == 1 and strategy.model is module:
        return trained[0]
    raise InvalidModel(
        f"{type(module).__name__} {'optimizes manually' if can_run_again else 'fetches its own batches'}.",
        why="its training step as a whole cannot be run again for measuring, and "
        + (f"it trains {len(trained)} modules" if len(trained) != 1 else "it is wrapped by DistributedDataParallel"),
        next="put all trained parameters into one child module and train on one device, or use automatic optimization",
    )


def _refuse_twins(callbacks: list[Any]) -> None:
    given = sum(isinstance(callback, PlimsollCallback) for callback in callbacks)
    if given > 1:
        raise InvalidOption(
            f"Lightning got {given} PlimsollCallbacks.",
            why="each of them would plan for the same bytes",
            next="keep only one of them",
        )
