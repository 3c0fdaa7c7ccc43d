"""A plan: one decision for every saved value of every region, with what it is predicted to cost. Data only, never code."""

from __future__ import annotations

import itertools
import pprint
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.costs import CostSource
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.files import write_whole
from plimsoll.errors import InvalidOption, PlanNotUsable
from plimsoll.units import format_bytes


class ValueDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision for one saved value of one region.

    ``bytes`` counts the storage once, at the first slot that holds it; ``seconds`` is what bringing it back costs: its share
    of the replay, or encoding and decoding (0 for KEEP). ``form`` names the codec or the link of COMPRESS and OFFLOAD,
    ``held_bytes`` what they leave on the device, ``error`` the relative gradient error that they are expected to add.
    ``reason`` is one sentence in terms of the price.
    """

    value: str
    decision: Decision
    bytes: int
    seconds: float = 0.0
    reason: str = ""
    form: str = ""
    held_bytes: int = 0
    error: float = 0.0
    is_lossy: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether the value is held in another form."""
        return self.decision in (Decision.COMPRESS, Decision.OFFLOAD)


class RegionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of one region call; an empty tuple (or all KEEP) leaves the region untouched.

    With ``is_boundary_dropped`` the region's input is not held either: it is rebuilt through the region before.
    ``price_seconds_per_byte`` is what a byte costs that is held from this region's forward to the end of its backward: an
    early region holds its values through more moments of scarcity than a late one (``None``: an older plan did not say).
    ``steady_inputs`` are those that autograd does not save, and that forward, which made them, does not write to any more:
    where recipes need one it is held as it is, and any other is copied.
    """

    name: str
    call: int
    kind: str
    decisions: tuple[ValueDecision, ...]
    retained_bytes: int
    replay_seconds: float
    is_boundary_dropped: bool = False
    price_seconds_per_byte: float | None = None
    steady_inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _refuse_twice([decision.value for decision in self.decisions], "values")

    @property
    def is_untouched(self) -> bool:
        """Whether the plan leaves this region exactly as it is."""
        return not self.is_boundary_dropped and all(d.decision is Decision.KEEP for d in self.decisions)

    @property
    def dropped(self) -> frozenset[str]:
        """Names of the values that backward gets by running ops again."""
        return frozenset(d.value for d in self.decisions if d.decision is Decision.RECOMPUTE)

    @property
    def packed(self) -> dict[str, str]:
        """Codec or link by the name of the value, for values that are held in another form."""
        return {d.value: d.form for d in self.decisions if d.is_packed}

    @property
    def effect(self) -> tuple[object, ...]:
        """What the region will do: plans that are equal in this differ in predictions alone."""
        packed = tuple(sorted(self.packed.items()))
        return (self.call, self.dropped, packed, self.is_boundary_dropped, self.steady_inputs)

    @property
    def saved_ops(self) -> dict[str, tuple[int, ...]]:
        """Which outputs are kept, by the name of the op, of ops of which nothing is dropped."""
        return saved_ops([d.value for d in self.decisions if d.decision is Decision.KEEP], self.dropped)

    @property
    def has_offload(self) -> bool:
        """Whether some value of this region goes over a link."""
        return any(d.decision is Decision.OFFLOAD for d in self.decisions)


def hiding(regions: Iterable[RegionPlan]) -> frozenset[str]:
    """Names of the regions behind which the transfers of the one before hide."""
    return frozenset(after.name for region, after in itertools.pairwise(regions) if region.has_offload)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who holds memory at the moment of the peak."""

    label: str
    bytes: int


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The highest moment of the step: when it is, how many bytes are alive, and whose they are (largest first)."""

    moment: str
    bytes: int
    holders: tuple[Holder, ...]


class TimelinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes alive at one tick, by category.

    ``unmanaged_seconds`` is when the tick's op starts in the unmanaged step under the plan's costs: replays, codecs and
    transfers are not in it (``None``: an older plan did not say). ``unmanaged_bytes`` are the most that the unmanaged step has
    alive around this tick, ``None`` where that was not asked for.
    """

    tick: int
    moment: str
    bytes: int
    by_category: dict[str, int]
    unmanaged_seconds: float | None = None
    unmanaged_bytes: int | None = None

    @property
    def phase(self) -> str:
        """The part of the step in which it lies, the first word of its moment: ``backward of layers.3.mlp (mm)``."""
        return self.moment.partition(" ")[0]


class FrontierPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The least seconds of a step at one peak."""

    peak_bytes: int
    step_seconds: float


class CompiledUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A module that torch.compile compiles, ``path`` in the model, and the regions that it holds (paths from the model).

    ``options`` are those of torch.compile where the plan compiles a plain module itself; ``None``: the user has compiled it.
    ``copied_inputs``: as for the calls of its regions in the trace.
    ``is_in_order``: backward runs in the order of its graph, and no memory is held for reuse; else inductor orders, fuses and
    reuses as it does without a plan.
    """

    path: str
    regions: tuple[str, ...]
    options: dict[str, bool | int | float | str | None] | None = None
    copied_inputs: tuple[str, ...] = ()
    is_in_order: bool = True


def _refuse_twice(names: list[str], what: str) -> None:
    """Of two decisions about one thing only the last would count."""
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"two {what} are called {twice!r:.200}")


LINK_NAMES = ("disk", "host")
"""Where offloaded values may go."""
COLLECTIVES = "collectives"
"""What ``allow`` says where recipes may run collectives again."""


class Plan(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """What to do with every saved value under a budget. Build one with ``plimsoll.plan``; save it with ``save``.

    ``lower_bound_seconds`` bounds the step of *any* plan of this engine under this model of the machine (each op run again
    at most once, these costs); it does not bound the machine itself. ``price_seconds_per_byte`` is what one more byte of
    budget would save per step at the solution (0 when memory is not scarce). ``str`` shows the plan as a table.
    """

    KIND: ClassVar[str] = "plan"
    SCHEMA_VERSION: ClassVar[int] = 3
    """3: points of the timeline carry the bytes of the unmanaged step. 2: regions carry their price, points their seconds.
    Older files are read without."""

    schema_version: int = SCHEMA_VERSION
    status: Status
    strategy: str
    model: str
    fingerprint: str
    signature: str
    device: str
    cost_source: CostSource
    cost_device: str
    budget_bytes: int | None
    floor_bytes: int
    baseline_peak_bytes: int
    baseline_seconds: float
    predicted_peak_bytes: int
    predicted_seconds: float
    lower_bound_seconds: float
    gap_of_overhead: float
    gap_of_step: float
    price_seconds_per_byte: float
    regions: tuple[RegionPlan, ...]
    peak: Peak
    baseline_peak: Peak
    classes: dict[str, int]
    """Bytes of each memory category at the peak."""
    timeline: tuple[TimelinePoint, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    notes: tuple[str, ...] = ()
    solve_seconds: float = 0.0
    allow: tuple[str, ...] = ("recompute",)
    """What the plan was allowed to do besides keeping: ``recompute``, ``compress``, ``offload``, and ``collectives`` (to run
    them again in recipes)."""
    max_error: float | None = 0.0
    """The relative error of the gradient, ‖Δg‖ / ‖g‖, that the plan may cause; ``None``: a named strategy, any."""
    predicted_error: float = 0.0
    measured_error: float | None = None
    """The relative error of the gradient as measured when the plan was run once; ``None`` where it was not."""
    link: str = ""
    """Where offloaded values go: ``host`` or ``disk``; empty without any."""
    offloaded_bytes: int = 0
    """Bytes at the other end of the link when they are most."""
    host_budget_bytes: int | None = None
    budget_bytes_of_ranks: dict[str, int] = {}
    """Where ranks with different budgets planned together, the budget of each; ``budget_bytes`` is the tightest's."""
    compiled: tuple[CompiledUnit, ...] = ()
    """What torch.compile compiles; the plan decides about the regions in there through its partitioner."""
    written: tuple[str, ...] = ()
    """Parameters that the step itself writes to; runs beside training put them back."""
    in_flight: int = 1
    """Micro-batches between their forward and their backward at once, on a stage of a pipeline; all follow this plan."""
    framework: str = "torch"
    """What the plan was made for: plans of one framework say nothing about functions of another."""

    def __post_init__(self) -> None:
        _refuse_twice([f"{region.name}, call {region.call}" for region in self.regions], "regions")

    @property
    def effect(self) -> tuple[object, ...]:
        """What the plan will do: those that are equal in this differ in predictions and reasons alone."""
        return tuple((region.name, *region.effect) for region in self.regions)

    @property
    def own_compilation(self) -> dict[str, bool | int | float | str | None] | None:
        """How the plan itself has the model compiled, as ``compile=`` of ``plimsoll.plan``; ``None``: it does not."""
        return next((unit.options for unit in self.compiled if unit.options is not None), None)

    @property
    def is_lossless(self) -> bool:
        """Whether no value is held in a lossy form, so that gradients are bound to be equal bit for bit."""
        return not any(decision.is_lossy for region in self.regions for decision in region.decisions)

    @property
    def predicted_overhead(self) -> float:
        """Predicted extra time as a share of the unmanaged step."""
        if not self.baseline_seconds:
            return 0.0
        return self.predicted_seconds / self.baseline_seconds - 1.0

    def explain(self) -> str:
        """Every decision with its reason in terms of the price of memory, what one more GiB buys, who holds the peak."""
        return ArtifactBase.render(self, with_details=True)

    def export(self, kind: str, path: str | Path) -> None:
        """Write the plan down for training without Plimsoll, at a cost in time.

        Args:
            kind: ``sac``, a Python file that needs torch alone: its ``apply(model)`` checkpoints every region by a policy
                that saves what the plan keeps.
            path: where to; an existing file is replaced.

        Raises:
            PlanNotUsable: the plan compresses or offloads, drops a region's input, or has no usable status.
            InvalidOption: another kind.
            PlanFileError: the place cannot be written.

        Example:
            >>> plan.export("sac", "policy.py")  # doctest: +SKIP
        """
        if kind != "sac":
            raise InvalidOption(
                f"{kind!r} is nothing that a plan is exported to.",
                why="a plan is written down as a policy of selective activation checkpointing (sac) and as nothing else",
                next='call plan.export("sac", "policy.py"); for Megatron-Core: plimsoll estimate … --export megatron',
            )
        self._check_recomputing()
        headline = (
            f"{self.model}, {self.signature}: {format_bytes(self.predicted_peak_bytes)} of "
            f"{format_bytes(self.baseline_peak_bytes)}"
        )
        regions = {(each.name, each.call): each.saved_ops for each in self.regions if not each.is_untouched}
        write_whole(policy_file(ArtifactBase.policy_text(), headline, regions), path)

    def _check_recomputing(self) -> None:
        """Refuse a plan that does more than to keep and to recompute region by region."""
        why = "" if self.status.is_usable else f"its status is {self.status.value}"
        if self.compiled:
            why = "it is for parts that torch.compile compiles, where its partitioner decides"
        for region in self.regions:
            if region.packed:
                value, form = next(iter(region.packed.items()))
                why = f"a policy saves or recomputes, and the plan holds {value} of {region.name} as {form}"
            elif region.is_boundary_dropped:
                why = f"a policy holds the input of every region, and the plan drops that of {region.name}"
        if why:
            raise PlanNotUsable(
                "This plan cannot be written as a policy of selective activation checkpointing.",
                why=why,
                next='plan again with allow={"recompute"} and strategy="auto", or use plimsoll.apply',
            )


_OUTPUT = re.compile(r"(?P<op>[^#]*#\d+)(?:\.(?P<position>\d+))?")
"""The name of a value: ``module::op#occurrence``, and which output where the op has several."""


def saved_ops(kept: Iterable[str], dropped: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Which outputs are kept of ops of which nothing is dropped, for a policy saves all outputs of an op or none.

    Example:
        >>> saved_ops(["input:0", "mlp::mm#0", "topk#0.1", "norm#0.1"], ["norm#0.0"])
        {'mlp::mm#0': (0,), '::topk#0': (1,)}
    """
    never = {op for op, _ in map(_split, dropped)}
    found: dict[str, list[int]] = {}
    for op, position in map(_split, kept):
        if op and op not in never:
            found.setdefault(op, []).append(position)
    return {op: tuple(sorted(positions)) for op, positions in found.items()}


def policy_file(text: str, headline: str, regions: Mapping[tuple[str, int], Mapping[str, tuple[int, ...]]]) -> str:
    """The policy's text with the decisions: by path of a region and number of its call, the ops whose outputs are saved."""
    saved: list[Mapping[str, tuple[int, ...]]] = []
    calls: dict[str, dict[int, int]] = {}
    for (path, call), ops in regions.items():
        if ops not in saved:
            saved.append(ops)
        calls.setdefault(path, {})[call] = saved.index(ops)
    for name, value in (("PLAN", headline), ("SAVED", tuple(saved)), ("REGIONS", calls)):
        head, declared, tail = re.split(rf"^({name}\b.*) = .*$", text, flags=re.MULTILINE)
        text = f"{head}{declared} = {pprint.pformat(value, width=120, compact=True)}{tail}"
    return text


def _split(value: str) -> tuple[str, int]:
    """The op that makes a value and which of its outputs it is; no op for what comes from outside."""
    found = _OUTPUT.fullmatch(value)
    if found is None:
        return "", 0
    return (found["op"] if "::" in found["op"] else f"::{found['op']}"), int(found["position"] or 0)
