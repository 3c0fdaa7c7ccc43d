"""Counts what compression did: bytes sent and not sent, steps, and steps with a gradient that was not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plimsoll.distributed.gradient_compression.method import CompressionSettings
from plimsoll.distributed.gradient_compression.slots import GradientSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counted since compression began, on this rank.

    Attributes:
        steps: reductions of the whole model.
        uncompressed_bytes: what this rank would have sent without compression, in rings.
        sent_bytes: what it sent.
        nonfinite_steps: steps in which some rank had a gradient with NaN or infinity; nothing was kept of such gradients.
    """

    steps: int = 0
    uncompressed_bytes: int = 0
    sent_bytes: int = 0
    nonfinite_steps: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; 1 before anything was."""
        return self.uncompressed_bytes / self.sent_bytes if self.sent_bytes else 1.0


class Tally:
    """Counts up. What is only known on the device is added up there, and read when it is asked for."""

    def __init__(self) -> None:
        self.steps = 0
        self._uncompressed_bytes = 0
        self._sent_bytes = 0
        self._nonfinite_steps: torch.Tensor | None = None
        self._last_nonfinite: torch.Tensor | None = None
        self._before = 0

    def add(
        self, slots: Sequence[GradientSlot], settings: CompressionSettings, is_nonfinite: torch.Tensor, step: int
    ) -> None:
        """Count one reduction of some parameters, before their own counts go up.

        ``is_nonfinite`` is one truth on the device; a step (from 0) is counted as not finite once.
        """
        for slot in slots:
            self._uncompressed_bytes += slot.dense_bytes
            self._sent_bytes += slot.sent_bytes(settings) if slot.is_due(settings) else slot.dense_bytes
        if self._nonfinite_steps is None or self._last_nonfinite is None:
            self._nonfinite_steps = torch.zeros((), dtype=torch.int64, device=is_nonfinite.device)
            self._last_nonfinite = torch.full_like(self._nonfinite_steps, -1)
        self._nonfinite_steps += is_nonfinite & (self._last_nonfinite < step)
        self._last_nonfinite = torch.where(is_nonfinite, step, self._last_nonfinite)
        self.steps = max(self.steps, step + 1)

    def read(self) -> Counters:
        """The counts so far."""
        counted = 0 if self._nonfinite_steps is None else int(self._nonfinite_steps)
        return Counters(
            steps=self.steps,
            uncompressed_bytes=self._uncompressed_bytes,
            sent_bytes=self._sent_bytes,
            nonfinite_steps=self._before + counted,
        )

    def restore(self, counters: Counters) -> None:
        """Go on from counts that were saved."""
        self.steps = counters.steps
        self._uncompressed_bytes = counters.uncompressed_bytes
        self._sent_bytes = counters.sent_bytes
        self._before = counters.nonfinite_steps
        self._nonfinite_steps = self._last_nonfinite = None
