"""Operations of the codecs int8, int4 and fp8 on blocks of elements: scale, rotate, round at random.

A block is ``width`` neighbours in memory. Its scale is a bfloat16, rounded up, so that no element of the block exceeds the last
code. An affine block also has the value of its code 0 in bfloat16, rounded down. The scale is NaN if the block contains NaN,
infinity, or values so close to the end of the dtype's range that decoding might leave it.

Rotation multiplies groups of 32 neighbours by an orthogonal Hadamard matrix, which is its own inverse. An outlier becomes 32
entries of a sixth of its size, so that the scale of its block is small again. The error made in the new basis has the same L2
norm in the old basis. Normally distributed blocks are not changed in distribution. An element that is exactly zero comes back
as a small number. Outside of the kernels, rotation is a float32 matrix product of torch: if the user lowers the precision of
matrix products, rotation is less precise too.

Source: the idea is from QuaRot (Ashkboos et al., NeurIPS 2024), section 4, which rotates the weights' channels. Here a group is
any 32 neighbours in memory. Why 32, and what rotation brings: docs/project/lab-notes.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from plimsoll.engine.codecs.layout import CHUNK, Elements

SCALE_DTYPE = torch.bfloat16
WIDEST = 4096
GROUP = 32
"""The number of neighbouring elements that are rotated together."""
GAIN = math.sqrt(GROUP)
"""The most that rotation can multiply the largest entry of a group with."""
_UP = 1 + 2**-8 + 2**-15
"""The factor that scales are multiplied with before they are rounded to bfloat16, so that they do not become too small.

Rounding loses at most 2**-8, so the scale is still too large by at least 2**-16.
"""
_LEAST_SCALE = 2.0**-126
"""The smallest scale: the smallest float32 whose inverse is finite and that is not flushed to zero."""
_HEADROOM = 1 - 2**-6
"""The share of the dtype's largest number that may be encoded. Decoding can enlarge a value by less than the remaining share,
so decoded values stay finite.
"""
_NOISE_STEPS = 2**16
_NOISE_MIDDLE = 0.5 + 0.5 / _NOISE_STEPS
"""The offset that moves random numbers from [-1/2, 1/2 - 1/_NOISE_STEPS] into the open interval from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of elements: some whole blocks of ``width`` elements, or the short block at the end.

    ``blocks`` is the range of block numbers.
    """

    start: int
    stop: int
    blocks: slice
    width: int


def spans(count: int, width: int) -> Iterator[Span]:
    """Split ``count`` elements into spans of at most ``CHUNK`` elements, and yield the spans in order."""
    whole = count - count % width
    for start in range(0, whole, CHUNK):
        stop = min(start + CHUNK, whole)
        yield Span(start, stop, slice(start // width, stop // width), width)
    if whole < count:
        yield Span(whole, count, slice(whole // width, whole // width + 1), count - whole)


def largest_of(dtype: torch.dtype) -> float:
    """Return the largest magnitude that certainly decodes to a finite number of ``dtype``."""
    limits = torch.finfo(dtype)
    # the range of an affine block is up to twice its largest magnitude
    return min(limits.max * _HEADROOM, torch.finfo(torch.float32).max / 4)


def block_count(count: int, width: int) -> int:
    """Return the number of blocks of ``width`` elements that ``count`` elements need."""
    return -(-count // width)


def blocks_of(elements: Elements, span: Span, scratch: torch.Tensor) -> torch.Tensor:
    """Return the blocks of a span as rows of float32.

    If the elements are float32, the rows are a view. Otherwise they are converted into ``scratch``.
    """
    run = elements.run(span.start, span.stop)
    if elements.dtype is not torch.float32:
        run = scratch[: run.numel()].copy_(run)
    return run.view(-1, span.width)


def symmetric_scales(rows: torch.Tensor, last_code: float, largest: float) -> torch.Tensor:
    """Return the scale of each row (a block of elements) for codes from ``-last_code`` to ``last_code``. It is NaN if the row
    has a magnitude above ``largest``.
    """
    # amax and amin take 0.1 ns per element each; aminmax along a dimension takes 2.6 (docs/project/lab-notes.md).
    farthest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
    return _scales(farthest, farthest, last_code, largest)


def affine_scales(rows: torch.Tensor, codes: int, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors with an element for each row: the scale, and the value that the lowest code decodes to.

    ``codes`` is the number of codes. A scale is NaN if the row has a magnitude above ``largest``.
    """
    most, least = rows.amax(1, keepdim=True), rows.amin(1, keepdim=True)
    farthest = torch.maximum(most, -least)
    lows = (least - least.abs().mul_(_UP - 1)).to(SCALE_DTYPE)
    return _scales(most.sub_(lows), farthest, codes - 1, largest), lows


def _scales(reach: torch.Tensor, farthest: torch.Tensor, steps: float, largest: float) -> torch.Tensor:
    """Return the scales of rows: ``reach / steps`` rounded up, but NaN where ``farthest``, the row's largest magnitude, is
    above ``largest``.
    """
    scales = reach.mul(_UP / steps).clamp_(min=_LEAST_SCALE)  # NaN stays NaN
    return scales.masked_fill_(farthest > largest, torch.nan).to(SCALE_DTYPE)


def are_representable(scales: torch.Tensor) -> bool:
    """Return True if no scale is NaN, so that every block can be encoded.

    On CUDA the function returns True without looking, because decode gives NaN for blocks whose scale is NaN.
    """
    return scales.device.type != "cpu" or not math.isnan(scales.amax().item())


@functools.cache
def hadamard() -> npt.NDArray[np.float32]:
    """Return Sylvester's matrix of order 32, which is orthogonal and symmetric.

    It is made from the matrix of order 1 by five Kronecker products with the matrix of order 2.
    """
    matrix = np.ones((1, 1))
    while len(matrix) < GROUP:
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]]))
    return (matrix / GAIN).astype(np.float32)


def rotate(rows: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Rotate float32 rows, and write the result into the beginning of ``out``, which must be other memory. An incomplete last
    group is copied unchanged.

    Returns:
        The rotated rows, in the shape of ``rows``.
    """
    values, out = rows.view(-1), out[: rows.numel()]
    whole = values.numel() - values.numel() % GROUP
    torch.mm(values[:whole].view(-1, GROUP), matrix, out=out[:whole].view(-1, GROUP))
    out[whole:].copy_(values[whole:])
    return out.view(rows.shape)


def mix_seed(seed: int) -> int:
    """Mix all bits of ``seed`` into 32 bits, because torch's CPU generator uses only 32.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """
    mask = 2**64 - 1
    mixed = (seed + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> 32


class StochasticRounding:
    """Rounds float32 numbers up or down at random. The expected value of the result is the number itself.

    It rounds up to ``most`` elements at a time, with its own scratch memory.
    """

    __slots__ = ("_bits", "_generator", "_noise")

    def __init__(self, seed: int, most: int, device: torch.device) -> None:
        self._generator = torch.Generator(device)
        self._generator.manual_seed(mix_seed(seed))
        self._bits = torch.empty(-(-most // 4), dtype=torch.int64, device=device)
        self._noise = torch.empty(most, dtype=torch.float32, device=device)

    @staticmethod
    def scratch_bytes(most: int) -> int:
        """Return the size in bytes of the scratch memory for ``most`` elements and of the generator's state together."""
        return 8 * -(-most // 4) + 4 * most + 8192

    def round_(self, values: torch.Tensor) -> torch.Tensor:
        """Round a contiguous float32 tensor at random, up or down, in place."""
        bits = self._bits[: -(-values.numel() // 4)]
        bits.random_(-(2**63), None, generator=self._generator)
        noise = self._noise[: values.numel()].copy_(bits.view(torch.int16)[: values.numel()])
        return values.add_(noise.view(values.shape), alpha=1 / _NOISE_STEPS).add_(_NOISE_MIDDLE).floor_()
