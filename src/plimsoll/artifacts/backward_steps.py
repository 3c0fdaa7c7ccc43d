"""A decision about the optimizer's step: which parameters are stepped while backward runs, each as soon as its gradient is
complete. The gradient is then freed.
"""

from __future__ import annotations

import msgspec


class BackwardSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the parameters (names) that are stepped in backward. ``optimizer.step()`` steps all others.

    ``temporary_bytes`` are the most bytes that the step of each of these parameters allocates and frees again.
    ``gradient_bytes`` is the size of all gradients of the model, and ``freed_bytes`` the part that backward frees.
    ``seconds`` is what the calls of the optimizer for single parameters cost in each step, in addition to its arithmetic.

    Example:
        >>> sizes = {"temporary_bytes": (4,), "gradient_bytes": 12, "freed_bytes": 8}
        >>> BackwardSteps(optimizer="SGD", parameters=("weight",), **sizes).parameters
        ('weight',)
    """

    optimizer: str
    parameters: tuple[str, ...]
    temporary_bytes: tuple[int, ...]
    gradient_bytes: int
    freed_bytes: int
    seconds: float = 0.0
