"""A plan: one decision for every saved value of every region, with its predicted cost. Data only, never code."""

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

    ``bytes`` counts the storage once, at the first slot that holds it. ``seconds`` is what it costs to bring the value back:
    its share of the recomputation, or encoding and decoding (0 for KEEP). ``form`` names the codec of COMPRESS or the link of
    OFFLOAD, ``held_bytes`` is what that form keeps on the device, ``error`` is the relative gradient error that it is
    expected to add. ``reason`` is one sentence that compares the decision with the price of memory.
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
        """Whether the value is compressed or offloaded between forward and backward."""
        return self.decision in (Decision.COMPRESS, Decision.OFFLOAD)


class RegionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions for one region call; an empty tuple (or all KEEP) leaves the region untouched.

    With ``is_boundary_dropped`` the region's input is not held either: it is rebuilt through the previous region.
    ``price_seconds_per_byte`` is the price of one byte held from this region's forward to the end of its backward. Early
    regions hold values across more moments at which memory is scarce than late regions do (``None``: an older plan did not
    record it). ``steady_inputs`` are inputs that autograd does not save, that forward made, and that forward no longer writes
    to. If a recipe needs one of these, the tensor itself is held; any other input is copied.
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
        """Whether the plan changes nothing in this region."""
        return not self.is_boundary_dropped and all(d.decision is Decision.KEEP for d in self.decisions)

    @property
    def dropped(self) -> frozenset[str]:
        """Names of the values that are recomputed in backward."""
        return frozenset(d.value for d in self.decisions if d.decision is Decision.RECOMPUTE)

    @property
    def packed(self) -> dict[str, str]:
        """Codec or link by the name of the value, for compressed and offloaded values."""
        return {d.value: d.form for d in self.decisions if d.is_packed}

    @property
    def effect(self) -> tuple[object, ...]:
        """What the region will do. Plans with equal effects differ only in predictions and reasons."""
        packed = tuple(sorted(self.packed.items()))
        return (self.call, self.dropped, packed, self.is_boundary_dropped, self.steady_inputs)

    @property
    def saved_ops(self) -> dict[str, tuple[int, ...]]:
        """Kept outputs by op name; ops with any dropped output are left out."""
        return saved_ops([d.value for d in self.decisions if d.decision is Decision.KEEP], self.dropped)

    @property
    def has_offload(self) -> bool:
        """Whether any value of this region is offloaded over a link."""
        return any(d.decision is Decision.OFFLOAD for d in self.decisions)


def hiding(regions: Iterable[RegionPlan]) -> frozenset[str]:
    """Names of the regions whose compute hides the previous region's transfers."""
    return frozenset(after.name for region, after in itertools.pairwise(regions) if region.has_offload)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor or group that holds memory at the peak."""

    label: str
    bytes: int


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of the step: its moment, how many bytes are alive, and which tensors hold them (largest first)."""

    moment: str
    bytes: int
    holders: tuple[Holder, ...]


class TimelinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes alive at one tick, by category.

    ``unmanaged_seconds`` is when the tick's op starts in the unmanaged step under the plan's costs. It does not include
    recomputation, codecs or transfers (``None``: an older plan did not record it). ``unmanaged_bytes`` is the most that the
    unmanaged step has alive around this tick, ``None`` if it was not computed.
    """

    tick: int
    moment: str
    bytes: int
    by_category: dict[str, int]
    unmanaged_seconds: float | None = None
    unmanaged_bytes: int | None = None

    @property
    def phase(self) -> str:
        """The part of the step that this tick belongs to: the first word of ``backward of layers.3.mlp (mm)``."""
        return self.moment.partition(" ")[0]


class FrontierPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The least step time at one peak."""

    peak_bytes: int
    step_seconds: float


class CompiledUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A module that torch.compile compiles: its ``path`` in the model, and the paths of the regions inside it.

    ``options`` are torch.compile's options if the plan compiles a plain module itself; ``None``: the user compiled it.
    ``copied_inputs`` has the format of ``RegionCall.copied_inputs`` in the trace.
    ``is_in_order``: backward runs in the order of its graph and inductor does not reuse buffers; otherwise inductor orders,
    fuses and reuses buffers as it does without a plan.
    """

    path: str
    regions: tuple[str, ...]
    options: dict[str, bool | int | float | str | None] | None = None
    copied_inputs: tuple[str, ...] = ()
    is_in_order: bool = True


def _refuse_twice(names: list[str], what: str) -> None:
    """Refuse two decisions with one name: only the last of them would take effect."""
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"two {what} have the name {twice!r:.200}")


LINK_NAMES = ("disk", "host")
"""Where offloaded values may go."""
COLLECTIVES = "collectives"
"""The word in ``allow`` that permits recipes to run collectives again."""


class Plan(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """What to do with every saved value under a budget. Build one with ``plimsoll.plan``; save it with ``save``.

    ``lower_bound_seconds`` bounds the step time of *any* plan that this engine could make under this model of the machine
    (each op recomputed at most once, these costs); it does not bound the machine itself. ``price_seconds_per_byte`` is the
    time per step that one more byte of budget would save at the solution (0 if memory is not scarce). ``str`` shows the plan
    as a table.
    """

    KIND: ClassVar[str] = "plan"
    SCHEMA_VERSION: ClassVar[int] = 3
    """3: timeline points carry the bytes of the unmanaged step. 2: regions carry their price, points their seconds.
    In older files these fields are ``None``."""

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
    """What the plan was allowed to do apart from keeping: ``recompute``, ``compress``, ``offload``, and ``collectives``
    (recipes may run collectives again)."""
    max_error: float | None = 0.0
    """The allowed relative error of the gradient, ‖Δg‖ / ‖g‖; ``None``: a named strategy, whose error is not limited."""
    predicted_error: float = 0.0
    measured_error: float | None = None
    """The relative error of the gradient, measured by running the plan once; ``None`` if it was not measured."""
    link: str = ""
    """Where offloaded values go: ``host`` or ``disk``; empty if the plan does not offload."""
    offloaded_bytes: int = 0
    """The most bytes that are offloaded at one time."""
    host_budget_bytes: int | None = None
    budget_bytes_of_ranks: dict[str, int] = {}
    """The budget of each rank, if ranks with different budgets planned together; ``budget_bytes`` is then the smallest."""
    compiled: tuple[CompiledUnit, ...] = ()
    """The modules that torch.compile compiles; the plan's decisions for regions in them go through its partitioner."""
    written: tuple[str, ...] = ()
    """Parameters that the step itself writes to; runs outside training (such as measurements) restore them."""
    in_flight: int = 1
    """Micro-batches that are between forward and backward at one time on a pipeline stage; all follow this plan."""
    framework: str = "torch"
    """The framework that the plan was made for; a plan for one framework cannot be applied to functions of another."""

    def __post_init__(self) -> None:
        _refuse_twice([f"{region.name}, call {region.call}" for region in self.regions], "regions")

    @property
    def effect(self) -> tuple[object, ...]:
        """What the plan will do. Plans with equal effects differ only in predictions and reasons."""
        return tuple((region.name, *region.effect) for region in self.regions)

    @property
    def own_compilation(self) -> dict[str, bool | int | float | str | None] | None:
        """torch.compile options that the plan uses for the model, as in ``plimsoll.plan(compile=…)``; ``None``: it does not."""
        return next((unit.options for unit in self.compiled if unit.options is not None), None)

    @property
    def is_lossless(self) -> bool:
        """Whether no value is held in a lossy form, so that gradients must be equal bit for bit."""
        return not any(decision.is_lossy for region in self.regions for decision in region.decisions)

    @property
    def predicted_overhead(self) -> float:
        """Predicted extra time as a share of the unmanaged step."""
        if not self.baseline_seconds:
            return 0.0
        return self.predicted_seconds / self.baseline_seconds - 1.0

    def explain(self) -> str:
        """Text with every decision and its reason, the price of memory, what one more GiB buys, and who holds the peak."""
        return ArtifactBase.render(self, with_details=True)

    def export(self, kind: str, path: str | Path) -> None:
        """Write the plan as a file that trains without Plimsoll, at a cost in time.

        Args:
            kind: ``sac``, a Python file that needs only torch: its ``apply(model)`` checkpoints every region with a policy
                that saves what the plan keeps.
            path: where to write; an existing file is replaced.

        Raises:
            PlanNotUsable: the plan compresses or offloads, drops a region's input, or its status is not usable.
            InvalidOption: ``kind`` is not ``sac``.
            PlanFileError: the place cannot be written.

        Example:
            >>> plan.export("sac", "policy.py")  # doctest: +SKIP
        """
        if kind != "sac":
            raise InvalidOption(
                f"a plan cannot be exported as {kind!r}.",
                why='the only export of a plan is "sac", a policy for selective activation checkpointing',
                next='call plan.export("sac", "policy.py"); for Megatron-Core, run plimsoll estimate … --export megatron',
            )
        self._check_recomputing()
        headline = (
            f"{self.model}, {self.signature}: {format_bytes(self.predicted_peak_bytes)} of "
            f"{format_bytes(self.baseline_peak_bytes)}"
        )
        regions = {(each.name, each.call): each.saved_ops for each in self.regions if not each.is_untouched}
        write_whole(policy_file(ArtifactBase.policy_text(), headline, regions), path)

    def _check_recomputing(self) -> None:
        """Refuse a plan that does anything other than keep and recompute, region by region."""
        why = "" if self.status.is_usable else f"its status is {self.status.value}"
        if self.compiled:
            why = "the plan is for parts that torch.compile compiles, where torch's partitioner decides what to save"
        for region in self.regions:
            if region.packed:
                value, form = next(iter(region.packed.items()))
                why = f"a policy can only save or recompute, but the plan holds {value} of {region.name} as {form}"
            elif region.is_boundary_dropped:
                why = f"a policy holds the input of every region, but the plan drops the input of {region.name}"
        if why:
            raise PlanNotUsable(
                "This plan cannot be written as a policy of selective activation checkpointing.",
                why=why,
                next='plan again with allow={"recompute"} and strategy="auto", or use plimsoll.apply',
            )


_OUTPUT = re.compile(r"(?P<op>[^#]*#\d+)(?:\.(?P<position>\d+))?")
"""The name of a value: ``module::op#occurrence``, and the output's position if the op has several outputs."""


def saved_ops(kept: Iterable[str], dropped: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the kept outputs by op, without ops that have a dropped output: a policy saves all outputs of an op or none.

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
    """Return the policy's source with the decisions filled in; ``regions`` maps (path, call number) to the saved ops."""
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
    """Split a value's name into its op and the output's position; the op is empty for values from outside the region."""
    found = _OUTPUT.fullmatch(value)
    if found is None:
        return "", 0
    return (found["op"] if "::" in found["op"] else f"::{found['op']}"), int(found["position"] or 0)
