"""TRL's activation offloading: every saved tensor but the head's goes to pinned host memory, on a stream of its own.

Source: ``trl.models.activation_offloading`` (TRL 0.20 to 1.16), with its defaults; needs TRL and a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def apply(model: nn.Module) -> Iterator[Callable[..., Any]]:
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    offloading = get_act_offloading_ctx_manager(model)

    def forward(**batch: Any) -> Any:
        with offloading:
            return model(**batch)

    yield forward
