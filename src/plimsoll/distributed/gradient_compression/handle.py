"""The handle that a caller gets for compressed gradients: counters, a description, the state to save, and removal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from plimsoll.distributed.gradient_compression.averaging import Averages, Counters, Tally
from plimsoll.distributed.gradient_compression.method import CompressionSettings
from plimsoll.distributed.gradient_compression.replicas import Replicas
from plimsoll.distributed.gradient_compression.shards import Shards
from plimsoll.distributed.gradient_compression.slots import STATE, GradientSlot
from plimsoll.engine.apply import RemovedAtEnd
from plimsoll.errors import CompressionMismatch, InvalidOption
from plimsoll.units import format_bytes

_SCHEMA_VERSION = 2


class CompressionHandle(RemovedAtEnd):
    """The handle of compressed gradients for one model on one rank.

    As a context manager, it ends the compression at the end.
    """

    def __init__(
        self,
        settings: CompressionSettings,
        slots: Sequence[GradientSlot],
        averages: Averages,
        layout: Replicas | Shards,
    ) -> None:
        self._settings = settings
        self._slots = list(slots)
        self._averages = averages
        self._layout: Replicas | Shards | None = layout
        self._place = {"layout": layout.name, "ranks": layout.group.size(), "rank": layout.group.rank()}

    @property
    def is_active(self) -> bool:
        """Whether gradients are compressed now. After ``remove`` they are not."""
        return self._layout is not None

    @property
    def counters(self) -> Counters:
        """The bytes and steps that were counted so far. On a GPU, this property waits for the device."""
        return self._averages.tally.read()

    @property
    def step_bytes(self) -> int:
        """The bytes that this rank sends in a step after warm-up, if all parameters have a gradient in that step."""
        return sum(slot.sent_bytes(self._settings) for slot in self._slots)

    def remove(self) -> None:
        """End the compression: torch reduces the gradients again, and the residuals are freed. A second call does nothing.

        All ranks must call this method, between two steps. The residuals are lost unless ``state_dict`` was called before.
        """
        layout, self._layout = self._layout, None
        if layout is None:
            return
        layout.detach()
        for slot in self._slots:
            for kind in STATE:
                setattr(slot, kind, None)

    def rescale(self, factor: float) -> None:
        """Multiply residuals and momentum by a factor, because a change of the loss scale multiplies gradients by that factor.

        Call it after ``scaler.update()``, with the new scale divided by the old scale.

        Args:
            factor: above 0.

        Raises:
            InvalidOption: the factor is 0, negative or not finite. Such a factor would erase or reverse the residuals.
        """
        if not 0 < factor < math.inf:
            raise InvalidOption(
                f"rescale({factor:g}).",
                why="it is the new loss scale over the old one, and both are above 0",
                next="pass scaler.get_scale() after update() over that before it",
            )
        with torch.no_grad():
            for slot in self._slots:
                for kept in (slot.residual, slot.velocity):
                    if kept is not None:
                        kept.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that this rank needs for its next step. Each rank must save its own state."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "settings": self._settings.as_text(),
            **self._place,
            "shapes": {slot.name: list(slot.shape) for slot in self._slots},
            "counters": asdict(self.counters),
            "reductions": {slot.name: slot.reductions for slot in self._slots},
            **{
                kind: {slot.name: kept for slot in self._slots if (kept := getattr(slot, kind)) is not None}
                for kind in STATE
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, as if the run had not been interrupted.

        Args:
            state: the result of ``state_dict`` on this rank.

        Raises:
            CompressionMismatch: the state is for another method, model, layout, number of ranks, or rank, or it is incomplete.
                Then nothing changes.
            InvalidOption: ``remove`` was called.
        """
        if self._layout is None:
            raise InvalidOption(
                "This compression has ended.",
                why="after remove() nothing would use the saved residuals",
                next="call compress_gradients again, and load the state into the new handle",
            )
        saved, mine = _facts(state), _facts(self.state_dict())
        odd = [what for what in {**saved, **mine} if saved.get(what) != mine.get(what)]
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise CompressionMismatch(
                f"The saved state of gradient compression has {odd[0]} = {saved.get(odd[0])}{more}, "
                f"this run has {mine.get(odd[0])}.",
                why="what a rank has not sent yet belongs to its parameters, its method and its number of ranks",
                next="load on the same rank of as many ranks with the same call, or start without the state: what was unsent "
                "is lost",
            )
        names = {slot.name for slot in self._slots}
        missing = [what for what in ("reductions", "counters", *STATE) if what not in state]
        if missing or names - state["reductions"].keys():
            raise CompressionMismatch(
                f"The saved state of gradient compression lacks {', '.join(missing) or 'reductions of some parameters'}.",
                why="a run continues only from everything that state_dict() returned",
                next="load the whole state, or start without it: what was unsent is lost",
            )
        for slot in self._slots:
            slot.reductions = state["reductions"][slot.name]
            for kind in STATE:
                kept = state[kind].get(slot.name)
                # Load to the host. The stream that exchanges gradients copies it to the device, into its own memory.
                setattr(slot, kind, None if kept is None else kept.detach().to("cpu", copy=True))
        self._averages.tally = Tally(Counters(**state["counters"]))

    def describe(self) -> str:
        """Return a text that says what is compressed, what is not compressed and why, and how much this rank sends in a
        step.
        """
        compressed = [slot for slot in self._slots if slot.is_compressed]
        before = sum(slot.dense_bytes for slot in self._slots)
        after = self.step_bytes
        lines = [
            f"{self._settings.method} on {self._place['ranks']} ranks: "
            f"{len(compressed)} of {len(self._slots)} parameters are compressed",
            f"sent by each rank in a step: {format_bytes(after)} instead of {format_bytes(before)}"
            + (f", {before / after:.1f} times fewer" if after else ""),
            f"kept between steps on this rank: {format_bytes(sum(slot.state_bytes for slot in self._slots))}",
        ]
        if self._settings.warmup_steps:
            lines.append(f"the first {self._settings.warmup_steps} steps are not compressed")
        reasons = Counter(slot.reason for slot in self._slots if slot.reason)
        lines += [f"not compressed: {count}, {reason}" for reason, count in reasons.most_common()]
        return "\n".join(lines)


def _facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state that must be equal in a saved state and in this run, by name."""
    alone = {what: state.get(what) for what in ("schema_version", "layout", "ranks", "rank")}
    groups = ((what, state.get(what, {})) for what in ("settings", "shapes"))
    return alone | {f"{what}: {name}": value for what, group in groups for name, value in group.items()}
