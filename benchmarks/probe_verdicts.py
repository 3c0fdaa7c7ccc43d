"""Ten plans whose worth is known, five good and five bad, and what the probe says about them.

    python -m benchmarks.probe_verdicts --steps 400

A tiny transformers Llama is trained on the standard library's source. Every plan is probed twice: as a user would, with an
early answer where it is clear, and over all steps, which is the truth that the verdict is held against. A plan is truly
bad if after all steps its held-out loss is worse than without it by more than three unmanaged runs from different seeds lie
apart, or if its gradient at equal parameters points elsewhere (mean cosine below 0.9) or is too long or too short by more
than a tenth.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import msgspec
import torch
from torch import nn

from benchmarks.bad_codecs import registered
from benchmarks.machine import device_name, versions
from benchmarks.progress import say
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.verdict import Ruling, Verdict
from plimsoll.demo.corpus import VOCABULARY, read_corpus
from plimsoll.measuring.timing import one_thread

BATCH, SEQUENCE, HELD_OUT = 4, 64, 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan and what is expected of it."""

    name: str
    is_good: bool
    make: Callable[[nn.Module, Any], Plan]


def make_model(seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def make_batches(seed: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of the text that do not overlap; the last ``HELD_OUT`` batches are the same for every seed."""
    text = torch.frombuffer(bytearray(read_corpus()), dtype=torch.uint8).long()
    pieces = text[: len(text) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    held_out, training = order[: HELD_OUT * BATCH], order[HELD_OUT * BATCH :]
    shuffled = training[torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))]
    picked = torch.cat((shuffled[: count * BATCH], held_out)).view(-1, BATCH)
    return [{"input_ids": pieces[rows], "labels": pieces[rows]} for rows in picked]


def named(strategy: str) -> Callable[[nn.Module, Any], Plan]:
    def make(model: nn.Module, batch: Any) -> Plan:
        import plimsoll

        return plimsoll.plan(model, batch, strategy=strategy)

    return make


def with_codec(form: str) -> Callable[[nn.Module, Any], Plan]:
    """Everything that the strategy ``int8`` holds, in another form."""

    def make(model: nn.Module, batch: Any) -> Plan:
        return in_other_form(named("int8")(model, batch), form)

    return make


def in_other_form(plan: Plan, form: str) -> Plan:
    """The plan with every compressed value in ``form``."""
    regions = tuple(
        msgspec.structs.replace(
            region,
            decisions=tuple(
                msgspec.structs.replace(decision, form=form) if decision.decision is Decision.COMPRESS else decision
                for decision in region.decisions
            ),
        )
        for region in plan.regions
    )
    return msgspec.structs.replace(plan, regions=regions, strategy=form)


CANDIDATES = (
    Candidate("full recomputation", True, named("full")),
    Candidate("int8", True, named("int8")),
    Candidate("bf16", True, with_codec("bf16")),
    Candidate("int8 and recomputation (hybrid:1,2)", True, named("hybrid:1,2")),
    Candidate("int4, stochastic rounding", True, with_codec("int4:block=32:stochastic")),
    Candidate("2 bits", False, with_codec("two-bits")),
    Candidate("4 bits, rounded down", False, with_codec("floored")),
    Candidate("8 bits, stale scale", False, with_codec("stale-scale")),
    Candidate("largest 1%", False, with_codec("topk:share=0.01")),
    Candidate("sign and mean", False, with_codec("sign-only")),
)
BORDERLINE = (Candidate("8 bits, a tenth too large", False, with_codec("tenth-too-large")),)


def held_out_of_seed(seed: int, steps: int) -> float:
    """The held-out loss of an unmanaged run."""
    model, batches = make_model(seed), make_batches(seed, steps)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches[:steps]:
        optimizer.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return statistics.fmean(float(model(**batch).loss) for batch in batches[steps:])


def probe(candidate: Candidate, steps: int, *, is_early: bool) -> Verdict:
    import plimsoll

    model, batches = make_model(0), make_batches(0, steps)
    plan = candidate.make(model, batches[0])
    return plimsoll.probe(model, batches[:-HELD_OUT], plan, steps=steps, held_out=batches[-HELD_OUT:], early=is_early)


def is_truly_bad(verdict: Verdict, spread: float) -> bool:
    """The truth, from all steps; ``spread`` is how far the held-out losses of unmanaged seeds lie apart."""
    if verdict.ruling in (Ruling.DIVERGED, Ruling.IDENTICAL):
        return verdict.ruling is Ruling.DIVERGED
    whole = verdict.gradients[0]
    assert whole.cosine is not None
    assert whole.gain is not None
    ours, theirs = verdict.plan.held_out_loss, verdict.baseline.held_out_loss
    is_worse = ours is None or theirs is None or ours - theirs > spread
    return is_worse or whole.cosine.value < 0.9 or abs(whole.gain.value - 1) > 0.1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe_verdicts", description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plans", nargs="+", default=[""], help="parts of the names of plans; all by default")
    options = parser.parse_args()
    with one_thread(), registered():
        print(f"{device_name(torch.device('cpu'))}; {', '.join(f'{n} {v}' for n, v in versions().items())}", flush=True)
        seeds = [held_out_of_seed(seed, options.steps) for seed in options.seeds]
        print(f"held-out loss of unmanaged seeds: {', '.join(f'{loss:.4f}' for loss in seeds)}", flush=True)
        print("| plan | truly | held-out | error | cosine | gain | verdict | rule | steps | right |")
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        chosen = [each for each in CANDIDATES if any(part in each.name for part in options.plans)]
        right = [_row(candidate, options.steps, max(seeds) - min(seeds)) for candidate in chosen]
        for candidate in BORDERLINE if len(chosen) == len(CANDIDATES) else ():
            _row(candidate, options.steps, max(seeds) - min(seeds))
    print(f"{sum(right)} of {len(right)} right")
    return 0 if all(right) else 1


def _row(candidate: Candidate, steps: int, spread: float) -> bool:
    say(f"{candidate.name}: all steps")
    full = probe(candidate, steps, is_early=False)
    say(f"{candidate.name}: early answer")
    early = probe(candidate, steps, is_early=True)
    is_bad = is_truly_bad(full, spread)
    is_right = early.ruling.is_pass is not is_bad and full.ruling.is_pass is not is_bad
    if is_bad:
        is_right = is_right and early.ruling is not Ruling.UNDECIDED
    whole = full.gradients[0] if full.gradients else None
    figures = ["–"] * 3
    if whole is not None and whole.cosine is not None and whole.gain is not None:
        figures = [f"{whole.relative_error:.1%}", f"{whole.cosine.value:.3f}", f"{whole.gain.value:.3f}"]
    held_out = "–" if full.plan.held_out_loss is None else f"{full.plan.held_out_loss:.4f}"
    cells = [candidate.name, "bad" if is_bad else "good", held_out, *figures, str(early.ruling), early.decided_by]
    cells += [str(early.steps), "yes" if is_right else f"NO ({full.ruling} over all steps)"]
    print(f"| {' | '.join(cells)} |", flush=True)
    return is_right and is_bad is not candidate.is_good


if __name__ == "__main__":
    raise SystemExit(main())
