"""Fits PyTorch training under a memory budget in bytes, at the least cost in time, and proves that it did.

Example:
    >>> plan = plimsoll.plan(model, batch, budget="70GiB")  # doctest: +SKIP
    >>> with plimsoll.apply(model, plan):  # doctest: +SKIP
    ...     train(model)

Names are loaded when they are first used, so ``import plimsoll`` loads neither torch nor scipy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plimsoll.artifacts.plan import Plan
    from plimsoll.artifacts.receipt import Receipt
    from plimsoll.errors import PlimsollError
    from plimsoll.pipeline import (
        advise,
        apply,
        attach,
        compare,
        diagnose,
        estimate,
        explain,
        fit,
        load,
        plan,
        probe,
        report,
        verify,
    )

__all__ = [
    "Plan",
    "PlimsollError",
    "Receipt",
    "advise",
    "apply",
    "attach",
    "compare",
    "diagnose",
    "estimate",
    "explain",
    "fit",
    "load",
    "plan",
    "probe",
    "report",
    "verify",
]

_HOMES = {
    "Plan": "plimsoll.artifacts.plan",
    "PlimsollError": "plimsoll.errors",
    "Receipt": "plimsoll.artifacts.receipt",
    "advise": "plimsoll.pipeline",
    "apply": "plimsoll.pipeline",
    "attach": "plimsoll.pipeline",
    "compare": "plimsoll.pipeline",
    "diagnose": "plimsoll.pipeline",
    "estimate": "plimsoll.pipeline",
    "explain": "plimsoll.pipeline",
    "fit": "plimsoll.pipeline",
    "load": "plimsoll.pipeline",
    "plan": "plimsoll.pipeline",
    "probe": "plimsoll.pipeline",
    "report": "plimsoll.pipeline",
    "verify": "plimsoll.pipeline",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        return version("plimsoll")
    if name not in _HOMES:
        raise AttributeError(f"module 'plimsoll' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
