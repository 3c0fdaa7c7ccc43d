"""Codecs that harm training, each by a mistake that people make: for the probe to find. None of them is in the library.

They follow the protocol of `plimsoll.engine.codecs`, and are known to the registry only inside `registered`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import torch

from plimsoll.engine.codecs import registry
from plimsoll.engine.codecs.layout import Elements, empty_decoded
from plimsoll.engine.codecs.protocol import Codec, Payload

_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Careless(Codec, abc.ABC):
    """A codec of floats that fits in a few lines: whole tensors at once, float32 scales, no care for NaN."""

    is_lossless: ClassVar[bool] = False
    name: ClassVar[str] = ""

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int:
        return count + 4 * -(-count // _BLOCK)

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        return 12 * (count + _BLOCK)

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        elements = Elements(tensor)
        flat = torch.cat([elements.run(i, min(i + _BLOCK, elements.count)).float() for i in self._starts(elements)])
        padded = torch.nn.functional.pad(flat, (0, -elements.count % _BLOCK)).view(-1, _BLOCK)
        scales = self.scales(padded)
        codes = self.codes(padded / scales).to(torch.int8)
        return elements.payload(codes.flatten()[: elements.count].clone(), scales)

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        codes, scales = payload.parts
        padded = torch.nn.functional.pad(codes.float(), (0, -codes.numel() % _BLOCK)).view(-1, _BLOCK)
        flat.copy_((padded * scales).flatten()[: codes.numel()])
        return tensor

    @abc.abstractmethod
    def scales(self, blocks: torch.Tensor) -> torch.Tensor: ...

    @abc.abstractmethod
    def codes(self, scaled: torch.Tensor) -> torch.Tensor: ...

    @staticmethod
    def _starts(elements: Elements) -> range:
        return range(0, elements.count, _BLOCK)


@dataclass(frozen=True, slots=True)
class TwoBits(Careless):
    """Four levels per block: -2, -1, 0, 1 times half of the largest magnitude."""

    name: ClassVar[str] = "two-bits"

    def scales(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.abs().amax(1, keepdim=True).clamp_min(1e-30) / 2

    def codes(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.round().clamp(-2, 1)


@dataclass(frozen=True, slots=True)
class Floored(Careless):
    """Sixteen levels per block, always rounded down: every element is too small, by half a level on average."""

    name: ClassVar[str] = "floored"

    def scales(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.abs().amax(1, keepdim=True).clamp_min(1e-30) / 7

    def codes(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.floor().clamp(-8, 7)


@dataclass(frozen=True, slots=True)
class StaleScale(Careless):
    """Eight bits with the scale of the first block for all of them, as a scale from another batch or layer would be."""

    name: ClassVar[str] = "stale-scale"

    def scales(self, blocks: torch.Tensor) -> torch.Tensor:
        first = blocks[0].abs().mean().clamp_min(1e-30) / 127
        return first.expand(blocks.shape[0], 1).clone()

    def codes(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.round().clamp(-127, 127)


@dataclass(frozen=True, slots=True)
class SignOnly(Careless):
    """The sign and the mean magnitude of each block, for ops that read more than signs."""

    name: ClassVar[str] = "sign-only"

    def scales(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.abs().mean(1, keepdim=True).clamp_min(1e-30)

    def codes(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.sign()


@dataclass(frozen=True, slots=True)
class TenthTooLarge(Careless):
    """Eight bits, decoded a tenth too large."""

    name: ClassVar[str] = "tenth-too-large"

    def scales(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127

    def codes(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.round()

    def decode(self, payload: Payload) -> torch.Tensor:
        return Careless.decode(self, payload).mul_(1.1)


BAD_CODECS = (TwoBits(), Floored(), StaleScale(), SignOnly(), TenthTooLarge())


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Let plans name these codecs inside the block."""
    families = {codec.name: (lambda name, codec=codec: codec) for codec in BAD_CODECS}
    with mock.patch.dict(registry.FAMILIES, families):
        yield
