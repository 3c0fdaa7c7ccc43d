"""How much of the budget training may take now, as other things on the device come and go.

The budget is the most; the room is what is there at the moment. Where the room no longer holds what the plan at work takes,
the limit falls at once, to the rung of a ladder below it. It rises only when there has been more room for some steps on end,
to what there was in all of them. Room that went again soon after is trusted less: twice as many steps have to pass the next
time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from plimsoll.errors import InvalidOption
from plimsoll.tracing.meters.memory import free_bytes
from plimsoll.units import format_bytes

_LOG = logging.getLogger(__name__)
_RUNGS = 64
"""Limits are multiples of the budget over this, so that plans for them are found again."""
_PATIENCE = 4
"""So many steps on end have to begin with more room before the limit rises."""
_MOST_PATIENCE = 256
_TRUSTED_AFTER = 8
"""Room that lasted so many times the patience was no false alarm."""


class Pressure:
    """The limit under a budget. ``room`` says how many bytes the training step may take now; ``None``: nobody knows."""

    def __init__(self, room: Callable[[], int] | None) -> None:
        self._room, self._is_given = room, room is not None
        self._limit_bytes: int | None = None
        self._calm, self._least_bytes = 0, 0
        self._patience = _PATIENCE
        self._since_rise: int | None = None

    def watch(self, device: torch.device, beside_bytes: int) -> None:
        """Ask CUDA for the room, if nobody else is asked. What this process holds now, but for ``beside_bytes``, is the
        training's; what it holds more between later steps is not.
        """
        if device.type != "cuda" or self._is_given:
            return
        ours_bytes = torch.cuda.memory_allocated(device) - beside_bytes

        def room() -> int:
            more_bytes = max(0, torch.cuda.memory_allocated(device) - ours_bytes)
            return free_bytes(device) + torch.cuda.memory_allocated(device) - more_bytes

        self._room = room

    def withheld_bytes(self, budget_bytes: int) -> int:
        """What is taken off the budget for now."""
        return 0 if self._limit_bytes is None else max(0, budget_bytes - self._limit_bytes)

    def lower(self, limit_bytes: int) -> None:
        """The step was found to have less than this."""
        self._limit_bytes = limit_bytes
        self._calm = 0
        if self._since_rise is not None and self._since_rise < _TRUSTED_AFTER * self._patience:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._since_rise = None

    def changes(self, budget_bytes: int, needed_bytes: int) -> bool:
        """A step is about to begin, which takes ``needed_bytes``: whether it has to be planned for another limit."""
        if self._room is None:
            return False
        limit_bytes = budget_bytes if self._limit_bytes is None else self._limit_bytes
        room_bytes = min(self._room(), budget_bytes)
        if self._since_rise is not None:
            self._since_rise += 1
        if room_bytes < needed_bytes and _rung(room_bytes, budget_bytes) < limit_bytes:
            self.lower(_rung(room_bytes, budget_bytes))
        elif _rung(room_bytes, budget_bytes) <= limit_bytes:
            self._calm = 0
            return False
        else:
            self._least_bytes = min(room_bytes, self._least_bytes) if self._calm else room_bytes
            self._calm += 1
            if self._calm < self._patience:
                return False
            self._limit_bytes, self._calm, self._since_rise = _rung(self._least_bytes, budget_bytes), 0, 0
        _LOG.warning(
            "plimsoll: room for %s (budget %s); the limit goes from %s to %s",
            *map(format_bytes, (room_bytes, budget_bytes, limit_bytes, self._limit_bytes or 0)),
        )
        return True


def _rung(bytes_: int, budget_bytes: int) -> int:
    """The highest limit that such room holds; all of the budget where it does."""
    rung_bytes = max(1, budget_bytes // _RUNGS)
    return budget_bytes if bytes_ >= budget_bytes else bytes_ // rung_bytes * rung_bytes


def check_room(room: object, *, follows: bool, ranks: int) -> None:
    """Refuse what cannot be asked for room, and several ranks that have to run one plan (``follows``: each has its own)."""
    if room is None or (callable(room) and (follows or ranks == 1)):
        return
    is_odd = not callable(room)
    raise InvalidOption(
        f"room= is a {type(room).__name__}." if is_odd else f"room= is given on {ranks} ranks that run one plan.",
        why="it is called before every training step, for the bytes that this may take"
        + ("" if is_odd else "; with this allow= ranks would have to agree on another plan in every step"),
        next="room=lambda: bytes_free_now()" if is_odd else "allow=('recompute',), or leave room= out",
    )
