"""A plan: one decision for each saved value of each region, with the predicted cost. It contains only data, never code.

A saved value is a tensor that autograd saves for backward; a region is a module that Plimsoll manages.
"""

from __future__ import annotations

import itertools
import pprint
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import msgspec

from plimsoll.artifacts.backward_steps import BackwardSteps
from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.costs import CostSource
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.files import write_whole
from plimsoll.artifacts.offloaded_state import OffloadedState
from plimsoll.artifacts.tile import Tile
from plimsoll.errors import InvalidOption, PlanNotUsable
from plimsoll.units import format_bytes


class ValueDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the decision for one saved value (a tensor that autograd saves) of one region (a module that the plan decides
    about).

    ``bytes`` is the size of the value's storage. If several values share a storage, only the first of them has its bytes.
    ``seconds`` is the time to bring the value back: its share of the recomputation, or encoding and decoding (0 for KEEP).
    ``form`` is the name of the codec of COMPRESS or of the link (to host memory or disk) of OFFLOAD. ``held_bytes`` are the
    bytes that stay on the device under this decision, and ``error`` is the relative gradient error that it is expected to add.
    ``reason`` is one sentence that compares the decision with the price of memory.
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
    """Data: the decisions for one call of one region (a module that Plimsoll manages). If there are none or all are KEEP, the
    region is not changed.

    With ``is_boundary_dropped`` the region's input is not held either: the previous region rebuilds it. With ``is_input_lossy``
    it does so from values that are stored with loss, so that the input does not come back bit for bit.
    ``price_seconds_per_byte`` is the price of one byte held from this region's forward to the end of its backward: the seconds
    per step that one such byte costs (``None`` in older plans, which did not record the price). It is higher for early regions,
    because they hold values across more moments at which memory is scarce. ``steady_inputs`` names the inputs that autograd
    does not save, that forward made, and that forward does not write to any more. If a recipe (the list of ops that rebuilds
    dropped values) needs a steady input, the tensor itself is held; any other input is copied.
    """

    name: str
    call: int
    kind: str
    decisions: tuple[ValueDecision, ...]
    retained_bytes: int
    replay_seconds: float
    is_boundary_dropped: bool = False
    is_input_lossy: bool = False
    price_seconds_per_byte: float | None = None
    steady_inputs: tuple[str, ...] = ()
    value_read: str = ""
    """The first line of the model's code in this region that reads values of tensors (``moe.py:62``), or "". Calls with other
    data may run other ops, or ops of other sizes.
    """
    input_bytes: int = 0
    """The bytes of the tensors that the region was called with."""
    spare_bytes: int | None = 0
    """How many bytes of values that the plan does not know may be kept. A call has such values if its code took another branch
    than in the planned step.

    If a call saves more of them, they are dropped. ``None`` means any number.
    """

    def __post_init__(self) -> None:
        _refuse_twice([decision.value for decision in self.decisions], "values")

    @property
    def is_untouched(self) -> bool:
        """Whether the plan keeps everything in this region."""
        return not self.is_boundary_dropped and all(d.decision is Decision.KEEP for d in self.decisions)

    @property
    def is_left_alone(self) -> bool:
        """Whether Plimsoll does not touch this region at all.

        A region that reads values of tensors may save values that the plan does not know. If their bytes are limited, the
        region is managed although the plan keeps everything.
        """
        return self.is_untouched and not (self.value_read and self.spare_bytes is not None)

    @property
    def dropped(self) -> frozenset[str]:
        """The names of the values that are recomputed in backward."""
        return frozenset(d.value for d in self.decisions if d.decision is Decision.RECOMPUTE)

    @property
    def packed(self) -> dict[str, str]:
        """Maps the name of each compressed or offloaded value to its codec or link."""
        return {d.value: d.form for d in self.decisions if d.is_packed}

    @property
    def effect(self) -> tuple[object, ...]:
        """A key for comparing the plans of a region. Equal keys mean that both plans do the same in the region.

        Such plans differ only in predictions and reasons.
        """
        packed = tuple(sorted(self.packed.items()))
        links = (self.is_boundary_dropped, self.is_input_lossy)
        return (self.call, self.dropped, packed, *links, self.steady_inputs, self.spare_bytes)

    @property
    def saved_ops(self) -> dict[str, tuple[int, ...]]:
        """Maps the name of each op whose outputs are kept to the positions of these outputs.

        An op is left out if any of its outputs is dropped.
        """
        return saved_ops([d.value for d in self.decisions if d.decision is Decision.KEEP], self.dropped)

    @property
    def has_offload(self) -> bool:
        """Whether any value of this region is offloaded to host memory or disk."""
        return any(d.decision is Decision.OFFLOAD for d in self.decisions)


def hiding(regions: Iterable[RegionPlan]) -> frozenset[str]:
    """Return the names of the regions that compute while values of another region are transferred over a link.

    They are the regions that follow a region with offloaded values.
    """
    return frozenset(after.name for region, after in itertools.pairwise(regions) if region.has_offload)


class FixedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Data: activations that no plan of this model can drop: their bytes, where they are saved, and the reason."""

    where: str
    bytes: int
    why: str


_ENOUGH = 0.5
"""A share of the activations. If plans can drop, compress or offload less than this share, the user gets a sentence that says
why.
"""
_PARTS_SHOWN = 2


def limits_of(activation_bytes: int, fixed: tuple[FixedPart, ...]) -> tuple[str, ...]:
    """Return a sentence that says how much of the activations a plan can drop at most, and what every plan keeps and why.

    The result is empty if a plan can drop half of the activations.

    Args:
        activation_bytes: the bytes that the step holds for backward without a plan.
        fixed: the parts of them that every plan keeps, the largest first.
    """
    droppable_bytes = activation_bytes - sum(part.bytes for part in fixed)
    if not fixed or droppable_bytes >= _ENOUGH * activation_bytes:
        return ()
    kept = "; ".join(f"{format_bytes(part.bytes)} in {part.where} ({part.why})" for part in fixed[:_PARTS_SHOWN])
    return (
        f"Plans of this model can drop at most {droppable_bytes / activation_bytes:.0%} of its activations, "
        f"{format_bytes(droppable_bytes)} of {format_bytes(activation_bytes)}. Every plan keeps {kept}.",
    )


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one tensor, or one group of tensors, that takes memory at a moment of the step: its label and its bytes."""

    label: str
    bytes: int


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the peak of the step: its moment, how many bytes are alive, and which tensors hold them (largest first)."""

    moment: str
    bytes: int
    holders: tuple[Holder, ...]


class TimelinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the bytes alive at one tick (the moment when one op runs), in total and for each memory category.

    ``unmanaged_seconds`` is the time at which the tick's op starts in the step without a plan, computed with the plan's costs.
    It does not include recomputation, codecs or transfers (``None`` in older plans, which did not record it).
    ``unmanaged_bytes`` is the largest number of bytes that the step without a plan has alive around this tick; ``None`` if it
    was not computed.
    """

    tick: int
    moment: str
    bytes: int
    by_category: dict[str, int]
    unmanaged_seconds: float | None = None
    unmanaged_bytes: int | None = None

    @property
    def phase(self) -> str:
        """The part of the step that this tick (the position of an op) belongs to: the first word of ``backward of layers.3.mlp
        (mm)``.
        """
        return self.moment.partition(" ")[0]


class FrontierPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one point of the trade-off between memory and time: a peak in bytes, and the least step time for this peak.

    ``change`` names the largest group of values that are dropped or packed here, but not at the next larger peak in the table
    of other budgets (``recompute gelu in 2 more blocks, 8.0 MiB``). It is empty without a plan, and in older plans.
    """

    peak_bytes: int
    step_seconds: float
    change: str = ""


class CompiledUnit(msgspec.Struct, frozen=True, kw_only=True):
    """Data: a module that torch.compile compiles, with its ``path`` in the model and the paths of the regions inside it.

    ``options`` are torch.compile's options if the plan compiles a plain module itself; ``None`` if the user compiled it.
    ``copied_inputs`` lists inputs that backward reads as copies, in the format of ``RegionCall.copied_inputs`` in the trace.
    With ``is_in_order``, backward runs in the order of its graph, and inductor does not reuse buffers. Otherwise inductor
    orders, fuses and reuses buffers in the same way as without a plan.
    """

    path: str
    regions: tuple[str, ...]
    options: dict[str, bool | int | float | str | None] | None = None
    copied_inputs: tuple[str, ...] = ()
    is_in_order: bool = True


def _refuse_twice(names: list[str], what: str) -> None:
    """Raise ValueError if a name is in the list twice, because only the last of the two entries would take effect.

    ``what`` says in the error's text what the names are.
    """
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"two {what} have the name {twice!r:.200}")


LINK_NAMES = ("disk", "host")
"""The names of the links: offloaded values may go to the disk or to pinned host memory."""
COLLECTIVES = "collectives"
"""The word in ``allow`` that permits recomputation to run collectives again."""


class Plan(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Data: the decisions for all saved values of a step under a budget. ``plimsoll.plan`` makes it; ``save`` saves it.

    ``lower_bound_seconds`` bounds the step time of *any* plan that Plimsoll could make under this model of the machine (each op
    recomputed at most once, these costs); it does not bound the machine itself. ``price_seconds_per_byte`` is the time per step
    that one more byte of budget would save at the solution (0 if memory is not scarce). ``str`` shows the plan as a table.
    """

    KIND: ClassVar[str] = "plan"
    SCHEMA_VERSION: ClassVar[int] = 6
    """Schema 2 added the price of regions and the seconds of timeline points. Schema 3 added the bytes of the step without a
    plan to timeline points. In older files these fields are ``None``. Schema 4 added the change to points of the frontier, and
    tiles; in older files both are empty. Schema 5 added the state that is offloaded, and schema 6 the parameters that are
    stepped in backward; in older files there are none.
    """

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
    """Maps the name of each memory category to its bytes at the peak."""
    timeline: tuple[TimelinePoint, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    notes: tuple[str, ...] = ()
    solve_seconds: float = 0.0
    allow: tuple[str, ...] = ("recompute",)
    """What the plan was allowed to do apart from keeping: ``recompute``, ``tile``, ``compress``, ``offload``,
    ``offload-state``, ``step-in-backward``, and ``collectives`` (recomputation may run collectives again)."""
    max_error: float | None = 0.0
    """The allowed relative error of the gradient, ‖Δg‖ / ‖g‖. ``None`` if a named strategy was followed, because its error is
    not limited."""
    predicted_error: float = 0.0
    measured_error: float | None = None
    """The relative error of the gradient, measured by running the plan once; ``None`` if it was not measured."""
    link: str = ""
    """Where offloaded values go: ``host`` or ``disk``; empty if the plan does not offload."""
    offloaded_bytes: int = 0
    """The largest number of bytes that are offloaded at the same time."""
    host_budget_bytes: int | None = None
    budget_bytes_of_ranks: dict[str, int] = {}
    """Maps each rank to its budget in bytes, if ranks with different budgets planned together. ``budget_bytes`` is then the
    smallest of these budgets."""
    compiled: tuple[CompiledUnit, ...] = ()
    """The modules that torch.compile compiles; the plan's decisions for regions in them go through its partitioner."""
    written: tuple[str, ...] = ()
    """Names of the parameters that forward or backward writes to in place. Measurements that run the step outside of training
    restore them afterwards.
    """
    in_flight: int = 1
    """How many micro-batches are between their forward and their backward at the same time on a pipeline stage. All of them
    follow this plan."""
    activation_bytes: int = 0
    """The bytes that the step holds for backward at the end of forward without a plan; 0 if unknown (older plans)."""
    fixed: tuple[FixedPart, ...] = ()
    """The parts of ``activation_bytes`` that no plan of this model can drop, compress or offload, the largest first."""
    tiles: tuple[Tile, ...] = ()
    """The module calls that run in tiles, a few rows at a time. The bounds and gaps of the plan hold for steps with these
    tiles."""
    state: OffloadedState | None = None
    """Which optimizer state is on a link between steps; ``None`` if all of it stays on the device. The bounds and gaps of the
    plan hold for steps with this decision.
    """
    backward_steps: BackwardSteps | None = None
    """Which parameters the optimizer steps while backward runs; ``None`` if it steps all of them at the end. The bounds and
    gaps of the plan hold for steps with this decision.
    """
    framework: str = "torch"
    """The framework that the plan was made for; a plan for one framework cannot be applied to functions of another."""

    def __post_init__(self) -> None:
        _refuse_twice([f"{region.name}, call {region.call}" for region in self.regions], "regions")

    @property
    def effect(self) -> tuple[object, ...]:
        """A key for comparing plans. Two plans with equal keys do the same, and differ only in predictions and reasons."""
        state = () if self.state is None else self.state.chunks
        steps = () if self.backward_steps is None else (self.backward_steps.parameters,)
        return (
            *((tile.path, tile.count) for tile in self.tiles),
            *state,
            *steps,
            *((r.name, *r.effect) for r in self.regions),
        )

    @property
    def limits(self) -> tuple[str, ...]:
        """A sentence that says what every plan of this model keeps; empty if a plan can drop half of the activations."""
        return limits_of(self.activation_bytes, self.fixed)

    @property
    def own_compilation(self) -> dict[str, bool | int | float | str | None] | None:
        """The torch.compile options that the plan uses to compile the model, as in ``plimsoll.plan(compile=…)``.

        ``None`` if the plan does not compile anything itself.
        """
        return next((unit.options for unit in self.compiled if unit.options is not None), None)

    @property
    def is_lossless(self) -> bool:
        """Whether all values are restored without loss, so that gradients must be equal bit for bit."""
        return not any(decision.is_lossy for region in self.regions for decision in region.decisions)

    @property
    def predicted_overhead(self) -> float:
        """The predicted seconds that the plan adds to a step, as a share of the step's seconds without a plan."""
        if not self.baseline_seconds:
            return 0.0
        return self.predicted_seconds / self.baseline_seconds - 1.0

    def explain(self) -> str:
        """Return a text with all decisions and their reasons, the price of memory, the time that one more GiB of budget saves,
        and the tensors that take the memory at the peak.
        """
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
        """Raise ``PlanNotUsable`` if the plan does anything other than keep and recompute values, region by region."""
        why = "" if self.status.is_usable else f"its status is {self.status.value}"
        if self.framework != "torch":
            why = f"the plan is for {self.framework}, and a policy is for PyTorch"
        if self.tiles:
            why = f"the plan runs {self.tiles[0].path} in {self.tiles[0].count} tiles, and a policy cannot"
        if self.state is not None:
            why = f"the plan offloads the state of {self.state.optimizer}, and a policy decides about activations alone"
        if self.backward_steps is not None:
            why = (
                f"the plan steps parameters of {self.backward_steps.optimizer} in backward, and a policy decides about "
            )
            why += "activations alone"
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
"""Matches the name of a value that an op made: ``module::op#occurrence``, followed by ``.position`` if the op has several
outputs."""


def saved_ops(kept: Iterable[str], dropped: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return a mapping from each op's name to the positions of its kept outputs.

    An op with a dropped output is left out, because a policy saves either all outputs of an op or none.

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
    """Return the source text of a Python file that trains with a plan's decisions: ``text`` with the decisions filled in.

    ``regions`` maps (region path, call number) to the saved outputs of ops, in the format of ``saved_ops``.
    """
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
    """Return the name of the op that made a value, and the position of the value among the op's outputs.

    Both are read from the value's name. The op's name is empty for a value that no op made.
    """
    found = _OUTPUT.fullmatch(value)
    if found is None:
        return "", 0
    return (found["op"] if "::" in found["op"] else f"::{found['op']}"), int(found["position"] or 0)
