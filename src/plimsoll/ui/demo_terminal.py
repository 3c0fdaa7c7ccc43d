"""Renders the demo on a terminal: the plan, claims and measurements, and a summary in three sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan
from plimsoll.ui.document import MemoryChart, Table, Tone, format_budget, name_budget
from plimsoll.ui.terminal import render_elements
from plimsoll.ui.views.plan import classes_table, decisions_table
from plimsoll.units import format_bytes, format_bytes_up, format_more, format_seconds, format_share

if TYPE_CHECKING:
    from plimsoll.ui.demo.story import DemoSetup, Preparation, Story

_SPARKS = "▁▂▃▄▅▆▇█"
_HELD = {True: "✓", False: "✗"}


def render_introduction(setup: DemoSetup) -> RenderableType:
    """Render the text that announces what the demo trains."""
    return Text.assemble(
        ("Plimsoll demo\n", "bold"),
        f"A Llama of {setup.layers} layers, hidden size {setup.hidden_size}, learns Python's standard library byte by ",
        f"byte:\n{setup.batch} × {setup.sequence} bytes a step, {setup.steps} steps, AdamW. ",
        "Two copies of the model train in turns: one without and one with a memory budget.\n",
    )


def render_preparation(ready: Preparation) -> RenderableType:
    """Render the plan, before the training starts."""
    plan = ready.plan
    budget = name_budget(plan.budget_bytes)
    return Group(
        Text(f"{ready.parameters / 1e6:.1f} million parameters; without a plan the step peaks at "
             f"{format_bytes(plan.baseline_peak_bytes)}; {budget}, floor {format_bytes_up(plan.floor_bytes)}.\n"),
        *render_elements([classes_table(plan), decisions_table(plan)]),
        Text("\nMemory over one step under the plan", style="bold"),
        *render_elements([MemoryChart(plan.timeline, plan.budget_bytes)]),
        Text(),
    )  # fmt: skip


def render_story(story: Story) -> RenderableType:
    """Render a table of both trainings side by side, the checks, and a summary in three sentences."""
    plan, receipt = story.plan, story.receipt
    unmanaged, managed = story.unmanaged, story.managed
    table = Table(
        title="The same training twice",
        header=("", "plain PyTorch", "with Plimsoll"),
        numbers=(1, 2),
        rows=[
            (
                "predicted peak",
                format_bytes(plan.baseline_peak_bytes),
                format_bytes(plan.predicted_peak_bytes),
            ),
            ("measured peak", _bytes(receipt.measured_baseline_peak_bytes), _bytes(receipt.measured_peak_bytes)),
            ("predicted step time", "", format_share(plan.predicted_overhead)),
            ("fastest step", format_seconds(unmanaged.fastest_seconds), format_seconds(managed.fastest_seconds)),
            ("step time, paired median", "", format_share(story.measured_overhead)),
            ("first and last loss", _ends(unmanaged.losses), _ends(managed.losses)),
            ("loss curve", draw_spark(unmanaged.losses), draw_spark(managed.losses)),
        ],
    )
    equal = receipt.compared_gradients - len(receipt.gradient_mismatches)
    checks = Table(
        rows=[
            (_HELD[is_held], text)
            for text, is_held in (
                (
                    f"every peak, also of the first step, within the budget: {_budget(plan)}",
                    not receipt.is_over_budget,
                ),
                (
                    f"{equal} of {receipt.compared_gradients} gradients equal bit for bit",
                    not receipt.gradient_mismatches,
                ),
                (f"{len(managed.losses)} losses identical bit for bit", story.are_losses_identical),
                ("weights after the last step identical bit for bit", story.are_weights_identical),
            )
        ],
        tones={_HELD[True]: Tone.GOOD, _HELD[False]: Tone.BAD},
    )
    return Group(
        *render_elements([table, checks]), Text(), Panel(tell(story), title="What happened", title_align="left")
    )


def tell(story: Story) -> str:
    """Return a summary of the demo's results in three sentences."""
    plan, receipt = story.plan, story.receipt
    first = (
        f"Plain training needs {_bytes(receipt.measured_baseline_peak_bytes)} at its peak, "
        f"but the budget was only {_budget(plan)}."
    )
    dropped, total = _dropped(plan)
    second = (
        f"Plimsoll freed {format_bytes(dropped)} of the {format_bytes(total)} of activations that forward saves, and "
        f"recomputed them in backward, so the step peaked at {_bytes(receipt.measured_peak_bytes)} "
        f"and took {format_more(story.measured_overhead)} time."
    )
    if story.is_success:
        third = "Every gradient, every loss and every final weight is equal bit for bit to the run without Plimsoll."
    else:
        third = f"A check failed ({receipt.verdict}): the rows with a cross above show which. Please report it."
    return f"{first} {second} {third}"


def draw_spark(numbers: list[float], *, width: int = 20) -> str:
    """Return the numbers as one line of small bars.

    If there are more than ``width`` numbers, only ``width`` of them are drawn.
    """
    if not numbers:
        return ""
    shown = [numbers[index * len(numbers) // min(width, len(numbers))] for index in range(min(width, len(numbers)))]
    low, high = min(shown), max(shown)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((number - low) * scale)] for number in shown)


def _dropped(plan: Plan) -> tuple[int, int]:
    """Return the bytes that the plan recomputes, and all bytes that forward saves in the managed regions (modules that the plan
    decides about) without a plan.
    """
    decisions = [decision for region in plan.regions for decision in region.decisions]
    dropped = sum(decision.bytes for decision in decisions if decision.decision is Decision.RECOMPUTE)
    return dropped, sum(decision.bytes for decision in decisions)


def _budget(plan: Plan) -> str:
    return format_budget(plan.budget_bytes, "no budget")


def _bytes(bytes_: int | None) -> str:
    return "not measured" if bytes_ is None else format_bytes(bytes_)


def _ends(losses: list[float]) -> str:
    return f"{losses[0]:.4f} → {losses[-1]:.4f}"
