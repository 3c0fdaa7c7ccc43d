"""A region and its choice in, the square of the relative gradient error that its packed values are expected to cause out.

A value in a lossy form reaches the gradient through its own slots, and through every dropped slot whose recipe starts from
it: each slot adds (sensitivity of its value · noise of the form)². Noise is taken to pass through recipes unchanged, and
noises to be independent; what a plan causes in truth is measured when it is run once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from plimsoll.planning.choice import Choice
from plimsoll.planning.replay import provider_of
from plimsoll.planning.replay_schedule import recipe_ops
from plimsoll.planning.step import RegionView, StepIndex


def choice_error(view: RegionView, choice: Choice, linked: Mapping[int, float] | None = None) -> float:
    """The squared error.

    Infinite where a value that must be exact (an index, a mask) would be rebuilt from a lossy form, or where anything would
    be rebuilt from a form that only its own slots can use.

    Args:
        view: the region.
        choice: what it does.
        linked: squared noise of the inputs that the region before rebuilds.
    """
    noise = _Noise(view, choice, linked or {})
    if noise.is_absent:
        return 0.0
    total = 0.0
    for value in view.saved:
        squared_noise = noise.squared(value)
        if squared_noise:
            total += sensitivity(view, value) ** 2 * squared_noise if math.isfinite(squared_noise) else math.inf
    return total


def form_error(view: RegionView, choice: Choice, value: int) -> float:
    """The gradient error that the form of one value adds, through its own slots and all that is rebuilt from it."""
    noise = view.form(value, choice.forms[value]).noise
    if not noise:
        return 0.0
    made = _Noise(view, choice, {})
    return noise * math.sqrt(sum(sensitivity(view, v) ** 2 for v in view.saved if value in made.leaves(v)))


def step_error(index: StepIndex, choices: Sequence[Choice], linked: Mapping[int, frozenset[int]]) -> float:
    """The squared error of all regions; ``linked`` are the inputs that dropped boundaries let go, by region."""
    total = 0.0
    noises: list[_Noise] = []
    for view, choice in zip(index.views, choices, strict=True):
        mine = linked.get(view.call.index, frozenset())
        given = {}
        if mine:
            provider = noises[provider_of(index, view, mine)]
            given = {value: provider.of_output(view.graph.values[value].storage) for value in mine}
        noises.append(_Noise(view, choice, given))
        total += choice_error(view, choice, given)
    return total


class _Noise:
    """The squared noise of the values of one region as they come back in backward."""

    def __init__(self, view: RegionView, choice: Choice, linked: Mapping[int, float]) -> None:
        forms = {value: view.form(value, form) for value, form in choice.packed if value not in linked}
        self._view = view
        self._held = view.leaves | choice.kept | forms.keys() | linked.keys()
        self._private = {value for value, form in forms.items() if form.is_private}
        self._of_leaves = {value: form.noise**2 for value, form in forms.items()} | dict(linked)
        self.is_absent = not self._private and not any(self._of_leaves.values())

    def squared(self, value: int) -> float:
        """The noise of a value for its own slots; infinite if it would be made of a private form."""
        leaves = self.leaves(value)
        if self._private.intersection(leaves) - {value}:
            return math.inf
        return sum(self._of_leaves.get(leaf, 0.0) for leaf in leaves)

    def leaves(self, value: int) -> tuple[int, ...]:
        """What a value is made of."""
        return (value,) if value in self._held else recipe_ops(self._view.graph, value, self._held)[1]

    def of_output(self, storage: int) -> float:
        """The noise of the region's output in a storage for the region that asks for it."""
        graph = self._view.graph
        outputs = [value for value in graph.outputs if graph.values[value].storage == storage]
        return max(math.inf if value in self._private else self.squared(value) for value in outputs)


def sensitivity(view: RegionView, value: int) -> float:
    """Relative error of the gradient per unit of noise in a value; infinite if it was not measured."""
    entry = view.forms.get(value)
    return math.inf if entry is None else entry.sensitivity
