"""What an estimate says of a training step, beside a real step on this CPU: peak and categories, model by model.

    python -m benchmarks.estimate_accuracy

Every estimate is made without weights, from a fake trace with the kernels of a CPU; the real step then runs with random
weights and its allocator events are read. Writes ``benchmarks/results/<date>-<device>-estimates.md``.

The truth has to lie within the error bar of every row; a row that names something *unsupported* has no bar to keep.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Read when torch is loaded; without it the allocator warns once a second while memory is measured.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

from benchmarks.machine import device_name, page_head, page_stem, versions
from benchmarks.page import format_mib, format_table
from benchmarks.real_steps import MeasuredStep, Training, measure
from plimsoll.artifacts.costs import Costs, CostSource
from plimsoll.artifacts.estimate import StageEstimate
from plimsoll.artifacts.job import parse_precision
from plimsoll.artifacts.trace import Category
from plimsoll.estimator.estimate import estimate
from plimsoll.estimator.targets.tracing import TraceRequest, trace_target
from plimsoll.estimator.trace_cache import AnswerCache, TracedTarget
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_none
from plimsoll.tracing.meters.timing import one_thread

_RESULTS = Path(__file__).parent / "results"
_DEVICE = "laptop-CPU"
PEAK_WITHIN = 0.02
CATEGORY_WITHIN = 0.03

ROWS = (
    *(
        Training(target=name)
        for name in (
            "llama-tiny", "qwen3-tiny", "gpt2-tiny", "mixtral-tiny", "qwen3-moe-tiny", "deepseek-v3-tiny", "bert-tiny",
            "t5-tiny", "whisper-tiny", "mamba2-tiny", "vit-tiny", "clip-tiny", "sd-unet-tiny",
        )
    ),
    Training(target="llama-tiny", precision="bf16"),
    Training(target="llama-tiny", precision="bf16-mixed"),
    Training(target="gpt2-tiny", precision="bf16-mixed"),
    Training(target="vit-tiny", precision="bf16-mixed"),
    Training(target="llama-tiny", micro_batches=2),
    Training(target="t5-tiny", micro_batches=2),
    Training(target="llama-tiny", optimizer="sgd"),
    Training(target="gpt2-tiny", optimizer="sgd-momentum"),
    Training(target="qwen3-tiny", optimizer="adafactor"),
    Training(target="bert-tiny", optimizer="rmsprop"),
    Training(target="t5-tiny", optimizer="adagrad"),
)  # fmt: skip
"""Every family of the catalogue with dropout where its configuration has it, then precisions, accumulation, optimizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One predicted figure beside the measured one, in bytes."""

    name: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """As a share of what was measured."""
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training as estimated and as run."""

    training: Training
    stage: StageEstimate
    measured: MeasuredStep
    figures: tuple[Figure, ...]

    @property
    def peak(self) -> Figure:
        """The first figure."""
        return self.figures[0]

    @property
    def unsupported(self) -> str:
        """What the estimate gives no figure for."""
        return ", ".join(item.name for item in self.stage.unsupported)

    @property
    def is_within_bar(self) -> bool:
        """Whether the measured peak lies in the estimate's range, or the estimate says that it cannot give one."""
        return bool(self.unsupported) or abs(self.peak.predicted - self.peak.measured) <= self.stage.error_bytes

    @property
    def is_on_target(self) -> bool:
        """Peak within 2%, every category within 3%."""
        return abs(self.peak.error) <= PEAK_WITHIN and all(
            abs(figure.error) <= CATEGORY_WITHIN for figure in self.figures[1:]
        )


def compare(training: Training) -> Row:
    """Estimate a training without weights, then run it."""
    found = estimate(
        training.target,
        device=_DEVICE,
        precision=training.precision or None,
        optimizer=training.optimizer,
        layout=f"micro-batches={training.micro_batches}" if training.micro_batches > 1 else "",
    )
    (stage,) = found.stages
    held_bytes, gradient_bytes = _held_after_forward(training)
    measured = measure(training)
    items = {item.name: item.bytes or 0 for item in stage.items}
    made = sum(items.get(name, 0) for name in ("activations", "temporaries", "gradients"))
    return Row(
        training=training,
        stage=stage,
        measured=measured,
        figures=(
            Figure(name="peak", predicted=stage.allocated_bytes, measured=measured.peak_bytes),
            Figure(name="parameters", predicted=items["parameters"], measured=measured.parameter_bytes),
            Figure(name="gradients", predicted=gradient_bytes, measured=measured.gradient_bytes),
            Figure(name="optimizer state", predicted=items["optimizer state"], measured=measured.state_bytes),
            Figure(name="held after forward", predicted=held_bytes, measured=measured.held_bytes),
            Figure(name="made by the step", predicted=made, measured=measured.made_bytes),
        ),
    )


def _held_after_forward(training: Training) -> tuple[int, int]:
    """What forward leaves for backward, and the gradients that backward makes, by the trace that the estimate is made of."""
    request = TraceRequest(
        target=training.target, device_name=_DEVICE, precision=parse_precision(training.precision or None)
    )
    trace = trace_target(request, cache=AnswerCache(TracedTarget)).trace
    index = StepIndex(trace, Costs(device=_DEVICE, source=CostSource.ROOFLINE, ops={}))
    batch = sum(storage.bytes for storage in trace.storages if storage.category is Category.INPUT)
    gradients = sum(storage.bytes for storage in trace.storages if storage.category is Category.GRADIENT)
    kept = run_choices(index, choose_none(index, ""))
    return int(kept.curve[index.handover]) - index.lasting_bytes - batch, gradients


def page_lines(rows: Sequence[Row], command: str) -> Iterable[str]:
    """The page of results."""
    peaks = sorted(abs(row.peak.error) for row in rows)
    yield from page_head(
        "Estimates against real steps", command, device=device_name(torch.device("cpu")), versions=versions()
    )
    yield (
        "Estimated without weights, from a fake trace with the kernels of a CPU; measured from allocator events of a real step "
        "(the second: the optimizer's state is there) on one thread. Percentages are of what was measured. *Held* is what "
        "forward "
        "leaves for backward. *Made* is what the step itself has alive at the peak: activations, temporaries and gradients. "
        "*Bar* is the estimate's own error, as a share of its peak."
    )
    yield ""
    yield (
        f"{len(rows)} trainings: peak off by {peaks[len(peaks) // 2]:.2%} in the median, {peaks[-1]:.2%} at most; "
        f"{sum(row.is_on_target for row in rows)} with the peak within {PEAK_WITHIN:.0%} and every category within "
        f"{CATEGORY_WITHIN:.0%}; {sum(row.is_within_bar for row in rows)} within their error bar or with a part called "
        "unsupported."
    )
    yield ""
    head = ("training", "measured MiB", "estimated MiB", "peak", "parameters", "gradients", "optimizer state", "held", "made",
            "bar", "truth within", "unsupported")  # fmt: skip
    yield from format_table(head, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    bar = row.stage.error_bytes / row.stage.allocated_bytes
    errors = [f"{figure.error:+.2%}" if figure.predicted != figure.measured else "equal" for figure in row.figures]
    sizes = [format_mib(row.peak.measured), format_mib(row.peak.predicted)]
    return [
        str(row.training),
        *sizes,
        *errors,
        f"±{bar:.1%}",
        "yes" if row.is_within_bar else "**no**",
        row.unsupported,
    ]


def main() -> int:
    """Compare every row and write the page; 1 where a truth lies outside its bar."""
    rows = []
    with one_thread():
        for training in ROWS:
            print(training, file=sys.stderr, flush=True)
            rows.append(compare(training))
            print("  ", *_cells(rows[-1])[1:], file=sys.stderr, flush=True)
    lines = list(page_lines(rows, "python -m benchmarks.estimate_accuracy"))
    stem = page_stem(torch.device("cpu"), "estimates")
    (_RESULTS / f"{stem}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0 if all(row.is_within_bar for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
