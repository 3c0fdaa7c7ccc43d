"""Turns a traced step into the same step under a technique, such as another loss kernel or dtype, without torch.

Here a technique changes the model's own ops and tensors, before the step is cut into stages. Its changes to a rank's state,
gradients and collectives are made where these are computed (``parallelism/rank``, ``optimizers``).
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from plimsoll.artifacts.job import Techniques
from plimsoll.artifacts.region import Origin, Value
from plimsoll.artifacts.trace import Category, OpSpec, Phase, RegionCall, Trace
from plimsoll.errors import InvalidOption
from plimsoll.estimator.parallelism.editing import Edit
from plimsoll.planning.costing.roofline import FUSED, is_product
from plimsoll.planning.what_if import HeadAndLoss, find_head, with_chunked_loss

_ALONE = re.compile(r"sort|topk|scatter|index_put|nonzero|cumsum|histc|bincount|embedding|_local_scalar")
"""Names of ops that a compiler runs alone, not fused with others. Matrix products and collectives are not fused either."""
_PASSES_OF_FUSED_LOSS = 3
"""How often a fused loss moves the logits: it reads them for maximum and sum, reads them again, and writes the gradient."""


def with_techniques(
    trace: Trace, how: Techniques, sequence: int | None = None, *, reads_both_ways: bool = False
) -> Trace:
    """Return the step of one micro-batch under techniques (such as fp8 or another loss kernel) that change its ops.

    ``sequence`` is a sample's length in tokens. With ``reads_both_ways`` the device's fp8 products can read one copy of an
    operand by rows and by columns (Blackwell).

    Raises:
        InvalidOption: a loss technique without a loss over classes in the step, or a technique that does not change any op.

    Example:
        >>> with_techniques(trace, Techniques(tf32=True))  # doctest: +SKIP
    """
    if how.tf32:
        specs = {key: _in_tf32(spec) for key, spec in trace.specs.items()}
        trace = replace(trace, specs=specs)
    if how.is_fused:
        trace = _with_compiled_blocks(trace)
    if how.megatron:
        trace = _as_megatron_saves(trace)
    if how.packed:
        trace = _with_documents(trace, how.packed, sequence)
    if how.fp8:
        trace = _with_fp8(trace, how, reads_both_ways=reads_both_ways)
    if how.comm_overlap:
        trace = _with_hidden_collectives(trace)
    if how.loss in ("chunked", "fused", "fused-linear"):
        head = find_head(trace, is_divided=how.loss == "fused")
        if head is None:
            raise InvalidOption(
                f"loss={how.loss} cannot be used: no head with a loss over classes was found in {trace.model}.",
                why="it is recognised as a log-softmax after a matrix product, outside the blocks; under tensor parallelism "
                "the loss never holds all logits and can only be fused",
                next="leave loss= out, or use loss=fused with tensor parallelism",
            )
        if how.loss != "chunked":
            trace = _with_fused_loss(trace, head, how.loss)
        if how.loss != "fused":
            trace = with_chunked_loss(trace, head)
    return trace


def _with_documents(trace: Trace, tokens: int, sequence: int | None) -> Trace:
    """Return the step for samples that each contain several documents.

    Fused attention then runs within each document, as kernels for varying lengths do.
    """
    specs = {
        key: replace(spec, flops=spec.flops * tokens // sequence)
        for key, spec in trace.specs.items()
        if sequence and sequence > tokens and "scaled_dot_product" in spec.name
    }
    if not specs:
        raise InvalidOption(
            f"packed={tokens} would not reduce the work of attention in {trace.model}.",
            why=f"it limits fused attention to documents of {tokens} tokens; tokens in a sample: {sequence or 'none'}",
            next="use fewer tokens than a sample has and a model with fused attention (sdpa), or leave packed= out",
        )
    return replace(trace, specs=trace.specs | specs)


class _Fp8(NamedTuple):
    """One way to compute matrix products in fp8, as data.

    ``reads`` is how often a cast reads the tensor. ``bytes`` is the size of an element, including scales. ``is_held`` says
    whether the fp8 copies are held for backward.
    """

    reads: int
    bytes: float
    is_held: bool
    multiple: int = 16
    """Matrix products whose sizes are not all multiples of this number stay in 16 bits."""


_FP8 = {
    "tensorwise": _Fp8(2, 1, is_held=False),
    "rowwise": _Fp8(2, 1, is_held=False),
    "delayed": _Fp8(1, 1, is_held=True),
    "current": _Fp8(2, 1, is_held=True),
    "mxfp8": _Fp8(1, 1 + 1 / 32, is_held=True, multiple=32),
}
_NARROW = ("bf16", "f16")
_LINEAR = ("mm", "addmm")
_BOTH_WAYS = 2
"""The number of fp8 copies of a tensor: Transformer Engine casts it by rows and by columns together, one copy for this product
and one for backward's.
"""


def _with_fp8(trace: Trace, how: Techniques, *, reads_both_ways: bool) -> Trace:
    """Return the step with the matrix products of its blocks in fp8.

    torchao's ``Float8Linear`` casts both operands right before each product, and saves inputs in 16 bits. Transformer Engine
    casts an input, a weight and a gradient once. It saves inputs in fp8 (and in 16 bits too if another op saves them), holds
    fp8 weights by rows and by columns, with or without the 16-bit weights, and gathers operands of fp8 products in fp8. A scale
    per tensor needs one extra read before the cast; a scale per row is computed during the cast if that is compiled.

    Source: torchao's ``Float8Linear``; NVIDIA/TransformerEngine issues 1261, 1764, 1880 and pull requests 2168 and 2343. Known
    weakness: casts are counted where products first run, not where recomputation runs them again; fp8 weights are counted for
    the whole step, as with several micro-batches.
    """
    edit, recipe = Edit(trace), _FP8[how.fp8]
    cast_share, again = _casts_of_inputs(trace) if recipe.is_held else ({}, set())
    copies = 1 if reads_both_ways and recipe.multiple < _FP8["mxfp8"].multiple else _BOTH_WAYS
    held_weights: dict[str, int] = {}
    reads = 1 if how.fp8 == "rowwise" and how.compile else recipe.reads
    weights = {s.born for s in trace.storages if s.category is Category.GRADIENT}
    specs, ticks = dict(trace.specs), []
    for tick, op in enumerate(trace.ops):
        spec = trace.specs[op.cost_key]
        sizes = spec.product
        if op.region < 0 or spec.name not in _LINEAR or sizes is None or spec.dtype not in _NARROW:
            continue
        batch, rows, columns, inner = sizes
        if any(size % recipe.multiple for size in (rows, columns, inner)):
            continue
        ticks.append(tick)
        elements = batch * inner * (rows + columns)
        specs[op.cost_key] = replace(spec, dtype="float8_e4m3fn", moved_bytes=spec.moved_bytes - elements)
        written, held = elements, elements
        if recipe.is_held:
            is_forward = op.phase is Phase.FORWARD
            if is_forward:
                held_weights[f"{op.module}.weight"] = int(copies * recipe.bytes * batch * inner * columns)
            if tick in weights or tick in again:
                continue  # both operands were cast for earlier products
            elements = int(batch * inner * rows * cast_share.get(tick, 1.0))
            written, held = _BOTH_WAYS * elements, batch * inner * rows * (1 if is_forward else _BOTH_WAYS)
        moved_bytes = 2 * reads * elements + int(recipe.bytes * written)
        cast = OpSpec(name="fp8_cast", flops=0, moved_bytes=moved_bytes, dtype=spec.dtype)
        made = edit.op(tick, op.module, f"fp8_cast({moved_bytes})", cast)
        edit.add(int(recipe.bytes * held), Category.TEMPORARY, f"{op.module}: operands in fp8", made, tick + 1)
    if not ticks:
        raise InvalidOption(
            f"fp8={how.fp8} does not apply to any matrix product of {trace.model}.",
            why=f"it applies to 16-bit linear layers inside blocks whose sizes are multiples of {recipe.multiple}",
            next="use precision bf16, bf16-mixed or fsdp-bf16, or leave fp8= out",
        )
    _hold_weights(edit, held_weights, is_alone=how.fp8_weights)
    saved, others = _saved_by_products(trace, ticks) if recipe.is_held else ({}, set())
    shares = {storage: recipe.bytes / 2 + (storage in others) for storage in saved}
    for storage, last in saved.items():
        wide = trace.storages[storage]
        rest = wide.bytes - int(wide.bytes * shares[storage])
        if rest > 0:
            edit.add(rest, Category.TEMPORARY, f"{wide.label} until it is in fp8", wide.born, last + 1)
    found = edit.finish(parameters=trace.parameters, notes=())
    found = replace(found, specs=found.specs | {key: specs[key] for key in trace.specs})
    return _resized(_gathering_in_fp8(found, recipe.bytes / 2) if recipe.is_held else found, shares)


def _hold_weights(edit: Edit, held_bytes: dict[str, int], *, is_alone: bool) -> None:
    """Add storages for the fp8 weights to the trace. They are held in addition to the 16-bit weights.

    With ``is_alone`` they replace the 16-bit weights.
    """
    storages = {parameter.name: parameter.storage for parameter in edit.trace.parameters}
    for name, size in held_bytes.items():
        if is_alone and storages.get(name, -1) >= 0:
            wide = edit.trace.storages[storages[name]]
            edit.change(wide.id, wide.born, None, bytes=size)
        else:
            edit.add(size, Category.TEMPORARY, f"weight in fp8:{name}", -1, None)


def _casts_of_inputs(trace: Trace) -> tuple[dict[int, float], set[int]]:
    """Find the casts of product inputs to fp8 that are smaller than the input, or that are not needed at all.

    Returns:
        A mapping from the tick (position) of a forward product to the share of its input that is cast, for inputs that are
        gathered after the cast; and the ticks of products whose input was already cast for an earlier product.
    """
    shares: dict[int, float] = {}
    again: set[int] = set()
    for call in trace.regions:
        graph, seen = call.graph, set[int]()
        for op in graph.ops:
            inputs = [v for v in op.reads if graph.values[v].origin in (Origin.OP, Origin.INPUT)]
            if op.name not in _LINEAR or not inputs:
                continue
            value = graph.values[inputs[0]]
            if value.storage in seen:
                again.add(op.tick)
            seen.add(value.storage)
            maker = graph.ops[value.producer] if value.producer >= 0 else None
            if maker is not None and maker.reads and _is_gather(trace, maker.cost_key):
                shares[op.tick] = min(graph.values[maker.reads[0]].bytes / max(value.bytes, 1), 1.0)
    return shares, again


def _gathering_in_fp8(trace: Trace, share: float) -> Trace:
    """Return the trace with the bytes of tensor-parallel gathers inside blocks multiplied by ``share``."""
    gathers = [t for t, op in enumerate(trace.ops) if op.region >= 0 and _is_gather(trace, op.cost_key)]
    keys = {tick: f"{trace.ops[tick].cost_key}@fp8" for tick in gathers}
    wide = {key: trace.specs[trace.ops[tick].cost_key] for tick, key in keys.items()}
    narrow = {key: replace(spec, moved_bytes=int(share * spec.moved_bytes)) for key, spec in wide.items()}
    return _with_cost_keys(trace, keys, narrow)


def _is_gather(trace: Trace, cost_key: str) -> bool:
    spec = trace.specs[cost_key]
    return spec.group == "tp" and spec.name.endswith("all_gather")


def _with_cost_keys(trace: Trace, keys: Mapping[int, str], specs: dict[str, OpSpec]) -> Trace:
    """Return the trace with other cost keys (which say what an op costs) at some ticks, the positions of ops.

    The ops of its regions (modules that the plan decides about) are changed too.
    """
    ops = tuple(replace(op, cost_key=keys.get(tick, op.cost_key)) for tick, op in enumerate(trace.ops))
    regions = tuple(
        replace(
            call,
            graph=replace(
                call.graph,
                ops=tuple(replace(op, cost_key=ops[op.tick].cost_key) if op.tick >= 0 else op for op in call.graph.ops),
            ),
        )
        for call in trace.regions
    )
    return replace(trace, ops=ops, specs=trace.specs | specs, regions=regions)


def _saved_by_products(trace: Trace, ticks: list[int]) -> tuple[dict[int, int], set[int]]:
    """Find the 16-bit storages that the products at these ticks (positions of ops) save for backward.

    Return a mapping from such a storage to the tick of its last product in forward, and the set of storages that other ops
    save.
    """
    products, found, others = frozenset(ticks), dict[int, int](), set[int]()
    for call in trace.regions:
        starts = [op.tick for op in call.graph.ops]
        for slot in call.graph.slots:
            if not slot.is_managed:
                continue
            value = call.graph.values[slot.value]
            saver = call.graph.ops[min(bisect.bisect_left(starts, slot.packed), len(starts) - 1)]
            if (
                trace.ops[slot.unpacked].name in _LINEAR
                and saver.tick in products
                and slot.value in saver.reads
                and value.producer >= 0
            ):
                found[value.storage] = max(found.get(value.storage, -1), saver.tick)
            else:
                others.add(value.storage)
    return found, others


def _resized(trace: Trace, shares: Mapping[int, float]) -> Trace:
    """Return the trace with the bytes of some storages scaled by their share, in the storages and in the values of regions."""
    regions = tuple(
        replace(
            call,
            graph=replace(
                call.graph,
                values=tuple(
                    replace(value, bytes=int(value.bytes * shares[value.storage])) if value.storage in shares else value
                    for value in call.graph.values
                ),
            ),
        )
        for call in trace.regions
    )
    sized = tuple(replace(s, bytes=int(s.bytes * shares[s.id])) if s.id in shares else s for s in trace.storages)
    return replace(trace, regions=regions, storages=sized)


def _as_megatron_saves(trace: Trace) -> Trace:
    """Return the step with blocks that save the tensors that Megatron-Core on Transformer Engine saves.

    Inputs of norms are saved in the dtype they arrive in. Under sequence parallelism each rank saves its part of a gathered
    tensor, and backward gathers the tensor again.

    Source: Korthikanti et al. 2022, section 4.2.2; TransformerEngine's ``LayerNormLinear`` and ``LayerNormMLP``.
    """
    edit, shares, regions = Edit(trace), dict[int, float](), list[RegionCall]()
    for call in trace.regions:
        graph, narrow = call.graph, dict[int, int]()
        saved = {slot.value for slot in graph.slots if slot.is_managed}
        for op in graph.ops:
            if not op.reads or not op.writes or op.writes[0] not in saved:
                continue
            read, made = graph.values[op.reads[0]], graph.values[op.writes[0]]
            if op.name == "_to_copy" and read.bytes < made.bytes:
                narrow[made.id] = read.id
            elif _is_gather(trace, op.cost_key) and made.storage not in shares:
                shares[made.storage] = read.bytes / made.bytes
                _gather_again(edit, call, made, shares[made.storage])
        slots = (replace(slot, value=narrow.get(slot.value, slot.value)) for slot in graph.slots)
        regions.append(replace(call, graph=replace(graph, slots=tuple(slots))))
    edit.trace = replace(trace, regions=tuple(regions))
    found = _resized(edit.finish(parameters=trace.parameters, notes=()), shares)
    return replace(found, specs={key: _of_megatron(spec) for key, spec in found.specs.items()})


def _of_megatron(spec: OpSpec) -> OpSpec:
    """Return the op's spec (name, FLOPs, bytes). If the op is attention, rename it to cuDNN's kernel, which Transformer Engine
    uses.
    """
    return replace(spec, name=spec.name.replace("flash_attention", "cudnn_attention"))


def _gather_again(edit: Edit, call: RegionCall, value: Value, part: float) -> None:
    """Shorten the time during which a gathered value is held whole. It is then held to the end of its last read in forward, and
    in backward from a second gather on.
    """
    wide, graph = edit.trace.storages[value.storage], call.graph
    rest = wide.bytes - int(part * wide.bytes)
    maker = graph.ops[value.producer]
    last = max((op.tick for op in graph.ops if value.id in op.reads), default=maker.tick)
    slots = [slot for slot in graph.slots if slot.value == value.id and slot.is_managed]
    edit.add(rest, Category.TEMPORARY, f"{wide.label}, gathered", wide.born, last + 1)
    first, end = min(slot.unpacked for slot in slots), max(slot.released for slot in slots)
    if 0 <= first < edit.last_tick:
        again = edit.op(first, call.name, maker.cost_key, edit.trace.specs[maker.cost_key], region=call.index)
        edit.add(rest, Category.TEMPORARY, f"{wide.label}, gathered again", again, max(end, first + 1))


def _with_hidden_collectives(trace: Trace) -> Trace:
    """Return the step with tensor-parallel gathers and scatters overlapped with the products up to the next collective.

    Inside blocks, such a collective is divided into pieces, and products run meanwhile.

    Source: Megatron-Core's ``tp_comm_overlap`` (Transformer Engine's userbuffers); torch's asynchronous tensor parallelism
    does the same.
    """
    specs: dict[str, OpSpec] = {}
    keys: dict[int, str] = {}
    gather, products, place = -1, list[str](), (-1, Phase.FORWARD)

    def hide(tick: int) -> None:
        if tick >= 0 and products:
            alone = trace.ops[tick].cost_key
            keys[tick] = f"{alone}|{'|'.join(products)}"
            specs[keys[tick]] = replace(trace.specs[alone], beside=tuple(products))

    for tick, op in enumerate(trace.ops):
        spec = trace.specs[op.cost_key]
        if (op.region, op.phase) != place:
            hide(gather)
            gather, products, place = -1, [], (op.region, op.phase)
        if op.region >= 0 and spec.group == "tp":
            hide(gather)
            if spec.name.endswith("reduce_scatter"):
                hide(tick)
            gather, products = tick if _is_gather(trace, op.cost_key) else -1, []
        elif op.region >= 0 and spec.product is not None:
            products.append(op.cost_key)
    return _with_cost_keys(trace, keys, specs)


def _in_tf32(spec: OpSpec) -> OpSpec:
    return (
        replace(spec, dtype="tf32")
        if spec.dtype == "f32" and is_product(spec.name) and "scaled_dot_product" not in spec.name
        else spec
    )


def _with_fused_loss(trace: Trace, head: HeadAndLoss, name: str) -> Trace:
    """Return the step with a fused loss: logits are held once, and their gradient takes their place.

    One kernel replaces casts, log-softmax and their backwards.
    """
    end = max((trace.storages[s].born for s in head.all_gradients), default=head.loss_tick)
    logits, *others = sorted(head.logit_storages, key=lambda storage: trace.storages[storage].born)
    storages = list(trace.storages)
    storages[logits] = replace(storages[logits], dies=max(storages[logits].dies, end + 1))
    for storage in others:
        storages[storage] = replace(storages[storage], bytes=0)
    key, freed = f"{name}_loss({head.rows}x{head.classes})", "in_fused_loss()"
    least = head.rows * head.classes
    ops = list(trace.ops)
    is_first = True
    for tick in range(head.first_tick + 1, end):
        spec = trace.specs[ops[tick].cost_key]
        is_product = spec.flops >= 2 * least * min(head.features, 2)
        if ops[tick].region < 0 and spec.moved_bytes >= least and not is_product:
            ops[tick] = replace(ops[tick], cost_key=key if is_first else freed)
            is_first = False
    moved_bytes = _PASSES_OF_FUSED_LOSS * head.bytes
    specs = {
        key: OpSpec(name="fused_cross_entropy", flops=0, moved_bytes=moved_bytes, dtype="f32"),
        freed: OpSpec(name="fused_cross_entropy", flops=0, moved_bytes=0, dtype="f32"),
    }
    return replace(trace, storages=tuple(storages), ops=tuple(ops), specs=trace.specs | specs)


def _with_compiled_blocks(trace: Trace) -> Trace:
    """Return the step with every block run as torch.compile runs it: neighbouring ops that are not products become one kernel.

    A tensor that is made and used only within a kernel is never written: its storage gets 0 bytes, and one write and one read
    of it are taken off the bytes that the kernel moves. The FLOPs of the ops do not change. Which tensors of forward are saved
    for backward is left to the strategy (``min-cut``).

    Source: inductor fuses pointwise ops and reductions over neighbouring reads. That all neighbours fuse is an upper bound:
    reductions of different shapes sometimes become separate kernels.
    """
    held = _held_storages(trace)
    born: dict[int, list[int]] = {}
    for storage in trace.storages:
        born.setdefault(storage.born, []).append(storage.id)
    ops, specs, storages = list(trace.ops), dict(trace.specs), list(trace.storages)
    for first, end in _kernels(trace):
        made = (each for tick in range(first, end) for each in born.get(tick, ()))
        inside = [each for each in made if each not in held and storages[each].dies <= end]
        moved = sum(trace.specs[ops[tick].cost_key].moved_bytes for tick in range(first, end))
        kept = max(moved - 2 * sum(storages[each].bytes for each in inside), 0)
        for each in inside:
            storages[each] = replace(storages[each], bytes=0)
        for tick in range(first, end):
            spec = trace.specs[ops[tick].cost_key]
            share = spec.moved_bytes * kept // moved if moved else 0
            key = f"{ops[tick].cost_key}@{share}{'' if tick == first else '+'}"
            specs[key] = replace(spec, name=spec.name if tick == first else FUSED, moved_bytes=share)
            ops[tick] = replace(ops[tick], cost_key=key)
    regions = tuple(
        replace(
            call,
            is_compiled=True,
            graph=replace(
                call.graph,
                ops=tuple(
                    replace(op, cost_key=ops[op.tick].cost_key if op.tick >= 0 else op.cost_key)
                    for op in call.graph.ops
                ),
            ),
        )
        for call in trace.regions
    )
    return replace(trace, ops=tuple(ops), specs=specs, storages=tuple(storages), regions=regions)


def _held_storages(trace: Trace) -> set[int]:
    """Return the ids of storages that stay in memory although ops are fused: what blocks save, return or receive, and the
    gradients of parameters.
    """
    held = {storage.id for storage in trace.storages if storage.category is Category.GRADIENT}
    for call in trace.regions:
        graph = call.graph
        values = {slot.value for slot in graph.slots if slot.is_managed} | set(graph.outputs)
        values |= {value.id for value in graph.values if value.producer < 0}
        held |= {graph.values[value].storage for value in values}
    return held


def _kernels(trace: Trace) -> Iterator[tuple[int, int]]:
    """Find runs of neighbouring ops that become one kernel. Yield for each run two ticks (positions of ops): the tick of the
    first op, and the tick after the last op.

    The ops of a kernel are in one block and phase. A kernel of a single op is not yielded.
    """
    first = -1
    for tick in range(len(trace.ops) + 1):
        op = trace.ops[tick] if tick < len(trace.ops) else None
        before = trace.ops[first] if first >= 0 else None
        if before is not None and (
            op is None or (op.region, op.phase) != (before.region, before.phase) or not _is_fusible(trace, tick)
        ):
            if tick - first > 1:
                yield first, tick
            first = -1
        if first < 0 and op is not None and op.region >= 0 and _is_fusible(trace, tick):
            first = tick


def _is_fusible(trace: Trace, tick: int) -> bool:
    op = trace.ops[tick]
    spec = trace.specs[op.cost_key]
    return not spec.group and not is_product(op.name) and not _ALONE.search(op.name) and "." not in op.name
