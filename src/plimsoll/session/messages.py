"""Warnings and log lines about training steps."""

from __future__ import annotations

import logging
import sys
import time
import warnings

import torch
from torch import nn

from plimsoll.artifacts.progress import Progress, bar, is_bar_shown, silent
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.batch_shapes import Shapes
from plimsoll.session.situations import Situation
from plimsoll.units import budget_text, format_bytes

_LOG = logging.getLogger(__name__)

_QUIET_SECONDS = 1.0
"""Tracing that lasts longer than this is announced. It is less than half of planning, so all of planning then takes 2 s or
more.
"""
_TRACED_SHARE = 0.5


def warn(text: str) -> None:
    """Give a Python warning about a training step. The warning points near the user's call of the model."""
    warnings.warn(f"plimsoll: {text}", stacklevel=7)


def name_batch(error: BudgetBelowFloor, situation: Situation) -> None:
    """Add to the error about a budget which batch it is about. A loop of texts of random lengths was refused three times, each
    time with a longer text.
    """
    error.next += f". The budget is for this batch, {situation.shown}; larger ones may need more"


def announce(text: str) -> None:
    """Log one line at level INFO on the first rank.

    If neither the logger "plimsoll" nor the root logger has a handler, the program does not configure logging. Then the line
    is printed on stderr, unless the level of the logger "plimsoll" is above INFO.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    library = logging.getLogger("plimsoll")
    if library.hasHandlers():
        _LOG.info("plimsoll: %s", text)
    elif library.level <= logging.INFO > library.manager.disable and not library.disabled:  # level 0: not set
        print(f"plimsoll: {text}", file=sys.stderr, flush=True)


class PlanningNotice:
    """Passes on the progress reports of the first plan, and writes one line if planning takes seconds.

    Without it, a terminal or log shows nothing for 5 to 25 s. Nothing is written if ``report`` already shows the progress.
    """

    def __init__(self, report: Progress, budget: str) -> None:
        self._report = report
        self._text: str | None = f"planning for budget {budget} in the first two training steps"
        if report is not silent and not (report is bar and not is_bar_shown()):
            self._text = None
        self._begun_seconds = time.monotonic()

    def begin(self, stage: str) -> None:
        """Report that planning begins with ``stage``, and start the clock."""
        self._begun_seconds = time.monotonic()
        self._report(stage, 0.0)

    def __call__(self, stage: str, share: float, /) -> None:
        """Receive one report, as `Progress`."""
        if share < _TRACED_SHARE and time.monotonic() - self._begun_seconds > _QUIET_SECONDS:
            self.write()
        self._report(stage, share)

    def write(self) -> None:
        """Write the line now, if it was not written before."""
        if self._text is not None:
            announce(self._text)
        self._text = None


def warn_of_larger(situation: Situation) -> None:
    """Warn that this rank's batch is larger than the batches that the plan is for."""
    found = f"this rank's batch ({situation.shown}) is larger than all earlier batches, or its mask is of another kind"
    advice = "Pad batches to the same shape, or train on every rank's largest batch first"
    warn(
        f"{found}, and not all ranks have such a batch in this call. The plan stays the same, and this step may exceed the "
        f"budget. {advice}"
    )


def warn_of_unknown(shapes: Shapes) -> None:
    """Warn that the peak of a batch is unknown, because the ranks do not all meet a new shape in this call."""
    warn(
        f"the memory that a batch of {Situation(shapes).shown} needs is unknown: it does not follow from the shapes traced so "
        "far, and not all ranks have a new shape in this call. Such batches run at the lowest peak, and may exceed the budget. "
        "Let all ranks train on some of them in the first steps"
    )


def warn_of_waiting(waiting: int, planned: int, *, is_planned: bool) -> None:
    """Warn that more forwards wait for one backward than planned, and say whether the next steps are planned for that."""
    then = "; the following steps are planned for that" if is_planned else ""
    found = f"{waiting} forwards of the model wait for one backward"
    warn(f"{found}, and the plan was made for {planned}: this step may exceed the budget{then}")


def announce_no_backward_steps(reason: str) -> None:
    """Write one line that says why parameters are not stepped in backward, although it is allowed."""
    announce(f"parameters are not stepped in backward: {reason}")


def log_fewer_forwards(waiting: int, planned: int) -> None:
    """Log that the next steps are planned for fewer forwards before one backward, as the latest steps had them."""
    forwards = "1 forward" if waiting == 1 else f"{waiting} forwards"
    _LOG.info("plimsoll: plans are made for %s before one backward again, not for %d", forwards, planned)


def warn_of_state(new_bytes: int) -> None:
    """Warn that the plan does not count some state of this rank's optimizer."""
    state = (
        f"the optimizer of this rank has stepped ({format_bytes(new_bytes)} of new state), but not those of all ranks"
    )
    warn(f"{state}. The plan stays the same, and does not count this state. Pass optimizer= to plimsoll.attach")


def warn_of_overrun(peak_bytes: int, budget_bytes: int, cause: str, next_: str) -> None:
    """Warn that a step exceeded its budget. ``cause`` says why, and ``next_`` says what happens in the next steps."""
    warn(
        f"a training step took {format_bytes(peak_bytes)}, {format_bytes(peak_bytes - budget_bytes)} more than the "
        f"budget {format_bytes(budget_bytes)}.\n  why   {cause}\n  next  {next_}"
    )


def no_plan_is_lower(peak_bytes: int) -> str:
    """Return what to do about a step that exceeded its budget under the plan with the lowest peak."""
    return (
        f"the budget is below the smallest reachable peak of such steps, {format_bytes(peak_bytes)}, and this plan has it: set "
        f"{budget_text(peak_bytes)}, or use a smaller micro-batch"
    )


def log_recurrence(peak_bytes: int, budget_bytes: int, times: int, cause: str) -> None:
    """Log that a step exceeded its budget as an earlier one did that a warning has named."""
    # Not a warning: Python shows a warning with the same text once.
    _LOG.warning(
        "plimsoll: a training step took %s again, %s more than the budget %s (recurrence %d).\n  why   %s",
        *map(format_bytes, (peak_bytes, peak_bytes - budget_bytes, budget_bytes)),
        times,
        cause,
    )


def log_planning_overrun(peak_bytes: int, budget_bytes: int, why: str, next_: str) -> None:
    """Log that a call exceeded the budget only because plans were made in it. Later calls keep to the budget."""
    # A log line and not a warning: the device had enough memory, and the user has nothing to do.
    _LOG.warning(
        "plimsoll: the training call that made the plan took up to %s, %s more than the budget %s.\n  why   %s\n"
        "  next  later calls run under a plan for the budget; %s",
        *map(format_bytes, (peak_bytes, peak_bytes - budget_bytes, budget_bytes)),
        why,
        next_,
    )


def warn_of_floor(error: BudgetBelowFloor, why: str) -> None:
    """Warn that no plan fits any more (``error`` names the lowest peak), and that the plan with the lowest peak runs
    instead.
    """
    warn(
        f"{error.found}\n  why   {why}; {error.why}\n  next  {error.next}; until then, the plan with the lowest peak runs"
    )


def warn_of_parts(cause: str, next_: str, *, has_lowest: bool) -> None:
    """Warn that a step has called parts of the model, and not the model itself, so no plan was chosen for its batch."""
    then = "such steps run under the plan with the lowest peak" if has_lowest else "such steps run under the last plan"
    warn(f"a plan was not chosen for a training step; {then}, and are measured.\n  why   {cause}\n  next  {next_}")


def warn_of_frozen(model: nn.Module) -> None:
    """Warn that attach does not manage a call that computes gradients of its inputs only."""
    warn(
        f"this call of {type(model).__name__} trains no parameter, so it is not managed.\n  why   all its parameters are "
        "frozen, and attach plans in the first call that trains some\n  next  if you train parameters later, change nothing; "
        "else unfreeze some"
    )


def warn_of_unseen(model: nn.Module, part: str) -> None:
    """Warn that an optimizer steps the model's parameters although the model was never called in training mode. ``part`` is the
    part of it that was called instead, or "" if none was seen.
    """
    name = type(model).__name__
    children = [child_name for child_name, child in model.named_children() if any(True for _ in child.parameters())]
    cause = "the training loop calls another module, or calls this one in evaluation mode"
    next_ = f"attach to the module that is called, such as .{[*children, 'module'][0]}"
    if part:
        cause = (
            f"the training loop calls {part!r} of {name} without a call of {name} itself, as model.forward(batch) does"
        )
        next_ = f"call the model itself, model(batch), or attach to .{part.partition('.')[0]}, if that is what the loop calls"
    warn(
        f"an optimizer has trained {name}, but attach has not seen a training call of it, so nothing is managed.\n"
        f"  why   attach plans in the call of this very module; {cause}\n  next  {next_}"
    )
