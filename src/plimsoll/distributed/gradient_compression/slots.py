"""A slot is the record of one parameter: whether its gradient is compressed, the bytes that a rank sends for it, and its state
between steps.

Bytes are those that each rank's link carries in each direction. An all-reduce passes each byte twice around the ring of ranks;
a reduce-scatter and an all-gather pass it once. Libraries may differ on other topologies. The counters of a training use the
same figures.

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
"""What a rank gets from a reduction.

``mean``: the whole mean, as under DDP. ``shard``: the rank's own shard of the mean, as under FSDP2.
"""

STATE = ("residual", "velocity", "factor")
"""The names of the fields of ``GradientSlot`` that hold tensors from one step to the next."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of gradients that are compressed. Gradients of other dtypes are sent uncompressed."""
_MOST_ELEMENTS = 2**31 - 1
_INDEX_BYTES = torch.int32.itemsize


def dense_bytes(elements: int, dtype: torch.dtype, ranks: int, form: Form) -> int:
    """Return the bytes that one rank sends to reduce an uncompressed gradient.

    The reduction is an all-reduce if each rank gets the whole mean (form ``mean``), and a reduce-scatter if it gets its shard
    (form ``shard``).
    """
    passes = 2 if form == "mean" else 1
    return passes * elements * dtype.itemsize * (ranks - 1) // ranks


def compressed_bytes(method: Method, shape: Sequence[int], dtype: torch.dtype, ranks: int, form: Form) -> int:
    """Return the bytes that one rank sends to reduce a compressed gradient.

    If each rank gets only its shard of the mean (form ``shard``), ``shape`` is ``(ranks, elements of a padded shard)``.
    """
    if method.kind == "powersgd":
        rows, columns, rank = factors_of(shape, method.rank)
        return dense_bytes((rows + columns) * rank, torch.float32, ranks, "mean")
    # An all-gather of one payload, or an all-to-all of one payload per rank: the payload goes to each other rank.
    sent = method.elements_sent(shape[1] if form == "shard" else math.prod(shape))
    return sent * (_INDEX_BYTES + dtype.itemsize) * (ranks - 1)


def factors_of(shape: Sequence[int], rank: int) -> tuple[int, int, int]:
    """Return the rows and columns of the matrix that a parameter is reshaped to, and the number of columns of its low-rank
    factors.

    Example:
        >>> factors_of((64, 3, 3, 3), 4)
        (64, 27, 4)
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return rows, columns, min(rows, columns, rank)


@dataclass(slots=True, kw_only=True)
class GradientSlot:
    """Data: one parameter's gradient on one rank, with its state between steps. A reduction averages the gradient over ranks.

    Attributes:
        number: the parameter's position among all parameters, the same on all ranks.
        shape: the gradient's shape; for the form ``shard``, ``(ranks, elements of a padded shard)``.
        reason: why the gradient is not compressed; empty if it is compressed.
        reductions: the number of the gradient's reductions so far.
        residual: what this rank has not sent yet, float32 ``(rows, elements)``. Under ``shard``, it has one row per rank.
        velocity: momentum before compression, in the shape of the residual. For a parameter that is not compressed, it is the
            momentum of the mean.
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
        """The number of elements of the gradient."""
        return math.prod(self.shape)

    @property
    def is_compressed(self) -> bool:
        """Whether the gradient is compressed after warm-up."""
        return not self.reason

    @property
    def dense_bytes(self) -> int:
        """The bytes that one rank sends in a reduction of this gradient without compression."""
        return dense_bytes(self.elements, self.dtype, self.ranks, self.form)

    def sent_bytes(self, settings: CompressionSettings) -> int:
        """Return the bytes that one rank sends in a reduction of this gradient after warm-up."""
        if not self.is_compressed:
            return self.dense_bytes
        return compressed_bytes(settings.method, self.shape, self.dtype, self.ranks, self.form)

    def is_due(self, settings: CompressionSettings) -> bool:
        """Return whether the next reduction of this gradient is compressed: it is compressed at all, and its warm-up is
        over.
        """
        return self.is_compressed and self.reductions >= settings.warmup_steps

    @property
    def state_bytes(self) -> int:
        """The bytes that the gradient's state takes on this rank between steps."""
        return sum(kept.nbytes for kind in STATE if (kept := getattr(self, kind)) is not None)


class GradientPart(NamedTuple):
    """Data: the name of a parameter, and its gradient's shape and dtype in the reduction, which may differ from the
    parameter's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def make_slots(
    parts: Iterable[GradientPart], settings: CompressionSettings, *, ranks: int, form: Form
) -> list[GradientSlot]:
    """Make one slot (the record of a parameter's gradient) per parameter, in the order of ``parts``.

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
