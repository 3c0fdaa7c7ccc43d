"""Finds the pipeline stage of every op, parameter and storage, and which tensors cross stage boundaries, without torch."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.job import Layout, ModelFacts, StageRule
from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import Category, Phase, Storage, Trace, TraceParameter
from plimsoll.errors import InvalidLayout


@dataclass(frozen=True, slots=True)
class Membership:
    """The assignment of ops, regions (modules that the plan decides about) and storages to pipeline stages, as data.

    ``op_stages`` has the stage of each op. ``starts`` has the index of each stage's first region.
    """

    starts: tuple[int, ...]
    stage_of: tuple[int, ...]
    """For each region call (a call of a repeated block), the number of its pipeline stage, in the order of the calls."""
    op_stages: tuple[int, ...]
    static_stages: dict[int, frozenset[int]]
    """A mapping from each storage that existed before the step to the stages that hold it."""
    parameter_stages: tuple[frozenset[int], ...]
    """For each parameter, in the order of the trace's parameters, the stages that hold it."""

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.starts)


def assign(trace: Trace, counts: Sequence[int]) -> Membership:
    """Assign to pipeline stages every op, and every storage that existed before the step.

    Forward is cut where the first region call (call of a managed block) of a stage starts: ops between the regions of two
    stages belong to the earlier stage. In backward the order is reversed: an op outside all regions belongs to the stage of the
    next region, since it makes what that region's backward reads. ``counts`` is the number of region calls of each stage; the
    trace must not contain an optimizer step.
    """
    assert sum(counts) == len(trace.regions), "every region call belongs to one stage"
    assert all(op.phase is not Phase.OPTIMIZER for op in trace.ops), (
        "the optimizer's step is added to a rank, not split"
    )
    starts = tuple(sum(counts[:stage]) for stage in range(len(counts)))
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    cuts = [trace.regions[start].forward[0] for start in starts[1:]]
    op_stages = [0] * len(trace.ops)
    following = 0
    for tick in range(len(trace.ops) - 1, -1, -1):
        op = trace.ops[tick]
        if op.phase is Phase.FORWARD:
            op_stages[tick] = bisect.bisect_right(cuts, tick)
        else:
            following = stage_of[op.region] if op.region >= 0 else following
            op_stages[tick] = following
    users, readers = _users(trace, op_stages), readers_of(trace, stage_of)
    parameters = _parameter_stages(trace, stage_of, users, readers)
    return Membership(
        starts=starts,
        stage_of=tuple(stage_of),
        op_stages=tuple(op_stages),
        static_stages=_static_stages(trace, parameters, len(counts) - 1, users, readers),
        parameter_stages=parameters,
    )


def even_counts(regions: int, stages: int) -> tuple[int, ...]:
    """Return the number of region calls (calls of modules that the plan decides about) of each stage, as even as possible.

    The first and the last stage get the smaller numbers.

    Example:
        >>> even_counts(32, 4), even_counts(126, 16)
        ((8, 8, 8, 8), (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7))
    """
    least, more = divmod(regions, stages)
    inner_first = [*range(1, stages - 1), 0, stages - 1]
    larger = set(inner_first[:more])
    return tuple(least + (stage in larger) for stage in range(stages))


def stage_counts(trace: Trace, layout: Layout, facts: ModelFacts, costs: Callable[[], Costs]) -> tuple[int, ...]:
    """Return the number of region calls (calls of modules that the plan decides about) of each stage, by the layout's own
    numbers or its rule.

    Args:
        trace: the whole step.
        layout: its stages, and the rule that cuts them.
        facts: sizes of the model, which nanotron's rule uses as weights.
        costs: a function that returns the seconds of the ops; it is called only if stages are cut by cost.

    Raises:
        InvalidLayout: the rule cannot cut the model.

    Source: nanotron's ``build_model`` and ``get_block_compute_costs``; Megatron-Core's ``get_num_layers_to_build``;
    torchtitan's ``generate_llm_fqn_per_model_part``. Known weakness: nanotron may give its last stages only the head, while a
    stage here has at least one block; recomputation may make a stage slower than ``cost`` assumes.
    """
    blocks, stages, cut = len(trace.regions), layout.stages, layout.cut
    if not isinstance(cut, StageRule):
        return cut
    if cut is StageRule.BLOCKS or stages >= blocks:  # with one block per stage, every rule gives the same
        return even_counts(blocks, stages)
    match cut:
        case StageRule.COST:
            return _by_cost(_block_seconds(trace, costs()), stages)
        case StageRule.NANOTRON:
            return _as_nanotron(blocks, stages, facts)
        case _:
            return _as_layers(blocks, stages, cut)


def _as_layers(blocks: int, stages: int, rule: StageRule) -> tuple[int, ...]:
    """Divide blocks evenly among the stages, and return for each stage the number of its blocks.

    Embedding and head count as one block each, except for Megatron's rule. A remainder goes to the first stages for
    torchtitan's rule, and is refused for the other rules.
    """
    weight = 0 if rule is StageRule.MEGATRON else 1
    least, more = divmod(blocks + 2 * weight, stages)
    counts = [least + (stage < more) for stage in range(stages)]
    counts[0] -= weight
    counts[-1] -= weight
    if min(counts) < 1 or (more and rule is not StageRule.TORCHTITAN):
        with_both = ", counting embedding and head as one block each" if weight else ""
        raise InvalidLayout(
            f"stages={rule.value} cannot cut {blocks} blocks into {stages} stages{with_both}.",
            why="this rule gives every stage the same number of blocks, at least one",
            next=f"list the blocks per stage, stages={','.join(map(str, even_counts(blocks, stages)))}, or leave stages= out",
        )
    return tuple(counts)


def _as_nanotron(blocks: int, stages: int, facts: ModelFacts) -> tuple[int, ...]:
    """Return for each stage the number of its blocks, divided as nanotron divides them.

    A stage is filled with blocks until the number of their parameters that take part in matrix products exceeds the stage's
    share of all. The head counts with its own parameters.
    """
    hidden, wide, words = facts.hidden, facts.intermediate, facts.vocabulary
    if hidden is None or wide is None or words is None:
        raise InvalidLayout(
            f"stages=nanotron is not supported for {facts.name}.",
            why="it weighs blocks by hidden and feed-forward width and the head by vocabulary size, and these are not known",
            next="list the blocks of each stage, such as stages=9,8,8,7",
        )
    block = 4 * hidden * hidden + 3 * wide * hidden
    total = block * blocks + words * hidden
    counts, stage = [0] * stages, 0
    for number in range(blocks):
        counts[stage] += 1
        if (number + 1) * block * stages > total * (stage + 1):
            stage = min(stage + 1, stages - 1)
    for empty in (at for at in reversed(range(stages)) if not counts[at]):
        counts[max(at for at in range(empty) if counts[at] > 1)] -= 1
        counts[empty] = 1
    return tuple(counts)


def _block_seconds(trace: Trace, costs: Costs) -> list[float]:
    """Return for each block the seconds of its ops in forward and backward.

    The first block includes what precedes all blocks, the last includes the head and the loss.
    """
    seconds = [0.0] * len(trace.regions)
    for op, block in zip(trace.ops, assign(trace, [1] * len(trace.regions)).op_stages, strict=True):
        seconds[block] += costs.seconds_of(op.cost_key)
    return seconds


def _by_cost(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Divide blocks into consecutive runs such that the slowest run is as fast as possible.

    Return the number of blocks of each run.
    """
    ends = [0.0, *itertools.accumulate(seconds)]
    # For the first n blocks divided into `stage` runs: the slowest run's seconds, and the counts.
    best: list[tuple[float, tuple[int, ...]]] = [(end, (n,)) for n, end in enumerate(ends)]
    for stage in range(2, stages + 1):
        best = [
            min(
                ((max(best[before][0], ends[n] - ends[before]), (*best[before][1], n - before))
                 for before in range(stage - 1, n)),
                default=(math.inf, ()),
            )
            for n in range(len(ends))
        ]  # fmt: skip
    return best[-1][1]


def _users(trace: Trace, op_stages: Sequence[int]) -> dict[str, set[int]]:
    """Return a mapping from each module to the pipeline stages that run forward ops of it."""
    users: dict[str, set[int]] = {}
    for tick, op in enumerate(trace.ops):
        if op.phase is Phase.FORWARD:
            users.setdefault(op.module, set()).add(op_stages[tick])
    return users


def readers_of(trace: Trace, stage_of: Sequence[int]) -> dict[int, set[int]]:
    """Return a mapping from each storage to the pipeline stages whose blocks read or save it.

    Merely passing it through a block does not count.
    """
    readers: dict[int, set[int]] = {}
    for call in trace.regions:
        graph = call.graph
        used = {value for op in graph.ops for value in op.reads} | {slot.value for slot in graph.slots}
        parameters = {v.id for v in graph.values if v.origin in (Origin.PARAMETER, Origin.BUFFER)}
        for value in (used | parameters) - {-1}:
            readers.setdefault(graph.values[value].storage, set()).add(stage_of[call.index])
    return readers


def _parameter_stages(
    trace: Trace, stage_of: Sequence[int], users: Mapping[str, set[int]], readers: Mapping[int, set[int]]
) -> tuple[frozenset[int], ...]:
    homes = {call.name: stage_of[call.index] for call in reversed(trace.regions)}
    found: list[frozenset[int]] = []
    is_after = False
    for parameter in trace.parameters:
        stages = set(readers.get(parameter.storage, ()))
        for name in (parameter.name, *parameter.aliases):
            stages |= users.get(name.rpartition(".")[0], set())
            inside = region_of(name, homes)
            if inside is not None:
                stages.add(homes[inside])
                is_after = True
        found.append(frozenset(stages or {len(set(stage_of)) - 1 if is_after else 0}))
    return tuple(found)


def region_of(name: str, regions: Container[str]) -> str | None:
    """Return the region (repeated block) that contains a parameter or buffer, by its name; ``None`` if it is outside all
    regions.
    """
    parts = name.split(".")
    prefixes = (".".join(parts[:depth]) for depth in range(len(parts)))
    return next((prefix for prefix in prefixes if prefix in regions), None)


def _static_stages(
    trace: Trace,
    parameters: Sequence[frozenset[int]],
    last: int,
    users: Mapping[str, set[int]],
    readers: Mapping[int, set[int]],
) -> dict[int, frozenset[int]]:
    of_name = {f"gradient:{p.name}": stages for p, stages in zip(trace.parameters, parameters, strict=True)}
    of_storage = {p.storage: stages for p, stages in zip(trace.parameters, parameters, strict=True)}
    found: dict[int, frozenset[int]] = {}
    for storage in trace.storages:
        if storage.born >= 0:
            continue
        if storage.id in of_storage:
            found[storage.id] = of_storage[storage.id]
        elif storage.label in of_name:
            found[storage.id] = of_name[storage.label]
        elif storage.category is Category.INPUT:
            found[storage.id] = frozenset({0, last} | readers.get(storage.id, set()))
        else:
            owner = storage.label.partition(":")[2].rpartition(".")[0]
            found[storage.id] = frozenset(readers.get(storage.id) or users.get(owner) or {0})
    return found


def tied_parameters(trace: Trace, members: Membership) -> tuple[TraceParameter, ...]:
    """Return the parameters that more than one pipeline stage holds, because their modules share them."""
    return tuple(p for p, stages in zip(trace.parameters, members.parameter_stages, strict=True) if len(stages) > 1)


@dataclass(frozen=True, slots=True)
class Crossings:
    """The storages that cross stage boundaries, as data.

    ``received`` has, for each stage, the storages that an earlier stage made and this stage or a later one needs. ``gradients``
    has, for each stage, pairs of a storage that it sent and the gradient of that storage, which a later stage made.
    ``made_anew`` maps a storage to the later stages that compute it again from the batch.
    """

    received: tuple[frozenset[int], ...]
    gradients: tuple[tuple[tuple[int, int], ...], ...]
    made_anew: dict[int, frozenset[int]]


def find_crossings(trace: Trace, members: Membership) -> Crossings:
    """Find the storages that are sent across each boundary between stages. ``members`` has the stage of each op."""
    readers = readers_of(trace, members.stage_of)
    received: list[set[int]] = [set() for _ in range(members.stages)]
    made_anew: dict[int, frozenset[int]] = {}
    first = trace.regions[0].forward[0]
    for storage in trace.storages:
        later = _later_readers(trace, members, storage, readers.get(storage.id, set()))
        if not later:
            continue
        if storage.born < first:
            made_anew[storage.id] = frozenset(later)
            continue
        for stage in range(members.op_stages[storage.born] + 1, max(later) + 1):
            received[stage].add(storage.id)
    return Crossings(
        received=tuple(frozenset(each) for each in received),
        gradients=tuple(
            _gradients(trace, members, stage, received[stage + 1]) if stage + 1 < members.stages else ()
            for stage in range(members.stages)
        ),
        made_anew=made_anew,
    )


def _later_readers(trace: Trace, members: Membership, storage: Storage, readers: set[int]) -> set[int]:
    """Return the later stages that read a forward storage. Later means after the stage that made the storage.

    A storage that dies while the head runs is read by the head.
    """
    if storage.born < 0 or trace.ops[storage.born].phase is not Phase.FORWARD:
        return set()
    home, last = members.op_stages[storage.born], members.stages - 1
    later = {stage for stage in readers if stage > home}
    head = trace.regions[-1].forward[1]
    is_backward = storage.dies >= len(trace.ops) or trace.ops[storage.dies].phase is not Phase.FORWARD
    if home < last and storage.born >= trace.regions[0].forward[0] and storage.dies > head and not is_backward:
        later.add(last)
    return later


def _gradients(trace: Trace, members: Membership, stage: int, sent: set[int]) -> tuple[tuple[int, int], ...]:
    """Return pairs of storages: each storage that ``stage`` sent to later stages, and the gradient that comes back for it.

    The gradient is a storage of equal size that is alive when the stage's backward begins.
    """
    begins = next(
        (t for t, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD and members.op_stages[t] == stage), -1
    )
    if begins < 0:
        return ()
    alive = [
        storage
        for storage in trace.storages
        if 0 <= storage.born < begins < storage.dies
        and trace.ops[storage.born].phase is Phase.BACKWARD
        and members.op_stages[storage.born] > stage
        and storage.category is Category.TEMPORARY
    ]
    alive.sort(key=lambda storage: storage.born)
    pairs = []
    for each in sorted(sent, reverse=True):
        size = trace.storages[each].bytes
        found = next((storage for storage in reversed(alive) if storage.bytes == size), None)
        if found is not None:
            alive.remove(found)
            pairs.append((each, found.id))
    return tuple(pairs)
