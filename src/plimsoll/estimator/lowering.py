"""Finds the best of a framework's own switches for activation checkpointing within a budget, by the estimator.

A framework can say few things: no layer, all, some, some modules of all. Each setting is one of our strategies, simulated like
any other; the one with the least time within the budget is chosen, or with none in there the one with the lowest peak. What a
setting saves grows with its number of layers, so that number is found by bisection.

Known weakness: a framework runs again all of what it checkpoints, our simulation what backward needs of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from plimsoll.artifacts.estimate import SwitchSetting
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidOption

_TIES = 1e-9


@dataclass(frozen=True, slots=True)
class SwitchValues:
    """Values of a framework's switches, and the strategy that does as they say."""

    strategy: str
    values: dict[str, str | int | bool | list[str] | None]


@dataclass(frozen=True, slots=True)
class SwitchedModel:
    """What settings depend on: layers of the longest pipeline stage, and whether there are experts."""

    layers: int
    has_experts: bool

    @staticmethod
    def of(trace: Trace, *, stages: int, has_experts: bool) -> SwitchedModel:
        """Those of a traced model."""
        return SwitchedModel(-(-len(trace.regions) // stages), has_experts)


def _megatron(model: SwitchedModel) -> Iterator[list[SwitchValues]]:
    layer = "moe" if model.has_experts else "mlp"
    modules = {"core_attn": "core", "layernorm": "norm", layer: "mlp"}
    yield [SwitchValues("none", {"recompute_granularity": None})]
    for count in (1, 2, 3):
        for chosen in combinations(modules, count):
            strategy = f"selective:{'+'.join(modules[name] for name in chosen)}"
            yield [SwitchValues(strategy, {"recompute_granularity": "selective", "recompute_modules": list(chosen)})]
    yield [_layers(f"first:{n}", "block", n) for n in range(1, model.layers + 1)]
    yield [_layers(f"every:{n}", "uniform", n) for n in range(1, min(model.layers, 8) + 1)]


def _layers(strategy: str, method: str, count: int) -> SwitchValues:
    return SwitchValues(
        strategy, {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
    )


def _transformers(model: SwitchedModel) -> Iterator[list[SwitchValues]]:
    yield [SwitchValues("none", {"activation_checkpointing": False})]
    yield [
        SwitchValues(f"nth:{n}", {"activation_checkpointing": True, "every_n_layers": n})
        for n in range(model.layers, 0, -1)
    ]


def _torchtitan(model: SwitchedModel) -> Iterator[list[SwitchValues]]:
    yield [SwitchValues("none", {"activation_checkpoint": None})]
    yield [SwitchValues("selective:torchtitan", {"activation_checkpoint": "SelectiveAC"})]
    yield [SwitchValues("full", {"activation_checkpoint": "FullAC"})]


FRAMEWORKS: dict[str, Callable[[SwitchedModel], Iterator[list[SwitchValues]]]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "transformers": _transformers,
}
"""Rows of settings: along a row peaks fall and time grows, or nothing is known (``uniform``)."""


def check_framework(framework: str) -> None:
    """Refuse a framework whose switches are not known.

    Raises:
        InvalidOption: it is.
    """
    if framework not in FRAMEWORKS:
        raise InvalidOption(
            f"Nothing is known of switches of {framework!r}.",
            why=f"known are those of {', '.join(FRAMEWORKS)}",
            next='name one of them, or write a plan for torch alone: plan.export("sac", "policy.py")',
        )


def lower(
    framework: str, model: SwitchedModel, budget_bytes: int, measure: Callable[[str], tuple[int, float]]
) -> tuple[SwitchSetting, ...]:
    """The chosen setting first, then its neighbours: of every row those next to where the budget is met.

    Args:
        framework: one of ``FRAMEWORKS``.
        model: what settings depend on.
        budget_bytes: for the tensors of one rank.
        measure: peak bytes and seconds of a step under a strategy.
    """
    known: dict[str, SwitchSetting] = {}

    def tried(setting: SwitchValues) -> SwitchSetting:
        if setting.strategy not in known:
            peak_bytes, seconds = measure(setting.strategy)
            known[setting.strategy] = SwitchSetting(
                values=setting.values, strategy=setting.strategy, peak_bytes=peak_bytes, step_seconds=seconds
            )
        return known[setting.strategy]

    for row in FRAMEWORKS[framework](model):
        low, high = -1, len(row)
        if row[0].strategy.startswith("every:"):  # no order: the peak of a group grows with it
            for setting in row:
                tried(setting)
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if tried(row[middle]).peak_bytes <= budget_bytes else (middle, high)
        for at in {min(high, len(row) - 1), max(low, 0)}:
            tried(row[at])
    found = list(known.values())
    fits = [each for each in found if each.peak_bytes <= budget_bytes]
    best = min(fits, key=_cost) if fits else min(found, key=lambda each: each.peak_bytes)
    others = sorted(
        (each for each in found if each is not best), key=lambda each: abs(each.peak_bytes - best.peak_bytes)
    )
    return (best, *sorted(others[:6], key=lambda each: -each.peak_bytes))


def _cost(setting: SwitchSetting) -> tuple[float, int]:
    """The least time, and among equals the fewest switches."""
    return (round(setting.step_seconds / _TIES) * _TIES, len(setting.values))
