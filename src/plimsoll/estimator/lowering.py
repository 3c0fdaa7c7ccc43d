"""Finds the best of a framework's own switches for activation checkpointing within a budget, by the estimator.

A framework can say few things: no layer, all, some, some modules of all, and what of them goes to the host. Each setting is
one of our strategies, and what is sent of it (``planning/sending``), simulated like any other; the one with the least time
within the budget is chosen, or with none in there the one with the lowest peak. Along a row of settings peaks fall and time
grows, so the first one that fits is found by bisection; a row that sends more and more is left out where sending nothing is
too slow already.

Known weakness: a framework runs again all of what it checkpoints, our simulation what backward needs of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from plimsoll.artifacts.estimate import SwitchSetting
from plimsoll.artifacts.job import Techniques
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidOption
from plimsoll.planning.costing.devices import Device
from plimsoll.planning.sending import Sending

_TIES = 1e-9
_TENTHS = 10
_NEIGHBOURS = 6
_PARAMETERS = "parameters"
"""The technique that leaves shards, gradients and optimizer on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchValues:
    """Values of a framework's switches, and what does as they say: a strategy, what is sent of what it keeps, and
    ``on_host``, the words of ``offload=`` among techniques.
    """

    strategy: str
    values: dict[str, str | int | float | bool | list[str] | None]
    sending: Sending | None = None
    on_host: str = ""

    @property
    def key(self) -> tuple[str, Sending | None, str]:
        """Equal for what is simulated alike."""
        return self.strategy, self.sending, self.on_host


@dataclass(frozen=True, slots=True)
class SwitchFigures:
    """What a setting takes: bytes of the fullest rank, on the device and on the host, and seconds of a step."""

    peak_bytes: int
    step_seconds: float
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedModel:
    """What settings depend on: layers of the longest pipeline stage, what kinds of modules they have, and what may be sent."""

    layers: int
    has_experts: bool = False
    has_dense: bool = False
    """Whether layers without experts are among those with."""
    has_shared_experts: bool = False
    has_compressed_keys: bool = False
    has_host_link: bool = False
    may_leave_shards: bool = False
    """Whether parameters, gradients and optimizer could be the host's."""

    @staticmethod
    def of(trace: Trace, *, stages: int, has_host_link: bool, may_leave_shards: bool) -> SwitchedModel:
        """Those of a traced model."""

        def has(pattern: str) -> list[bool]:
            names = ([value.name for value in call.graph.values] for call in trace.regions)
            return [any(re.search(pattern, name, re.IGNORECASE) for name in each) for each in names]

        experts = has(r"(?<!shared_)experts\b")
        return SwitchedModel(
            layers=-(-len(trace.regions) // stages),
            has_experts=any(experts),
            has_dense=any(experts) and not all(experts),
            has_shared_experts=any(has(r"shared_?experts?\b")),
            has_compressed_keys=any(has("kv_b_proj")),
            has_host_link=has_host_link,
            may_leave_shards=may_leave_shards,
        )


Row = list[SwitchValues]


def _megatron(model: SwitchedModel) -> Iterator[Row]:
    selections = list(_megatron_selections(model))
    yield from ([each] for each in selections)
    yield [_layers(f"first:{n}", "block", n) for n in range(1, model.layers + 1)]
    yield [_layers(f"every:{n}", "uniform", n) for n in range(1, min(model.layers, 8) + 1)]
    if model.has_host_link:
        for selection, modules in product(selections, _megatron_modules(model)):
            if _go_together(frozenset(_modules_again(selection)), frozenset(modules)):
                yield [selection, *(_sent(selection, modules, tenths / _TENTHS) for tenths in range(1, _TENTHS + 1))]


def _megatron_selections(model: SwitchedModel) -> Iterator[SwitchValues]:
    """No module run again, or each sum of those that the model has."""
    yield SwitchValues(strategy="none", values={"recompute_granularity": None})
    wide = ["core_attn", "layernorm", *(["mla_up_proj"] if model.has_compressed_keys else [])]
    inner = ["moe_act", *(["shared_experts"] if model.has_shared_experts else [])] if model.has_experts else []
    layer = ["mlp", "moe"] if model.has_dense else ["moe"] if model.has_experts else ["mlp"]
    narrow = [[], layer, *(list(each) for count in (1, 2) for each in combinations(inner, count))]
    for count, some in product(range(len(wide) + 1), narrow):
        for chosen in combinations(wide, count):
            modules = [*chosen, *some]
            if modules:
                parts = "+".join(dict.fromkeys(_STRATEGIES[name] for name in modules))
                yield SwitchValues(
                    strategy=f"selective:{parts}",
                    values={"recompute_granularity": "selective", "recompute_modules": modules},
                )


_STRATEGIES = {
    "core_attn": "core",
    "layernorm": "norm",
    "mla_up_proj": "mla-up",
    "mlp": "mlp",
    "moe": "mlp",
    "moe_act": "moe-act",
    "shared_experts": "shared",
}
"""What ``selective:`` calls the modules that Megatron-Core runs again."""


def _megatron_modules(model: SwitchedModel) -> list[list[str]]:
    """What may be sent: a part of a layer, those of attention or of experts, or all of them.

    The norm before attention comes with the product behind it: Transformer Engine fuses them, and what both save is its.
    """
    before, core = ["attn_norm", "qkv_linear"], ["core_attn", "attn_proj"]
    found = [before, core, [*before, *core]]
    if model.has_experts:
        experts = ["expert_fc1", "moe_act"]
        found += [["expert_fc1"], ["moe_act"], experts, [*core, *experts], [*before, *core, "mlp_norm", *experts]]
    return found


def _modules_again(setting: SwitchValues) -> list[str]:
    modules = setting.values.get("recompute_modules")
    return modules if isinstance(modules, list) else []


def _go_together(again: frozenset[str], sent: frozenset[str]) -> bool:
    """Whether Megatron-Core takes both: what it makes again is not there to be sent."""
    conflicts = (
        ("core_attn", {"core_attn"}),
        ("layernorm", {"qkv_linear"}),
        ("mla_up_proj", {"core_attn"}),
        ("moe", {"expert_fc1", "moe_act"}),
    )
    return not any(name in again and modules & sent for name, modules in conflicts)


def _sent(setting: SwitchValues, modules: Sequence[str], fraction: float) -> SwitchValues:
    values = {**setting.values, "fine_grained_activation_offloading": True, "offload_modules": list(modules)}
    part = {} if fraction == 1 else {"activation_offload_fraction": fraction}
    sending = Sending(tuple(modules), fraction)
    return SwitchValues(strategy=setting.strategy, values={**values, **part}, sending=sending)


def _layers(strategy: str, method: str, count: int) -> SwitchValues:
    return SwitchValues(
        strategy=strategy,
        values={"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count},
    )


def _transformers(model: SwitchedModel) -> Iterator[Row]:
    yield [SwitchValues(strategy="none", values={"activation_checkpointing": False})]
    counts = range(model.layers, 0, -1)
    values = {n: {"activation_checkpointing": True, "every_n_layers": n} for n in counts}
    yield [SwitchValues(strategy=f"nth:{n}", values={**values[n]}) for n in counts]
    if model.has_host_link:
        yield [
            SwitchValues(strategy=f"nth:{n}", values={**values[n], "offload": True}, sending=Sending()) for n in counts
        ]


def _torchtitan(model: SwitchedModel) -> Iterator[Row]:
    classes = {"none": None, "selective:torchtitan": "SelectiveAC", "full": "FullAC"}
    for strategy, name in classes.items():
        yield [SwitchValues(strategy=strategy, values={"activation_checkpoint": name})]
    for strategy, name in classes.items() if model.may_leave_shards else ():
        values = {"activation_checkpoint": name, "enable_cpu_offload": True}
        yield [SwitchValues(strategy=strategy, values={**values}, on_host=_PARAMETERS)]


FRAMEWORKS: dict[str, Callable[[SwitchedModel], Iterator[Row]]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "transformers": _transformers,
}
"""Rows of settings: along a row peaks fall and time grows, or nothing is known (``uniform``)."""


def lowering_notes(device: Device) -> tuple[str, ...]:
    """What was not tried on a device."""
    if device.host_link_bytes_per_second:
        return ()
    return (f"switches that offload were not tried: no link between {device.name} and a host is in the catalogue",)


def check_framework(framework: str, how: Techniques) -> None:
    """Refuse a framework whose switches are not known, and techniques that do what its switches are to say.

    Raises:
        InvalidOption: it is, or one does.
    """
    if framework not in FRAMEWORKS:
        raise InvalidOption(
            f"Nothing is known of switches of {framework!r}.",
            why=f"known are those of {', '.join(FRAMEWORKS)}",
            next='name one of them, or write a plan for torch alone: plan.export("sac", "policy.py")',
        )
    if "activations" in how.on_host:
        raise InvalidOption(
            f"offload={how.offload} does not go with export={framework!r}.",
            why="offload=activations sends what a strategy keeps, and the switches say what is sent",
            next="leave activations out: settings that offload are tried where the device has a link to its host",
        )


class _Search:
    """The settings that were simulated."""

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
        """Of what fits so far."""
        found = (each.step_seconds for _, each in self.known.values() if each.peak_bytes <= self.budget_bytes)
        return min(found, default=float("inf"))

    def search(self, row: Row) -> None:
        """Find the first setting of a row that fits, and the one before it."""
        if row[0].strategy.startswith("every:"):  # no order: the peak of a group grows with it
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
    """The chosen setting, and its figures before those of its neighbours: of every row those next to where the budget is met.

    Args:
        framework: one of ``FRAMEWORKS``.
        model: what settings depend on.
        budget_bytes: for the tensors of one rank.
        measure: what a setting takes.
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
    """The least time, and among equals the fewest switches and the least on the host."""
    setting = found[1]
    return (round(setting.step_seconds / _TIES) * _TIES, len(setting.values), setting.host_bytes)
