"""The contract of every codec: encode a tensor as a payload of fewer bytes, and decode it exactly or approximately.

All codecs guarantee:

- ``encode`` never raises because of a tensor's contents. It returns None if the codec cannot represent them, and the caller
  keeps the tensor.
- NaN and infinity never decode to numbers. On the CPU lossy codecs return None for them. On CUDA that would have to wait for
  the device, so there the scale of their block becomes NaN, and the whole block decodes to NaN.
- The same tensor and seed give the same payload on the same device. Global random generators are not used.
- Temporaries are bounded by ``workspace_bytes``, however large the tensor is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded tensor: the codec's output, and the size, strides and dtype of the decoded tensor."""

    parts: tuple[torch.Tensor, ...]
    """The codec's output: codes, scales, a bitmap. No part shares its storage with anything else."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of the storages of all parts: scales and constants count."""
        return sum(part.untyped_storage().nbytes() for part in self.parts)


class Codec(Protocol):
    """One way to store a tensor in fewer bytes. Codecs are frozen dataclasses, comparable and without state.

    Their fields are their parameters, made by ``word`` and ``number``.
    """

    family: ClassVar[str]
    """The name of the codec with its defaults."""
    dtypes: ClassVar[Container[torch.dtype]]
    is_lossless: ClassVar[bool]
    """Whether decoding gives exactly what backward would have read, bit by bit."""
    keeps_sign_only: ClassVar[bool] = False
    """Whether only the sign is kept (positive or not). Lossless for an op whose backward reads only the sign, such as ReLU."""

    @property
    def name(self) -> str:
        """The family and the fields that differ from their defaults. ``find_codec`` makes an equal codec from this name."""
        parts = [self.family]
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # a protocol cannot say that it is a dataclass
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(value if "words" in field.metadata else f"{field.name}={value}")
        return ":".join(parts)

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype can be encoded at all."""
        return dtype in self.dtypes

    def is_capturable(self, dtype: torch.dtype) -> bool:
        """Whether a CUDA graph may repeat encode and decode: both run the same kernels for any data and seed."""
        return True

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int | None:
        """Exact bytes of the payload of ``count`` elements; None if they depend on the contents."""
        ...

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        """The most bytes of temporaries alive during encode or decode, in addition to the tensor and the payload."""
        ...

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        """Encode a tensor.

        Args:
            tensor: any shape and strides, of a dtype that the codec accepts.
            seed: for stochastic rounding; other codecs ignore it.
            most_bytes: the limit of the payload's bytes.

        Returns:
            The payload; None if the codec cannot represent the data, or not within ``most_bytes``.
        """
        ...

    def decode(self, payload: Payload) -> torch.Tensor:
        """A new tensor of the payload's size, strides and dtype, on the payload's device."""
        ...


@dataclass(frozen=True, slots=True)
class Numbers:
    """The values that a numeric parameter may have; whole numbers must be powers of two."""

    kind: type[int] | type[float]
    least: float
    most: float

    def read(self, text: str) -> float | None:
        """Parse the number in ``text``; None if it is not allowed."""
        try:
            value = self.kind(text)
        except ValueError:
            return None
        is_allowed = self.least <= value <= self.most and (self.kind is float or math.log2(value).is_integer())
        return value if is_allowed else None

    def __str__(self) -> str:
        what = "a power of two" if self.kind is int else "a number"
        return f"{what} from {self.least} to {self.most}"


def word(default: str, *others: str) -> Any:
    """A parameter that is one of these words; a codec's name has the word alone."""
    return dataclasses.field(default=default, metadata={"words": (default, *others)})


def number(default: float, *, least: float, most: float) -> Any:
    """A parameter that is a number (a power of two where ``default`` is an int); a codec's name has ``field=value``."""
    return dataclasses.field(default=default, metadata={"numbers": Numbers(type(default), least, most)})
