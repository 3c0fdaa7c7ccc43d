"""Overrides: decisions that a user makes for all values whose paths match a pattern. This file also applies them.

An override is written ``pattern=decision``: ``layers.*.mlp::silu=compress:int8``, ``*.attn*=keep``, ``layers.0.*=recompute``,
``*::gelu=offload``. The pattern is a shell pattern over the paths of values (`value_path`).
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from plimsoll.artifacts.decision import Decision
from plimsoll.errors import InvalidStrategy
from plimsoll.planning.choice import Choice
from plimsoll.planning.step import RegionView, StepIndex, boundary_values


@dataclass(frozen=True, slots=True)
class Override:
    """Data: a pattern over paths of values, and the user's decision (such as KEEP) for the values that match it.

    ``form`` is the name of the codec or link (to host memory or disk); if it is empty, any form is allowed.
    """

    pattern: str
    decision: Decision
    form: str = ""

    def matches(self, path: str) -> bool:
        """Return True if the pattern matches the path of a value.

        The number (``#0``) and the front of the path may be left out, and a module matches everything inside it:
        ``layers.*.mlp::silu`` also matches ``model.layers.0.mlp.act_fn::silu#0``.
        """
        inside = self.pattern.replace("::", ".*::")
        patterns = (self.pattern, f"*.{self.pattern}", inside, f"*.{inside}")
        paths = (path, path.rpartition("#")[0] or path)
        return any(fnmatch.fnmatchcase(name, pattern) for name in paths for pattern in patterns)


def value_path(region: str, value: str) -> str:
    """Return the path of a value in the notation of overrides: region (module call), module, op and the op's number.

    Example:
        >>> value_path("layers.0", "mlp::silu#0"), value_path("layers.0", "add#1")
        ('layers.0.mlp::silu#0', 'layers.0::add#1')
    """
    return f"{region}.{value}" if "::" in value else f"{region}::{value}"


def parse_override(text: str) -> Override:
    """Parse one override, written ``pattern=decision``.

    Raises:
        InvalidStrategy: the pattern is empty, or the decision does not exist.

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
            f"{text!r} is not a valid override.",
            why="an override is pattern=keep, =recompute, =compress, =compress:CODEC or =offload",
            next="write, for example, 'layers.*.mlp::silu=compress:int8'",
        )
    return Override(pattern.strip(), decision, form.strip())


def refuse_unknown_modules(overrides: Sequence[Override], modules: Sequence[str], ops: Collection[str]) -> None:
    """Refuse overrides that name a module which the model does not have, before the model is traced.

    The texts between the wildcards of a pattern are compared. So a pattern that passes may still match nothing: wildcards may
    hide which texts belong to one path.

    Args:
        overrides: the user's overrides.
        modules: the paths of all modules of the model, such as ``model.layers.0.mlp``.
        ops: the names of all ops that the model could run. A pattern without ``::`` may name one of them.

    Raises:
        InvalidStrategy: names the pattern and the closest modules.
    """
    names = sorted({name for module in modules for name in module.split(".")})
    paths = "\n".join(f".{module}.\n.{module}::" for module in modules)
    known_ops = "\n".join((*ops, *_NAMES_WITHOUT_OP))
    for override in overrides:
        path, colons, _ = override.pattern.partition("::")
        texts = _WILDCARD.split(path)
        # Without "::" the last name may belong to an op.
        parts = path.split(".") if colons else path.split(".")[:-1]
        unknown = next((part for part in parts if _PLAIN_NAME.fullmatch(part) and part not in names), None)
        if "." in texts[0] and f".{texts[0]}" not in paths:
            why, close = f"no module has {texts[0]!r} in its path", _closest(texts[0].rstrip("."), modules)
        elif unknown is not None:
            why, close = f"no module is named {unknown!r}", _closest(unknown, names)
        else:
            # What follows a single colon or a number sign belongs to a value of a compiled module, or counts.
            parts = [re.split("[:#]", text)[0] for text in texts]
            unknown = next((each for each in parts if each not in paths and (colons or each not in known_ops)), None)
            if unknown is None:
                continue
            why = f"no module has {unknown!r} in its path" + ("" if colons else ", and no op in its name")
            close = _closest(unknown.strip("."), names if colons else [*names, *ops])
        raise InvalidStrategy(
            f"override {override.pattern!r} does not match any module of the model.",
            why=why,
            next=f"closest: {', '.join(close)}" if close else "print(model) shows the modules",
        )


def _closest(text: str, names: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(text, names, n=3, cutoff=0.2)


_PLAIN_NAME = re.compile(r"\w+")
_WILDCARD = re.compile(r"\[[^\]]*\]|[*?\[]")
_NAMES_WITHOUT_OP = ("input", "scaled_dot_product_attention")
"""Names of values that are not names of ops: inputs of a region, and results of any kernel of fused attention."""


def pin_values(index: StepIndex, overrides: Sequence[Override]) -> StepIndex:
    """Return a copy of the step with the user's decisions recorded as ``pins`` of the regions.

    Raises:
        InvalidStrategy: an override matches no value, or demands what a value cannot do.
    """
    if not overrides:
        return index
    names = {value_path(view.call.name, view.graph.values[value].name) for view in index.views for value in view.saved}
    for override in overrides:
        if not any(override.matches(name) for name in names):
            close = difflib.get_close_matches(override.pattern, sorted(names), n=3, cutoff=0.2)
            raise InvalidStrategy(
                f"override {override.pattern!r} does not match any saved value.",
                why=f"values are named region.module::op, and none of the {len(names)} values matches",
                next="closest: " + ", ".join(close)
                if close
                else "plan once without the override, and look at the plan's values",
            )
    # A shallow copy suffices: nothing that the index has cached depends on decisions.
    pinned_index = copy.copy(index)
    pinned_index.views = tuple(dataclasses.replace(view, pins=_pins_of(view, overrides)) for view in index.views)
    return pinned_index


def _pins_of(view: RegionView, overrides: Sequence[Override]) -> dict[int, str]:
    """Return a mapping from values of a region to the user's demands: ``KEEP``, ``RECOMPUTE`` or the name of a form (codec or
    offload).

    If several overrides match a value, the last one applies.

    Raises:
        InvalidStrategy: the value cannot meet the demand.
    """
    pins: dict[int, str] = {}
    for value in view.saved:
        name = value_path(view.call.name, view.graph.values[value].name)
        override = next((o for o in reversed(overrides) if o.matches(name)), None)
        if override is not None and value not in view.resident:
            pins[value] = _pin(view, value, name, override)
    return pins


def _pin(view: RegionView, value: int, name: str, override: Override) -> str:
    """Return what an override demands of one value: ``KEEP``, ``RECOMPUTE`` or the name of a form (codec or offload).

    Raises:
        InvalidStrategy: the value cannot meet the demand.
    """
    if override.decision is Decision.KEEP:
        return Decision.KEEP
    if override.decision is Decision.RECOMPUTE and value in view.droppable:
        return Decision.RECOMPUTE
    entry = view.forms.get(value)
    forms = entry.forms if entry is not None and value in view.decided else ()
    wanted = [f for f in forms if f.decision is override.decision and override.form in ("", f.name)]
    if wanted:
        return min(wanted, key=lambda f: (f.noise > 0, f.held_bytes)).name
    if override.decision is Decision.RECOMPUTE:
        why = "it cannot be recomputed, or allow= does not include recompute"
    elif entry is not None and value not in view.decided:
        why = "other regions save the same memory"
    elif entry is not None and override.form in dict(entry.refused):
        why = dict(entry.refused)[override.form]
    else:
        why = "allow= or max_error= does not allow this form, or the value's data cannot be held in it"
    wishes = ("offload" if form.decision is Decision.OFFLOAD else f"compress:{form.name}" for form in forms)
    possible = ", ".join(["keep", *(["recompute"] if value in view.droppable else []), *wishes])
    raise InvalidStrategy(
        f"The override of {name!r} to {override.decision.value.lower()}{override.form and ':' + override.form} is impossible.",
        why=why,
        next=f"choose one of: {possible} (allow= enables compress and offload, max_error= enables lossy codecs), or exempt the "
        f"value with a later override: '{name}=keep'",
    )


def pinned(view: RegionView, choice: Choice) -> Choice:
    """Return a copy of a choice (what a region keeps or recomputes) that follows the user's decisions for single values."""
    if not view.pins:
        return choice
    rest = choice.without(frozenset(view.pins))
    kept = {value for value, pin in view.pins.items() if pin == Decision.KEEP and value in view.everything}
    forms = {(v, pin) for v, pin in view.pins.items() if pin not in (Decision.KEEP, Decision.RECOMPUTE)}
    return Choice(rest.kept | kept, rest.packed | forms, choice.is_boundary_dropped)


def pin_choices(index: StepIndex, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return a copy of the choices (what to keep or recompute), one for each region, that follows the user's decisions (pins).

    If a choice drops the region's input and an override decides about this input, the input is held.
    """
    return tuple(_pinned_in_step(index, view, choice) for view, choice in zip(index.views, choices, strict=True))


def _pinned_in_step(index: StepIndex, view: RegionView, choice: Choice) -> Choice:
    if choice.is_boundary_dropped and boundary_values(index, view) & view.pins.keys():
        choice = dataclasses.replace(choice, is_boundary_dropped=False)
    return pinned(view, choice)
