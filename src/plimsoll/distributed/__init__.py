"""Training on several ranks: what one-device code does not need. Names are loaded when they are first used.

``plimsoll.plan``, ``apply``, ``attach`` and ``verify`` need nothing from here: under torchrun they agree by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plimsoll.errors import RankFailed, RankMissing, RanksDiffer

__all__ = [
    "RankFailed",
    "RankMissing",
    "RanksDiffer",
]

_HOMES = {
    "RankFailed": "plimsoll.errors",
    "RankMissing": "plimsoll.errors",
    "RanksDiffer": "plimsoll.errors",
}
"""The file of every name."""


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'plimsoll.distributed' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
