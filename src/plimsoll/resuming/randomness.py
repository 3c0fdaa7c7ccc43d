"""A process's random streams in, a plain record of where they stand out; and back.

The streams are those that training code draws from without saying so: Python's ``random``, NumPy's legacy generator where NumPy
is loaded, torch's on the host, and torch's on the accelerator that the model is on. Generators that a script makes for itself
(``torch.Generator``, ``numpy.random.default_rng``) are its own to keep.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

_PYTHON, _NUMPY, _HOST, _DEVICE = "python", "numpy", "host", "device"


def random_state(device: torch.device) -> dict[str, Any]:
    """Where this process's streams stand.

    Args:
        device: the accelerator whose stream counts, besides the host's; the CPU for none.

    Returns:
        Numbers, text and tensors only.
    """
    state: dict[str, Any] = {_PYTHON: random.getstate(), _HOST: torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        name, key, position, has_normal, normal = np.random.get_state(legacy=True)
        keys = torch.from_numpy(key.astype("int64"))  # type: ignore[union-attr]  # legacy=True gives a tuple of parts
        state[_NUMPY] = (str(name), keys, int(position), int(has_normal), float(normal))
    if device.type != "cpu":
        state[_DEVICE] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the streams where ``random_state`` found them. A stream that the record lacks is left alone."""
    random.setstate(state[_PYTHON])
    torch.set_rng_state(state[_HOST])
    if _NUMPY in state:
        import numpy as np

        name, keys, *rest = state[_NUMPY]
        np.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if device.type != "cpu" and _DEVICE in state:
        torch.get_device_module(device).set_rng_state(state[_DEVICE], device)


def reseed(seed: int, rank: int) -> None:
    """Give every stream of this process a new beginning that depends on the seed and the rank."""
    derived = int.from_bytes(hashlib.sha256(f"{seed}/{rank}".encode()).digest()[:8])
    random.seed(derived)
    torch.manual_seed(derived)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(derived % 2**32)
