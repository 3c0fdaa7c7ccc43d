"""Compares plans that recompute everything with torch's checkpointing, on models whose code reads values of tensors.

    PYTHONPATH=src python -m benchmarks.value_reads
    PYTHONPATH=src python -m benchmarks.value_reads --steps 30 --only routed mixtral

Three twins with the same seeds train in turns on new data in each step: without anything, with
``torch.utils.checkpoint`` around each block (transformers: ``gradient_checkpointing_enable``), and under a plan of strategy
``full``. Peaks are the highest of the last five steps, without parameters. Times are medians of the second half of the
steps, as processor time on one thread. The first step also records.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BigBirdConfig,
    BigBirdForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LongformerConfig,
    LongformerForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import plimsoll
from benchmarks.machine import device_name, page_head, versions
from benchmarks.page import format_table
from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.units import MIB

Batch = Mapping[str, torch.Tensor]
_WIDTH, _ROWS, _BLOCKS = 128, 1024, 8
_VOCABULARY, _TOKENS = 128, 128
_HEAD = (
    "model", "unmanaged MiB", "checkpoint MiB", "plan MiB", "plan / checkpoint", "checkpoint time", "plan time", "first step",
    "recorded", "run again", "warnings", "equal bits",
)  # fmt: skip


class _Block(nn.Module):
    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down, self.gate = nn.Linear(4 * _WIDTH, _WIDTH), nn.Linear(_WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.register_buffer("table", torch.randn(8, _WIDTH))
        self._function = function

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(self, x)


class _Blocks(nn.Module):
    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(function) for _ in range(_BLOCKS))
        self.is_checkpointed = False

    def gradient_checkpointing_enable(self, _: Mapping[str, bool]) -> None:
        self.is_checkpointed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x.square().mean()


def _plain(block: _Block, x: torch.Tensor) -> torch.Tensor:
    return x + block.wide(x)


def _guarded(block: _Block, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    return x + (wide / 10 if wide.abs().max().item() > 1e4 else wide)


def _counted(block: _Block, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    return x + wide / (wide > 0).sum().item() * 1e4


def _branched(block: _Block, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    return x + (wide * F.silu(wide) if x.detach()[0, 0].item() > 0 else wide)


def _six_branches(block: _Block, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    for is_taken, function in zip((x.detach()[0, :6] > 0).tolist(), _FUNCTIONS, strict=True):
        if is_taken:
            wide = wide + 0.1 * function(wide)
    return x + wide


_FUNCTIONS = (torch.sin, torch.tanh, F.gelu, torch.sigmoid, F.silu, torch.cos)


def _looked_up(block: _Block, x: torch.Tensor) -> torch.Tensor:
    return x + block.wide(x + block.table[(x.detach().sum().abs() * 1000).long() % 8])


def _routed(block: _Block, x: torch.Tensor) -> torch.Tensor:
    rows = (x.detach()[:, 0] > 0).nonzero().squeeze(1)
    return x.index_add(0, rows, block.wide(x[rows]))


def _masked(block: _Block, x: torch.Tensor) -> torch.Tensor:
    mask, result = x.detach()[:, 0] > 0, x.clone()
    result[mask] = x[mask] + block.wide(x[mask])
    return result


def _experts(block: _Block, x: torch.Tensor) -> torch.Tensor:
    weights, chosen = block.gate(x).softmax(-1).topk(2, -1)
    result = x + block.wide(x)
    for number, expert in enumerate(block.experts):
        rows, places = torch.where(chosen == number)
        result = result.index_add(0, rows, F.gelu(expert(x[rows])) * weights[rows, places, None])
    return result


def _early_exit(block: _Block, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        wide = block.wide(x)
        x = x + wide
        if float(wide.detach().abs().mean()) < 0.115:
            break
    return x


def _rows(step: int) -> Batch:
    return {"x": torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(step))}


def _words(step: int) -> Batch:
    words = torch.randint(2, _VOCABULARY, (4, _TOKENS), generator=torch.Generator().manual_seed(step))
    return {"input_ids": words, "labels": words}


def _marked_words(step: int) -> Batch:
    words = _words(step)
    marks = torch.arange(_TOKENS)[None] < torch.tensor([1 + step % 5, 3, 2, 4])[:, None]
    return {**words, "attention_mask": torch.ones_like(words["input_ids"]), "global_attention_mask": marks.long()}


_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": _TOKENS + 2,
}


def _eager(kind: Any, config: Any) -> nn.Module:
    config._experts_implementation = "eager"  # a loop over the experts that got rows
    config.use_cache = False
    model: nn.Module = kind(config)
    return model


_KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    **{
        function.__name__.strip("_").replace("_", " "): (lambda function=function: _Blocks(function), _rows)
        for function in (
            *(_plain, _guarded, _counted, _branched, _six_branches),
            *(_looked_up, _routed, _masked, _experts, _early_exit),
        )
    },
    "Mixtral": (
        lambda: _eager(MixtralForCausalLM, MixtralConfig(**_SIZES, num_key_value_heads=2, num_local_experts=6)),
        _words,
    ),
    "Qwen3-MoE": (
        lambda: _eager(
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(
                **_SIZES, num_key_value_heads=2, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2
            ),
        ),
        _words,
    ),
    "OLMoE": (
        lambda: _eager(OlmoeForCausalLM, OlmoeConfig(**_SIZES, num_experts=8, num_experts_per_tok=2)),
        _words,
    ),
    "DeepSeek-V3": (
        lambda: _eager(
            DeepseekV3ForCausalLM,
            DeepseekV3Config(
                **_SIZES,
                num_key_value_heads=4,
                moe_intermediate_size=64,
                n_routed_experts=8,
                num_experts_per_tok=2,
                n_group=2,
                topk_group=1,
                first_k_dense_replace=1,
                kv_lora_rank=32,
                q_lora_rank=32,
                qk_rope_head_dim=16,
                qk_nope_head_dim=32,
                v_head_dim=32,
            ),
        ),
        _words,
    ),
    "GPT-OSS": (
        lambda: _eager(
            GptOssForCausalLM,
            GptOssConfig(**_SIZES, num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
        ),
        _words,
    ),
    "Longformer": (
        lambda: LongformerForMaskedLM(LongformerConfig(**_SIZES, attention_window=16, pad_token_id=1)),
        _marked_words,
    ),
    "BigBird": (
        lambda: BigBirdForMaskedLM(
            BigBirdConfig(**_SIZES, block_size=8, num_random_blocks=2, attention_type="block_sparse")
        ),
        _words,
    ),
}


@dataclass
class _Twin:
    """One of the twins, and what its steps took."""

    model: nn.Module
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def step(self, step: int, batch: Batch, *, is_metered: bool) -> None:
        torch.manual_seed(step)
        self.model.zero_grad()
        gc.collect()
        with PeakMeter("cpu") if is_metered else _Nothing() as meter:
            begun = time.process_time()
            _loss(self.model(**batch)).backward()
            self.seconds.append(time.process_time() - begun)
        if is_metered:
            self.peaks.append(meter.peak_bytes)

    def relative_seconds(self, plain: _Twin) -> float:
        half = len(self.seconds) // 2
        return statistics.median(a / b for a, b in zip(self.seconds[half:], plain.seconds[half:], strict=True))


class _Nothing:
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _loss(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def _are_equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all((a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def _compare(kind: str, steps: int) -> tuple[str, ...]:
    make, batch_of = _KINDS[kind]
    torch.manual_seed(0)
    model = make().train()
    plain, rerun, ours = (_Twin(each) for each in (model, copy.deepcopy(model), copy.deepcopy(model)))
    rerun.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    plan = plimsoll.plan(ours.model, dict(batch_of(steps)), strategy="full", loss=_loss)
    is_equal = True
    with plimsoll.apply(ours.model, plan), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            batch = batch_of(step)
            for twin in (plain, rerun, ours):
                twin.step(step, batch, is_metered=step >= steps - 5)
            is_equal &= _are_equal(plain.model, ours.model)
        services = [
            service
            for inner in ours.model.modules()
            if hasattr(vars(inner).get("forward"), "services")
            for service in inner.forward.services.values()
        ]
    peaks = [max(twin.peaks) for twin in (plain, rerun, ours)]
    return (
        kind,
        *(f"{peak / MIB:.1f}" for peak in peaks),
        f"{peaks[2] / peaks[1]:.2f}",
        f"{rerun.relative_seconds(plain):.2f} ×",
        f"{ours.relative_seconds(plain):.2f} ×",
        f"{ours.seconds[0] / statistics.median(plain.seconds):.1f} ×",
        f"{max(service.recordings for service in services)}",
        str(sum(service.reruns for service in services)),
        str(sum("plimsoll" in str(each.message) for each in caught)),
        "yes" if is_equal else "**no**",
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.value_reads", description=__doc__)
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="steps of each training (default 60)")
    parser.add_argument("--only", choices=tuple(_KINDS), nargs="+", help="some models alone")
    options = parser.parse_args()
    with one_thread():
        rows = [_compare(kind, options.steps) for kind in options.only or _KINDS]
    command = " ".join(["PYTHONPATH=src python -m benchmarks.value_reads", *sys.argv[1:]])
    title = "Models that read values of tensors"
    print("\n".join(page_head(title, command, device=device_name(torch.device("cpu")), versions=versions())))
    print("\n".join(format_table(_HEAD, rows)))
    print(
        "\nTimes are shares of the unmanaged twin's step. *Recorded*: the most recordings of one block. *Run again*: calls "
        "that made torch calls without a recording; backward ran their forward again."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
