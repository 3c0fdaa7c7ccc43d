"""Korthikanti et al. 2022: bytes that one layer holds for backward, and what recomputation adds to its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.claims.claim import Claim, Figure
from benchmarks.claims.traces import KORTHIKANTI, Sizes, layer
from plimsoll.artifacts.job import Layout

_PAPER = "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198)"
_TP = 8
_TENSOR = Layout(tp=_TP)
_SEQUENCE = Layout(tp=_TP, sequence_parallel=True)
_SBH = "{:.2f} sbh"
_CHEAP = ("175B",)

Formula = Callable[[Sizes], float]


def _scores(sizes: Sizes) -> float:
    """5as/h."""
    return 5 * sizes.heads * sizes.sequence / sizes.hidden


def _figures(
    formula: Formula, strategy: str, layout: Layout, *, names: tuple[str, ...] = _CHEAP, attention: str = "eager"
) -> Iterator[Figure]:
    for name in names:
        sizes = replace(KORTHIKANTI[name], attention=attention)
        yield Figure(
            what=name,
            published=formula(sizes),
            ours=layer(sizes, strategy, layout).bytes / sizes.sbh,
            unit=_SBH,
        )


def _whole() -> list[Figure]:
    return list(_figures(lambda z: 34 + _scores(z), "none", Layout(), names=tuple(KORTHIKANTI)))


def _tensor_parallel() -> list[Figure]:
    return list(_figures(lambda z: 10 + 24 / _TP + _scores(z) / _TP, "none", _TENSOR))


def _sequence_parallel() -> list[Figure]:
    found = list(_figures(lambda z: (34 + _scores(z)) / _TP, "regather+none", _SEQUENCE))
    other = _figures(lambda z: (34 + _scores(z)) / _TP, "none", _SEQUENCE)
    return [*found, *(replace(f, what=f"{f.what}, gathered inputs held", is_other_reading=True) for f in other)]


def _selective() -> list[Figure]:
    one = [replace(f, what=f"{f.what}, one rank") for f in _figures(lambda _: 34, "selective:core", Layout())]
    eight = [
        replace(f, what=f"{f.what}, t = {_TP} with sequence parallelism")
        for f in _figures(lambda _: 34 / _TP, "regather+selective:core", _SEQUENCE)
    ]
    fused = [
        replace(f, what=f"{f.what}, one rank, fused attention, nothing recomputed", is_other_reading=True)
        for f in _figures(lambda _: 34, "none", Layout(), attention="sdpa")
    ]
    return [*one, *eight, *fused]


def _full() -> list[Figure]:
    found = list(_figures(lambda _: 2, "full", Layout(), attention="sdpa"))
    other = _figures(lambda _: 2, "full", Layout())
    return [*found, *(replace(f, what=f"{f.what}, eager attention with a mask", is_other_reading=True) for f in other)]


def _shares() -> list[Figure]:
    published = {"175B": 0.70, "530B": 0.65}
    found = []
    for name, share in published.items():
        sizes = KORTHIKANTI[name]
        whole, core = (layer(sizes, strategy).bytes for strategy in ("none", "selective:core"))
        found.append(Figure(what=name, published=share, ours=1 - core / whole, unit="{:.1%}"))
    return found


def _fivefold() -> list[Figure]:
    sizes = KORTHIKANTI["175B"]
    tensor = layer(sizes, "none", _TENSOR).bytes
    return [
        Figure(
            what="175B, t = 8",
            published=5.4,
            ours=tensor / layer(sizes, "regather+selective:core", _SEQUENCE).bytes,
            unit="{:.2f} times less",
        ),
        Figure(
            what="175B, t = 8, as torch's sequence parallelism holds it",
            published=5.4,
            ours=tensor / layer(sizes, "selective:core", _SEQUENCE).bytes,
            unit="{:.2f} times less",
            is_other_reading=True,
        ),
    ]


def _layer_seconds() -> list[Figure]:
    sizes = KORTHIKANTI["22B"]
    base = layer(sizes, "none", _TENSOR).seconds
    published = (
        ("nothing recomputed", "none", _TENSOR, 19.6e-3),
        ("sequence parallelism", "none", _SEQUENCE, 19.0e-3),
        ("full recomputation", "full", _TENSOR, 27.2e-3),
        ("selective", "selective:core", _TENSOR, 20.9e-3),
        ("selective and sequence parallelism", "selective:core", _SEQUENCE, 20.3e-3),
    )
    found = []
    for what, strategy, layout, seconds in published:
        ours = layer(sizes, strategy, layout).seconds
        found.append(Figure(what=what, published=seconds * 1e3, ours=ours * 1e3, unit="{:.1f} ms"))
        if strategy != "none":
            overhead = seconds / 19.6e-3 - 1
            found.append(
                Figure(what=f"{what}, overhead", published=1 + overhead, ours=ours / base, unit="{:.2f} times")
            )
    return found


CLAIMS = (
    Claim(
        name="bytes of a layer",
        statement="A transformer layer holds sbh(34 + 5as/h) bytes for backward",
        source=f"{_PAPER}, equation 1",
        reading=(
            "GPT-2's block of transformers with the sizes of table 3, bf16, dropout 0.1, attention of separate kernels; "
            "the difference "
            "between three and two layers, traced with the kernels of a GPU"
        ),
        figures=_whole,
        why="what is left over are the norms' means and deviations in float32, which the paper leaves out",
    ),
    Claim(
        name="tensor parallelism",
        statement="With t ranks of tensor parallelism sbh(10 + 24/t + 5as/(ht))",
        source=f"{_PAPER}, equation 2",
        reading="the same on one of eight ranks",
        figures=_tensor_parallel,
    ),
    Claim(
        name="sequence parallelism",
        statement="With tensor and sequence parallelism sbh/t(34 + 5as/h)",
        source=f"{_PAPER}, equation 4",
        reading=(
            "the same, with the gathered inputs of column-parallel layers let go after forward and gathered again in "
            "backward, as "
            "Megatron-LM does; torch's own sequence parallelism holds them, which is the other reading"
        ),
        figures=_sequence_parallel,
        why=(
            "Megatron-LM holds each rank's part of the norms' outputs; the plan makes those again as well, from the norms' "
            "inputs"
        ),
        is_cheap=True,
    ),
    Claim(
        name="selective recomputation",
        statement="Without what attention makes between its two products a layer holds 34sbh, or 34sbh/t",
        source=f"{_PAPER}, equation 6",
        reading=(
            "strategy `selective:core`; with fused attention, the other reading, the same bytes are never there and "
            "nothing has to be "
            "computed again"
        ),
        figures=_selective,
        why=(
            "a plan makes the norms' outputs, which the paper keeps, again where the gathered inputs are: 0.5 sbh over 8 "
            "ranks"
        ),
    ),
    Claim(
        name="full recomputation",
        statement="With everything recomputed a layer holds 2sbh",
        source=f"{_PAPER}, section 5",
        reading="strategy `full` with fused attention, which needs no mask",
        figures=_full,
        why="the mask of eager attention is one tensor, which all blocks hold",
    ),
    Claim(
        name="share of attention's core",
        statement="Selective recomputation saves 70% of a layer's activations at 175B, 65% at 530B",
        source=f"{_PAPER}, section 5",
        reading="strategy `selective:core` on one rank",
        figures=_shares,
    ),
    Claim(
        name="fivefold",
        statement="Sequence parallelism and selective recomputation together cut activations by a factor of five",
        source=f"{_PAPER}, abstract; (10 + 24/t + 5as/(ht)) / (34/t) is 5.4 at 175B",
        reading="tensor parallelism alone over both, eight ranks",
        figures=_fivefold,
        why="as for selective recomputation; torch's sequence parallelism, the other reading, holds the gathered inputs",
    ),
    Claim(
        name="seconds of a layer",
        statement=(
            "A layer of the 22B model takes 19.6 ms; full recomputation adds 39%, selective 7%, with sequence parallelism 4%"
        ),
        source=f"{_PAPER}, table 4 (8 A100, micro-batch of 4)",
        reading="roofline and link model of A100-80GB, eight ranks, forward and backward of one layer",
        figures=_layer_seconds,
        why=(
            "element-wise ops are kernels of their own here and fused in Megatron-LM, which also hides an all-reduce of "
            "backward behind "
            "the gradient of the weights"
        ),
    ),
)
