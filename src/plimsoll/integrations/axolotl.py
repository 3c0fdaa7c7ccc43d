"""Train under a budget with Axolotl: a plugin that reads ``memory_budget:`` from Axolotl's configuration.

    plugins:
      - plimsoll.integrations.axolotl.PlimsollPlugin
    memory_budget: 20GiB

Axolotl's trainers derive from transformers' ``Trainer``. The plugin adds ``PlimsollCallback`` to them, which does the work.
This file can be imported without Axolotl: it looks up its base class only when the plugin is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plimsoll.integrations.budgeted import Framework

if TYPE_CHECKING:
    from transformers import TrainerCallback

_TRIED = Framework("axolotl", oldest="0.19", newest="0.19")


class _Budgeted:
    """An Axolotl plugin that applies a memory budget. Methods that are not here come from Axolotl's base class.

    Raises:
        UnsupportedFramework: when the plugin is registered: Axolotl is older or newer than the tested versions.
        Others: those of ``PlimsollCallback``, when the trainer is made or begins.
    """

    def register(self, cfg: dict[str, Any]) -> None:
        """Raise an error if Axolotl has a version that was not tested.

        Axolotl calls this method when it registers the plugin.
        """
        _TRIED.check()

    def get_input_args(self) -> str:
        """Return the import path of the class that declares the new fields of Axolotl's configuration (``memory_budget``)."""
        return f"{__name__}.PlimsollArgs"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[TrainerCallback]:
        """Return a list with the callback that applies the budget. The list is empty if no budget is configured."""
        from plimsoll.integrations.transformers import PlimsollCallback

        if cfg.memory_budget is None:
            return []
        return [PlimsollCallback(cfg.memory_budget, **(cfg.memory_budget_options or {}))]


def __getattr__(name: str) -> Any:
    if name == "PlimsollPlugin":
        from axolotl.integrations.base import BasePlugin

        return type(name, (_Budgeted, BasePlugin), {"__module__": __name__, "__doc__": _Budgeted.__doc__})
    if name == "PlimsollArgs":
        from pydantic import create_model

        fields: dict[str, Any] = {
            "memory_budget": (int | str | None, None),
            "memory_budget_options": (dict[str, Any] | None, None),
        }
        return create_model(name, __module__=__name__, **fields)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
