"""Packs bits and halves of bytes into full bytes; the lowest bits of a byte belong to its first element.

Neighbouring bytes are combined by reading them as one wider integer (of a little-endian machine), so that every step is
one op over contiguous memory, on any device.
"""

from __future__ import annotations

import torch

_BIT_OF_EACH_BYTE = int.from_bytes(bytes(1 << i for i in range(8)), "little", signed=True)
_ONE_IN_EACH_BYTE = 0x0101010101010101


def packed_bits_bytes(count: int) -> int:
    """Bytes of ``count`` packed bits."""
    return -(-count // 8)


def packed_nibbles_bytes(count: int) -> int:
    """Bytes of ``count`` packed halves of a byte."""
    return -(-count // 2)


class BitPacker:
    """Packs and unpacks up to ``most`` bits at a time, in scratch memory of its own.

    Example:
        >>> packer = BitPacker(3, torch.device("cpu"))
        >>> packer.bits(3).copy_(torch.tensor([True, False, True]))
        tensor([ True, False,  True])
        >>> packer.pack(3, out=torch.empty(1, dtype=torch.uint8))
        tensor([5], dtype=torch.uint8)
    """

    __slots__ = ("_bytes", "_other")

    def __init__(self, most: int, device: torch.device) -> None:
        self._bytes = torch.empty(packed_bits_bytes(most) * 8, dtype=torch.uint8, device=device)
        self._other = torch.empty_like(self._bytes)

    @staticmethod
    def scratch_bytes(most: int) -> int:
        """Bytes of the scratch memory."""
        return 16 * packed_bits_bytes(most)

    def bits(self, count: int) -> torch.Tensor:
        """Where the ``count`` bits are written to before ``pack``, and read from after ``unpack``."""
        return self._bytes[:count].view(torch.bool)

    def pack(self, count: int, out: torch.Tensor) -> torch.Tensor:
        """The bits, 8 in each of the bytes of ``out``."""
        padded = 8 * out.numel()
        self._bytes[count:padded].zero_()
        words = self._bytes[:padded].view(torch.int64)
        moved = self._other[:padded].view(torch.int64)
        for shift in (7, 14, 28):  # afterwards the lowest byte has the bits of 2, 4, 8 bytes
            torch.bitwise_right_shift(words, shift, out=moved)
            words.bitwise_or_(moved)
        return out.copy_(words)

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        """``count`` bits of ``packed``, where ``bits`` has them."""
        words = self._other[: 8 * packed.numel()].view(torch.int64)
        words.copy_(packed)
        words.mul_(_ONE_IN_EACH_BYTE).bitwise_and_(_BIT_OF_EACH_BYTE)
        return self.bits(count).copy_(self._other[:count])


def pack_nibbles(codes: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Codes from 0 to 15, two in each of the bytes of ``out``.

    Args:
        codes: int8, an even number of them.
        scratch: int16, at least half as many.
        out: uint8, half as many.
    """
    pairs = codes.view(torch.int16)
    moved = scratch[: pairs.numel()]
    torch.bitwise_right_shift(pairs, 4, out=moved)
    return out.copy_(moved.bitwise_or_(pairs))


def unpack_nibbles(packed: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The codes that ``pack_nibbles`` packed, as int8 in ``out``; ``scratch`` as there."""
    pairs = out.view(torch.int16)
    moved = scratch[: pairs.numel()]
    pairs.copy_(packed)
    torch.bitwise_left_shift(pairs, 4, out=moved)
    pairs.bitwise_or_(moved).bitwise_and_(0x0F0F)
    return out
