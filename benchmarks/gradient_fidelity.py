"""Training on real text with compressed gradients: what held-out loss costs, and where it is lost.

    python -m benchmarks.gradient_fidelity --steps 200 --folder benchmarks/results

Trains the demo's Llama on source text of Python's standard library on two ranks under DDP, from several seeds (weights and
order of the text), without compression and with every method, and measures the loss on text that no run sees. A method is
*within* if its mean over seeds lies within the spread of the uncompressed seeds, as in ``benchmarks.convergence``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.launching import launch
from benchmarks.machine import device_name, page_head, page_stem, versions
from benchmarks.page import format_table
from plimsoll.ui.demo.story import Batches, DemoSetup, make_model, read_corpus

RANKS = 2
_HELD_OUT = 0.1
_HELD_OUT_BATCHES = 24
_HEAD = (
    "",
    "held-out loss",
    "least to most",
    "against none, same seed",
    "of the worst seed",
    "within",
    "bytes of a step",
    "fewer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row: a method with its options and its optimizer."""

    method: str
    warmup: float = 0.1
    momentum: float = 0.0
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        """As the table says it."""
        extra = f", momentum correction {self.momentum:g}" if self.momentum else ""
        late = "" if self.warmup or self.method == "none" else ", no warm-up"
        return f"`{self.method}`{extra}{late}"


SETTINGS = (
    Setting(method="none"),
    Setting(method="powersgd:4"),
    Setting(method="powersgd:1"),
    Setting(method="topk:10%"),
    Setting(method="topk:1%"),
    Setting(method="topk:1%", warmup=0.0),
    Setting(method="topk:0.1%"),
    Setting(method="none", optimizer="sgd"),
    Setting(method="topk:1%", optimizer="sgd"),
    Setting(method="topk:1%", optimizer="sgd", momentum=0.9),
)


@dataclass(frozen=True, slots=True)
class Run:
    """How one training ended: nats per byte on held-out text, and what one rank sent in a step after warm-up."""

    loss: float
    sent_bytes: int
    ratio: float


def on_a_rank(payload: dict[str, Any]) -> dict[tuple[int, int], Run]:
    """Every setting from every seed; the same on every rank."""
    text = read_corpus()
    border = int(len(text) * (1 - _HELD_OUT))
    found = {}
    for seed in payload["seeds"]:
        for number, setting in enumerate(SETTINGS):
            start = time.perf_counter()
            found[number, seed] = _train(setting, seed, payload["steps"], text[:border], text[border:])
            if dist.get_rank() == 0:
                took = time.perf_counter() - start
                print(
                    f"seed {seed} {setting.name} {setting.optimizer}: {found[number, seed].loss:.4f}, {took:.0f} s",
                    file=sys.stderr,
                )
    return found


def _train(setting: Setting, seed: int, steps: int, training: bytes, held_out: bytes) -> Run:
    from plimsoll.distributed import compress_gradients

    setup = DemoSetup(hidden_size=64, intermediate_size=172, layers=2, batch=4, sequence=64, seed=seed)
    model = DistributedDataParallel(make_model(setup))
    warmup_steps = int(setting.warmup * steps)
    handle = compress_gradients(model, setting.method, momentum=setting.momentum, warmup_steps=warmup_steps, seed=seed)
    optimizer = _optimizer(setting, model)
    # Falls to zero, so that the end does not depend on where the last few steps happened to be.
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    batches = Batches(training, batch=setup.batch, sequence=setup.sequence, seed=RANKS * seed + dist.get_rank())
    for step in range(steps):
        if step == warmup_steps:
            before = handle.counters
        optimizer.zero_grad(set_to_none=True)
        model(**batches.draw()).loss.backward()
        optimizer.step()
        decay.step()
    after, compressed = handle.counters, steps - warmup_steps
    handle.remove()
    unseen = Batches(held_out, batch=16, sequence=setup.sequence, seed=0)
    model.eval()
    with torch.no_grad():
        losses = [float(model.module(**unseen.draw()).loss) for _ in range(_HELD_OUT_BATCHES)]
    sent = (after.sent_bytes - before.sent_bytes) // compressed
    whole = (after.uncompressed_bytes - before.uncompressed_bytes) // compressed
    return Run(statistics.fmean(losses), sent, whole / sent)


def _optimizer(setting: Setting, model: torch.nn.Module) -> torch.optim.Optimizer:
    if setting.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=2e-3)
    # With momentum correction the momentum is in the gradients already.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if setting.momentum else 0.9)


def table(found: dict[tuple[int, int], Run], seeds: list[int], optimizer: str) -> list[str]:
    """The rows of one optimizer."""
    numbers = [i for i, setting in enumerate(SETTINGS) if setting.optimizer == optimizer]
    plain = {seed: found[numbers[0], seed].loss for seed in seeds}
    rows = []
    for number in numbers:
        runs = {seed: found[number, seed] for seed in seeds}
        losses = [run.loss for run in runs.values()]
        mean, extra = statistics.fmean(losses), [runs[seed].loss - plain[seed] for seed in seeds]
        is_within = min(plain.values()) <= mean <= max(plain.values())
        setting = SETTINGS[number]
        rows.append(
            [
                setting.name,
                f"{mean:.4f}",
                f"{min(losses):.4f}–{max(losses):.4f}",
                "" if number == numbers[0] else f"{statistics.fmean(extra):+.4f}",
                "" if number == numbers[0] else f"{max(extra):+.4f}",
                "" if number == numbers[0] else ("yes" if is_within else "**no**"),
                f"{runs[seeds[0]].sent_bytes:,}",
                f"{runs[seeds[0]].ratio:.1f}×",
            ]
        )
    return format_table(_HEAD, rows)


def page(found: dict[tuple[int, int], Run], seeds: list[int], steps: int) -> str:
    """The page of one run of this benchmark."""
    device = device_name(torch.device("cpu"))
    command = f"python -m benchmarks.gradient_fidelity --steps {steps} --seeds {' '.join(map(str, seeds))}"
    lines = [
        *page_head("Compressed gradients on the text task", command, device=device, versions=versions()),
        f"A Llama of width 64 with 2 layers, bytes of Python's standard library, {RANKS} ranks under DDP with 4 sequences of "
        f"64 each, {steps} steps, learning rate falling to zero, the first tenth of the steps uncompressed unless a row says "
        f"otherwise. Held-out loss in nats per byte, mean of {len(seeds)} seeds; *within*: the mean lies between the least and "
        "the most that uncompressed seeds reached. Bytes are what one rank sends in a step after warm-up, in rings; embedding, "
        "head and norms are never compressed here, and are most of what the sparse methods still send.",
        "",
        "## AdamW, 2e-3",
        "",
        *table(found, seeds, "adamw"),
        "",
        "## SGD, 0.1, momentum 0.9",
        "",
        *table(found, seeds, "sgd"),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient_fidelity", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, help="write the page here as well")
    options = parser.parse_args()
    payload = {"steps": options.steps, "seeds": options.seeds}
    ranks = launch(RANKS, "benchmarks.gradient_fidelity:on_a_rank", payload)
    found = ranks[0]
    differ = [key for key in found if any(asdict(rank[key]) != asdict(found[key]) for rank in ranks)]
    text = page(found, options.seeds, options.steps)
    print(text)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        name = f"{page_stem(torch.device('cpu'), 'gradient-fidelity')}.md"
        (options.folder / name).write_text(text, encoding="utf-8")
    if differ:
        print(f"ranks ended with different models: {differ}", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
