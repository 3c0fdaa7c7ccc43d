"""Meters every training step cheaply: reads the allocated bytes at four moments and compares them with measured steps.

Measuring a whole step on a CPU needs torch's profiler and takes longer than the step itself. Reading the allocator takes
microseconds (see ``tracing.meters.allocated``). It is read when forward begins and ends, and when backward begins and ends. If
a reading is higher than in all measured steps, the step has taken more than those, and the next step is measured.

Known weakness: if only temporaries of single operations grow, the peak may be higher although no reading is.
"""

from __future__ import annotations

import torch

from plimsoll.tracing.meters.allocated import allocated_bytes
from plimsoll.units import KIB, format_bytes

_MORE = 1 / 128
"""Readings that differ by a smaller share are equal: they include the rest of the process."""
_LEAST_BYTES = 32 * KIB
_EARLY = 1 / 16
_MOST_LOSSES = 16
"""After this many different sizes of the loss's graph, only a larger one counts as new: the loop may draw them at random."""


def is_more(found_bytes: float, known_bytes: float, scale_bytes: float | None = None) -> bool:
    """Whether the difference is more than noise, which is a share of ``scale_bytes`` (default: ``known_bytes``)."""
    scale_bytes = known_bytes if scale_bytes is None else scale_bytes
    return found_bytes - known_bytes > max(_LEAST_BYTES, _MORE * scale_bytes)


class StepLevels:
    """Readings of the running step, in bytes above its beginning, and the highest readings of measured steps.

    Before each forward the owner sets two figures. ``expected_forward_bytes`` is the predicted growth in forward (0: no
    prediction; the largest measured forward is expected). ``expected_peak_bytes`` is the expected peak of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.expected_forward_bytes = 0
        self.expected_peak_bytes = 0
        self.cause = ""
        """Which reading of the last step was higher than in measured steps."""
        self._device = device
        self._begin_bytes: int | None = None
        allocated_bytes(
            device
        )  # the first reading allocates a little to try itself out, and no step should contain that
        self._expected = self._forward = self._loss = self._end = self._loss_nodes = 0
        self._known_loss_nodes: set[int] = set()
        """How many autograd nodes measured steps have made between forward and backward."""
        self._forward_share = self._loss_share = 0.0
        """The highest readings of measured steps when forward ended and when backward began, over what was expected."""
        self._most_end = self._most_bytes = 0
        self._base_bytes = 0
        """Bytes at the beginning of the last measured step, without optimizer state."""

    def begin(self) -> int:
        """A step's first forward begins; returns the allocated bytes, 0 if they are not read."""
        self._begin_bytes = self.read()
        self._expected = self._forward = self._loss = self._end = self._loss_nodes = 0
        return self._begin_bytes or 0

    def read(self) -> int | None:
        """Bytes that are allocated now."""
        return allocated_bytes(self._device)

    def above_begin(self) -> int:
        """Bytes that are allocated now, minus those at the beginning of the step."""
        found = None if self._begin_bytes is None else self.read()
        return 0 if found is None or self._begin_bytes is None else found - self._begin_bytes

    def is_early(self) -> bool:
        """Whether the forward that runs has added less than a sixteenth of a measured one."""
        known_bytes = self._forward_share * (self.expected_forward_bytes or 1)
        return self.above_begin() < _EARLY * known_bytes

    def forward_ended(self) -> None:
        """A forward of the step has returned."""
        self._expected += self.expected_forward_bytes or 1
        self._forward = max(self._forward, self.above_begin())

    def backward_begins(self, nodes: int) -> None:
        """A backward has reached the output of a forward. The loss's graph, of ``nodes`` nodes, is partly freed by now."""
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
        self._known_loss_nodes.add(self._loss_nodes)

    @property
    def has_new_loss(self) -> bool:
        """Whether the loop has made a number of autograd nodes between forward and backward that no measured step has made."""
        known = self._known_loss_nodes
        if len(known) >= _MOST_LOSSES:
            return self._loss_nodes > max(known)
        return bool(known) and self._loss_nodes not in known

    def estimated_peak_bytes(self, state_bytes: int) -> int:
        """Estimate the peak of the step that ends, with ``state_bytes`` of optimizer state; 0 if no reading is above those of
        measured steps.

        Every reading is a lower bound of the peak. If forward has added more, the peak is higher by at least as much.
        """
        if not self._forward_share or not self._expected:
            return 0
        base_bytes = self._base_bytes + state_bytes
        moments = (
            ("forward had ended", self._forward, self._forward_share * self._expected),
            ("backward began", self._loss, self._loss_share * self._expected),
            ("backward had ended", self._end, self._most_end),
        )
        # The bytes of autograd nodes and of the allocator itself do not shrink with the batch.
        scale_bytes = max(self._most_bytes, *(known for _, _, known in moments))
        higher = [(when, found, known) for when, found, known in moments if is_more(found, known, scale_bytes)]
        if not higher:
            return 0
        when, found, known = higher[0]
        self.cause = (
            f"when {when}, {format_bytes(found)} of the step were there, not {format_bytes(round(known))} as before"
        )
        grown_bytes = found - round(known) if found is self._forward else 0
        self._accept()
        return max(self.expected_peak_bytes + grown_bytes, *(base_bytes + found for _, found, _ in higher))
