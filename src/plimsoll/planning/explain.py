"""Makes the texts of errors and notes about plans.

They say what takes the memory at the floor (the lowest peak that any plan reaches), why a plan hardly lowers the peak, and why
a value is kept or dropped.
"""

from __future__ import annotations

import math
import re

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.naming import name_largest
from plimsoll.artifacts.other_budgets import OtherBudgets
from plimsoll.artifacts.plan import Peak
from plimsoll.errors import BudgetBelowFloor, InvalidStrategy
from plimsoll.planning.choice import Limits
from plimsoll.planning.describe import describe_peak
from plimsoll.planning.replay_schedule import Unreachable, recipe_ops
from plimsoll.planning.simulate import Simulation
from plimsoll.planning.step import RegionView
from plimsoll.units import MIB, budget_text, format_bytes, format_bytes_up, format_seconds

_SMALLER_STATE = "an optimizer with less state (SGD, an 8-bit Adam)"
_WORTH_NAMING = 0.005
"""Measured bytes below this share of the floor are not worth a clause."""
_WORTH_CHUNKING = 0.05
"""A share of the floor, which is the lowest peak of all plans. An error suggests a chunked loss only if that lowers the floor
by more than this share."""


def floor_error(
    budget_bytes: int,
    floor: Peak,
    excess_bytes: int = 0,
    *,
    chunked_bytes: int | None = None,
    accumulating_bytes: int = 0,
    state_bytes: int,
    others: OtherBudgets | None = None,
) -> BudgetBelowFloor:
    """Return the error for a budget below the floor, the lowest peak of all plans. It names the tensors alive at the floor.

    Args:
        budget_bytes: the user's budget.
        floor: the lowest peak.
        excess_bytes: measured minus predicted peak.
        chunked_bytes: the same plan's peak with the loss computed in chunks; ``None`` if the model does not have a suitable
            head.
        accumulating_bytes: the peak measured while gradients of earlier micro-batches are present.
        state_bytes: the optimizer state in the step.
        others: what other budgets cost.
    """
    floor_bytes = floor.bytes + excess_bytes
    chunked = ""
    if chunked_bytes is not None and floor.bytes - chunked_bytes > _WORTH_CHUNKING * floor.bytes:
        then = format_bytes(chunked_bytes + excess_bytes)
        chunked = f"call plimsoll.chunked.chunk_loss(model) before planning (floor {then}), or use "
    measured = ""
    if excess_bytes > _WORTH_NAMING * floor_bytes:
        measured = f", and a real step was measured to need {format_bytes(excess_bytes)} more"
    # With adapters the state is a few KiB, and a smaller one would not help.
    smaller_state = f", or {_SMALLER_STATE}" if state_bytes > _WORTH_CHUNKING * floor_bytes else ""
    accumulating = ""
    if accumulating_bytes > floor_bytes:
        accumulating = f", or {budget_text(accumulating_bytes)} if gradients accumulate over micro-batches"
    return BudgetBelowFloor(
        f"budget {format_bytes(budget_bytes)} is below the smallest reachable peak, {_named(floor_bytes)}.",
        why=f"{_name_together(floor)}{measured}",
        next=f"{chunked}{budget_text(floor_bytes)} ({floor_bytes} bytes){accumulating}, or a smaller micro-batch"
        f"{smaller_state}",
        others=() if others is None else others.lines(),
    )


def _named(floor_bytes: int) -> str:
    """Return the floor with the digits of the budget that the error advises: two figures for one floor were taken for two."""
    text = re.sub(r"(?<=\d)(?=[KMGT]iB)", " ", budget_text(floor_bytes).removeprefix("budget=").strip('"'))
    return text if text.endswith("B") else f"{floor_bytes} bytes"


def strategy_error(strategy: str, budget_bytes: int, peak: Peak, floor_bytes: int) -> BudgetBelowFloor:
    """Return the error for a named strategy whose peak exceeds the budget. It names the largest tensors at this peak."""
    if floor_bytes <= budget_bytes:
        advice = f"strategy='auto', whose floor is {format_bytes(floor_bytes)}"
    else:
        advice = f"a budget of at least {format_bytes_up(floor_bytes)} with strategy='auto'"
    return BudgetBelowFloor(
        f"strategy {strategy!r} peaks at {format_bytes(peak.bytes)}, above the budget {format_bytes(budget_bytes)}.",
        why=_name_together(peak),
        next=f"{advice}, or a budget of {format_bytes_up(peak.bytes)} for this strategy",
    )


def limits_error(what: str, simulation: Simulation, limits: Limits) -> InvalidStrategy:
    """Return the error for decisions that exceed the limits on gradient error or offloaded bytes.

    ``what`` says whose decisions they are: a named strategy or the user's overrides.
    """
    error = math.sqrt(simulation.squared_error)
    advice = "raise the limit, override fewer values, or let strategy='auto' choose"
    if limits.link_bytes is not None and simulation.link_bytes > limits.link_bytes:
        found = f"{what} would offload {format_bytes(simulation.link_bytes)}"
        why = f"the host budget is {format_bytes(limits.link_bytes)}"
    elif math.isinf(error):
        found = f"{what} would recompute an exact value (a mask, an index) from a lossy value"
        why = "the gradient would be wrong, not only less precise"
        advice = "keep the values that it is computed from, or compress them without loss"
    else:
        found = f"{what} would cause an expected gradient error of {error:.2g}"
        why = f"max_error allows {math.sqrt(limits.squared_error):.2g}"
    return InvalidStrategy(f"{found}.", why=why, next=advice)


def name_holders(peak: Peak) -> str:
    """Return a text with the largest tensors at a peak: ``4.1 GiB parameters; 3.2 GiB logits; 0.4 GiB in other tensors``."""
    return name_largest([(holder.label, holder.bytes) for holder in peak.holders])


def _name_together(peak: Peak) -> str:
    """Return a clause with the largest tensors at a peak and its moment."""
    return f"these tensors exist at the same time in {peak.moment}: {name_holders(peak)}"


def notes_about_peak(simulation: Simulation, baseline: Simulation) -> tuple[str, ...]:
    """Return a note on a plan that frees much memory at the end of forward but hardly lowers the peak.

    The note is one sentence in a tuple. The tuple is empty for other plans. ``baseline`` is the step without a plan.
    """
    resident, before = _resident_bytes(simulation), _resident_bytes(baseline)
    saved = before - resident
    if saved <= 0 or baseline.peak_bytes - simulation.peak_bytes >= saved // 2:
        return ()
    peak = describe_peak(simulation)
    return (
        f"The plan lowers what is resident after forward from {format_bytes(before)} to {format_bytes(resident)}, but "
        f"the peak only from {format_bytes(baseline.peak_bytes)} to {format_bytes(simulation.peak_bytes)}: the peak is in "
        f"{peak.moment} ({name_holders(peak)}).",
    )


def _resident_bytes(simulation: Simulation) -> int:
    """Return the bytes alive in a simulated step when the forward of the last region (module call) has ended."""
    views = simulation.index.views
    if not views:
        return 0
    return int(simulation.curve[min(2 * max(view.call.forward[1] for view in views), len(simulation.curve) - 1)])


def notes_about_forms(simulation: Simulation) -> tuple[str, ...]:
    """Return sentences that say why a plan does not compress or offload any value, although the user allowed this.

    The tuple is empty if there is nothing to explain.
    """
    index = simulation.index
    forms = [form for view in index.views for entry in view.forms.values() for form in entry.forms]
    used = {name for choice in simulation.choices for _, name in choice.packed}
    notes = []
    for decision, verb in ((Decision.COMPRESS, "compressed"), (Decision.OFFLOAD, "offloaded")):
        offered = {form.name for form in forms if form.decision is decision}
        if offered and not offered & used:
            why = (
                "everything fits without it"
                if all(
                    choice.kept == view.everything for view, choice in zip(index.views, simulation.choices, strict=True)
                )
                else "other decisions reach the budget in less time"
            )
            notes.append(f"Nothing is {verb} although it was allowed: {why}.")
    return tuple(notes)


def optimizer_floor_error(budget_bytes: int, floor_bytes: int, where: str = "") -> BudgetBelowFloor:
    """Return the error for a budget below the measured memory of the optimizer's step.

    ``where`` names the rank; it is empty if there is only one rank.
    """
    return BudgetBelowFloor(
        f"budget {format_bytes(budget_bytes)} is below what the optimizer's step needs, {format_bytes(floor_bytes)}{where}.",
        why="the optimizer's step needs parameters, gradients, its state and its temporaries at the same time, and a plan "
        "changes activations only",
        next=f"{budget_text(floor_bytes)}, or {_SMALLER_STATE}, or the optimizer's argument "
        "foreach=False (smaller temporaries)",
    )


def after_backward_floor_error(
    budget_bytes: int, floor_bytes: int, others: OtherBudgets | None = None
) -> BudgetBelowFloor:
    """Return the error for a budget below the memory that was measured after backward, before the next forward. ``others`` says
    what other budgets cost.
    """
    return BudgetBelowFloor(
        f"budget {format_bytes(budget_bytes)} is below what a training step takes after backward, {format_bytes(floor_bytes)}.",
        why="parameters, gradients, the optimizer's step, and tensors that the training loop makes until the next forward "
        "exist at the same time, and a plan changes activations only",
        next=f"{budget_text(floor_bytes)}, or {_SMALLER_STATE}, or the optimizer's argument "
        "foreach=False (smaller temporaries), or delete outputs and losses before the next forward",
        others=() if others is None else others.lines(),
    )


def compared(seconds: float, bytes_: int, price: float) -> str:
    """Return a text that compares the seconds of recomputing a value with the price of memory (seconds per byte).

    For example: ``recompute costs 0.8 µs/MiB, memory is worth 2.1 µs/MiB here``.
    """
    if not bytes_:
        return "it does not take memory"
    if math.isinf(seconds):
        cost = "it cannot be recomputed"
    else:
        cost = f"recompute costs {format_seconds(seconds * MIB / bytes_)}/MiB"
    return f"{cost}, {worth(price)}"


def worth(price: float) -> str:
    """Return a text that states a price of memory, given in seconds per byte: ``memory is worth 2.1 µs/MiB here``."""
    return f"memory is worth {format_seconds(price * MIB)}/MiB here" if price > 0 else "memory is not scarce here"


def why_kept(view: RegionView, value: int) -> str:
    """Return a text with the reason why one value of a region is kept under every plan."""
    if view.call.obstacle:
        return f"the region is not managed: {view.call.obstacle}"
    entry = view.graph.values[value]
    if entry.producer < 0:
        return f"{entry.origin.value} of the region"
    try:
        recipe_ops(view.graph, value, (frozenset(view.saved) | view.leaves) - {value})
    except Unreachable as unreachable:
        return f"it cannot be recomputed: {unreachable.obstacle}"
    return "its memory was allocated outside the region"
