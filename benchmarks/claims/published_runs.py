"""Published training runs with their layouts: step time and MFU, beside what an estimate says of them.

None of the device's figures is fitted to these runs. What the comparison leaves open is the error that estimates carry
(``estimator/estimate_job.py``).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.claims.claim import Claim, Figure
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.job import Precision
from plimsoll.estimator.estimate import estimate

_KORTHIKANTI = "Korthikanti et al. 2022 (arXiv 2205.05198), tables 3 and 5 (A100-80GB)"
_NARAYANAN = "Narayanan et al. 2021 (arXiv 2104.04473), table 1 (A100-80GB, full recomputation)"
_LLAMA_3 = "Grattafiori et al. 2024 (arXiv 2407.21783), table 4 (H100)"
_A100_FLOPS_PER_SECOND = 312e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """Sizes of a GPT as these papers give them."""

    hidden: int
    heads: int
    layers: int
    sequence: int = 2048
    vocabulary: int = 51200
    attention: str = "eager"
    dropout: float = 0.1
    tied: bool = True

    def model_flops(self, samples: int) -> float:
        """Of forward and backward: Korthikanti et al. 2022, equation 7."""
        s, h, layers, v = self.sequence, self.hidden, self.layers, self.vocabulary
        return 72.0 * samples * layers * s * h * h * (1 + s / (6 * h) + v / (12 * h * layers))

    def write_config(self, folder: Path) -> Path:
        """As a transformers configuration: GPT-2 with GELU as one kernel."""
        fields = {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": self.hidden,
            "n_head": self.heads,
            "n_layer": self.layers,
            "n_positions": self.sequence,
            "vocab_size": self.vocabulary,
            "activation_function": "gelu_pytorch_tanh",
            "attn_implementation": self.attention,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), self.dropout),
            "tie_word_embeddings": self.tied,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        place = folder / f"gpt-{self.hidden}-{self.layers}.json"
        place.write_text(json.dumps(fields), encoding="utf-8")
        return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run. ``step_seconds`` follows from the published figure where it is a throughput."""

    name: str
    model: Gpt | str
    device: str
    layout: str
    strategy: str
    samples: int
    step_seconds: float
    micro_batch: int = 1
    sequence: int = 2048
    source: str
    is_other_reading: bool = False

    def estimate(self) -> Estimate:
        """What Plimsoll says of it."""
        return _estimated(self.model, self.micro_batch, self.device, self.sequence, self.layout, self.strategy)


@cache
def _estimated(model: Gpt | str, batch: int, device: str, sequence: int, layout: str, strategy: str) -> Estimate:
    with tempfile.TemporaryDirectory() as folder:
        target = model if isinstance(model, str) else str(model.write_config(Path(folder)))
        return estimate(
            target,
            batch,
            device=device,
            sequence=sequence,
            precision=Precision.BF16,
            optimizer="adamw",
            has_master_weights=True,
            layout=layout,
            strategy=strategy,
        )


def _korthikanti() -> tuple[Run, ...]:
    rows = (
        ("22B", Gpt(hidden=6144, heads=64, layers=48), 4, 4, "tp=8", "", 1.42, 1.10),
        ("175B", Gpt(hidden=12288, heads=96, layers=96), 1, 64, "tp=8", "pp=8,schedule=interleaved,virtual=3", 18.13, 13.75),
        ("530B", Gpt(hidden=20480, heads=128, layers=105), 1, 280, "tp=8", "pp=35,schedule=interleaved,virtual=3", 49.05,
         37.83),
        ("1T", Gpt(hidden=25600, heads=160, layers=128), 1, 512, "tp=8", "pp=64", 94.42, 71.49),
    )  # fmt: skip
    found = []
    for name, model, micro_batch, samples, tensor, pipeline, full_seconds, selective_seconds in rows:
        micro_batches = f"micro-batches={samples // micro_batch}" if samples > micro_batch else ""
        for what, strategy, sequence_parallel, seconds in (
            ("full", "full", "", full_seconds),
            ("selective and sequence parallelism", "selective:core", "sp", selective_seconds),
        ):
            layout = ",".join(part for part in (tensor, sequence_parallel, pipeline, micro_batches) if part)
            found.append(
                Run(
                    name=f"{name}, {what}",
                    model=model,
                    device="A100-80GB",
                    layout=layout,
                    strategy=strategy,
                    samples=samples,
                    step_seconds=seconds,
                    micro_batch=micro_batch,
                    source=_KORTHIKANTI,
                )
            )
    return tuple(found)


def _narayanan() -> tuple[Run, ...]:
    rows = (
        ("1.7B", Gpt(hidden=2304, heads=24, layers=24), 1, 1, 32, 512, 137),
        ("7.5B", Gpt(hidden=4096, heads=32, layers=36), 4, 1, 128, 512, 142),
        ("39.1B", Gpt(hidden=8192, heads=64, layers=48), 8, 2, 512, 1536, 138),
        ("145.6B", Gpt(hidden=12288, heads=96, layers=80), 8, 8, 1536, 2304, 148),
        ("529.6B", Gpt(hidden=20480, heads=128, layers=105), 8, 35, 2520, 2520, 163),
    )
    found = []
    for name, model, tp, pp, devices, samples, teraflops in rows:
        dp = devices // (tp * pp)
        parts = [f"{key}={value}" for key, value in (("dp", dp), ("tp", tp), ("pp", pp)) if value > 1]
        micro_batches = samples // dp
        # Their throughput counts the recomputed forward: 96 instead of 72 in the formula (their equation 3).
        executed = model.model_flops(samples) * 96 / 72
        found.append(
            Run(
                name=name,
                model=model,
                device="A100-80GB",
                layout=",".join([*parts, f"micro-batches={micro_batches}"]),
                strategy="full",
                samples=samples,
                step_seconds=executed / (devices * teraflops * 1e12),
                source=_NARAYANAN,
            )
        )
    return tuple(found)


def _llama_3() -> tuple[Run, ...]:
    """Of 16 million tokens a step; the data-parallel ranks shard the optimizer state (the paper: FSDP without resharding)."""
    schedules = (
        ("1F1B", ""),
        ("interleaved, 4 stages a rank", "schedule=interleaved,virtual=4,"),
    )
    sizes = (("8,192 GPUs", 64, 32, 430, 8192), ("16,384 GPUs", 128, 16, 400, 16384))
    rows = [
        (
            f"{name}, {schedule}",
            f"dp={dp},tp=8,sp,pp=16,zero=1,{text}micro-batches={count}",
            8192,
            2048,
            teraflops,
            devices,
        )
        for name, dp, count, teraflops, devices in sizes
        for schedule, text in schedules
    ]
    found = []
    for name, layout, sequence, samples, teraflops, devices in rows:
        model = Gpt(hidden=16384, heads=128, layers=126, sequence=sequence, vocabulary=128256)
        found.append(
            Run(
                name=name,
                model="llama-3-405b",
                device="H100-SXM",
                layout=layout,
                strategy="none",
                samples=samples,
                sequence=sequence,
                step_seconds=_llama_flops(model, samples) / (devices * teraflops * 1e12),
                source=_LLAMA_3,
                is_other_reading="interleaved" not in layout,
            )
        )
    return tuple(found)


_LLAMA_405B_PARAMETERS = 405.85e9


def _llama_flops(model: Gpt, samples: int) -> float:
    """Six per parameter and token, and the two products of attention over half of the scores (a causal mask)."""
    attention = 6.0 * model.layers * model.hidden * model.sequence
    return samples * model.sequence * (6.0 * _LLAMA_405B_PARAMETERS + attention)


def _seconds(runs: Iterable[Run]) -> list[Figure]:
    return [
        Figure(
            what=f"{run.name} ({run.layout})",
            published=run.step_seconds,
            ours=run.estimate().throughput.step_seconds,
            unit="{:.2f} s",
            is_other_reading=run.is_other_reading,
        )
        for run in runs
    ]


def _korthikanti_figures() -> list[Figure]:
    return _seconds(_korthikanti())


def _gains() -> list[Figure]:
    """How much faster the selective run is than the full one."""
    published = {"22B": 0.290, "175B": 0.318, "530B": 0.297, "1T": 0.321}
    runs = _korthikanti()
    found = []
    for full, selective in zip(runs[::2], runs[1::2], strict=True):
        name = full.name.partition(",")[0]
        ours = full.estimate().throughput.step_seconds / selective.estimate().throughput.step_seconds
        found.append(Figure(what=name, published=1 + published[name], ours=ours, unit="{:.2f} times as fast"))
    return found


def _utilisation() -> list[Figure]:
    """MFU by the paper's formula of model arithmetic, so that only seconds differ."""
    published = {"22B": 0.415, "175B": 0.514, "530B": 0.560, "1T": 0.563}
    found = []
    for run in _korthikanti()[1::2]:
        assert isinstance(run.model, Gpt)
        name = run.name.partition(",")[0]
        found_estimate = run.estimate()
        devices = found_estimate.layout.ranks
        flops = run.model.model_flops(run.samples)
        mfu = flops / (found_estimate.throughput.step_seconds * devices * _A100_FLOPS_PER_SECOND)
        found.append(Figure(what=name, published=published[name], ours=mfu, unit="{:.1%}"))
    return found


CLAIMS = (
    Claim(
        name="selective against full, 22B to 1T",
        statement=(
            "Step times of four models with full recomputation, and with selective recomputation and sequence parallelism"
        ),
        source=_KORTHIKANTI,
        reading=(
            "GPT-2 blocks with separate attention kernels, the paper's layouts, AdamW with master weights, no data "
            "parallelism"
        ),
        figures=_korthikanti_figures,
        why="element-wise ops are not fused, and collectives are not hidden behind products, as Megatron-LM does both",
    ),
    Claim(
        name="gain of selective recomputation",
        statement="Selective recomputation with sequence parallelism is 29 to 32% faster than full recomputation",
        source=_KORTHIKANTI,
        reading="the same step times",
        figures=_gains,
    ),
    Claim(
        name="MFU of 22B to 1T",
        statement="Model FLOPs utilisation of 41.5%, 51.4%, 56.0% and 56.3%",
        source=_KORTHIKANTI,
        reading="the paper's own formula of model arithmetic over our step times",
        figures=_utilisation,
    ),
    Claim(
        name="weak scaling",
        statement="137 to 163 teraFLOP/s per GPU from 1.7B on 32 to 1T on 3,072 GPUs",
        source=_NARAYANAN,
        reading=(
            "every second row of the table as step times; micro-batches of one sample and plain 1F1B, neither of which the "
            "table "
            "gives; their count of arithmetic includes the forward that is run again"
        ),
        figures=lambda: _seconds(_narayanan()),
        why="where the micro-batch was larger or the schedule interleaved, the published run is faster than this reading of it",
    ),
    Claim(
        name="Llama-3 405B",
        statement="430 teraFLOP/s per GPU (43% MFU) on 8,192 H100, 400 (41%) on 16,384",
        source=_LLAMA_3,
        reading=(
            "llama-3-405b of the catalogue, nothing recomputed, the optimizer state sharded; the paper's schedule is "
            "interleaved "
            "with a number of stages a rank that it does not give: four are assumed, and plain 1F1B is another reading"
        ),
        figures=lambda: _seconds(_llama_3()),
        why="the first and last rank of the paper have a layer less, and its schedule sends while it computes",
    ),
)
