"""What a communication hook of ``DistributedDataParallel`` is to us: a bucket in, the future of its averaged gradients out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Hook = Callable[[Any], torch.futures.Future[torch.Tensor]]
"""Takes torch's ``GradBucket``, or what can be asked the same questions."""


def finished(value: Any, devices: Sequence[torch.device]) -> torch.futures.Future[Any]:
    """A future that has come already."""
    future: torch.futures.Future[Any] = torch.futures.Future(
        devices=[device for device in devices if device.type != "cpu"]
    )
    future.set_result(value)
    return future
