"""Decisions that a user has taken by pattern in, choices that respect them out.

An override is written ``pattern=decision``: ``layers.*.mlp::silu=compress:int8``, ``*.attn*=keep``,
``layers.0.*=recompute``, ``*::gelu=offload``. The pattern is a shell pattern over ``region.value`` names.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.artifacts.decision import Decision
from plimsoll.errors import InvalidStrategy
from plimsoll.planning.choice import Choice
from plimsoll.planning.step import RegionView, StepIndex


@dataclass(frozen=True, slots=True)
class Override:
    """One pattern and what is decided for the values that it matches; ``form`` is empty where any form will do."""

    pattern: str
    decision: Decision
    form: str = ""

    def matches(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern) or fnmatch.fnmatchcase(name, f"*.{self.pattern}")


def parse_override(text: str) -> Override:
    """Read one override.

    Raises:
        InvalidStrategy: no pattern, or no decision that there is.

    Example:
        >>> parse_override("layers.*.mlp::silu=compress:int8")
        Override(pattern='layers.*.mlp::silu', decision=<Decision.COMPRESS: 'COMPRESS'>, form='int8')
    """
    pattern, equals, wish = text.rpartition("=")
    word, colon, form = wish.partition(":")
    decision = next((d for d in Decision if d.value.lower() == word.strip().lower()), None)
    takes_form = decision in (Decision.COMPRESS, Decision.OFFLOAD)
    if not equals or not pattern.strip() or decision is None or (colon and (not form or not takes_form)):
        raise InvalidStrategy(
            f"{text!r} is no override.",
            why="it wants pattern=keep, =recompute, =compress, =compress:CODEC or =offload",
            next="write for example 'layers.*.mlp::silu=compress:int8'",
        )
    return Override(pattern.strip(), decision, form.strip())


def pin_values(index: StepIndex, overrides: Sequence[Override]) -> StepIndex:
    """Give the regions of a new index the decisions of the user; returns it.

    Raises:
        InvalidStrategy: an override matches nothing, or demands what a value cannot do.
    """
    names = {f"{view.call.name}.{view.graph.values[value].name}" for view in index.views for value in view.saved}
    for override in overrides:
        if not any(override.matches(name) for name in names):
            close = difflib.get_close_matches(override.pattern, sorted(names), n=3, cutoff=0.2)
            raise InvalidStrategy(
                f"override {override.pattern!r} matches no saved value.",
                why=f"values are named region.module::op; there are {len(names)}",
                next="closest: " + ", ".join(close) if close else "plan once without it, and show the plan's values",
            )
    index.views = tuple(dataclasses.replace(view, pins=pins_of(view, overrides)) for view in index.views)
    return index


def pins_of(view: RegionView, overrides: Sequence[Override]) -> dict[int, str]:
    """What overrides demand of the values of a region: ``KEEP``, ``RECOMPUTE`` or the name of a form; the last one counts.

    Raises:
        InvalidStrategy: a demand that the value cannot meet.
    """
    pins: dict[int, str] = {}
    for value in view.saved:
        name = f"{view.call.name}.{view.graph.values[value].name}"
        override = next((o for o in reversed(overrides) if o.matches(name)), None)
        if override is not None and value not in view.free:
            pins[value] = _pin(view, value, name, override)
    return pins


def _pin(view: RegionView, value: int, name: str, override: Override) -> str:
    if override.decision is Decision.KEEP:
        return Decision.KEEP
    if override.decision is Decision.RECOMPUTE:
        if value in view.droppable:
            return Decision.RECOMPUTE
        why, possible = "no recipe rebuilds it", "keep"
    else:
        entry = view.forms.get(value)
        forms = [] if entry is None else [f for f in entry.forms if f.decision is override.decision]
        wanted = [f for f in forms if not override.form or f.name == override.form]
        if wanted:
            return min(wanted, key=lambda f: (f.noise > 0, f.held_bytes)).name
        why = "it is not allowed, or its data do not take that form"
        if entry is not None and entry.obstacle:
            why = entry.obstacle
        possible = ", ".join(f.name for f in forms) or "keep, recompute"
    raise InvalidStrategy(
        f"{name!r} cannot be decided as {override.decision.value.lower()}{override.form and ':' + override.form}.",
        why=why,
        next=f"possible here: {possible} (allow= opens compress and offload, max_error= lossy codecs)",
    )


def pinned(view: RegionView, choice: Choice) -> Choice:
    """The same choice with pinned values as they are pinned."""
    if not view.pins:
        return choice
    rest = choice.without(frozenset(view.pins))
    kept = {value for value, pin in view.pins.items() if pin == Decision.KEEP and value in view.everything}
    forms = {(v, pin) for v, pin in view.pins.items() if pin not in (Decision.KEEP, Decision.RECOMPUTE)}
    return Choice(rest.kept | kept, rest.packed | forms, choice.is_boundary_dropped)


def pin_choices(index: StepIndex, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """One choice per region, as pinned."""
    return tuple(pinned(view, choice) for view, choice in zip(index.views, choices, strict=True))
