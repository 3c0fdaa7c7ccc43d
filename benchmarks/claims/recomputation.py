"""What is said of recomputation: how much memory it saves, for how much time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from benchmarks.claims.claim import Claim, Figure, Range
from benchmarks.claims.traces import A100, Sizes, costs_of, held, layer, traced
from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.trace import Phase
from plimsoll.planning.simulate import Simulation

_NOTES = "the project's founding notes, which give no reference"
_STATE_BYTES_PER_PARAMETER = 16
"""Mixed precision with Adam: 2 for the weight, 2 for its gradient, 12 for master weight and both moments."""

LLAMA_7B = Sizes(
    hidden=4096, heads=32, layers=32, sequence=4096, vocabulary=32000, intermediate=11008, attention="sdpa"
)
LLAMA_13B = replace(LLAMA_7B, hidden=5120, heads=40, layers=40, intermediate=13824)
_NARROW = Sizes(hidden=64, heads=4, layers=4, sequence=64, batch=2, vocabulary=64, attention="sdpa")


def parameters(sizes: Sizes) -> int:
    """Of a Llama of these sizes."""
    per_layer = 4 * sizes.hidden**2 + 3 * sizes.hidden * sizes.intermediate + 2 * sizes.hidden
    return sizes.layers * per_layer + 2 * sizes.vocabulary * sizes.hidden + sizes.hidden


@cache
def overhead(sizes: Sizes, strategy: str) -> float:
    """Seconds that a strategy adds to a step, as a share of the plain one."""
    return held(sizes, strategy).seconds / held(sizes).seconds - 1


def saved(sizes: Sizes, strategy: str) -> float:
    """Share of the activations between forward and backward that a strategy saves."""
    return 1 - held(sizes, strategy).bytes / held(sizes).bytes


def _saved_of_all(sizes: Sizes, strategy: str) -> float:
    """The same of model state and activations together."""
    state = _STATE_BYTES_PER_PARAMETER * parameters(sizes)
    return 1 - (state + held(sizes, strategy).bytes) / (state + held(sizes).bytes)


def _share(what: str, published: float | Range, ours: float, *, is_other_reading: bool = False) -> Figure:
    return Figure(what=what, published=published, ours=ours, unit="{:.0%}", is_other_reading=is_other_reading)


def _every_fourth() -> list[Figure]:
    sizes = replace(LLAMA_7B, layers=8)
    batched = replace(LLAMA_7B, batch=8)
    return [
        _share("every block, time", 0.34, overhead(sizes, "full")),
        _share("every 4 blocks, time", 0.19, overhead(sizes, "every:4")),
        _share("one block of four, time", 0.19, overhead(sizes, "one-of:4"), is_other_reading=True),
        _share("one block of two, time", 0.19, overhead(sizes, "one-of:2"), is_other_reading=True),
        _share("every block, memory of activations", 0.50, saved(LLAMA_7B, "full")),
        _share("every 4 blocks, memory of activations", 0.42, saved(LLAMA_7B, "every:4")),
        _share("one block of two, memory of activations", 0.42, saved(LLAMA_7B, "one-of:2"), is_other_reading=True),
        _share("every block, all memory at batch 8", 0.50, _saved_of_all(batched, "full"), is_other_reading=True),
        _share("every 4 blocks, all memory at batch 8", 0.42, _saved_of_all(batched, "every:4"), is_other_reading=True),
        _share("one block of two, all at batch 8", 0.42, _saved_of_all(batched, "one-of:2"), is_other_reading=True),
    ]


def _sweet_spot() -> list[Figure]:
    time, memory = Range(0.10, 0.20), Range(0.40, 0.60)
    sizes = replace(LLAMA_7B, layers=8)
    found = []
    for size in (2, 4):
        found += [
            _share(f"groups of {size}, time", time, overhead(sizes, f"every:{size}")),
            _share(f"groups of {size}, memory", memory, saved(sizes, f"every:{size}")),
            _share(f"one block of {size}, time", time, overhead(sizes, f"one-of:{size}"), is_other_reading=True),
            _share(f"one block of {size}, memory", memory, saved(sizes, f"one-of:{size}"), is_other_reading=True),
        ]
    return found


def _passing_peak(layers: int, strategy: str) -> int:
    """The most that is alive beyond what lasts, batch and gradients: boundaries and one group's values."""
    simulation = held(replace(_NARROW, layers=layers), strategy).simulation
    return _peak_without_gradients(simulation)


def _peak_without_gradients(simulation: Simulation) -> int:
    index = simulation.index
    curve = simulation.curve.copy()
    for storage in index.trace.storages:
        if storage.category.value in ("gradient", "parameter", "buffer", "input"):
            start, stop = index.life(storage.id)
            curve[start:stop] -= storage.bytes
    return int(curve.max())


def _square_root() -> list[Figure]:
    small, large = 9, 36
    few, many = (_passing_peak(count, "sqrt") for count in (small, large))
    plain = _passing_peak(large, "none") / _passing_peak(small, "none")
    step = traced(replace(_NARROW, layers=large))
    costs = costs_of(step, Layout())
    block = [op for op in step.ops if op.phase is Phase.FORWARD and op.region >= 0]
    forward = sum(costs.ops[op.cost_key].seconds for op in block)
    simulation = held(replace(_NARROW, layers=large), "sqrt").simulation
    again = sum(
        costs.ops[simulation.index.views[region].graph.ops[op].cost_key].seconds for region, op in simulation.replayed
    )
    return [
        Figure(what="four times the layers, memory", published=2.0, ours=many / few, unit="{:.2f} times"),
        Figure(
            what="the same without recomputation",
            published=4.0,
            ours=plain,
            unit="{:.2f} times",
            is_other_reading=True,
        ),
        Figure(what="forwards of the blocks run again", published=1.0, ours=again / forward, unit="{:.2f}"),
    ]


def _selective_13b() -> list[Figure]:
    found = []
    for sequence in (512, 2048, 4096):
        sizes = replace(LLAMA_13B, sequence=sequence, attention="eager", layers=4)
        plain, core = (layer(sizes, strategy) for strategy in ("none", "selective:core"))
        found += [
            _share(
                f"sequence {sequence}, memory of a layer",
                1 - 47 / 72,
                1 - core.bytes / plain.bytes,
                is_other_reading=sequence != 4096,
            ),
            _share(
                f"sequence {sequence}, time, full",
                0.34,
                layer(sizes, "full").seconds / plain.seconds - 1,
                is_other_reading=sequence != 4096,
            ),
            _share(
                f"sequence {sequence}, time, selective",
                0.14,
                core.seconds / plain.seconds - 1,
                is_other_reading=sequence != 4096,
            ),
        ]
    return found


def _theory() -> list[Figure]:
    sizes = replace(LLAMA_7B, layers=4)
    step = traced(sizes)
    flops = sum(step.specs[op.cost_key].flops for op in step.ops)
    simulation = held(sizes, "full").simulation
    again = sum(
        step.specs[simulation.index.views[region].graph.ops[op].cost_key].flops for region, op in simulation.replayed
    )
    fused = layer(sizes)
    eager = replace(sizes, attention="eager")
    return [
        _share("arithmetic run again", Range(0.20, 0.33), again / flops),
        _share("seconds, full", Range(0.34, 0.38), layer(sizes, "full").seconds / fused.seconds - 1),
        _share(
            "seconds, selective (attention's core, separate kernels)",
            Range(0.10, 0.15),
            layer(eager, "selective:core").seconds / layer(eager).seconds - 1,
        ),
        _share(
            "seconds, selective (attention modules, fused kernels)",
            Range(0.10, 0.15),
            layer(sizes, "selective:attention").seconds / fused.seconds - 1,
            is_other_reading=True,
        ),
    ]


CLAIMS = (
    Claim(
        name="every fourth block",
        statement="Checkpoints every 4 blocks save 42% of memory for 19% of time, every block 50% for 34% (7B, A100)",
        source=_NOTES,
        reading=(
            f"Llama-2-7B, bf16, micro-batch of 1 × 4096, roofline of {A100}: a checkpoint every 4 blocks recomputes groups "
            "of four "
            "(`every:4`). Which memory is meant is not said: activations between forward and backward, and as another "
            "reading model state "
            "(16 bytes per parameter) and activations together at batch 8"
        ),
        figures=_every_fourth,
        why=(
            "groups do not change what is computed again: everything, once. Only leaving blocks alone does, as when one "
            "block of two is "
            "recomputed; of the activations recomputation saves far more than half, of all memory it depends on the batch. "
            "Blocks whose input autograd does not save (bf16 under RMS norm in float32) hold it each, so that "
            "`every:4` "
            "holds as much as `full`"
        ),
    ),
    Claim(
        name="two to four blocks",
        statement="Groups of 2 to 4 blocks are the sweet spot: 40-60% of memory for 10-20% of time",
        source=_NOTES,
        reading=(
            "the same model with 8 blocks, `every:2` and `every:4`; as another reading one block of two or four is "
            f"recomputed, {A100}"
        ),
        figures=_sweet_spot,
        why="as above: the time of recomputation does not fall with the size of groups; one block of two is what comes near",
    ),
    Claim(
        name="square root",
        statement="Training n layers takes memory of the order √n for one more forward",
        source="Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, section 4.3",
        reading="peak without model state and gradients of 9 and 36 narrow GPT blocks under `sqrt`, traced",
        figures=_square_root,
        why="embedding, head and loss stay as they are, and the last group's values need not be made again twice",
    ),
    Claim(
        name="13B selective",
        statement="At 13B selective recomputation takes memory from 72 to 47 GB and its overhead from 34% to 14%",
        source=_NOTES,
        reading=(
            "neither batch, sequence, layout nor the memory that is meant are said. A layer of Llama-2-13B with separate "
            "attention kernels at "
            "the model's own sequence of 4096, `selective:core` against `full`; shorter sequences as other readings"
        ),
        figures=_selective_13b,
        why=(
            "what attention's core holds grows with the sequence: 35% of a layer at about 500 tokens, most of it at 4096; "
            "72 GB of "
            "everything with 47 GB left would need batch and layout to be known"
        ),
    ),
    Claim(
        name="theory and practice",
        statement="Full recomputation costs 20-33% in theory and 34-38% as observed; selective 10-15%",
        source=_NOTES,
        reading=(
            "Llama-2-7B, 1 × 4096: share of arithmetic that runs again in a model of 4 blocks; seconds of a layer by the "
            f"roofline of {A100}"
        ),
        figures=_theory,
        why=(
            "a roofline counts no gaps between launches, which make the observed overhead larger; the core of separate "
            "attention kernels is a larger part of a layer at sequence 4096 than at 2048"
        ),
    ),
)
