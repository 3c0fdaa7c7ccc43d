"""Sets a limit below the budget while other memory on the device comes and goes.

The room is what training may use at the moment, at most the budget. If the room is less than the current plan needs, the limit
falls at once, to the next lower multiple of 1/64 of the budget: too little room ends the training, too much costs only some
seconds. The limit rises after several successive steps with more room, to the least room among those steps. If the room shrinks
again soon, twice as many steps must pass before the next rise.
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
"""The limit is always a multiple of the budget divided by this number. So the same limits recur, and their plans are reused."""
_PATIENCE = 4
"""The number of successive steps that must begin with more room (bytes that training may take now) before the limit rises."""
# Doubling the patience bounds how often room that comes and goes changes the plan: seven times in 1,000 steps for every period
# that was tried (docs/project/design/the-limit-falls-at-once.md).
_MOST_PATIENCE = 256
_TRUSTED_AFTER = 8
"""If a raised limit holds for at least this many times the patience (steps before a rise), a later fall of the limit does not
double the patience.
"""


class Pressure:
    """Finds the limit below a budget that the device's free memory allows. ``room`` returns the bytes that the training step
    may take now, or ``None`` if they are unknown.
    """

    def __init__(self, room: Callable[[], int] | None) -> None:
        self._room, self._is_given = room, room is not None
        self._limit_bytes: int | None = None
        self._calm, self._least_bytes = 0, 0
        self._patience = _PATIENCE
        self._since_rise: int | None = None

    def watch(self, device: torch.device, beside_bytes: int) -> None:
        """From now on, ask CUDA how much memory is free. If the device is not a GPU, or if the user has passed ``room``,
        nothing changes.

        What this process has allocated now, except ``beside_bytes``, belongs to the training. Memory that this process holds in
        addition between later steps does not belong to it.
        """
        if device.type != "cuda" or self._is_given:
            return
        ours_bytes = torch.cuda.memory_allocated(device) - beside_bytes

        def room() -> int:
            more_bytes = max(0, torch.cuda.memory_allocated(device) - ours_bytes)
            return free_bytes(device) + torch.cuda.memory_allocated(device) - more_bytes

        self._room = room

    def withheld_bytes(self, budget_bytes: int) -> int:
        """Return the budget minus the current limit, in bytes. Plans may not use these bytes for now."""
        return 0 if self._limit_bytes is None else max(0, budget_bytes - self._limit_bytes)

    def lower(self, limit_bytes: int) -> None:
        """Set a lower limit for plans, because less memory is available on the device than before."""
        self._limit_bytes = limit_bytes
        self._calm = 0
        if self._since_rise is not None and self._since_rise < _TRUSTED_AFTER * self._patience:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._since_rise = None

    def changes(self, budget_bytes: int, needed_bytes: int) -> bool:
        """Called before a step that needs ``needed_bytes``. Update the limit, and return True if the limit has changed such
        that the step must be planned for it.
        """
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
            "plimsoll: the room is %s (budget %s); the limit changes from %s to %s",
            *map(format_bytes, (room_bytes, budget_bytes, limit_bytes, self._limit_bytes or 0)),
        )
        return True


def _rung(bytes_: int, budget_bytes: int) -> int:
    """Round ``bytes_`` down to a possible limit, and return that limit. Return the whole budget if it fits."""
    rung_bytes = max(1, budget_bytes // _RUNGS)
    return budget_bytes if bytes_ >= budget_bytes else bytes_ // rung_bytes * rung_bytes


def check_room(room: object, *, follows: bool, ranks: int) -> None:
    """Refuse a ``room`` that is not callable. Also refuse it on several ranks that share one plan (``follows`` is False)."""
    if room is None or (callable(room) and (follows or ranks == 1)):
        return
    is_odd = not callable(room)
    raise InvalidOption(
        f"room= has the type {type(room).__name__}, not a function."
        if is_odd
        else f"room= is given on {ranks} ranks that share one plan.",
        why="it is called before every training step, and returns the bytes that the step may use"
        + ("" if is_odd else "; with this allow=, ranks would have to agree on a plan before every step"),
        next="pass room=lambda: bytes_free_now()" if is_odd else "use allow=('recompute',), or leave room= out",
    )
