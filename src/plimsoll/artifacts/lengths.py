"""The result of a search for the longest sequences that fit on a device: one row for each set of memory-saving decisions."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.job import Layout, ModelFacts, Techniques


class LengthRow(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the longest sequence that fits on a device under one set of memory-saving decisions.

    ``tokens`` is that length, or ``None`` if no length fits. ``least_tokens`` and ``most_tokens`` are the lengths that would
    fit if the step took more or less memory, by the estimate's error. ``total_bytes`` is the memory that a device provides at
    ``tokens``, ``allocated_bytes`` the peak of live tensors in it, and ``host_bytes`` what the host holds. ``moment`` is the
    moment of the peak. ``is_gaining`` is false if this row's decisions do not make the sequence longer than the row above.
    """

    name: str
    tokens: int | None
    least_tokens: int = 0
    most_tokens: int = 0
    allocated_bytes: int = 0
    total_bytes: int = 0
    error_bytes: int = 0
    host_bytes: int = 0
    moment: str = ""
    is_gaining: bool = True

    @property
    def error_tokens(self) -> int:
        """By how many tokens the true length may differ from ``tokens`` at most, up or down; 0 if no length fits."""
        return 0 if self.tokens is None else max(self.tokens - self.least_tokens, self.most_tokens - self.tokens)


class SequenceLengths(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Data: the longest sequence that fits on a device, for training without decisions and with one more decision in each row.

    ``plimsoll.lengths.longest_sequence`` makes it. ``limit_tokens`` is the longest sequence that is tried; a row with this
    many tokens may fit more. ``attention`` names the attention kernels that the step is assumed to run.
    """

    KIND: ClassVar[str] = "lengths"
    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    target: str
    model: str
    device: str
    device_bytes: int | None
    budget_bytes: int | None
    precision: str
    optimizer: str
    layout: Layout
    techniques: Techniques
    facts: ModelFacts
    batch: int
    attention: str
    limit_tokens: int
    rows: tuple[LengthRow, ...]
    traced_tokens: tuple[int, ...]
    notes: tuple[str, ...] = ()
    trace_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def longest(self) -> int | None:
        """The tokens of the longest sequence of all rows, or ``None`` if no sequence fits."""
        return max((row.tokens for row in self.rows if row.tokens is not None), default=None)

    @property
    def exit_code(self) -> int:
        """The exit status of the command line: 0 if a sequence fits, else 3 (the status of a budget below the lowest peak)."""
        return 0 if self.longest is not None else 3
