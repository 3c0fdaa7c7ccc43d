"""All choices of a small step: what a solver's answer is compared with."""

from __future__ import annotations

import itertools

from plimsoll.planning.choice import Choice
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.step import StepIndex


def every_choice(index: StepIndex) -> list[Simulation]:
    """Every subset of the droppable values of every region, simulated."""
    subsets = [
        [frozenset(kept) for size in range(len(v.droppable) + 1) for kept in itertools.combinations(v.droppable, size)]
        for v in index.views
    ]
    return [run_choices(index, [Choice(kept) for kept in kepts]) for kepts in itertools.product(*subsets)]
