"""The cheap meter of every training step: how much is allocated at a few moments, held against steps that were measured.

A whole measurement of a step on a CPU takes torch's profiler, and longer than the step itself. A reading of the allocator takes
microseconds (see ``tracing.meters.allocated``). It is read when forward begins and ends, when backward begins and ends. A step
that stands higher at one of these moments than the measured ones has taken more than they have; the step after it is measured.

Known weakness: a step may have a higher peak than another and still stand no higher at these moments, where only temporaries of
single operations grow.
"""

from __future__ import annotations

import torch

from plimsoll.tracing.meters.allocated import allocated_bytes
from plimsoll.units import KIB, format_bytes

_MORE = 1 / 128
"""A step that stands higher by less than this share takes as much as another one: readings see the whole process."""
_LEAST_BYTES = 32 * KIB
_EARLY = 1 / 16


def is_more(found_bytes: float, known_bytes: float, scale_bytes: float | None = None) -> bool:
    """Whether a reading says that more is allocated, and not the process's noise: more by a share of ``scale_bytes``, by default
    of what was known.
    """
    scale_bytes = known_bytes if scale_bytes is None else scale_bytes
    return found_bytes - known_bytes > max(_LEAST_BYTES, _MORE * scale_bytes)


class StepLevels:
    """Readings of the step that runs, in bytes above its beginning, and the highest that measured steps have shown.

    Before each forward the owner sets what it expects of the step: ``expected_forward_bytes`` that the plan predicts to be added by
    forward (0: nothing is predicted, so the largest forward that was measured is expected), and ``expected_peak_bytes``.
    """

    def __init__(self, device: torch.device) -> None:
        self.expected_forward_bytes = 0
        self.expected_peak_bytes = 0
        self.cause = ""
        """What was higher in the last step than in measured ones."""
        self._device = device
        self._begin_bytes: int | None = None
        self._expected = self._forward = self._loss = self._end = self._loss_nodes = 0
        self._most_loss_nodes: int | None = None
        self._forward_share = self._loss_share = 0.0
        """The most that measured steps have held when forward ended and when backward began, in units of what was expected."""
        self._most_end = self._most_bytes = 0
        self._base_bytes = 0
        """What was there when a measured step began, but for optimizer state."""

    def begin(self) -> None:
        """A step's first forward begins."""
        self._begin_bytes = self.read()
        self._expected = self._forward = self._loss = self._end = self._loss_nodes = 0

    def read(self) -> int | None:
        """What is allocated now."""
        return allocated_bytes(self._device)

    def above_begin(self) -> int:
        """What is allocated now and was not when the step began."""
        found = None if self._begin_bytes is None else self.read()
        return 0 if found is None or self._begin_bytes is None else found - self._begin_bytes

    def is_early(self) -> bool:
        """Whether the forward that runs has hardly begun: less than a sixteenth of a known one is there."""
        known_bytes = self._forward_share * (self.expected_forward_bytes or 1)
        return self.above_begin() < _EARLY * known_bytes

    def forward_ended(self) -> None:
        """A forward of the step has returned."""
        self._expected += self.expected_forward_bytes or 1
        self._forward = max(self._forward, self.above_begin())

    def backward_begins(self, nodes: int) -> None:
        """A backward has reached what a forward returned. The loop has made ``nodes`` autograd nodes since: its loss, part of which
        is gone by now.
        """
        self._loss_nodes = max(self._loss_nodes, nodes)
        self._loss = max(self._loss, self.above_begin())

    def backward_ended(self) -> None:
        """A backward is through."""
        self._end = max(self._end, self.above_begin())

    def learn(self, base_bytes: int) -> None:
        """The step that ends was measured: it began with ``base_bytes``, optimizer state not counted."""
        self._base_bytes = base_bytes
        self._accept()

    def _accept(self) -> None:
        if self._expected:
            self._forward_share = max(self._forward_share, self._forward / self._expected)
            self._loss_share = max(self._loss_share, self._loss / self._expected)
        self._most_end = max(self._most_end, self._end)
        self._most_bytes = max(self._most_bytes, self._forward, self._loss)
        self._most_loss_nodes = max(self._most_loss_nodes or 0, self._loss_nodes)

    @property
    def has_larger_loss(self) -> bool:
        """Whether the loop has made more autograd nodes between forward and backward than in any measured step."""
        return self._most_loss_nodes is not None and self._loss_nodes > self._most_loss_nodes

    def estimated_peak_bytes(self, state_bytes: int) -> int:
        """About what the step that ends has taken, with ``state_bytes`` of an optimizer, where it stood higher at some moment than
        all measured steps did; else 0.

        Nothing that was read is more than the peak. A forward that has added more raises the peak by at least as much.
        """
        if not self._forward_share or not self._expected:
            return 0
        base_bytes = self._base_bytes + state_bytes
        moments = (
            ("forward had ended", self._forward, self._forward_share * self._expected),
            ("backward began", self._loss, self._loss_share * self._expected),
            ("backward had ended", self._end, self._most_end),
        )
        # What nodes and the allocator's own records take does not shrink with the batch.
        scale_bytes = max(self._most_bytes, *(known for _, _, known in moments))
        higher = [(when, found, known) for when, found, known in moments if is_more(found, known, scale_bytes)]
        if not higher:
            return 0
        when, found, known = higher[0]
        self.cause = f"when {when}, {format_bytes(found)} of the step were there, not {format_bytes(round(known))} as before"
        grown_bytes = found - round(known) if found is self._forward else 0
        self._accept()
        return max(self.expected_peak_bytes + grown_bytes, *(base_bytes + found for _, found, _ in higher))
