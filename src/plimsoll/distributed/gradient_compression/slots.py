"""One slot per parameter: whether its gradient is compressed, how many bytes it sends, and its state between steps.

Bytes are the bytes that each rank's link carries in each direction: all-reduce passes every byte twice around the ring,
reduce-scatter and all-gather once. Libraries may differ on other topologies. The same figures are counted in training.

Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from plimsoll.distributed.gradient_compression.method import EXCLUDED, CompressionSettings, Method
from plimsoll.errors import InvalidOption

Form = Literal["mean", "shard"]
"""``mean``: every rank gets the whole mean, as under DDP. ``shard``: every rank gets its shard of it, as under FSDP2."""

STATE = ("residual", "velocity", "factor")
"""The fields of a slot with tensors that live from step to step."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that are compressed; gradients of other dtypes are sent uncompressed."""
_MOST_ELEMENTS = 2**31 - 1
_INDEX_BYTES = torch.int32.itemsize


def dense_bytes(elements: int, dtype: torch.dtype, ranks: int, form: Form) -> int:
    """Bytes that one rank sends for an uncompressed gradient: an all-reduce, or a reduce-scatter for ``shard``."""
    passes = 2 if form == "mean" else 1
    return passes * elements * dtype.itemsize * (ranks - 1) // ranks


def compressed_bytes(method: Method, shape: Sequence[int], dtype: torch.dtype, ranks: int, form: Form) -> int:
    """Bytes that one rank sends for a compressed gradient.

    For ``shard``, ``shape`` is ``(ranks, elements of a padded shard)``.
    """
    if method.kind == "powersgd":
        rows, columns, rank = factors_of(shape, method.rank)
        return dense_bytes((rows + columns) * rank, torch.float32, ranks, "mean")
    # An all-gather of one payload, or an all-to-all of one payload per rank: the payload goes to each other rank.
    sent = method.elements_sent(shape[1] if form == "shard" else math.prod(shape))
    return sent * (_INDEX_BYTES + dtype.itemsize) * (ranks - 1)


def factors_of(shape: Sequence[int], rank: int) -> tuple[int, int, int]:
    """Rows and columns of a parameter reshaped to a matrix, and the number of columns of its factors.

    Example:
        >>> factors_of((64, 3, 3, 3), 4)
        (64, 27, 4)
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return rows, columns, min(rows, columns, rank)


@dataclass(slots=True, kw_only=True)
class GradientSlot:
    """One parameter on one rank.

    Attributes:
        number: its position among the parameters, the same on all ranks.
        shape: the gradient's shape; for ``shard``, ``(ranks, elements of a padded shard)``.
        reason: why it is not compressed; empty if it is compressed.
        reductions: the number of its reductions so far.
        residual: what this rank has not sent yet, float32 ``(rows, elements)``, where ``shard`` has one row per rank.
        velocity: momentum before compression, like the residual; of a parameter that is not compressed, of its mean.
        factor: the right factor of ``powersgd`` from the last step, ``(columns, rank)`` float32, the same on all ranks.
    """

    name: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: int
    form: Form
    reason: str
    residual: torch.Tensor | None = field(default=None, repr=False)
    velocity: torch.Tensor | None = field(default=None, repr=False)
    factor: torch.Tensor | None = field(default=None, repr=False)
    reductions: int = 0

    @property
    def elements(self) -> int:
        """The number of elements of its gradient."""
        return math.prod(self.shape)

    @property
    def is_compressed(self) -> bool:
        """True if it is compressed after warm-up."""
        return not self.reason

    @property
    def dense_bytes(self) -> int:
        """Bytes that one rank sends for it uncompressed."""
        return dense_bytes(self.elements, self.dtype, self.ranks, self.form)

    def sent_bytes(self, settings: CompressionSettings) -> int:
        """Bytes that one rank sends for it after warm-up."""
        if not self.is_compressed:
            return self.dense_bytes
        return compressed_bytes(settings.method, self.shape, self.dtype, self.ranks, self.form)

    def is_due(self, settings: CompressionSettings) -> bool:
        """True if its next reduction is compressed."""
        return self.is_compressed and self.reductions >= settings.warmup_steps

    @property
    def state_bytes(self) -> int:
        """Bytes of its state on this rank between steps."""
        return sum(kept.nbytes for kind in STATE if (kept := getattr(self, kind)) is not None)


class GradientPart(NamedTuple):
    """A parameter's gradient in its reduction, where shape and dtype may differ from the parameter's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def make_slots(
    parts: Iterable[GradientPart], settings: CompressionSettings, *, ranks: int, form: Form
) -> list[GradientSlot]:
    """Make one slot per parameter, in the order given.

    Raises:
        InvalidOption: one of the caller's patterns matches no parameter.
    """
    parts = list(parts)
    for pattern in settings.exclude:
        if pattern not in EXCLUDED and not any(fnmatch.fnmatchcase(part.name, pattern) for part in parts):
            some = ", ".join(part.name for part in parts[:3])
            raise InvalidOption(
                f"exclude={pattern!r} matches no parameter.",
                why=f"patterns are matched against whole names, such as {some}",
                next="correct the pattern (a star matches any text, '*.mlp.*'), or leave it out",
            )
    return [
        GradientSlot(
            **part._asdict(), number=number, ranks=ranks, form=form, reason=_reason_not_to(part, settings, ranks, form)
        )
        for number, part in enumerate(parts)
    ]


def _reason_not_to(part: GradientPart, settings: CompressionSettings, ranks: int, form: Form) -> str:
    elements = math.prod(part.shape)
    if settings.method.kind == "none":
        return "the method is none"
    for pattern in settings.exclude:
        if fnmatch.fnmatchcase(part.name, pattern):
            return f"excluded by {pattern!r}"
    if part.dtype not in _FLOATS:
        return f"gradients of {str(part.dtype).removeprefix('torch.')} are sent as they are"
    if elements < settings.min_elements or not elements:
        return f"fewer than {settings.min_elements} elements"
    if elements > _MOST_ELEMENTS:
        return f"more than {_MOST_ELEMENTS} elements: places are sent as 32-bit integers"
    # One rank alone sends nothing. Then decide as with two ranks.
    several = max(2, ranks)
    compressed = compressed_bytes(settings.method, part.shape, part.dtype, several, form)
    if dense_bytes(elements, part.dtype, several, form) < settings.min_ratio * compressed:
        return f"would save too little: its bytes divided by less than {settings.min_ratio:g}"
    return ""
