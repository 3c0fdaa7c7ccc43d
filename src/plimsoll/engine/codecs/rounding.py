"""Real numbers and a seed in, whole numbers out: up or down at random, so that the expectation is the real number.

The noise comes from a generator of its own. One draw of 64 bits serves four elements: the expectation is off by less than
2**-17 of a step. Whole numbers stay what they are.
"""

from __future__ import annotations

import torch

_STEPS = 2**16
_MIDDLE = 0.5 + 0.5 / _STEPS
"""Moves noise from [-1/2, 1/2 - 1/_STEPS] into the open interval from 0 to 1."""


def mix_seed(seed: int) -> int:
    """32 bits that all bits of ``seed`` have a say in: torch's CPU generator uses no more of it.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """
    mask = 2**64 - 1
    mixed = (seed + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> 32


class StochasticRounding:
    """Rounds up to ``most`` elements at a time, in scratch memory of its own."""

    __slots__ = ("_bits", "_generator", "_noise")

    def __init__(self, seed: int, most: int, device: torch.device) -> None:
        self._generator = torch.Generator(device)
        self._generator.manual_seed(mix_seed(seed))
        self._bits = torch.empty(-(-most // 4), dtype=torch.int64, device=device)
        self._noise = torch.empty(most, dtype=torch.float32, device=device)

    @staticmethod
    def scratch_bytes(most: int) -> int:
        """Bytes of the scratch memory, and of the generator's state."""
        return 8 * -(-most // 4) + 4 * most + 8192

    def round_(self, values: torch.Tensor) -> torch.Tensor:
        """Round a contiguous float32 tensor in place."""
        bits = self._bits[: -(-values.numel() // 4)]
        bits.random_(-(2**63), None, generator=self._generator)
        noise = self._noise[: values.numel()].copy_(bits.view(torch.int16)[: values.numel()])
        return values.add_(noise.view(values.shape), alpha=1 / _STEPS).add_(_MIDDLE).floor_()
