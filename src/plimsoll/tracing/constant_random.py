"""A mode under which random ops give constants, so that two runs that draw in another order can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ConstantRandomNumbers(TorchDispatchMode):
    """A context manager. Inside, dropout drops nothing, and tensors of random numbers are filled with ones. Random generators
    still advance.

    Known weakness: the dropout inside of a fused attention kernel stays random.

    Example:
        >>> with ConstantRandomNumbers():
        ...     torch.nn.functional.dropout(torch.full((2,), 3.0), 0.5), torch.rand(2)
        (tensor([6., 6.]), tensor([1., 1.]))
    """

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return out
        name = func._schema.name.partition("::")[2]
        if name == "native_dropout":
            value, share = args[0], args[1]
            return value / (1 - share), torch.ones_like(value, dtype=torch.bool)
        if not name.startswith("_"):  # the others compute with random numbers, such as attention
            for tensor in tree_leaves(out):
                tensor.fill_(1)
        return out
