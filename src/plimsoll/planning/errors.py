"""A region and its choice in, the square of the relative gradient error that its packed values are expected to cause out.

A value in a lossy form reaches the gradient through its own slots, and through every dropped slot whose recipe starts from
it: each slot adds (sensitivity of its value · noise of the form)². Noise is taken to pass through recipes unchanged, and
noises to be independent; what a plan causes in truth is measured when it is run once.
"""

from __future__ import annotations

import math

from plimsoll.planning.choice import Choice
from plimsoll.planning.step import RegionView
from plimsoll.schedule import recipe_ops


def choice_error(view: RegionView, choice: Choice) -> float:
    """The squared error.

    Infinite where a value that must be exact (an index, a mask) would be rebuilt from a lossy form, or where anything would
    be rebuilt from a form that only its own slots can use.
    """
    forms = {value: view.form(value, form) for value, form in choice.packed}
    noise = {value: form.noise for value, form in forms.items()}
    private = {value for value, form in forms.items() if form.is_private}
    if not any(noise.values()) and not private:
        return 0.0
    held = view.leaves | choice.kept | noise.keys()
    total = 0.0
    for value in view.saved:
        if value in choice.kept or value in view.forced:
            continue
        leaves = (value,) if value in noise else recipe_ops(view.graph, value, held)[1]
        if private.intersection(leaves) - {value}:
            return math.inf
        squared_noise = sum(noise.get(leaf, 0.0) ** 2 for leaf in leaves)
        if squared_noise:
            total += sensitivity(view, value) ** 2 * squared_noise
    return total


def sensitivity(view: RegionView, value: int) -> float:
    """Relative error of the gradient per unit of noise in a value; infinite if it was not measured."""
    entry = view.forms.get(value)
    return math.inf if entry is None else entry.sensitivity
