"""Named strategies: the well-known schemes of activation checkpointing, each as one choice for each region (module).

=====================  ================================================================================================
``auto``               the optimum under the budget (``solve`` finds it; no other strategy looks at the budget)
``none``               KEEP everything
``full``               every region keeps only its input, like ``torch.utils.checkpoint`` around each block
``input-only``         another name for ``full``
``every:k``            regions in groups of k; only a group's first region keeps its input, the group is replayed as one
``first:n``            the first n regions like ``full``; KEEP everything in the others (Megatron's ``block``)
``nth:k``              every k-th region like ``full``, starting with the first; KEEP everything in the others
``sqrt``               ``every:k`` with k the rounded square root of the number of regions (Chen et al. 2016)
``selective:attention``  RECOMPUTE what modules with attention in their path saved; KEEP the rest
``selective:core``       RECOMPUTE what attention makes between its two matrix products (scores, softmax, dropout); KEEP the
                         rest (Korthikanti et al. 2022, section 5); fused attention saves none of these values
``selective:mlp``        the same for feed-forward modules
``selective:norm``       the same for normalisation modules
``selective:shared``     the same for experts that every token passes
``selective:moe-act``    RECOMPUTE what experts make between their two matrix products; KEEP the rest
``selective:mla-up``     RECOMPUTE what multi-latent attention makes of its compressed queries, keys and values
``selective:mm,sdpa``    torch's selective activation checkpointing: a comma list of op names whose outputs are KEPT;
                         everything else is RECOMPUTE. ``sdpa`` means every scaled-dot-product op.
                         ``mm/2`` keeps only every second product
``selective:core+norm``  RECOMPUTE what ``core`` or ``norm`` recomputes
``selective:torchtitan``  torchtitan's own policy: KEEP attention, convolutions, the choice of experts, and every second
                          product without bias
``min-cut``             KEEP what products of backward read, and the fewest other bytes. Ops other than products,
                        reductions and random ones rebuild the rest (the default of torch.compile's partitioner)
``int8``, ``int4``, ``fp8``  COMPRESS every saved value that can take this form, masks and integers without loss; KEEP the rest
``offload``              OFFLOAD every saved value that may go over the link; KEEP the rest (the last region keeps, because
                         no later region hides its transfers)
``offload-inputs``       every region OFFLOADs its input and recomputes the rest, like ``full`` with its inputs over the link
                         (Unsloth, torchtune and axolotl ship this); the last region keeps its input
``hybrid:N,k``           the first N regions like ``int8``, the others like ``every:k``
=====================  ================================================================================================

A choice says which saved values of a region (module call) are kept, recomputed or stored in another form.

Every strategy keeps a value that cannot be rebuilt. All but ``every:k`` and ``sqrt`` keep region inputs.
"""

from __future__ import annotations

import bisect
import difflib
import math
import re
import reprlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidStrategy
from plimsoll.planning.choice import Choice
from plimsoll.planning.costing.roofline import is_product
from plimsoll.planning.cut import Network, Offers, Prices, solve_cuts
from plimsoll.planning.decisions import write_plan
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import RegionView, StepIndex

_MODULES = {
    "attention": re.compile(r"attn|attention", re.IGNORECASE),
    "mlp": re.compile(r"mlp|ffn|feed_?forward|\bff\b|fc\d|experts", re.IGNORECASE),
    "norm": re.compile(r"norm|(?:^|[._])ln(?:[._\d]|$)|(?:^|[._])bn(?:[._\d]|$)", re.IGNORECASE),
    "shared": re.compile(r"shared_?experts?", re.IGNORECASE),
}
ROUTED = re.compile(r"(?<!shared_)experts", re.IGNORECASE)
"""Regular expression for module paths. It matches experts that a router picks for each token, and does not match shared
experts, which every token passes."""
_REDUCTION = re.compile(r"^(mean|sum|amax|amin|var|var_mean|std|norm|_softmax|max|min|logsumexp|prod|any|all)$")
TORCHTITAN = "torchtitan"
_SAVED_BY_TORCHTITAN = ("mm/2", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "sdpa", "topk", "max")
"""Names of ops whose outputs torchtitan's ``SelectiveAC`` saves (in torchtitan 0.3). ``mm/2`` means every second matrix product
without bias."""
_OP_ALIASES = {"sdpa": "scaled_dot_product"}
MEMORY_BUDGET, CHECKPOINT, SELECTIVE = "memory-budget", "checkpoint", "checkpoint:selective"
"""Names of strategies that torch itself carries out under torch.compile. ``memory-budget:0.5`` sets torch's activation memory
budget to this share. ``checkpoint`` checkpoints each region. ``checkpoint:selective`` does the same, but saves the outputs of
matrix products and attention.
"""
_SOFTMAX = ("_softmax", "_safe_softmax")
_BATCHED = frozenset(["bmm", "baddbmm"])
_PRODUCTS = _BATCHED | {"mm", "addmm"}


def choose_none(index: StepIndex, _argument: str) -> tuple[Choice, ...]:
    """Return one choice (what to keep or recompute) for each region (module): the choice keeps all values that the region saved
    for backward.
    """
    return tuple(Choice(view.everything) for view in index.views)


def choose_full(index: StepIndex, _argument: str) -> tuple[Choice, ...]:
    """Return one choice for each region (module): it keeps only the region's input and what cannot be rebuilt."""
    return tuple(Choice(view.nothing) for view in index.views)


def choose_every(index: StepIndex, argument: str) -> tuple[Choice, ...]:
    """Return one choice for each region; k consecutive regions form a group, and ``argument`` is k.

    Each group keeps only the input of its first region. In backward, all regions of the group are recomputed from this input.
    """
    return _grouped(index.views, _group_size(argument))


def choose_first(index: StepIndex, argument: str) -> tuple[Choice, ...]:
    """Return one choice for each region: the first n regions keep only their inputs, the others keep everything.

    ``argument`` is n.
    """
    count = _group_size(argument, "first")
    return tuple(Choice(view.nothing if at < count else view.everything) for at, view in enumerate(index.views))


def choose_nth(index: StepIndex, argument: str) -> tuple[Choice, ...]:
    """Return one choice for each region: each k-th region keeps only its input, the others keep everything.

    ``argument`` is k.
    """
    size = _group_size(argument, "nth")
    return tuple(Choice(view.everything if at % size else view.nothing) for at, view in enumerate(index.views))


def choose_sqrt(index: StepIndex, _argument: str) -> tuple[Choice, ...]:
    """Return one choice for each of the n regions, in groups of about √n regions.

    Each group keeps only the input of its first region. In backward, all regions of the group are recomputed from this input.
    """
    return choose_every(index, str(max(round(math.sqrt(len(index.views))), 1)))


def choose_selective(index: StepIndex, argument: str) -> tuple[Choice, ...]:
    """Return one choice for each region under the strategy ``selective:argument``.

    If the argument names modules or parts of a block (joined by ``+``), their values are recomputed and all other values are
    kept. If the argument names ops (joined by commas), the outputs of these ops are kept and all other values are recomputed.
    """
    if "+" in argument:
        each = [choose_selective(index, part) for part in argument.split("+")]
        return tuple(
            Choice(frozenset.intersection(*(choice.kept for choice in of_one))) for of_one in zip(*each, strict=True)
        )
    if argument in _MADE_IN_PARTS:
        made = _MADE_IN_PARTS[argument]
        return tuple(Choice(view.everything - (made(view) & frozenset(view.droppable))) for view in index.views)
    pattern = _MODULES.get(argument)
    if pattern is not None:
        return tuple(Choice(_kept_outside(view, pattern) | view.nothing) for view in index.views)
    names = _op_names(argument)
    present = sorted({op.name for view in index.views for op in view.graph.ops})
    if names == [TORCHTITAN]:
        names = list(_SAVED_BY_TORCHTITAN)
    for name in names if argument != TORCHTITAN else ():
        if not any(_is_op(op, name.removesuffix("/2")) for op in present):
            known = [*_MODULES, *_MADE_IN_PARTS]
            close = difflib.get_close_matches(name, [*present, *known], n=3) or present[:5]
            raise InvalidStrategy(
                f"'selective:{argument}' names an op that this model does not run.",
                why=f"{name!r} is not one of {', '.join(known)}, and not an op of a region",
                next=f"closest: {', '.join(close)}" if close else "use strategy none or auto",
            )
    return tuple(Choice(_kept_outputs(view, names) | view.nothing) for view in index.views)


def choose_min_cut(index: StepIndex, _argument: str) -> tuple[Choice, ...]:
    """Return one choice for each region: it keeps the fewest bytes such that cheap ops can rebuild the other values.

    Cheap ops are all ops other than products, reductions and random ones.
    """
    found: dict[str, Choice] = {}
    for view in index.views:
        kind = view.call.kind
        if kind not in found or not found[kind].kept <= view.everything:
            found[kind] = _fewest_bytes(view)
    return tuple(found[view.call.kind] for view in index.views)


def _fewest_bytes(view: RegionView) -> Choice:
    """Return the choice of one region under the strategy ``min-cut``: a minimum cut whose cost is the bytes kept.

    In the cut's graph, a cheap op costs next to nothing to run again. Any other op costs infinity, so that it never runs again.
    A value that a product of backward reads is always kept and counts 0 bytes, because dropping this value saves nothing.
    """
    graph = view.graph
    costs = [
        math.inf if is_product(op.name) or _REDUCTION.search(op.name) or op.is_random else 1e-3 for op in graph.ops
    ]
    held = {value: float(graph.values[value].bytes) for value in (*view.decided, *view.copied)}
    ticks = [op.tick for op in graph.ops]
    read_by_products = set()
    for slot in graph.slots:  # a product of backward needs the whole value then, so dropping it saves nothing
        saver = graph.ops[min(bisect.bisect_left(ticks, slot.packed), len(ticks) - 1)]
        if slot.value in view.decided and is_product(saver.name) and slot.value in saver.reads:
            read_by_products.add(slot.value)
            held[slot.value] = 0.0
    offers = Offers(view, Prices(held_bytes=held, op_seconds=tuple(costs)))
    [[cut]] = solve_cuts(Network(view), [(offers, np.array([1.0]))])
    return Choice(cut.kept | view.nothing | read_by_products)


def choose_form(index: StepIndex, name: str) -> tuple[Choice, ...]:
    """Return one choice for each region that holds its values in the form ``name``: a codec, or ``offload``.

    Values that cannot take this form are kept unchanged. Values that a lossy codec cannot take, such as masks, are compressed
    without loss.
    """
    return tuple(_in_form(view, name) for view in index.views)


def choose_offload_inputs(index: StepIndex, _argument: str) -> tuple[Choice, ...]:
    """Return one choice for each region: it offloads its input, and recomputes everything else from it.

    The last region keeps its input: its backward begins at once, so nothing would hide the transfers.
    """
    sent = send_kept(index, choose_full(index, ""))
    return (*sent[:-1], *choose_full(index, "")[-1:])


def choose_hybrid(index: StepIndex, argument: str) -> tuple[Choice, ...]:
    """Return one choice for each region: the first N regions compress their values, the others are recomputed in groups of k.

    ``argument`` is ``N,k``.
    """
    first, size = _hybrid_sizes(argument)
    return (*choose_form(index, "int8")[:first], *_grouped(index.views[first:], size))


def _grouped(views: Sequence[RegionView], size: int) -> tuple[Choice, ...]:
    """Return one choice for each of these regions, in groups of ``size`` consecutive regions: all values are recomputed.

    The first region of a group keeps its input. The other regions of the group drop their inputs too.
    """
    return tuple(Choice(view.nothing, is_boundary_dropped=bool(at % size)) for at, view in enumerate(views))


def _group_size(argument: str, name: str = "every") -> int:
    if not argument.isdecimal() or int(argument) < 1:
        raise InvalidStrategy(
            f"'{name}:{argument}' is not a strategy.",
            why=f"{name}: needs a positive whole number of regions, not {argument!r}",
            next=f"write {name}:2",
        )
    return int(argument)


def _op_names(argument: str) -> list[str]:
    names = [name.strip() for name in argument.split(",") if name.strip()]
    if not names:
        raise InvalidStrategy(
            "'selective:' does not name anything to keep.",
            why=f"selective: needs {', '.join([*_MODULES, *_MADE_IN_PARTS])}, or the ops to keep with commas between them",
            next="write selective:attention or selective:mm,sdpa",
        )
    return names


def _hybrid_sizes(argument: str) -> tuple[int, int]:
    first, comma, size = argument.partition(",")
    if not comma or not first.strip().isdecimal() or not size.strip().isdecimal() or int(size) < 1:
        raise InvalidStrategy(
            f"'hybrid:{argument}' is not a strategy.",
            why="hybrid: needs two numbers: how many regions to compress, and the size of the groups in which the "
            "other regions are checkpointed",
            next="write hybrid:10,6",
        )
    return int(first), int(size)


def send_kept(index: StepIndex, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the same choices, one for each region, with all kept values offloaded, and the inputs of recomputation too.

    A value that may not go over the link to the host stays kept on the device.
    """
    found = []
    for view, choice in zip(index.views, choices, strict=True):
        is_rebuilding = view.everything > choice.kept | choice.forms.keys()
        held = choice.kept | (view.copied if is_rebuilding else frozenset())
        sent = frozenset(
            (value, form.name)
            for value in held & view.forms.keys()
            for form in view.forms[value].forms
            if form.decision is Decision.OFFLOAD
        )
        kept = choice.kept - {value for value, _ in sent}
        found.append(Choice(kept, choice.packed | sent, is_boundary_dropped=choice.is_boundary_dropped))
    return tuple(found)


def _in_form(view: RegionView, name: str) -> Choice:
    """Return the choice for one module call that compresses or offloads each value that can take the form ``name``, and keeps
    the others.

    The form is a codec, or ``offload``. For a codec, masks and integers take their smallest lossless form.
    """
    packed = set()
    for value in view.decided:
        entry = view.forms.get(value)
        forms = [] if entry is None else [form for form in entry.forms if form.name == name]
        if name != "offload" and entry is not None and not forms:
            # Masks and integers only have lossless forms: take the smallest.
            forms = [f for f in entry.forms if f.decision is Decision.COMPRESS and not f.noise]
        elif name == "offload" and entry is not None:
            forms = [form for form in entry.forms if form.decision is Decision.OFFLOAD]
        if forms:
            packed.add((value, min(forms, key=lambda f: f.held_bytes).name))
    return Choice(view.everything - {value for value, _ in packed}, frozenset(packed))


STRATEGIES: dict[str, Callable[[StepIndex, str], tuple[Choice, ...]]] = {
    "every": choose_every,
    "first": choose_first,
    "fp8": lambda index, _: choose_form(index, "fp8"),
    "full": choose_full,
    "hybrid": choose_hybrid,
    "input-only": choose_full,
    "int4": lambda index, _: choose_form(index, "int4"),
    "int8": lambda index, _: choose_form(index, "int8"),
    "min-cut": choose_min_cut,
    "none": choose_none,
    "nth": choose_nth,
    "offload": lambda index, _: choose_form(index, "offload"),
    "offload-inputs": choose_offload_inputs,
    "selective": choose_selective,
    "sqrt": choose_sqrt,
}
"""Maps the name of a strategy (the part before the colon) to a function that returns one choice for each region.

The function takes the step and the text after the colon. ``auto`` is missing, because ``solve`` itself finds its choices.
"""

_MOST_LETTERS = 4000
_WITH_ARGUMENT = ("every", "first", "hybrid", "nth", "selective")


def codecs_of_strategy(strategy: str) -> tuple[str, ...]:
    """Return the names of the lossy codecs that a named strategy uses; the tuple is empty if it uses none.

    The strategy uses them even if the user does not list these codecs among the allowed ones.
    """
    name = strategy.partition(":")[0]
    return {"int8": ("int8",), "int4": ("int4",), "fp8": ("fp8",), "hybrid": ("int8",)}.get(name, ())


def uses_link(strategy: str) -> bool:
    """Return True if a named strategy offloads values over a link (to host memory or disk)."""
    return strategy in ("offload", "offload-inputs")


def keeps_the_rest(strategy: str) -> bool:
    """Return True if a named strategy names what to drop and keeps the rest, False if it names what to keep.

    Example:
        >>> keeps_the_rest("none"), keeps_the_rest("selective:core+mlp"), keeps_the_rest("selective:mm,sdpa")
        (True, True, False)
    """
    name, _, argument = strategy.partition(":")
    parts = frozenset(argument.split("+"))
    return name in ("none", "first", "nth", "offload") or (
        name == "selective" and parts <= {*_MODULES, *_MADE_IN_PARTS}
    )


def is_torchs_own(strategy: str) -> bool:
    """Return True if torch itself carries out this strategy under torch.compile, without a plan.

    Example:
        >>> is_torchs_own("memory-budget:0.5"), is_torchs_own("checkpoint"), is_torchs_own("full")
        (True, True, False)
    """
    return strategy in (CHECKPOINT, SELECTIVE) or strategy.partition(":")[0] == MEMORY_BUDGET


def check_strategy(strategy: str) -> None:
    """Raise an error if the strategy is not valid for any model.

    The ops that ``selective:`` names are not checked: `refuse_unknown_ops` does that, and which of them a model runs is known
    after a trace.

    Args:
        strategy: a name from the module's table, or any other input.

    Raises:
        InvalidStrategy: the strategy does not exist, or its argument is not valid.

    Example:
        >>> check_strategy("every:2")
    """
    if strategy == "auto":
        return
    if not isinstance(strategy, str) or len(strategy) > _MOST_LETTERS:
        raise InvalidStrategy(
            f"{reprlib.repr(strategy)} is not a strategy.",
            why=f"a strategy is a str of at most {_MOST_LETTERS:,} characters",
            next="write full, every:2 or selective:mm,sdpa",
        )
    if is_torchs_own(strategy):
        raise InvalidStrategy(
            f"{strategy!r} is a strategy of torch.compile, not of Plimsoll.",
            why="torch itself carries it out when it compiles the model, so only compare accepts it, for a compiled model",
            next=f"run plimsoll compare TARGET --compile whole --strategy {strategy}",
        )
    name, colon, argument = strategy.partition(":")
    if name not in STRATEGIES or bool(colon) != (name in _WITH_ARGUMENT):
        known = ["auto", "every:2", "first:2", "fp8", "full", "hybrid:10,6", "input-only", "int4", "int8", "min-cut", "none",
                 "nth:2", "offload", "offload-inputs",
                 "selective:attention", "selective:core", "selective:mla-up", "selective:mlp", "selective:moe-act",
                 "selective:norm", "selective:shared", "selective:mm,sdpa", "selective:torchtitan",
                 "sqrt"]  # fmt: skip
        close = difflib.get_close_matches(strategy, known, n=3, cutoff=0.3)
        raise InvalidStrategy(
            f"{strategy!r} is not a strategy.",
            why="Plimsoll knows " + ", ".join(known),
            next="closest: " + ", ".join(close) if close else "use one of these",
        )
    if name in ("every", "first", "nth"):
        _group_size(argument, name)
    elif name == "hybrid":
        _hybrid_sizes(argument)
    elif name == "selective":
        _op_names(argument)


def refuse_unknown_ops(strategy: str, ops: Collection[str]) -> None:
    """Refuse ``selective:`` with an op that does not exist, before a model is traced.

    Names with a namespace (``mylib.scan``) are not checked: a model may register them when it first runs.

    Args:
        strategy: a valid strategy.
        ops: the names of all ops that a model could run.

    Raises:
        InvalidStrategy: no model can run one of the named ops.
    """
    name, _, argument = strategy.partition(":")
    known = [*_MODULES, *_MADE_IN_PARTS]
    for part in argument.split("+") if name == "selective" else ():
        for op in [] if part in (*known, TORCHTITAN) else _op_names(part):
            stem = op.removesuffix("/2")
            if "." not in stem and not any(_is_op(each, stem) for each in ops):
                close = difflib.get_close_matches(op, [*known, *ops], n=3)
                raise InvalidStrategy(
                    f"{strategy!r} names an op that does not exist.",
                    why=f"{op!r} is not one of {', '.join(known)}, and not an op of torch",
                    next=f"closest: {', '.join(close)}" if close else "write selective:attention or selective:mm,sdpa",
                )


def strategy_choices(index: StepIndex, strategy: str) -> tuple[Choice, ...]:
    """Return the choice of every region under a named strategy.

    Args:
        index: the step.
        strategy: a name from the module's table, without ``auto``.

    Raises:
        InvalidStrategy: the strategy does not exist, or its argument is not valid.
    """
    check_strategy(strategy)
    name, _, argument = strategy.partition(":")
    return STRATEGIES[name](index, argument)


@dataclass(frozen=True, slots=True)
class Extremes:
    """Data: the peak, in bytes, of a step without a plan, and the plan that recomputes everything."""

    unmanaged_peak_bytes: int
    lowest: Plan


def find_extremes(trace: Trace, costs: Costs) -> Extremes:
    """Simulate a step twice, with everything kept and with everything recomputed; return the first peak and the second plan.

    It is used for a step that Plimsoll only observes: no search for a better plan is needed there.
    """
    index = StepIndex(trace, costs)
    baseline, full = run_choices(index, choose_none(index, "")), run_choices(index, choose_full(index, ""))
    return Extremes(baseline.peak_bytes, write_plan(full, baseline, "full", [0.0] * len(index.views)))


def between_products(view: RegionView) -> frozenset[int]:
    """Return the ids of the values that attention makes between its two matrix products, such as scores and softmax.

    The first product's result (the scores) is included, the second product's result is not. The other operands of the two
    products are not included either. If a softmax reads a product with weights (a router), it is not attention, so it is
    skipped.
    """
    graph, found = view.graph, set[int]()
    for op in graph.ops:
        if op.name not in _SOFTMAX:
            continue
        scores = _up_to_products(view, op.reads)
        if not any(graph.ops[graph.values[value].producer].name in _BATCHED for value in scores):
            continue
        found |= scores
        pending = list(op.writes)
        while pending:  # follow the readers up to the second product, whose own result is not included
            value = pending.pop()
            found.add(value)
            pending += [
                out
                for other in graph.ops
                if value in other.reads and other.name not in _PRODUCTS
                for out in other.writes
                if out not in found
            ]
    return frozenset(found)


def _up_to_products(view: RegionView, values: Sequence[int]) -> frozenset[int]:
    """Return the ids of these values and of all values that they are computed from, back to the nearest matrix products.

    The results of these products are included, their operands are not.
    """
    graph, found, pending = view.graph, set[int](), list(values)
    while pending:
        value = pending.pop()
        producer = graph.values[value].producer
        if value in found or producer < 0:
            continue
        found.add(value)
        if not is_product(graph.ops[producer].name):
            pending.extend(graph.ops[producer].reads)
    return frozenset(found)


def core_ops(view: RegionView) -> frozenset[int]:
    """Return the ids of those ops of a region that compute attention itself, without its projections.

    They are the fused attention op, or all ops from the product that makes the scores to the product that reads the softmax.
    """
    between = between_products(view)
    found = {op.id for op in view.graph.ops if between & frozenset((*op.reads, *op.writes))}
    return frozenset(found | {op.id for op in view.graph.ops if _is_op(op.name, "sdpa")})


def _experts_activations(view: RegionView) -> frozenset[int]:
    """Return the ids of the values that routed experts make between their first and last matrix product.

    Routed experts are those that a router picks for each token.
    """
    ops = [op for op in view.graph.ops if op.writes and ROUTED.search(_module(view, op.writes[0]))]
    products = [op.id for op in ops if is_product(op.name)]
    between = (op for op in ops if products and products[0] < op.id < products[-1] and not is_product(op.name))
    return frozenset(value for op in between for value in op.writes)


def _up_projected(view: RegionView) -> frozenset[int]:
    """Return the ids of the queries, keys and values of multi-latent attention, and of the values they are made of.

    The walk goes back to the matrix products that expand the compressed queries, keys and values.
    """
    if not has_compressed_keys(view):
        return frozenset()
    found = _up_to_products(view, [value for op in view.graph.ops if _is_op(op.name, "sdpa") for value in op.reads])
    return frozenset(value for value in found if "_a_proj" not in view.graph.values[value].name)


def has_compressed_keys(view: RegionView) -> bool:
    """Return True if the attention in a region is multi-latent attention, which compresses keys and values."""
    return any("kv_b_proj" in value.name for value in view.graph.values)


_MADE_IN_PARTS: dict[str, Callable[[RegionView], frozenset[int]]] = {
    "core": between_products,
    "mla-up": _up_projected,
    "moe-act": _experts_activations,
}
"""Maps the name of a part of a block that is not a module (``core`` in ``selective:core``) to a function. The function takes a
region and returns the ids of the values that this part makes.
"""


def _module(view: RegionView, value: int) -> str:
    return view.graph.values[value].name.rpartition("::")[0]


def _kept_outside(view: RegionView, pattern: re.Pattern[str]) -> frozenset[int]:
    """Return the ids of those droppable values of a region that modules made whose path does not match the pattern."""
    return frozenset(v for v in view.droppable if not pattern.search(_module(view, v)))


def _kept_outputs(view: RegionView, names: list[str]) -> frozenset[int]:
    """Return the ids of those droppable values of a region that are outputs of the ops in ``names``.

    ``mm/2`` means only every second ``mm``.
    """
    ops = view.graph.ops
    kept: set[int] = set()
    for name in names:
        of_name = [op for op in ops if _is_op(op.name, name.removesuffix("/2"))]
        kept.update(value for op in of_name[:: 2 if name.endswith("/2") else 1] for value in op.writes)
    return frozenset(kept) & frozenset(view.droppable)


def _is_op(op: str, name: str) -> bool:
    alias = _OP_ALIASES.get(name)
    return op == name or (alias is not None and alias in op)
