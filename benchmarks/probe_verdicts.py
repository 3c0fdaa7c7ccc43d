"""Ten plans whose worth is known, five good and five bad, and what the probe says about them.

    python -m benchmarks.probe_verdicts --steps 400

A tiny transformers Llama is trained on the standard library's source. Every plan is probed over all steps; the table says
what the probe answers, at the first look where it is clear. What is true is measured beside it, over all steps: a plan
harms if its held-out loss is worse than without it by more than three unmanaged runs from different seeds lie apart
("loss"), or if at equal parameters some block's gradient points elsewhere (mean cosine below 0.9) or is too long or too
short by more than a tenth ("gradient": the same comparisons that the probe's own rule sees, over all steps).
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import msgspec
import torch
from torch import nn

from benchmarks.bad_codecs import registered
from benchmarks.machine import device_name, versions
from benchmarks.progress import say
from plimsoll.analysis.probe.evidence import ArmLog, GradientRecord, HeldOutRecord, ProbeEvidence, StepRecord
from plimsoll.analysis.probe.rules import LEAST_COSINE, MOST_SHIFT, ProbeSettings, stop_here
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.verdict import Ruling, Verdict
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.ui.demo.story import VOCABULARY, read_corpus

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
        return in_other_form(int8_plan(), form)

    return make


@functools.cache
def int8_plan() -> Plan:
    """The plan that the others differ from in their codec alone."""
    return named("int8")(make_model(0), make_batches(0, 1)[0])


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


@dataclass(frozen=True, slots=True)
class Answer:
    """What the probe says at the first look at which it would stop."""

    ruling: Ruling
    decided_by: str
    steps: int


def probe(candidate: Candidate, steps: int, run: Path) -> Verdict:
    """All steps, whatever is clear before."""
    import plimsoll

    model, batches = make_model(0), make_batches(0, steps)
    plan = candidate.make(model, batches[0])
    held_out = batches[-HELD_OUT:]
    return plimsoll.probe(model, batches[:-HELD_OUT], plan, steps=steps, held_out=held_out, run=run, early=False)


def early_answer(run: Path, verdict: Verdict) -> Answer:
    """What a run that may stop early would have answered: the same rules on the logs of this run as they were then.

    Runs are reproducible bit by bit, so a run that may stop early is this one up to where it stops.
    """
    settings = ProbeSettings(steps=verdict.planned_steps)
    blocks = tuple(entry.block for entry in verdict.comparisons[1:])
    for steps in range(settings.chunk_steps, verdict.steps + 1, settings.chunk_steps):
        evidence = ProbeEvidence(read_log(run, "baseline", steps), read_log(run, "plan", steps), blocks)
        stopped = stop_here(evidence, settings)
        if stopped is not None:
            return Answer(stopped.ruling, stopped.decided_by, steps)
    return Answer(verdict.ruling, verdict.decided_by, verdict.steps)


def read_log(run: Path, arm: str, steps: int) -> ArmLog:
    """An arm's log as it was after so many steps."""
    log = ArmLog(steps=[], gradients=[], held_out=[])
    for line in (run / f"{arm}.jsonl").read_bytes().splitlines():
        fields = msgspec.json.decode(line)
        if "gradient" in fields:
            log.gradients.append(msgspec.convert(fields["gradient"], GradientRecord))
        elif "held_out" in fields:
            log.held_out.append(msgspec.convert(fields["held_out"], HeldOutRecord))
        else:
            log.steps.append(msgspec.convert(fields, StepRecord))
    return ArmLog(
        steps=[record for record in log.steps if record.step < steps],
        gradients=[record for record in log.gradients if record.step < steps],
        held_out=[record for record in log.held_out if record.steps <= steps],
    )


def harms(verdict: Verdict, spread: float) -> tuple[str, ...]:
    """How the plan harms, from all steps; ``spread`` is how far the held-out losses of unmanaged seeds lie apart."""
    if verdict.ruling is Ruling.DIVERGED:
        return ("divergence",)
    ours, theirs = verdict.plan.held_out_loss, verdict.baseline.held_out_loss
    is_worse = ours is None or theirs is None or ours - theirs > spread
    is_wrong = any(
        (each.cosine is not None and each.cosine.value < LEAST_COSINE)
        or (each.gain is not None and abs(each.gain.value - 1) > MOST_SHIFT)
        for each in verdict.gradients
    )
    return tuple(name for name, holds in (("loss", is_worse), ("gradient", is_wrong)) if holds)


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
        print(
            "| plan | made to be | held-out | error | worst cosine | worst gain | harm | verdict | rule | steps | right |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
        spread = max(seeds) - min(seeds)
        right = [_row(each, options.steps, spread) for each in _chosen(CANDIDATES, options.plans)]
        for candidate in _chosen(BORDERLINE, options.plans):
            _row(candidate, options.steps, spread)
    print(f"{sum(right)} of {len(right)} right")
    return 0 if all(right) else 1


def _chosen(candidates: Sequence[Candidate], parts: Sequence[str]) -> list[Candidate]:
    return [each for each in candidates if any(part in each.name for part in parts)]


def _row(candidate: Candidate, steps: int, spread: float) -> bool:
    say(candidate.name)
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        full = probe(candidate, steps, run)
        early = early_answer(run, full)
    harm = harms(full, spread)
    rulings = (early.ruling, full.ruling)
    is_right = all(ruling.is_pass is candidate.is_good and ruling is not Ruling.UNDECIDED for ruling in rulings)
    whole, *blocks = full.gradients
    cosine = min(each.cosine.value for each in blocks if each.cosine is not None)
    gain = max((each.gain.value for each in blocks if each.gain is not None), key=lambda gain: abs(gain - 1))
    ours, theirs = full.plan.held_out_loss, full.baseline.held_out_loss
    held_out = "–" if ours is None or theirs is None else f"{ours - theirs:+.4f}"
    cells = [candidate.name, "good" if candidate.is_good else "bad", held_out, f"{whole.relative_error:.1%}"]
    cells += [f"{cosine:.3f}", f"{gain:.3f}", " and ".join(harm) or "none"]
    cells += [str(early.ruling), early.decided_by, str(early.steps)]
    cells += ["yes" if is_right else f"NO ({full.ruling} over all steps)"]
    print(f"| {' | '.join(cells)} |", flush=True)
    return is_right and bool(harm) is not candidate.is_good


if __name__ == "__main__":
    raise SystemExit(main())
