"""Counts how often `attach` refuses a budget before it names one that works, over forty training loops.

    PYTHONPATH=src python -m benchmarks.refusals > page.md
    PYTHONPATH=src python -m benchmarks.refusals --only "llama: two losses"

Each loop begins with a budget that no plan can meet. A refusal names a budget, and the loop is started again under it, until it
trains. Then smaller budgets are tried, 1.5% apart, to find the lowest one that trains.

A budget *trains* if no step of twelve is refused. Peaks are counted from outside, at the allocator.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import peft
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import plimsoll
from benchmarks.counted_allocations import AllocationCounter, run_counted
from benchmarks.machine import device_name, page_head, versions
from benchmarks.page import format_table
from benchmarks.progress import say
from plimsoll.errors import BudgetBelowFloor
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.units import MIB

_STEPS = 12
_MOST_REFUSALS = 6
_SHRINKING = 0.985
_LEAST_SHARE = 0.7
"""Smaller budgets are tried down to this share of the named one."""
_WORDS = 256
_HEAD = (
    "loop", "unmanaged MiB", "refusals", "named MiB", "peak under it MiB", "peak / named", "lowest that trains / named",
    "steps over",
)  # fmt: skip


@dataclass
class Loop:
    """One training: ``step`` runs one optimizer step with a seed."""

    model: nn.Module
    step: Callable[[int], None]


@dataclass
class Row:
    """The figures of one loop, in bytes."""

    loop: str
    unmanaged: int
    refusals: int
    named: int
    peak: int
    lowest_share: float
    """The lowest budget that trains, divided by the named one."""
    over: int
    """How many steps under the named budget were counted above it by more than 1%."""


# Models: a function that makes one, its batch for a seed, and its loss from the output


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=5,
        num_attention_heads=4,
        vocab_size=_WORDS,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=5, n_head=4, vocab_size=_WORDS, n_positions=128, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=5, num_attention_heads=4, intermediate_size=192, image_size=32, patch_size=4,
        num_labels=10,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norms[0](self.first(image)))
        return F.relu(image + self.norms[1](self.second(hidden)))


def _convolutions() -> nn.Module:
    width = 16
    blocks = nn.Sequential(*(_Residual(width) for _ in range(5)))
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    )


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _words(seed: int, rows: int) -> torch.Tensor:
    return torch.randint(0, _WORDS, (rows, 64), generator=_random(seed))


def _images(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, 32, 32, generator=_random(seed))


def _next_word(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def _first_classes(logits: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.arange(len(images)) % 10)


@dataclass(frozen=True)
class Family:
    """A model, its batches, and its loss outside of the model."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rows: int
    adapted: tuple[str, ...]
    """The modules that LoRA adapts."""

    def logits(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output = model(batch)
        return output if isinstance(output, torch.Tensor) else output.logits

    def loss_at(self, model: nn.Module, seed: int) -> torch.Tensor:
        """The loss of one batch."""
        batch = self.batch(seed, self.rows)
        return self.loss(self.logits(model, batch), batch)


FAMILIES = {
    "llama": Family(_llama, _words, _next_word, 8, ("q_proj", "v_proj")),
    "gpt2": Family(_gpt2, _words, _next_word, 8, ("c_attn",)),
    "vit": Family(_vit, _images, _first_classes, 12, ("q_proj", "v_proj")),
    "convolutions": Family(_convolutions, _images, _first_classes, 12, ("first", "second")),
}


# Loops


def _loop(model: nn.Module, backward: Callable[[int], None], optimizer: torch.optim.Optimizer | None = None) -> Loop:
    """Return a loop whose steps run ``backward`` with a seed, and then the optimizer (AdamW by default)."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-4)

    def step(seed: int) -> None:
        backward(seed)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, step)


def _outside(family: Family) -> Loop:
    model = family.make()
    return _loop(model, lambda seed: family.loss_at(model, seed).backward())


def _summed(family: Family) -> Loop:
    """Two losses of one output: the usual one, and one that reads all of it in float64."""
    model = family.make()

    def backward(seed: int) -> None:
        batch = family.batch(seed, family.rows)
        logits = family.logits(model, batch)
        (family.loss(logits, batch) + 1e-4 * logits.double().logsumexp(-1).square().mean()).backward()

    return _loop(model, backward)


def _accumulated(family: Family, micro_batches: int) -> Loop:
    model = family.make()

    def backward(seed: int) -> None:
        for micro_batch in range(micro_batches):
            (family.loss_at(model, micro_batches * seed + micro_batch) / micro_batches).backward()

    return _loop(model, backward)


def _autocast(family: Family) -> Loop:
    model = family.make()

    def backward(seed: int) -> None:
        batch = family.batch(seed, family.rows)
        with torch.autocast("cpu", torch.bfloat16):
            loss = family.loss(family.logits(model, batch).float(), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return _loop(model, backward)


def _contrasted(family: Family) -> Loop:
    """Two forwards, one backward."""
    model = family.make()

    def backward(seed: int) -> None:
        one, other = (family.logits(model, family.batch(2 * seed + k, family.rows)).flatten(1) for k in range(2))
        F.cosine_embedding_loss(one, other, torch.ones(len(one))).backward()

    return _loop(model, backward)


def _adapted(family: Family) -> Loop:
    config = peft.LoraConfig(r=8, target_modules=list(family.adapted))
    model = peft.get_peft_model(family.make(), config)  # type: ignore[arg-type]  # plain modules work too
    return _loop(model, lambda seed: family.loss_at(model, seed).backward())


def _preferred(family: Family) -> Loop:
    """As DPO trains: both answers in one batch, and a frozen second model as reference."""
    model, reference = family.make(), family.make().requires_grad_(requires_grad=False).eval()

    def scores(scorer: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return family.logits(scorer, batch).log_softmax(-1).flatten(1).amax(1)

    def backward(seed: int) -> None:
        batch = family.batch(seed, family.rows)
        with torch.no_grad():
            expected = scores(reference, batch)
        chosen, rejected = (scores(model, batch) - expected).chunk(2)
        (-F.logsigmoid(0.1 * (chosen - rejected)).mean()).backward()

    return _loop(model, backward)


def _momentum(family: Family) -> Loop:
    """Weights are averaged too, so the loop holds a copy of them."""
    model = family.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    averages = [each.detach().clone() for each in model.parameters()]
    train = _loop(model, lambda seed: family.loss_at(model, seed).backward(), optimizer).step

    def step(seed: int) -> None:
        train(seed)
        torch._foreach_lerp_(averages, [each.detach() for each in model.parameters()], 0.01)

    return Loop(model, step)


def _sharpness(family: Family) -> Loop:
    """As SAM trains: a second pass at perturbed weights."""
    model = family.make()
    parameters = list(model.parameters())

    def backward(seed: int) -> None:
        family.loss_at(model, seed).backward()
        changes = [0.05 * each.grad / (each.grad.norm() + 1e-6) for each in parameters if each.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(parameters, changes)
        model.zero_grad()
        family.loss_at(model, seed).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(parameters), changes)

    return _loop(model, backward)


LOOPS: dict[str, Callable[[Family], Loop]] = {
    "loss outside": _outside,
    "two losses": _summed,
    "accumulation of 2": lambda family: _accumulated(family, 2),
    "accumulation of 4": lambda family: _accumulated(family, 4),
    "autocast": _autocast,
    "two forwards": _contrasted,
    "LoRA": _adapted,
    "DPO": _preferred,
    "momentum and averages": _momentum,
    "SAM": _sharpness,
}
NAMES = [f"{family}: {loop}" for family in FAMILIES for loop in LOOPS]


# Running


@dataclass
class Run:
    """What a loop did under a budget: the steps' counted peaks in bytes, or the budget that a refusal named."""

    peaks: list[int]
    named: int | None = None


def _made(name: str) -> Loop:
    family, _, loop = name.partition(": ")
    torch.manual_seed(0)
    return LOOPS[loop](FAMILIES[family])


def _train(name: str, budget: int | None) -> Run:
    gc.collect()
    counter = AllocationCounter()
    begun = counter.live_bytes()
    loop = _made(name)
    outside = counter.live_bytes() - begun - _bytes_of(loop.model)  # a second model, averages: not in the budget
    handle = contextlib.nullcontext() if budget is None else plimsoll.attach(loop.model, budget)
    run = Run([])
    with handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(_STEPS):
            counter.begin_peak()
            try:
                loop.step(seed)
            except BudgetBelowFloor as error:
                run.named = _named(error)
                break
            run.peaks.append(counter.peak_bytes() - begun - outside)
    return run


def _bytes_of(model: nn.Module) -> int:
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}.values()
    return sum(each.numel() * each.element_size() for each in tensors)


def _named(error: BudgetBelowFloor) -> int:
    found = re.search(r"\((\d+) bytes\)", error.next)
    if found is None:
        raise SystemExit(f"a refusal names no budget: {error}")
    return int(found.group(1))


def measure(name: str) -> Row:
    unmanaged = _train(name, None)
    budget, refusals = _bytes_of(_made(name).model), 0
    run = _train(name, budget)
    while run.named is not None and refusals < _MOST_REFUSALS:
        refusals, budget = refusals + 1, run.named
        run = _train(name, budget)
    lowest = budget
    for smaller in _smaller(budget):
        if _train(name, smaller).named is not None:
            break
        lowest = smaller
    over = sum(peak > 1.01 * budget for peak in run.peaks)
    return Row(name, max(unmanaged.peaks), refusals, budget, max(run.peaks), lowest / budget, over)


def _smaller(budget: int) -> Iterator[int]:
    share = _SHRINKING
    while share >= _LEAST_SHARE:
        yield round(budget * share)
        share *= _SHRINKING


def _cells(row: Row) -> list[str]:
    mib = [f"{each / MIB:.2f}" for each in (row.unmanaged, row.named, row.peak)]
    shares = [f"{row.peak / row.named:.3f}", f"{row.lowest_share:.3f}"]
    return [row.loop, mib[0], str(row.refusals), mib[1], mib[2], *shares, str(row.over)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refusals", description=__doc__)
    parser.add_argument("--only", choices=NAMES, nargs="+", metavar="LOOP", help="some loops alone")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append rows as JSON; what is there is not run again")
    options = parser.parse_args()
    status = run_counted("benchmarks.refusals", sys.argv[1:])
    if status is not None:
        return status
    lines = options.rows.read_text().splitlines() if options.rows is not None and options.rows.exists() else []
    rows = {row.loop: row for row in (Row(**json.loads(line)) for line in lines)}
    with one_thread():
        for name in options.only or NAMES:
            if name in rows:
                continue
            rows[name] = row = measure(name)
            say(" ".join(_cells(row)))
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    shown = list(rows.values())
    only = [] if options.only is None else ["--only", *options.only]
    command = " ".join(["PYTHONPATH=src python -m benchmarks.refusals", *only])
    device = device_name(torch.device("cpu"))
    print("\n".join(page_head("Refusals before a loop trains", command, device=device, versions=versions())))
    print("\n".join(format_table(_HEAD, [_cells(row) for row in shown])))
    once, close = sum(row.refusals <= 1 for row in shown), sum(row.lowest_share > 0.97 for row in shown)
    print(f"\nRefused at most once: {once} of {len(shown)}. Named budget within 3% of the lowest that trains: {close}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
