"""What is said of the memory of whole models: activations at given sizes, and model state under ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from benchmarks.claims.claim import Claim, Figure, Range
from benchmarks.claims.recomputation import LLAMA_7B
from benchmarks.claims.traces import A100, Sizes, held, layer, traced
from plimsoll.artifacts.costs import Costs, CostSource
from plimsoll.artifacts.job import Layout, Precision
from plimsoll.artifacts.trace import Category
from plimsoll.estimator.parallelism.stages import split_stages
from plimsoll.estimator.rank_estimates import StageOfRank
from plimsoll.estimator.setting import Setting
from plimsoll.estimator.targets.tracing import TraceRequest, trace_target
from plimsoll.estimator.trace_cache import AnswerCache, TracedTarget
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_none

_NOTES = "the project's founding notes, which give no reference"
_GB = "{:.3g} GB"
_GIGA = 1e9
_MIB = 2**20
_RANKS = 64
_ZERO_PARAMETERS = 7.5e9
_GATHERED = "unsharded parameter:"
"""What FSDP2 gathers of the root for the length of a step; the paper leaves gathered copies out."""
_STATE = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)


def _whole_bytes(sizes: Sizes, strategy: str = "none") -> int:
    """Between forward and backward of all layers: two traced, the others equal to the difference of three and two."""
    few = replace(sizes, layers=2)
    return held(few, strategy).bytes + (sizes.layers - 2) * layer(sizes, strategy).bytes


def _seven_billion() -> list[Figure]:
    sizes = replace(LLAMA_7B, batch=8)
    claimed = Range(40.0, 50.0)

    def figure(what: str, bytes_: int, *, is_other_reading: bool = True) -> Figure:
        return Figure(what=what, published=claimed, ours=bytes_ / _GIGA, unit=_GB, is_other_reading=is_other_reading)

    return [
        figure("fused attention", _whole_bytes(sizes), is_other_reading=False),
        figure("attention of separate kernels", _whole_bytes(replace(sizes, attention="eager"))),
        figure("fused attention, every block recomputed", _whole_bytes(sizes, "full")),
        figure("fused attention, batch 1", _whole_bytes(replace(sizes, batch=1))),
        figure("fused attention, batch 2", _whole_bytes(replace(sizes, batch=2))),
    ]


def _bert_large() -> list[Figure]:
    found = []
    for precision in (Precision.BF16_MIXED, Precision.BF16, Precision.FP32):
        request = TraceRequest(target="bert-large", device_name=A100, precision=precision)
        traced = trace_target(request, cache=AnswerCache(TracedTarget))
        index = StepIndex(traced.trace, Costs(device=A100, source=CostSource.ROOFLINE, ops={}))
        batch = sum(s.bytes for s in traced.trace.storages if s.category is Category.INPUT)
        kept = run_choices(index, choose_none(index, ""))
        activations = int(kept.curve[index.handover]) - index.lasting_bytes - batch
        is_first = precision is Precision.BF16_MIXED
        found.append(
            Figure(
                what=f"activations, {precision.value}",
                published=8.0,
                ours=activations / _GIGA,
                unit=_GB,
                is_other_reading=not is_first,
            )
        )
        if is_first:
            weights = sum(parameter.bytes for parameter in traced.trace.parameters)
            found.append(Figure(what="parameters, float32", published=1.3, ours=weights / _GIGA, unit=_GB))
    return found


def _layer_output() -> list[Figure]:
    sizes = Sizes(hidden=4096, heads=32, layers=2, vocabulary=32000, attention="sdpa")

    def figure(what: str, bytes_: int, *, is_other_reading: bool = True) -> Figure:
        return Figure(
            what=what, published=64.0, ours=bytes_ / _MIB, unit="{:.0f} MiB", is_other_reading=is_other_reading
        )

    return [
        figure("held by a GPT layer, batch 1", layer(sizes).bytes, is_other_reading=False),
        figure("held by a Llama layer, batch 1", layer(replace(sizes, intermediate=11008)).bytes),
        figure("its output alone, batch 1", 2 * sizes.sbh),
        figure("its output alone, batch 4", 2 * sizes.sbh * 4),
    ]


def zero_bytes_per_parameter() -> Iterator[tuple[int, float]]:
    """Bytes of model state per parameter on one of 64 ranks, for every stage of ZeRO: two layers of the model's sizes."""
    step = traced(Sizes(hidden=4096, heads=32, layers=2, sequence=128))
    parameters = sum(prod(parameter.shape) for parameter in step.parameters)
    for stage in range(4):
        # Two micro-batches: gradients are then held from step to step, as the paper counts them.
        layout = Layout(dp=_RANKS, zero=stage, micro_batches=2)
        setting = Setting(
            device=find_device(A100),
            layout=layout,
            optimizer="adamw",
            has_master_weights=True,
            strategy="none",
            budget_bytes=None,
        )
        rank = StageOfRank(setting, split_stages(step, layout)[0], 1)
        lasting = [s for s in rank.index.lasting if s.category in _STATE and not s.label.startswith(_GATHERED)]
        yield stage, sum(storage.bytes for storage in lasting) / parameters


def _zero() -> list[Figure]:
    published = (120.0, 31.4, 16.6, 1.9)
    names = ("no ZeRO", "optimizer state", "and gradients", "and parameters")
    return [
        Figure(
            what=names[stage],
            published=published[stage],
            ours=per_parameter * _ZERO_PARAMETERS / _GIGA,
            unit=_GB,
        )
        for stage, per_parameter in zero_bytes_per_parameter()
    ]


CLAIMS = (
    Claim(
        name="7B at batch 8",
        statement="A 7B transformer at batch 8, sequence 4096 holds 40-50 GB of activations in mixed precision",
        source=_NOTES,
        reading="Llama-2-7B, bf16, GPU kernels, everything that is alive between forward and backward, head and loss among it",
        figures=_seven_billion,
        why="32 layers of about 0.7 GB per sample; 40-50 GB is what two samples hold",
    ),
    Claim(
        name="BERT-Large",
        statement="BERT-Large at batch 32 × 512 holds 8 GB of activations against 1.3 GB of parameters",
        source=_NOTES,
        reading="BertForMaskedLM, GPU kernels with fused attention, bf16 autocast; pure bf16 and float32 as other readings",
        figures=_bert_large,
        why="the parameters agree; activations are several times the claim in every precision, at this batch and sequence",
    ),
    Claim(
        name="64 MB per layer",
        statement="A layer at sequence 2048, hidden size 4096 takes about 64 MB in FP16",
        source=_NOTES,
        reading="what one layer holds for backward at batch 1 with fused attention (the claim does not say which batch)",
        figures=_layer_output,
        why="the claim counts outputs only: 16 MiB a sample, 64 for four; a layer holds 34 bytes per element and not 2",
    ),
    Claim(
        name="ZeRO",
        statement="Model state of 7.5B parameters on 64 ranks: 120 GB, under ZeRO 31.4, 16.6 and 1.9 GB",
        source="Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), figure 1 (K = 12)",
        reading=(
            "parameters, gradients, Adam's state and master weights of an estimate with dp=64 and zero=0 to 3: bytes per "
            "parameter of two "
            "layers with the hidden size and vocabulary of Megatron's 7.5B model, times 7.5 billion"
        ),
        figures=_zero,
        is_cheap=True,
    ),
)
