"""Prepares an eager model for ``attach``, apart from applying plans to it."""

from __future__ import annotations

import contextlib

from torch import nn

from plimsoll.session.options import PlanOptions
from plimsoll.tracing.recorder.untouched import Unread
from plimsoll.tracing.regions import find_regions
from plimsoll.tracing.zero import WholeRegions, is_gathered_by_zero


class EagerStep:
    """Prepares an eager model for ``attach``, and restores the model at the end. A block whose parameters DeepSpeed's ZeRO-3
    gathers layer by layer is gathered as a whole, and inputs that bitsandbytes' 8-bit products keep without need are freed. The
    model is not wrapped.
    """

    def __init__(self, model: nn.Module, options: PlanOptions) -> None:
        self.watched = model
        """The module whose calls are training calls."""
        # ZeRO-3 gathers parameters layer by layer, into new memory each time. So a block's parameters are gathered together:
        # otherwise a replay would find most of them gone.
        is_gathered = any(map(is_gathered_by_zero, model.parameters()))
        # bitsandbytes' 8-bit products keep their input for the gradient of a frozen weight. Until this freed it, the lowest
        # peak was 43% above that of reentrant checkpointing.
        self._unread = Unread(model)
        self._whole = WholeRegions(model, find_regions(model, options.regions).values() if is_gathered else ())

    def away(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing, because an eager model is not wrapped."""
        return contextlib.nullcontext()

    def remove(self) -> None:
        """Undo the changes to the model. Calling it twice does no harm."""
        self._whole.put_back()
        self._unread.put_back()
