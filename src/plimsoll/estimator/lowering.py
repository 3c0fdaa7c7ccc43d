"""Finds the best setting of a framework's own switches for activation checkpointing within a budget, with the estimator.

A framework offers few settings: it checkpoints no layer, all layers, some layers, or some modules of all layers, and may
offload some of these. Each setting corresponds to one of Plimsoll's strategies and a set of values that it offloads
(``planning/sending``), and is simulated like any other strategy. The fastest setting within the budget is chosen, or the
setting with the lowest peak if none fits. Settings form rows: lists where the peak falls and the time grows from one setting to
the next. So bisection finds the first setting of a row that fits. A row of settings that offload more and more is skipped if it
is already too slow without offloading.

Known weakness: a framework reruns everything that it checkpoints; the simulation reruns only what backward needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plimsoll.artifacts.estimate import SwitchSetting
from plimsoll.artifacts.job import Techniques
from plimsoll.errors import InvalidOption
from plimsoll.estimator.switches import FRAMEWORKS, Row, SwitchedModel, SwitchValues
from plimsoll.planning.costing.devices import Device

_TIES = 1e-9
_NEIGHBOURS = 6


@dataclass(frozen=True, slots=True)
class SwitchFigures:
    """What one setting of the switches needs: the largest bytes of a rank on its device and on the host, and the seconds of a
    step.
    """

    peak_bytes: int
    step_seconds: float
    host_bytes: int = 0


def lowering_notes(device: Device, framework: str | None) -> tuple[str, ...]:
    """Return notes for the user that name the switches of a framework that were not tried on this device, and the reason."""
    if framework is None or device.host_link_bytes_per_second:
        return ()
    return (
        f"switches that offload were not tried: the catalogue does not know the link between {device.name} and its host",
    )


def check_framework(framework: str, how: Techniques) -> None:
    """Raise an error for an unknown framework, and for techniques that set the same thing as the framework's switches.

    Raises:
        InvalidOption: the framework is unknown, or ``how`` offloads activations.
    """
    if framework not in FRAMEWORKS:
        raise InvalidOption(
            f"export={framework!r} is not a supported framework.",
            why=f"the supported frameworks are {', '.join(FRAMEWORKS)}",
            next='use one of them, or write a plan for torch alone: plan.export("sac", "policy.py")',
        )
    if "activations" in how.on_host:
        raise InvalidOption(
            f"offload={how.offload} cannot be combined with export={framework!r}.",
            why="offload=activations offloads what a strategy keeps, but here the framework's switches decide that",
            next="leave activations out: switches that offload are tried anyway if the device's host link is known",
        )


class _Search:
    """Simulates settings of the switches and remembers their figures, so that each setting is simulated only once."""

    def __init__(self, budget_bytes: int, measure: Callable[[SwitchValues], SwitchFigures]) -> None:
        self.budget_bytes, self.measure = budget_bytes, measure
        self.known: dict[object, tuple[SwitchValues, SwitchSetting]] = {}

    def tried(self, values: SwitchValues) -> SwitchSetting:
        if values.key not in self.known:
            figures = self.measure(values)
            self.known[values.key] = (
                values,
                SwitchSetting(
                    values=values.values,
                    strategy=values.strategy,
                    peak_bytes=figures.peak_bytes,
                    step_seconds=figures.step_seconds,
                    host_bytes=figures.host_bytes,
                ),
            )
        return self.known[values.key][1]

    def fits(self, values: SwitchValues) -> bool:
        return self.tried(values).peak_bytes <= self.budget_bytes

    @property
    def fastest_seconds(self) -> float:
        """The step time of the fastest setting (values of a framework's switches) so far that fits the budget. It is infinite
        if no setting fits.
        """
        found = (each.step_seconds for _, each in self.known.values() if each.peak_bytes <= self.budget_bytes)
        return min(found, default=float("inf"))

    def search(self, row: Row) -> None:
        """Simulate settings (values of a framework's switches) of a row until the first that fits the budget is found. The
        setting just before that one is simulated too.

        A row is a list of settings with falling peaks.
        """
        # Rows of "every:k" are not ordered: the peak of a group grows with the group, so bisection would not work.
        if row[0].strategy.startswith("every:"):
            for values in row:
                self.tried(values)
            return
        is_sending_more = row[0].sending is None and row[-1].sending is not None
        if is_sending_more and (self.tried(row[0]).step_seconds >= self.fastest_seconds or not self.fits(row[-1])):
            return
        low, high = -1, len(row)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(row[middle]) else (middle, high)
        for at in {min(high, len(row) - 1), max(low, 0)}:
            self.tried(row[at])


def lower(
    framework: str, model: SwitchedModel, budget_bytes: int, measure: Callable[[SwitchValues], SwitchFigures]
) -> tuple[SwitchValues, tuple[SwitchSetting, ...]]:
    """Choose the fastest setting of a framework's switches within the budget, or the setting with the lowest peak if none fits.

    Return the chosen setting and a tuple of figures: first the figures of the chosen setting, then the figures of the settings
    with the closest peaks.

    Args:
        framework: one of ``FRAMEWORKS``.
        model: the model's properties that settings depend on.
        budget_bytes: the limit in bytes for the tensors of one rank.
        measure: a function that returns the figures of a setting.
    """
    search = _Search(budget_bytes, measure)
    for row in FRAMEWORKS[framework](model):
        search.search(row)
    found = list(search.known.values())
    within = [each for each in found if each[1].peak_bytes <= budget_bytes]
    chosen = min(within, key=_cost) if within else min(found, key=lambda each: each[1].peak_bytes)
    others = [each for _, each in found if each is not chosen[1]]
    others.sort(key=lambda each: abs(each.peak_bytes - chosen[1].peak_bytes))
    return chosen[0], (chosen[1], *sorted(others[:_NEIGHBOURS], key=lambda each: -each.peak_bytes))


def _cost(found: tuple[SwitchValues, SwitchSetting]) -> tuple[float, int, int]:
    """Return a sort key of a setting. Settings are compared by step time, then by the number of switches, then by memory on the
    host.
    """
    setting = found[1]
    return (round(setting.step_seconds / _TIES) * _TIES, len(setting.values), setting.host_bytes)
