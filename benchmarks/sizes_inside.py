"""Trains transformers' models whose sizes inside follow the data while the batch keeps its shape, and counts every step's peak.

    PYTHONPATH=src python -m benchmarks.sizes_inside
    PYTHONPATH=src python -m benchmarks.sizes_inside --steps 20 --only detector

Each model is trained twice with the same seeds, without a budget and under ``attach``. Budget: what is there when a step begins
(parameters, buffers, the optimizer's state), and half of what the highest unmanaged step adds to it. A step is *named* if a
warning or a log line of its own or of the next step says that more than the budget was taken. A step *grows* if its unmanaged
twin takes more than all steps before it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrResNetConfig,
)
from transformers.modeling_flash_attention_utils import _get_unpad_data, _pad_input

import plimsoll
from benchmarks.counted_allocations import AllocationCounter, run_counted
from benchmarks.machine import device_name, page_head, versions
from benchmarks.page import format_table
from benchmarks.said import everything_said
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.units import MIB

Batch = Mapping[str, torch.Tensor]
_VOCABULARY = 512
_IGNORED = -100
_HEAD = (
    "training", "unmanaged MiB", "fixed MiB", "budget MiB", "managed MiB", "steps over", "at a growth", "silent", "messages",
    "losses equal",
)  # fmt: skip


def _padded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    indices: torch.Tensor,
    padding_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of tokens without padding, padded for the kernel alone: what transformers does around flash attention.

    Texts are no longer than half of ModernBERT's local window, so local layers see all of them.
    """
    padded = [_pad_input(each[0].transpose(0, 1), indices, *padding_mask.shape) for each in (query, key, value)]
    attended = functional.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in padded), padding_mask[:, None, None].bool(), dropout, scale=scaling
    )
    return attended.transpose(1, 2).flatten(0, 1)[indices][None], None


AttentionInterface.register("padded_attention", _padded_attention)


class PaddingFreeEncoder(nn.Module):
    """A masked language model that receives padded texts and drops the padding before its blocks."""

    def __init__(self, *, sparse_prediction: bool) -> None:
        super().__init__()
        config = ModernBertConfig(
            vocab_size=_VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
            embedding_dropout=0.1, mlp_dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
            sep_token_id=2, sparse_prediction=sparse_prediction, attn_implementation="padded_attention",
        )  # fmt: skip
        self.model = ModernBertForMaskedLM(config)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        indices, _, _ = _get_unpad_data(attention_mask)
        positions = attention_mask.cumsum(1) - 1
        rows = [each.flatten()[indices][None] for each in (input_ids, positions, labels)]
        names = ("input_ids", "position_ids", "labels")
        found = self.model(**dict(zip(names, rows, strict=True)), indices=indices, padding_mask=attention_mask)
        return found.loss  # type: ignore[no-any-return]


class PackedDecoder(nn.Module):
    """A causal language model on texts one after the other; transformers masks by positions that begin anew."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
            attn_implementation="sdpa", use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        indices, _, _ = _get_unpad_data(attention_mask)
        positions = (attention_mask.cumsum(1) - 1).flatten()[indices][None]
        tokens = input_ids.flatten()[indices][None]
        labels = tokens.masked_fill(positions == 0, _IGNORED)
        return self.model(input_ids=tokens, position_ids=positions, labels=labels).loss  # type: ignore[no-any-return]


class Detector(nn.Module):
    """RT-DETR with padded boxes: it adds queries with noise, as many as the picture with most objects asks for."""

    def __init__(self) -> None:
        super().__init__()
        backbone = RTDetrResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        )  # fmt: skip
        config = RTDetrConfig(
            backbone_config=backbone, encoder_hidden_dim=64, encoder_in_channels=[32, 64, 128], encoder_ffn_dim=128,
            d_model=64, decoder_in_channels=[64, 64, 64], decoder_ffn_dim=256, decoder_layers=3, num_queries=30,
            num_denoising=8, num_labels=20, encoder_attention_heads=4, decoder_attention_heads=4,
        )  # fmt: skip
        self.model = RTDetrForObjectDetection(config)

    def forward(
        self, pixel_values: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        labels = [
            {"boxes": box[:count], "class_labels": kind[:count]}
            for box, kind, count in zip(boxes, classes, counts.tolist(), strict=True)
        ]
        return self.model(pixel_values=pixel_values, labels=labels).loss  # type: ignore[no-any-return]


def _texts(rows: int, tokens: int) -> Batch:
    lengths = torch.randint(8, tokens + 1, (rows,))
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    return {"input_ids": torch.randint(3, _VOCABULARY, (rows, tokens)) * mask, "attention_mask": mask}


def _masked_texts() -> Batch:
    batch = _texts(16, 64)
    is_masked = (torch.rand(16, 64) < torch.rand(())) & (batch["attention_mask"] == 1)
    is_masked[0, 0] = True
    labels = batch["input_ids"].masked_fill(~is_masked, _IGNORED)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(is_masked, 4), "labels": labels}


def _pictures() -> Batch:
    return {
        "pixel_values": torch.randn(2, 3, 128, 128),
        "boxes": torch.rand(2, 100, 4) * 0.5 + 0.2,
        "classes": torch.randint(0, 20, (2, 100)),
        "counts": torch.randint(1, 101, (2,)),
    }


_KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "encoder": (lambda: PaddingFreeEncoder(sparse_prediction=False), _masked_texts),
    "sparse-encoder": (lambda: PaddingFreeEncoder(sparse_prediction=True), _masked_texts),
    "decoder": (PackedDecoder, lambda: _texts(8, 128)),
    "detector": (Detector, _pictures),
}


@dataclass(kw_only=True)
class Training:
    """Losses and peaks of all steps, what is there between steps, and warnings and log lines with the step of each."""

    losses: list[float]
    peaks: list[int]
    fixed_bytes: int
    warned: list[tuple[int, str]]


def train(kind: str, steps: int, budget: int | None = None) -> Training:
    """Train a model of one kind from the same seed, under a budget if there is one."""
    counter = AllocationCounter()
    build, draw = _KINDS[kind]
    gc.collect()
    before = counter.live_bytes()
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, peaks, warned, fixed_bytes = [], [], [], 0
    with everything_said() as caught, contextlib.ExitStack() as stack:
        if budget is not None:
            stack.enter_context(plimsoll.attach(model, budget, optimizer=optimizer))
        for number in range(steps):
            counter.begin_peak()
            torch.manual_seed(number)
            batch = draw()
            loss = model(**batch)
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            del loss, batch
            peaks.append(counter.peak_bytes() - before)
            fixed_bytes = max(fixed_bytes, counter.live_bytes() - before)
            warned += [(number, text) for text in caught[len(warned) :]]
    warned += [(steps, text) for text in caught[len(warned) :]]
    return Training(losses=losses, peaks=peaks, fixed_bytes=fixed_bytes, warned=warned)


def _compare(kind: str, steps: int) -> tuple[tuple[str, ...], list[str]]:
    """A row of the table, and a line for every step over the budget and every warning."""
    plain = train(kind, steps)
    budget = plain.fixed_bytes + (max(plain.peaks) - plain.fixed_bytes) // 2
    ours = train(kind, steps, budget)
    named = {number for number, text in ours.warned if "more than the budget" in text}
    over = [number for number, peak in enumerate(ours.peaks) if peak > budget]
    grown = {number for number in over if plain.peaks[number] > max(plain.peaks[:number], default=0)}
    said = {number for number in over if named & {number, number + 1}}
    row = (
        kind,
        f"{min(plain.peaks[1:]) / MIB:.1f} to {max(plain.peaks) / MIB:.1f}",
        f"{plain.fixed_bytes / MIB:.1f}",
        f"{budget / MIB:.1f}",
        f"{max(ours.peaks) / MIB:.1f}",
        f"{len(over)} of {steps}",
        str(len(grown)),
        str(len(over) - len(said)),
        str(len(ours.warned)),
        "yes" if plain.losses == ours.losses else "**no**",
    )
    lines = [
        f"- {kind}, step {number}: {ours.peaks[number] / budget - 1:.1%} over, "
        f"{'a' if number in grown else 'no'} growth, {'named' if number in said else '**silent**'}"
        for number in over
    ]
    lines += [f"- {kind}, message in step {number}: {' '.join(text.split())}" for number, text in ours.warned]
    return row, lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizes_inside", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of every training (default 200)")
    parser.add_argument("--only", choices=tuple(_KINDS), help="one model alone")
    options = parser.parse_args()
    status = run_counted("benchmarks.sizes_inside", sys.argv[1:])
    if status is not None:
        return status
    with one_thread():
        kinds = [options.only] if options.only else list(_KINDS)
        rows, lines = zip(*(_compare(kind, options.steps) for kind in kinds), strict=True)
    command = " ".join(["PYTHONPATH=src python -m benchmarks.sizes_inside", *sys.argv[1:]])
    title = "Sizes that follow the data inside transformers' models"
    print("\n".join(page_head(title, command, device=device_name(torch.device("cpu")), versions=versions())))
    print("\n".join(format_table(_HEAD, rows)))
    print(
        "\n".join(
            ["", "Steps are counted from 0. Steps over the budget, and all messages:", "", *itertools.chain(*lines)]
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
