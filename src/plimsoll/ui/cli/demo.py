"""``plimsoll demo``: train a small Llama on Python's own source, without and with a memory budget, and compare."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.ui.cli import commands, options, ranks, terminal
from plimsoll.ui.demo.story import BUDGET

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from plimsoll.ui.demo.story import OnStep

_LINES_PER_RUN = 6
DemoBudgetOption = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        metavar="BYTES",
        help="Memory limit for the step's peak; without Plimsoll it is about 422 MiB.",
    ),
]
DemoStepsOption = Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Training steps of each run.")]


@commands.command
def demo(*, budget: DemoBudgetOption = BUDGET, steps: DemoStepsOption = 30, seed: options.SeedOption = 0) -> None:
    """Train a small Llama on Python's own source text, without and with a memory budget, and compare both runs.

    Takes a few minutes on a laptop. Exits with 1 if gradients, losses or weights differ anywhere.
    """
    from plimsoll.errors import BudgetBelowFloor
    from plimsoll.estimator.targets.models import quiet_transformers
    from plimsoll.ui.demo import story
    from plimsoll.ui.demo.story import DemoSetup
    from plimsoll.ui.demo_terminal import render_introduction, render_preparation, render_story

    console = terminal.stdout()
    with ranks.one_process("demo"):
        quiet_transformers()
        setup = DemoSetup(steps=steps, seed=seed)
        console.print(render_introduction(setup))
        with terminal.show_progress() as report:
            try:
                ready = story.prepare(setup, budget, report)
            except BudgetBelowFloor as error:
                error.next = error.next.partition(", or ")[0]  # the demo has no option for other ways to a lower floor
                raise
        console.print(render_preparation(ready))
        with _show_steps(console, ("plain PyTorch", "with Plimsoll"), steps) as (plainly, managed):
            told = story.compare_training(setup, ready, plainly, managed)
        console.print(render_story(told))
        terminal.end(0 if told.is_success else 1)


@contextlib.contextmanager
def _show_steps(console: Console, names: tuple[str, ...], steps: int) -> Iterator[tuple[OnStep, ...]]:
    """A context that gives, for each training, a function to call after each step with the step's number, loss and seconds.

    The functions show one bar per training. Outside of a terminal, they print a few lines per training.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        yield tuple(_line_per_steps(console, name, steps) for name in names)
        return
    columns = (
        TextColumn("{task.description:14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield tuple(_bar_per_step(progress, name, steps) for name in names)


def _bar_per_step(progress: Progress, name: str, steps: int) -> OnStep:
    task = progress.add_task(name, total=steps, start=False, figures="")

    def on_step(step: int, loss: float, step_seconds: float) -> None:
        if step == 0:
            progress.start_task(task)
        progress.update(task, completed=step + 1, figures=f"loss {loss:.4f}  {step_seconds * 1e3:4.0f} ms a step")

    return on_step


def _line_per_steps(console: Console, name: str, steps: int) -> OnStep:
    def on_step(step: int, loss: float, step_seconds: float) -> None:
        if (step + 1) % max(1, steps // _LINES_PER_RUN) == 0:
            console.print(
                f"{name:14} step {step + 1:3} of {steps}  loss {loss:.4f}  {step_seconds * 1e3:4.0f} ms a step"
            )

    return on_step
