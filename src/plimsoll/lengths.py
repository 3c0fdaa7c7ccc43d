"""Finds how long a sequence fits on a device: without decisions, and with one more decision that saves memory in each row.

Example:
    >>> from plimsoll.lengths import longest_sequence
    >>> found = longest_sequence("llama-tiny", device="H100", budget="200MiB", precision="bf16")
    >>> found.longest > found.rows[0].tokens
    True

The command line has it as ``plimsoll estimate TARGET --longest-sequence`` and ``plimsoll fit TARGET --longest-sequence``. The
implementation is in `plimsoll.estimator.longest_sequence`, the result in `plimsoll.artifacts.lengths`.
"""

from plimsoll.artifacts.lengths import LengthRow, SequenceLengths
from plimsoll.estimator.longest_sequence import longest_sequence

__all__ = ["LengthRow", "SequenceLengths", "longest_sequence"]
