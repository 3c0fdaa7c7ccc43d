"""Functions for training on several ranks, which code for a single device does not need. Names are imported on first use.

``plimsoll.plan``, ``apply``, ``attach`` and ``verify`` need nothing from this package: under torchrun, ranks agree
automatically.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plimsoll.distributed.comm_cost.advise_compression import advise_compression
    from plimsoll.distributed.gradient_compression.compress import compress_gradients
    from plimsoll.distributed.gradient_compression.handle import CompressionHandle
    from plimsoll.distributed.pipelines.pipeline_stages import ScheduleAttachment, attach_schedule
    from plimsoll.distributed.pipelines.stage_plans import StagesHandle, apply_stages
    from plimsoll.errors import CompressionMismatch, RankFailed, RankMissing, RanksDiffer

__all__ = [
    "CompressionHandle",
    "CompressionMismatch",
    "RankFailed",
    "RankMissing",
    "RanksDiffer",
    "ScheduleAttachment",
    "StagesHandle",
    "advise_compression",
    "apply_stages",
    "attach_schedule",
    "compress_gradients",
]

_HOMES = {
    "CompressionHandle": "plimsoll.distributed.gradient_compression.handle",
    "CompressionMismatch": "plimsoll.errors",
    "RankFailed": "plimsoll.errors",
    "RankMissing": "plimsoll.errors",
    "RanksDiffer": "plimsoll.errors",
    "ScheduleAttachment": "plimsoll.distributed.pipelines.pipeline_stages",
    "StagesHandle": "plimsoll.distributed.pipelines.stage_plans",
    "apply_stages": "plimsoll.distributed.pipelines.stage_plans",
    "advise_compression": "plimsoll.distributed.comm_cost.advise_compression",
    "attach_schedule": "plimsoll.distributed.pipelines.pipeline_stages",
    "compress_gradients": "plimsoll.distributed.gradient_compression.compress",
}
"""Maps each public name to the module that defines it."""


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'plimsoll.distributed' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
