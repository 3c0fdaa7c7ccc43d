"""Reading a tensor of any strides for codecs: as flat elements, one chunk at a time, as values or as bit patterns.

A tensor without gaps or overlaps (transposed ones too) is read in memory order, without a copy, and decodes to the same
strides. Any other tensor (sliced, expanded) is read in index order and decodes to a contiguous tensor.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator

import torch

from plimsoll.engine.codecs.protocol import Payload

CHUNK = 2**18
"""The number of elements per chunk. As float32, they take 1 MiB of scratch memory, which stays in cache.

With smaller chunks, the overhead of calls exceeds the time of the ops.
"""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The floating-point dtypes that most lossy codecs accept."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Elements:
    """Reads the elements of a tensor of any strides in a fixed order, in runs of neighbours."""

    __slots__ = ("_copy", "_tensor", "count", "device", "dtype", "flat", "size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self.count, self.dtype, self.device = tensor.numel(), tensor.dtype, tensor.device
        self.size = tuple(tensor.shape)
        self._tensor = tensor
        self.flat: torch.Tensor | None = None  # a flat view of all elements, if that is possible without a copy
        self._copy: torch.Tensor | None = None
        if is_dense(tensor.shape, tensor.stride()):
            self.stride = tuple(tensor.stride())
            self.flat = tensor.as_strided((self.count,), (1,))
        else:
            self.stride = tensor.new_empty(self.size, device="meta").stride()
            self._copy = tensor.new_empty(min(CHUNK, self.count))

    def run(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop`` in one dimension, at most ``CHUNK`` elements.

        The result is a view, or a copy that the next call overwrites.
        """
        if self.flat is not None:
            return self.flat[start:stop]
        assert self._copy is not None
        out = self._copy[: stop - start]
        _gather(self._tensor, start, stop, out)
        return out

    def payload(self, *parts: torch.Tensor) -> Payload:
        """Return a payload with these parts that decodes to a tensor of this size, stride and dtype."""
        return Payload(parts, self.size, self.stride, self.dtype)


def empty_decoded(payload: Payload) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a new, unfilled tensor to decode a payload into, and a flat view to fill the tensor through."""
    device = payload.parts[0].device
    tensor = torch.empty_strided(payload.size, payload.stride, dtype=payload.dtype, device=device)
    return tensor, tensor.as_strided((tensor.numel(),), (1,))


def has_patterns(dtype: torch.dtype) -> bool:
    """Return whether torch has an integer dtype of the same width as this dtype, so that elements can be compared as bit
    patterns.
    """
    return dtype.itemsize in _INTEGERS


def patterns_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory as integers, for exact codecs.

    As floats, -0.0 equals 0.0 and NaN differs from itself. Bit patterns compare exactly.
    """
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def runs_kernels(device: torch.device) -> bool:
    """Return whether codecs use their Triton kernels on this device. The module `kernels` is imported only in that case."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def host_waits(device: torch.device) -> bool:
    """Return whether reading a value makes the host wait for this device.

    If so, codecs read at most one value, and keep other values on the device.
    """
    return device.type == "cuda"


def chunks(count: int, most: int = CHUNK) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` for each chunk of ``count`` elements. A chunk has at most ``most`` elements."""
    for start in range(0, count, most):
        yield start, min(start + most, count)


def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order."""
    expected = 1
    for step, length in sorted((step, length) for length, step in zip(size, stride, strict=True) if length != 1):
        if step != expected:
            return 0 in size
        expected *= length
    return True


def _gather(tensor: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
    """Copy elements ``start`` to ``stop``, counted in index order, into ``out``.

    Whole rows are copied at once where possible.
    """
    if tensor.dim() <= 1:
        out.copy_(tensor[start:stop] if tensor.dim() else tensor)
        return
    row = math.prod(tensor.shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        _gather(tensor[last], start - last * row, stop - last * row, out)
        return
    head, tail = first * row - start, stop - last * row
    if head:
        _gather(tensor[first - 1], row - head, row, out[:head])
    if last > first:
        body = tensor[first:last]
        out[head : head + body.numel()].view(body.shape).copy_(body)
    if tail:
        _gather(tensor[last], 0, tail, out[out.numel() - tail :])


_BIT_OF_EACH_BYTE = int.from_bytes(bytes(1 << i for i in range(8)), "little", signed=True)
_ONE_IN_EACH_BYTE = 0x0101010101010101


def packed_bits_bytes(count: int) -> int:
    """Return the number of bytes that ``count`` packed bits take."""
    return -(-count // 8)


def packed_nibbles_bytes(count: int) -> int:
    """Return the number of bytes that ``count`` packed half bytes take."""
    return -(-count // 2)


class BitPacker:
    """Packs and unpacks up to ``most`` bits at a time, with its own scratch memory.

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
        """Return the size in bytes of the scratch memory that an object for ``most`` bits allocates."""
        return 16 * packed_bits_bytes(most)

    def bits(self, count: int) -> torch.Tensor:
        """Return the first ``count`` elements of the buffer, as bools. Write to them before `pack`, and read from them after
        `unpack`.
        """
        return self._bytes[:count].view(torch.bool)

    def pack(self, count: int, out: torch.Tensor) -> torch.Tensor:
        """Pack the first ``count`` bits of the buffer into ``out``, 8 in each byte. Return ``out``."""
        padded = 8 * out.numel()
        self._bytes[count:padded].zero_()
        words = self._bytes[:padded].view(torch.int64)
        moved = self._other[:padded].view(torch.int64)
        for shift in (7, 14, 28):  # afterwards the lowest byte has the bits of 2, 4, 8 bytes
            torch.bitwise_right_shift(words, shift, out=moved)
            words.bitwise_or_(moved)
        return out.copy_(words)

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        """Unpack ``count`` bits of ``packed`` into the buffer, and return the buffer."""
        words = self._other[: 8 * packed.numel()].view(torch.int64)
        words.copy_(packed)
        words.mul_(_ONE_IN_EACH_BYTE).bitwise_and_(_BIT_OF_EACH_BYTE)
        return self.bits(count).copy_(self._other[:count])


def pack_nibbles(codes: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Pack codes from 0 to 15 into ``out``, two in each byte, and return ``out``.

    Args:
        codes: an even number of codes, as int8.
        scratch: scratch memory of int16, with at least half as many elements as ``codes``.
        out: the result as uint8, with half as many elements as ``codes``.
    """
    pairs = codes.view(torch.int16)
    moved = scratch[: pairs.numel()]
    torch.bitwise_right_shift(pairs, 4, out=moved)
    return out.copy_(moved.bitwise_or_(pairs))


def unpack_nibbles(packed: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Unpack codes that `pack_nibbles` has packed: write them to ``out`` as int8, and return ``out``. ``scratch`` is as large
    as for `pack_nibbles`.
    """
    pairs = out.view(torch.int16)
    moved = scratch[: pairs.numel()]
    pairs.copy_(packed)
    torch.bitwise_left_shift(pairs, 4, out=moved)
    pairs.bitwise_or_(moved).bitwise_and_(0x0F0F)
    return out
