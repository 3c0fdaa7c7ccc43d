"""Reads on CUDA what a step takes after its last backward, without the training of other models in the meantime.

The caching allocator's peak counter covers the whole process and is never reset. It is read when an optimizer of the model
begins and ends its step. So each rise of the counter has a cause: the optimizer's step, or the loop around it. The rises around
it do not count if the optimizer of another model has stepped, because that model was trained in this time.

Known weakness: if another model's training raises the counter first, a lower peak of the own optimizer is not seen.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from plimsoll.session.optimizer_watch import OptimizerSteps, optimized_parameters
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.meters.memory import RisingPeak
from plimsoll.tracing.zero import optimizer_inside


class RisenRest(OptimizerSteps):
    """Follows the peak counter from the last backward of a step to the next step.

    The owner calls ``begin`` when a step begins, ``backward_ended`` after each backward, and ``end`` when the step is over.
    """

    def __init__(self, model: nn.Module, rising: RisingPeak) -> None:
        super().__init__(optimized_parameters(model))
        self._model, self._rising = model, rising
        self._mark = self._in_step = self._around = 0
        self._trains_another = False

    def begin(self) -> None:
        """Note that a step begins."""
        self._parameters = optimized_parameters(self._model)
        self.backward_ended()

    def backward_ended(self) -> None:
        """Note that a backward has ended. Later rises of the counter belong to the rest of the step."""
        self._mark, self._in_step, self._around = self._rising.risen_to(), 0, 0
        self._trains_another = False

    def end(self) -> int:
        """Return the peak in bytes that the counter has risen to since the last backward, or 0 if it has not risen."""
        self._around = max(self._around, self._risen())
        return self._in_step if self._trains_another else max(self._in_step, self._around)

    def _own_begins(self, optimizer: Optimizer) -> None:
        self._around = max(self._around, self._risen())

    def _own_ended(self, optimizer: Optimizer) -> None:
        self._in_step = max(self._in_step, self._risen())

    def _other_begins(self) -> None:
        # DeepSpeed's optimizer trains this model too, although it holds flat partitions and not the model's parameters.
        self._trains_another |= optimizer_inside(inner_module(self._model)) is None

    def _risen(self) -> int:
        found = self._rising.risen_to()
        if found <= self._mark:
            return 0
        self._mark = found
        return found
