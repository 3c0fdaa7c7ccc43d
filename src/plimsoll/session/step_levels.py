"""Checks every training step cheaply: reads the allocated bytes at four moments and compares them with measured steps.

Measuring a whole step on a CPU needs torch's profiler, which makes the step slower. Reading the allocator takes microseconds
(see ``tracing.meters.allocated``). It is read when forward begins and ends, and when backward begins and ends. If a reading is
higher than in all measured steps, the step needed more memory than those, and the next step is measured.

Known weakness: if only temporaries of single operations grow, the peak may be higher although no reading is higher.
"""

from __future__ import annotations

import math

import torch

from plimsoll.tracing.meters.allocated import allocated_bytes
from plimsoll.units import KIB, format_bytes

_MORE = 1 / 128
"""Two readings that differ by less than this share count as equal. They contain all memory of the process, not only the
step's.
"""
_LEAST_BYTES = 32 * KIB
_EARLY = 1 / 16
"""A measurement may begin within a forward only while that forward has added less than this share of a measured forward's
bytes. Later, the meter would miss too many tensors: it does not see when tensors are freed that were made before it started.
"""
_MOST_LOSSES = 16
"""After this many different numbers of autograd nodes in the loss, only a larger number counts as new: the loop may draw them
at random.
"""


def is_more(found_bytes: float, known_bytes: float, scale_bytes: float | None = None) -> bool:
    """Return True if ``found_bytes`` exceeds ``known_bytes`` by more than noise. Noise is a share of ``scale_bytes`` (by
    default ``known_bytes``).
    """
    scale_bytes = known_bytes if scale_bytes is None else scale_bytes
    return found_bytes - known_bytes > max(_LEAST_BYTES, _MORE * scale_bytes)


class StepLevels:
    """Readings of the allocated bytes in the running step, and the highest such readings of measured steps. All are in bytes
    above the beginning of their step.

    Before each forward the owner sets two figures. ``expected_forward_bytes`` is the predicted growth in forward (0 if it
    cannot be predicted; the largest measured forward is then expected). ``expected_peak_bytes`` is the expected peak of the
    step.
    """

    def __init__(self, device: torch.device) -> None:
        self.expected_forward_bytes = 0
        self.expected_peak_bytes = 0
        self.cause = ""
        """If a reading of the last step was higher than in measured steps, a text that says which; otherwise ""."""
        self._device = device
        self._begin_bytes: int | None = None
        # The first reading allocates a little, to check that the C library counts torch's memory. That must not be in a step.
        allocated_bytes(device)
        self._expected = self._forward = self._loss = self._end = self._loss_nodes = 0
        self._known_loss_nodes: set[int] = set()
        """The numbers of autograd nodes that measured steps have made between forward and backward."""
        self._forward_share = self._loss_share = 0.0
        """The highest readings of measured steps at the end of forward and at the beginning of backward, divided by the
        expected bytes.
        """
        self._least_share = math.inf
        """The lowest reading at the end of forward of any step whose bytes were predicted, divided by the predicted bytes."""
        self._most_end = self._most_bytes = 0
        self._base_bytes = 0
        """Bytes that were allocated at the beginning of the last measured step, without optimizer state."""

    def begin(self) -> int:
        """Note that a step's first forward begins. Return the allocated bytes, or 0 if they cannot be read."""
        self._begin_bytes = self.read()
        self._expected = self._forward = self._loss = self._end = self._loss_nodes = 0
        return self._begin_bytes or 0

    def read(self) -> int | None:
        """Return the bytes that are allocated now, or None if they cannot be read."""
        return allocated_bytes(self._device)

    def above_begin(self) -> int:
        """Return the bytes that are allocated now, minus the bytes at the beginning of the step."""
        found = None if self._begin_bytes is None else self.read()
        return 0 if found is None or self._begin_bytes is None else found - self._begin_bytes

    def is_early(self) -> bool:
        """True if the running forward has added less than a sixteenth of a measured forward's bytes."""
        known_bytes = self._forward_share * (self.expected_forward_bytes or 1)
        return self.above_begin() < _EARLY * known_bytes

    def forward_ended(self) -> None:
        """Note that a forward of the step has returned."""
        self._expected += self.expected_forward_bytes or 1
        self._forward = max(self._forward, self.above_begin())

    @property
    def forward_growth(self) -> float:
        """The bytes that the step's forwards have added, as a multiple of the predicted bytes. It is 1 if that is no more than
        noise, or if they were not predicted.

        The prediction may leave out a constant share, such as the allocator's rounding. So it is compared with the step that
        was closest to its prediction.
        """
        if not self.expected_forward_bytes or not self._expected or self._forward <= 0:
            return 1.0
        share = self._forward / self._expected
        self._least_share = min(self._least_share, share)
        known_share = max(1.0, self._least_share)
        return share / known_share if is_more(self._forward, known_share * self._expected) else 1.0

    def backward_begins(self, nodes: int) -> None:
        """Note that a backward has reached a forward's output. The loss made ``nodes`` autograd nodes; some are freed
        by now.
        """
        self._loss_nodes = max(self._loss_nodes, nodes)
        self._loss = max(self._loss, self.above_begin())

    def backward_ended(self) -> None:
        """Note that a backward has ended."""
        self._end = max(self._end, self.above_begin())

    def learn(self, base_bytes: int) -> None:
        """Note that the step that ends was measured, so that its readings of allocated bytes count as known.

        ``base_bytes`` were allocated when it began, without optimizer state.
        """
        self._base_bytes = base_bytes
        self._accept()

    def _accept(self) -> None:
        if self._expected:
            self._forward_share = max(self._forward_share, self._forward / self._expected)
            self._loss_share = max(self._loss_share, self._loss / self._expected)
        self._most_end = max(self._most_end, self._end)
        self._most_bytes = max(self._most_bytes, self._forward, self._loss)
        self._known_loss_nodes.add(self._loss_nodes)

    @property
    def has_new_loss(self) -> bool:
        """Return True if the loop made a number of autograd nodes between forward and backward that no measured step has made.

        Fewer nodes count as well as more: a loss of fewer nodes may need more memory.
        """
        known = self._known_loss_nodes
        if len(known) >= _MOST_LOSSES:
            return self._loss_nodes > max(known)
        return bool(known) and self._loss_nodes not in known

    def estimated_peak_bytes(self, state_bytes: int) -> int:
        """Estimate the peak of the step that ends, in bytes, with ``state_bytes`` of optimizer state. Return 0 if no reading is
        higher than in measured steps.

        Every reading is a lower bound of the peak. If forward added more than expected, the peak is higher by at least as much.
        """
        if not self._forward_share or not self._expected:
            return 0
        base_bytes = self._base_bytes + state_bytes
        moments = (
            ("forward had ended", self._forward, self._forward_share * self._expected),
            ("backward began", self._loss, self._loss_share * self._expected),
            ("backward had ended", self._end, self._most_end),
        )
        # Compare with the noise of the largest step: the bytes of autograd nodes and of the allocator do not shrink with the
        # batch.
        scale_bytes = max(self._most_bytes, *(known for _, _, known in moments))
        higher = [(when, found, known) for when, found, known in moments if is_more(found, known, scale_bytes)]
        if not higher:
            return 0
        when, found, known = higher[0]
        self.cause = f"when {when}, the step held {format_bytes(found)}, and earlier steps {format_bytes(round(known))}"
        grown_bytes = found - round(known) if found is self._forward else 0
        self._accept()
        return max(self.expected_peak_bytes + grown_bytes, *(base_bytes + found for _, found, _ in higher))
