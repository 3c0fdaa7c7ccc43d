"""Two ledgers in; nothing out if they can be two runs of one model, an error with numbers if they cannot.

Compared are the forward ops per step (kernels where no op is known), with their shapes where both traces note them. A
plan may add ops to the forward pass; those of the baseline have to be there. Where only one side is compiled, ops that
fuse come and go: then matrix products and convolutions are compared, which stay.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence

from plimsoll.analysis.diagnose.ledger import Ledger, Work, WorkKind
from plimsoll.artifacts.finding import WorkPhase
from plimsoll.errors import InvalidTrace

LEAST_COMMON_SHARE = 0.9
_MOST_FACTOR = 1.1
_SAME_FACTOR, _MOST_KEYS, _FEW_KEYS = 0.02, 0.8, 8
FUSED = re.compile(r"triton_(?:poi|red|per|tem|for)_|_fused_|nvfuser|CompiledF(?:unction|xGraph)", re.IGNORECASE)
HEAVY = re.compile(
    r"gemm|cutlass|cublas|conv|wgrad|dgrad|flash|fmha|attention|splitk|::(?:_?mm|addmm|bmm|baddbmm|linear|matmul)$",
    re.IGNORECASE,
)


def refuse_unlike(baseline: Ledger, plan: Ledger) -> None:
    """Refuse two profiles that cannot come from the same model, batch and number of steps.

    Raises:
        InvalidTrace: says how much of the baseline's forward pass the other one has.
    """
    ours, theirs = _forward_counts(baseline, plan), _forward_counts(plan, baseline)
    total = sum(ours.values())
    if not total:
        raise InvalidTrace(
            f"{baseline.source} shows no work in its steps.",
            why=f"of {baseline.steps} steps none ran an operation or a kernel",
            next="profile whole training steps, and export the trace after the profiler has stopped",
        )
    factors = [theirs[key] / count for key, count in ours.items() if theirs[key]]
    common = sum(min(count, theirs[key]) for key, count in ours.items()) / total
    factor = statistics.median(factors) if factors else 0.0
    if _is_uniform(factors, factor, baseline, plan) and not 1 / _MOST_FACTOR <= factor <= _MOST_FACTOR:
        raise InvalidTrace(
            f"{plan.source} runs each forward operation {factor:.2f} times as often as {baseline.source}.",
            why=f"per step, over {plan.steps} and {baseline.steps} steps that could be told apart; "
            "a plan runs the forward pass once, like the baseline",
            next="profile the same number of steps in both, and let profiler.step() mark them",
        )
    if common < LEAST_COMMON_SHARE:
        raise InvalidTrace(
            f"{plan.source} has {common:.0%} of the forward operations of {baseline.source}.",
            why=f"of {total:.0f} per step {total * (1 - common):.0f} are missing or have other shapes, "
            f"{_examples(ours, theirs)}; it seems to be another model or batch",
            next="profile the same model and batch twice, once without and once with the plan",
        )


def _is_uniform(factors: list[float], factor: float, baseline: Ledger, plan: Ledger) -> bool:
    """Whether nearly every operation runs more often by one factor: another number of steps, or of micro-batches.

    A few operations tell that only where the steps are not marked.
    """
    same = sum(1 for each in factors if abs(each - factor) <= _SAME_FACTOR * factor)
    least = _FEW_KEYS if baseline.are_steps_marked and plan.are_steps_marked else 1
    return same >= max(_MOST_KEYS * len(factors), least)


def _forward_counts(ledger: Ledger, other: Ledger) -> Counter[str]:
    """Forward work per step, by name and, where both traces have shapes, by shape."""
    works = _forward_work(ledger, has_ops=bool(ledger.forward_ops and other.forward_ops))
    has_shapes = ledger.has_shapes and other.has_shapes
    is_compiled = _is_compiled(ledger) != _is_compiled(other)
    counts = Counter(
        f"{name} {shape}" if has_shapes else name for name, shape in works if not is_compiled or HEAVY.search(name)
    )
    return Counter({key: count / ledger.steps for key, count in counts.items()})


def _forward_work(ledger: Ledger, *, has_ops: bool) -> Sequence[tuple[str, str]]:
    """Ops, or kernels where one side knows no ops; all kernels where phases are not known."""
    if has_ops:
        return ledger.forward_ops
    kernels = [work for work in ledger.work if work.kind in (WorkKind.COMPUTE, WorkKind.GRAPH)]
    forward = [work for work in kernels if work.phase is WorkPhase.FORWARD]
    return [(work.name, work.shape) for work in forward or kernels]


def _is_compiled(ledger: Ledger) -> bool:
    return any(FUSED.search(work.name) for work in ledger.work)


def is_element_wise(work: Work) -> bool:
    """Whether a compiler would fuse the work into its neighbours: computation that is no product or convolution."""
    return work.kind is WorkKind.COMPUTE and not HEAVY.search(work.name) and not FUSED.search(work.name)


def _examples(ours: Counter[str], theirs: Counter[str]) -> str:
    missing = sorted(((count - theirs[key], key) for key, count in ours.items() if theirs[key] < count), reverse=True)
    return "such as " + ", ".join(f"{count:.0f} × {key[:60]}" for count, key in missing[:2])
