"""What every codec promises: it turns a tensor into a payload of fewer bytes, and back into the tensor or one close to it.

What is promised, by all of them:

- ``encode`` never raises for what a tensor holds. It answers None where the codec cannot represent it, and the caller
  keeps the tensor.
- NaN and infinity never come back as numbers. On the CPU lossy codecs answer None for them. On CUDA that would have to
  wait for the device, so there the scale of a block that holds one becomes NaN, and all of the block decodes to NaN.
- The same tensor and seed give the same payload on the same device, and nobody else's random numbers are touched.
- Temporaries are bounded by ``workspace_bytes``, however large the tensor.
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
    """An encoded tensor: what the codec wrote, and the size, strides and dtype of what it decodes to."""

    parts: tuple[torch.Tensor, ...]
    """The codec's own: codes, scales, a bitmap. None shares its storage with anything else."""
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
    """Decoding gives back what backward would have read, bit by bit."""
    keeps_sign_only: ClassVar[bool] = False
    """Only where the tensor is positive comes back. Lossless for an op whose backward reads no more, such as ReLU."""

    @property
    def name(self) -> str:
        """The family and the fields that differ from their defaults: ``find_codec`` makes an equal codec of it."""
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
        """Whether a CUDA graph may repeat encode and decode: both run the same kernels, whatever the data and the seed are."""
        return True

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int | None:
        """Exact bytes of the payload of ``count`` elements; None where they depend on what the elements are."""
        ...

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Most bytes alive during encode or decode besides the tensor and the payload."""
        ...

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        """The tensor as a payload.

        Args:
            tensor: any shape and strides, of a dtype that the codec accepts.
            seed: of stochastic rounding; codecs without it do not look.
            most_bytes: a payload above this is not made.

        Returns:
            None where the data cannot be represented, or not in ``most_bytes``.
        """
        ...

    def decode(self, payload: Payload) -> torch.Tensor:
        """A new tensor of the payload's size, strides and dtype, on the payload's device."""
        ...


@dataclass(frozen=True, slots=True)
class Numbers:
    """The values that a numeric parameter may have; whole numbers have to be powers of two."""

    kind: type[int] | type[float]
    least: float
    most: float

    def read(self, text: str) -> float | None:
        """The number that ``text`` says, if it may be one."""
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
