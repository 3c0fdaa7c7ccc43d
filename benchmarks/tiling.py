"""Compares the lowest peaks of plans with and without tiles, and plans in tiles with tiling by hand at its own peak.

    PYTHONPATH=src python -m benchmarks.tiling > page.md
    PYTHONPATH=src python -m benchmarks.tiling --only "wide Llama" --rounds 12

By hand means what ALST does: every block is checkpointed, and its MLP runs in as many shards as the sequence has times the
hidden size. The plan gets the peak of that step as its budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import plimsoll
from benchmarks.machine import device_name, page_head, versions
from benchmarks.page import format_table
from benchmarks.progress import say
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.manage import manage
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.units import MIB

WIDTH = 128
BOTH = ("recompute", "tile")
_HEAD = (
    "model", "rows", "unmanaged MiB", "floor MiB", "floor in tiles MiB", "in tiles / without", "predicted / measured",
    "by hand MiB", "time by hand", "time of the plan", "plan / by hand", "worst ratio of errors",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model, its batch, its loss, and the names of the blocks and of the MLPs that are tiled by hand (none: no peer)."""

    name: str
    make: Callable[[], tuple[nn.Module, Any, Callable[[Any], torch.Tensor] | None]]
    blocks: str
    mlp: str = "mlp"
    rows: int = 2048


@dataclass
class Row:
    """The figures of one model. Times are shares of the unmanaged step's processor time."""

    kind: str
    rows: int
    unmanaged_mib: float
    floor_mib: float
    tiled_mib: float
    measured_mib: float
    hand_mib: float | None = None
    hand_time: float | None = None
    plan_time: float | None = None
    ratio: float | None = None
    worst_ratio: float | None = None


def _text(kind: str, model: str, rows: int, **config: Any) -> Callable[[], Any]:
    def make() -> Any:
        shared = {
            "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128,
            "intermediate_size": 4 * WIDTH, "max_position_embeddings": rows, "use_cache": False,
        }  # fmt: skip
        made = getattr(transformers, model)(getattr(transformers, kind)(**{**shared, **config}))
        ids = torch.randint(0, 128, (1, rows), generator=torch.Generator().manual_seed(0))
        return made, {"input_ids": ids, "labels": ids}, None

    return make


def _vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=4, num_attention_heads=4, image_size=256,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    pixels = torch.randn(1, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.tensor([1])}, None


def _whisper() -> Any:
    config = transformers.WhisperConfig(
        d_model=WIDTH, encoder_layers=4, encoder_attention_heads=4, encoder_ffn_dim=4 * WIDTH, num_mel_bins=80,
        max_source_positions=1500, dropout=0.0, vocab_size=128, decoder_layers=1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(config)
    sound = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(0))
    return encoder, {"input_features": sound}, lambda output: output.last_hidden_state.square().mean()


class DitBlock(nn.Module):
    """A block of a diffusion transformer: attention and an MLP, both modulated by a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out, self.modulation = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 6 * WIDTH),
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm1(x) * (1 + scale1) + shift1).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Dit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DitBlock() for _ in range(4))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return x


def _dit() -> Any:
    draw = torch.Generator().manual_seed(0)
    batch = (torch.randn(1, 2048, WIDTH, generator=draw), torch.randn(1, WIDTH, generator=draw))
    return Dit(), batch, lambda output: output.square().mean()


class GraphLayer(nn.Module):
    """A layer of a graph network: the sum of the neighbours, then a wide MLP on each node."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        return x + self.mlp(self.norm(x).index_add(0, target, x[source]))


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer() for _ in range(4))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return x


def _graph() -> Any:
    draw = torch.Generator().manual_seed(0)
    batch = (torch.randn(4096, WIDTH, generator=draw), torch.randint(0, 4096, (2, 8192), generator=draw))
    return GraphNetwork(), batch, lambda output: output.square().mean()


_WIDE = {"intermediate_size": 8 * WIDTH}
_HEADS = {"head_dim": 32, "num_key_value_heads": 4}

KINDS = {
    kind.name: kind
    for kind in (
        Kind("wide Llama", _text("LlamaConfig", "LlamaForCausalLM", 4096, **_WIDE), "model.layers", rows=4096),
        Kind("Llama", _text("LlamaConfig", "LlamaForCausalLM", 2048), "model.layers"),
        Kind("Qwen3", _text("Qwen3Config", "Qwen3ForCausalLM", 2048, **_HEADS), "model.layers"),
        Kind("Gemma-2", _text("Gemma2Config", "Gemma2ForCausalLM", 1024, **_HEADS), "model.layers", rows=1024),
        Kind(
            "Mixtral", _text("MixtralConfig", "MixtralForCausalLM", 2048, num_key_value_heads=4), "model.layers", mlp=""
        ),
        Kind("ViT", _vit, "vit.layers", mlp="", rows=1025),
        Kind("DiT", _dit, "blocks"),
        Kind("Whisper's encoder", _whisper, "layers", mlp="", rows=1500),
        Kind("graph network", _graph, "layers", rows=4096),
    )
}


class HandTiled(torch.autograd.Function):
    """A tiled MLP as users write it: shards of rows forward without gradients, and again with them in backward."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., torch.Tensor], shards: int, x: torch.Tensor, *weights: nn.Parameter
    ) -> Any:
        ctx.run, ctx.shards, ctx.weights = run, shards, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([run(part) for part in x.chunk(shards, -2)], -2)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gradient = torch.empty_like(x)
        sums: list[torch.Tensor] = []
        places = gradient.chunk(ctx.shards, -2)
        for part, slope, place in zip(x.chunk(ctx.shards, -2), outer[0].chunk(ctx.shards, -2), places, strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.run(leaf)
            first, *found = torch.autograd.grad(out, (leaf, *ctx.weights), slope)
            place.copy_(first)
            sums = found if not sums else [one.add_(other) for one, other in zip(sums, found, strict=True)]
        return (None, None, gradient, *sums)


@contextlib.contextmanager
def tiled_by_hand(model: nn.Module, kind: Kind) -> Iterator[None]:
    """Inside, blocks are checkpointed and their MLPs run in shards."""
    blocks = list(model.get_submodule(kind.blocks).children())
    put: list[nn.Module] = []
    for block in blocks:
        mlp, forward = block.get_submodule(kind.mlp), block.forward
        own, shards = mlp.forward, kind.rows // WIDTH
        mlp.forward = lambda x, own=own, mlp=mlp, shards=shards: HandTiled.apply(own, shards, x, *mlp.parameters())
        block.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, **kwargs
        )
        put += [mlp, block]
    try:
        yield
    finally:
        for module in put:
            del module.forward


def measure(kind: Kind, rounds: int) -> Row:
    """Return the figures of one model."""
    torch.manual_seed(0)
    model, batch, loss = kind.make()

    def floor(allow: tuple[str, ...]) -> int:
        try:
            plimsoll.plan(model, batch, budget="1KiB", loss=loss, allow=allow)
        except BudgetBelowFloor as refusal:
            return int(refusal.next.partition("(")[2].partition(" bytes")[0])
        raise AssertionError("a budget of one KiB is kept")

    args, kwargs = (batch, {}) if isinstance(batch, tuple) else ((), batch)
    step = TrainingStep(model, args, kwargs, loss=loss)
    unmanaged = step.measure_peak().peak_bytes
    whole, tiled = floor(("recompute",)), floor(BOTH)
    lowest = plimsoll.plan(model, batch, budget=tiled, loss=loss, allow=BOTH)
    receipt = plimsoll.verify(model, batch, lowest, loss=loss, steps=2)
    rounding = receipt.tile_rounding
    row = Row(
        kind.name, kind.rows, unmanaged / MIB, whole / MIB, tiled / MIB, (receipt.measured_peak_bytes or 0) / MIB,
        worst_ratio=None if rounding is None else rounding.worst_ratio,
    )  # fmt: skip
    if not kind.mlp:
        return row
    with tiled_by_hand(model, kind):
        step.run()
        peak = step.measure_peak().peak_bytes
    row.hand_mib = peak / MIB
    plan = plimsoll.plan(model, batch, budget=max(peak, tiled), loss=loss, allow=BOTH)
    times: dict[str, list[float]] = {"plain": [], "hand": [], "plan": []}
    with manage(model, plan) as handle:
        step.run()
        handle.pause()
        for _ in range(rounds):
            for name, seconds in times.items():
                with contextlib.ExitStack() as stack:
                    if name == "hand":
                        stack.enter_context(tiled_by_hand(model, kind))
                    if name == "plan":
                        handle.resume()
                        stack.callback(handle.pause)
                    begin = time.process_time()
                    step.run()
                    seconds.append(time.process_time() - begin)
    ratios = {
        name: statistics.median(mine / plain for mine, plain in zip(seconds, times["plain"], strict=True))
        for name, seconds in times.items()
    }
    row.hand_time, row.plan_time = ratios["hand"], ratios["plan"]
    row.ratio = statistics.median(mine / theirs for mine, theirs in zip(times["plan"], times["hand"], strict=True))
    return row


def cells(row: Row) -> tuple[str, ...]:
    def shown(number: float | None, digits: int = 2) -> str:
        return "–" if number is None else f"{number:.{digits}f}"

    return (
        row.kind, str(row.rows), shown(row.unmanaged_mib, 1), shown(row.floor_mib, 1), shown(row.tiled_mib, 1),
        shown(row.tiled_mib / row.floor_mib), shown(row.tiled_mib / row.measured_mib, 3), shown(row.hand_mib, 1),
        shown(row.hand_time), shown(row.plan_time), shown(row.ratio), shown(row.worst_ratio),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiling", description=__doc__)
    parser.add_argument("--only", choices=tuple(KINDS), nargs="+", metavar="KIND", help="some models alone")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="timed steps of each side, in turns (12)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append rows as JSON; what is there is not run again")
    options = parser.parse_args()
    lines = options.rows.read_text().splitlines() if options.rows is not None and options.rows.exists() else []
    known = {row.kind: row for row in (Row(**json.loads(line)) for line in lines)}
    rows = []
    with one_thread():
        for name in options.only or KINDS:
            row = known.get(name) or measure(KINDS[name], options.rounds)
            rows.append(row)
            say(" | ".join(cells(row)))
            if options.rows is not None and name not in known:
                with options.rows.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    command = f"PYTHONPATH=src python -m benchmarks.tiling --rounds {options.rounds}"
    print("\n".join(page_head("Plans in tiles", command, device=device_name(torch.device("cpu")), versions=versions())))
    print("\n".join([_LEGEND, "", *format_table(_HEAD, map(cells, rows))]))
    return 0


_LEGEND = (
    "*Floor*: the smallest budget that a refusal names, which a measured step keeps to. *By hand*: every block under "
    "torch.utils.checkpoint, its MLP in rows / 128 shards (ALST's default). The plan has that step's peak as its budget, or "
    "its own floor where that is higher. Times are medians of paired steps in processor time, as shares of the unmanaged step; "
    "other work ran on the machine. *Worst ratio of errors*: the largest error of a gradient tensor against float64, as a "
    "multiple of the plain step's own (1.5 is allowed)."
)

if __name__ == "__main__":
    raise SystemExit(main())
