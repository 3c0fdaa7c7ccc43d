"""``plimsoll.PlimsollCallback``: the callback for the trainer that the program uses, transformers' or Lightning's.

The choice is made when the callback is created. At that time the program has imported its trainer, whereas ``from plimsoll
import PlimsollCallback`` often comes before that import.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from plimsoll.errors import UnsupportedFramework

_FRAMEWORKS = {
    "transformers": ("transformers.trainer",),
    "lightning": ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"),
}
"""Modules that a program has imported if it uses a trainer, for each integration. Transformers imports its trainer only on use.
"""
_PACKAGES = {"transformers": ("transformers",), "lightning": ("lightning", "pytorch_lightning")}


class _Choosing(type):
    def __instancecheck__(cls, instance: object) -> bool:
        """Return True for the callbacks of both frameworks, because calling the class makes one of them."""
        kind = type(instance)
        return kind.__name__ == "PlimsollCallback" and kind.__module__.startswith("plimsoll.integrations.")


class PlimsollCallback(metaclass=_Choosing):
    """Keeps a trainer's steps within a memory budget: a callback for transformers' ``Trainer`` (and TRL's trainers) or for
    Lightning's ``Trainer`` and ``Fabric``.

    It is the class of that name in ``plimsoll.integrations.transformers`` or ``plimsoll.integrations.lightning``. The trainer
    that the program has imported decides; if none is imported yet, the only installed framework.

    Args:
        budget: as for ``plimsoll.attach``.
        options: the other options of ``plimsoll.attach``, except the optimizer.

    Raises:
        UnsupportedFramework: neither framework is installed, or the program has imported the trainers of both.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[PlimsollCallback(budget="20GiB")])  # doctest: +SKIP
    """

    def __new__(cls, budget: int | str, **options: Any) -> Any:
        """Return the callback of the framework that the program uses."""
        return importlib.import_module(f"plimsoll.integrations.{_framework()}").PlimsollCallback(budget, **options)


def _framework() -> str:
    """Return the name of the integration for this program."""
    used = [name for name, modules in _FRAMEWORKS.items() if any(module in sys.modules for module in modules)]
    installed = [name for name, packages in _PACKAGES.items() if any(map(find_spec, packages))]
    found = used or installed
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnsupportedFramework(
            "PlimsollCallback needs transformers or Lightning, and neither is installed.",
            why="it is a callback for transformers' Trainer, TRL's trainers, Lightning's Trainer and Fabric",
            next="pip install transformers, or pip install lightning; in your own loop call plimsoll.attach(model, budget)",
        )
    raise UnsupportedFramework(
        f"PlimsollCallback cannot tell which trainer it is for: {' and '.join(found)} are both "
        f"{'imported' if used else 'installed, and no trainer is imported yet'}.",
        why="their callbacks are different classes",
        next="from plimsoll.integrations.transformers import PlimsollCallback, or from plimsoll.integrations.lightning",
    )
