"""The contract of every codec: encode a tensor as a payload of fewer bytes, and decode it exactly or approximately.

All codecs guarantee:

- ``encode`` never raises because of a tensor's contents. It returns None if the codec cannot represent the contents, and the
  caller keeps the tensor.
- NaN and infinity never decode to numbers. On the CPU, ``encode`` of a lossy codec returns None for them. On CUDA, the host
  would have to wait for the device for that. So on CUDA the scale of their block becomes NaN, and the whole block decodes to
  NaN.
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
    """Data: an encoded tensor. It has the codec's output, and the size, strides and dtype of the decoded tensor."""

    parts: tuple[torch.Tensor, ...]
    """The codec's output: codes, scales, a bitmap. The storage of a part is not shared with other tensors."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size in bytes of the storages of all parts. Scales and constants count too."""
        return sum(part.untyped_storage().nbytes() for part in self.parts)


class Codec(Protocol):
    """A protocol for codecs: ways to store a tensor in fewer bytes. Codecs are frozen dataclasses, comparable and without
    state.

    The fields of the dataclass are the codec's parameters. They are made by ``word`` and ``number``.
    """

    family: ClassVar[str]
    """The name that the codec has with its default parameters."""
    dtypes: ClassVar[Container[torch.dtype]]
    is_lossless: ClassVar[bool]
    """Whether decoding gives exactly the bits that backward would have read."""
    keeps_sign_only: ClassVar[bool] = False
    """Whether only the sign is kept (positive or not). This is lossless for an op whose backward reads only the sign, such as
    ReLU.
    """

    @property
    def name(self) -> str:
        """The codec's name, such as ``int8:block=128``: the family, and the parameters that differ from their defaults.
        ``find_codec`` makes an equal codec from the name.
        """
        parts = [self.family]
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # a protocol cannot say that it is a dataclass
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(value if "words" in field.metadata else f"{field.name}={value}")
        return ":".join(parts)

    def accepts(self, dtype: torch.dtype) -> bool:
        """Return whether this codec can encode tensors of this dtype at all."""
        return dtype in self.dtypes

    def is_capturable(self, dtype: torch.dtype) -> bool:
        """Return whether a CUDA graph may repeat encode and decode. For that, both must run the same kernels for any data and
        seed.
        """
        return True

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int | None:
        """Return the exact size in bytes of the payload of ``count`` elements, or None if the size depends on the contents."""
        ...

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return the most bytes of temporaries during encode or decode. The tensor and the payload do not count."""
        ...

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        """Encode a tensor, and return the payload.

        Args:
            tensor: any shape and strides, of a dtype that the codec accepts.
            seed: the seed for stochastic rounding. Codecs without stochastic rounding ignore it.
            most_bytes: the largest allowed size of the payload in bytes.

        Returns:
            The payload, or None if the codec cannot represent the data, or needs more than ``most_bytes``.
        """
        ...

    def decode(self, payload: Payload) -> torch.Tensor:
        """Decode a payload, and return a new tensor of the payload's size, strides and dtype, on the payload's device."""
        ...


@dataclass(frozen=True, slots=True)
class Numbers:
    """The range of values that a numeric parameter of a codec may have. Whole numbers must also be powers of two."""

    kind: type[int] | type[float]
    least: float
    most: float

    def read(self, text: str) -> float | None:
        """Return the number in ``text``, or None if the number is not allowed."""
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
    """Return a dataclass field for a parameter that is one of these words. A codec's name contains only the word."""
    return dataclasses.field(default=default, metadata={"words": (default, *others)})


def number(default: float, *, least: float, most: float) -> Any:
    """Return a dataclass field for a parameter that is a number. A codec's name contains ``field=value``.

    If ``default`` is an int, the number must be a power of two.
    """
    return dataclasses.field(default=default, metadata={"numbers": Numbers(type(default), least, most)})
