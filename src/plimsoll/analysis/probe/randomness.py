"""A seed in, the same random numbers for a block of code out; the state from before comes back on exit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


class RandomState:
    """The state of Python's, numpy's and torch's generators (of all CUDA devices that are in use)."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def seed_everything(seed: int) -> None:
    """Start all generators from one number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Whatever is drawn inside changes nothing outside."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()
