"""Warn once if a plan names values that the model's calls do not make. The values that the plan meant to drop are then kept.

A plan decides by name. Another device, another version of torch, or changed model code runs other ops, and their values have
other names. Values that the plan does not name are kept. Gradients are right, but the budget may not hold.

A missing name alone is harmless: a call that skips a branch makes fewer values. So two sizes are compared: the bytes that the
plan would have dropped under missing names, and the bytes that the call saves under names that the plan does not have. The
warning needs both to be more than a twentieth of the bytes that the call saves.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan, RegionPlan
from plimsoll.artifacts.region import Origin, RegionGraph
from plimsoll.units import format_bytes

_LEAST_SHARE = 0.05
"""The least share of a call's saved bytes that leads to a warning.

Smaller shares occur without a cause: autocast casts a weight once per step, so later calls save one cast fewer.
"""


@dataclass(frozen=True, slots=True)
class _Unmet:
    """Data about one call of a region (a module that the plan decides about): how many names of the plan the call did not make
    (``names``), the name of the largest, and the bytes that the call keeps because the plan does not have their names.

    ``kept_name`` is the name of the largest value that is kept under another name.
    """

    region: str
    names: int
    name: str
    kept_bytes: int
    kept_name: str


class UnmetNames:
    """Collects the names in one managed model's plan that the model's calls did not make, and warns about them."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], _Unmet] = {}
        self._is_said = False
        self.is_other_step = False
        """Whether such a call was noted since the owner last set this to False. The owner may plan anew for such calls."""

    def note(self, plan: RegionPlan, graph: RegionGraph) -> None:
        """Compare the names in a plan with the values of a recorded call. If the call did not make some of them and keeps many
        bytes under other names, note it for a warning.
        """
        made = {value.name for value in graph.values}
        missing = [each for each in plan.decisions if each.decision is not Decision.KEEP and each.value not in made]
        if not missing:
            return
        named = {each.value for each in plan.decisions}
        saved = {slot.value for slot in graph.slots if slot.is_managed}
        values = {graph.values[value].storage: graph.values[value] for value in sorted(saved)}
        own = [value for value in values.values() if value.origin is Origin.OP]
        strange = [value for value in own if value.name not in named]
        kept_bytes = sum(value.bytes for value in strange)
        least_bytes = _LEAST_SHARE * sum(value.bytes for value in own)
        if strange and min(kept_bytes, sum(each.bytes for each in missing)) > least_bytes:
            largest = max(missing, key=lambda each: each.bytes).value
            kept = max(strange, key=lambda value: value.bytes).name
            self.is_other_step = True
            if not self._is_said:
                self._found[plan.name, plan.call] = _Unmet(plan.name, len(missing), largest, kept_bytes, kept)

    def say(self, plan: Plan) -> None:
        """Warn once about names of the plan that the model's calls did not make. Called after each forward of the model."""
        if not self._found:
            return
        first = next(iter(self._found.values()))
        names = sum(each.names for each in self._found.values())
        kept_bytes = sum(each.kept_bytes for each in self._found.values())
        budget = f"budget of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes is not None else "predicted peak"
        self._found, self._is_said = {}, True
        warnings.warn(
            f"plimsoll: the plan names {names} tensors that this step does not save, such as {first.name!r} of region "
            f"{first.region!r}. Instead the step keeps {format_bytes(kept_bytes)} under other names, such as "
            f"{first.kept_name!r}, so it may need that much more than the {budget}. Gradients are right. The plan was made for "
            f"{plan.device}, {plan.signature}: plan again on this device, with this batch and these versions.",
            stacklevel=5,
        )
