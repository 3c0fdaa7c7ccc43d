"""The settings of frameworks' own switches for activation checkpointing and offloading. Each comes with the strategy of
Plimsoll that has the same effect.

Settings are grouped in rows, which are lists in order. From one setting of a row to the next the peak falls and the time grows.
Only rows of Megatron's ``uniform`` method are not ordered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from plimsoll.artifacts.trace import Trace
from plimsoll.planning.sending import Sending

_TENTHS = 10
_PARAMETERS = "parameters"
"""The value of the technique ``offload=`` that keeps shards, gradients and optimizer on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchValues:
    """Data: one setting of a training framework's switches, and the strategy of Plimsoll that it corresponds to.

    ``values`` are the switches themselves. ``strategy`` says what is kept and recomputed. ``sending`` says which kept values
    are offloaded. ``on_host`` has the words of the technique ``offload=`` (what is held on the host).
    """

    strategy: str
    values: dict[str, str | int | float | bool | list[str] | None]
    sending: Sending | None = None
    on_host: str = ""

    @property
    def key(self) -> tuple[str, Sending | None, str]:
        """A key under which a setting's simulation is stored: settings with equal keys have the same simulation."""
        return self.strategy, self.sending, self.on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedModel:
    """Data: the properties of a model that decide which settings of a framework's switches exist: the number of layers of the
    longest stage, the kinds of modules, and what may be offloaded.
    """

    layers: int
    has_experts: bool = False
    has_dense: bool = False
    """Whether some layers have experts and others do not."""
    has_shared_experts: bool = False
    has_compressed_keys: bool = False
    has_host_link: bool = False
    may_leave_shards: bool = False
    """Whether a setting (values of a framework's switches) may hold parameter shards, gradients and optimizer on the host."""

    @staticmethod
    def of(trace: Trace, *, stages: int, has_host_link: bool, may_leave_shards: bool) -> SwitchedModel:
        """Read these properties from a trace of the model."""

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
    """Yield one setting (values of a framework's switches) for each combination of modules that this model has and that
    Megatron-Core can recompute. The first setting recomputes none.
    """
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
"""For each module that Megatron-Core recomputes, its name in a strategy ``selective:…``."""


def _megatron_modules(model: SwitchedModel) -> list[list[str]]:
    """Return the sets of modules that may be offloaded: a part of a layer, the parts of attention or of experts, or all of
    them.

    The norm before attention is always paired with the product after it: Transformer Engine fuses them, and the fused kernel
    saves the tensors of both.
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
    """Whether Megatron-Core accepts a setting (values of a framework's switches) that recomputes the modules ``again`` and
    offloads the modules ``sent``.

    Recomputed tensors are not saved, so they cannot be offloaded.
    """
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
"""For each framework, a function that yields rows (ordered lists) of settings for its switches.

From one setting of a row to the next the peak falls and the time grows, except in rows of ``uniform``.
"""
