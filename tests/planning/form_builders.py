"""Other forms for the values of synthetic steps, and choices that use them: drawn at random, or the same for every block."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Form, Forms, LinkCost, RegionForms, ValueForms
from plimsoll.artifacts.region import Value
from plimsoll.artifacts.trace import Trace
from plimsoll.planning.choice import Choice
from plimsoll.planning.step import RegionView, StepIndex


def random_forms(trace: Trace, costs: Costs, seed: int, *, share: float = 0.6) -> Forms:
    """Forms for a ``share`` of the saved values: lossless, lossy, private, and over a link where something hides it."""
    draw = random.Random(f"forms {seed}")
    index = StepIndex(trace, costs)
    bytes_per_second = draw.choice([2.0, 10.0, 1000.0])
    link = LinkCost(
        name="host",
        out_bytes_per_second=bytes_per_second,
        in_bytes_per_second=bytes_per_second * draw.choice([0.5, 1.0]),
        latency_seconds=draw.choice([0.0, 0.1]),
    )
    has_link = draw.random() < 0.7
    regions = []
    for view in index.views:
        can_send = has_link and index.neighbour(view.call.index) is not None
        entries = [
            _random_entry(draw, view.graph.values[value], can_send=can_send)
            for value in view.saved
            if value not in view.free and draw.random() < share
        ]
        regions.append(RegionForms(name=view.call.name, call=view.call.call, values=tuple(entries)))
    return Forms(regions=tuple(regions), link=link if has_link else None)


def _random_entry(draw: random.Random, value: Value, *, can_send: bool) -> ValueForms:
    is_exact = draw.random() < 0.25
    forms = []
    if draw.random() < 0.5:
        forms.append(_random_form(draw, "lossless", value))
    if not is_exact and draw.random() < 0.7:
        forms.append(_random_form(draw, "int8", value, noise=draw.choice([0.01, 0.02])))
    if not is_exact and draw.random() < 0.3:
        forms.append(_random_form(draw, "int4", value, noise=draw.choice([0.1, 0.2])))
    if draw.random() < 0.2:
        forms.append(_random_form(draw, "sign", value, is_private=True))
    if can_send and draw.random() < 0.5:
        forms.append(offloaded(value.bytes, draw.choice([0.0, 0.1])))
    sensitivity = math.inf if is_exact else draw.choice([0.1, 0.5, 1.0])
    return ValueForms(value=value.name, sensitivity=sensitivity, forms=tuple(forms))


def _random_form(draw: random.Random, name: str, value: Value, **more: Any) -> Form:
    return compressed(
        name,
        draw.randint(0, max(value.bytes - 1, 0)),
        encode_seconds=draw.choice([0.0, 0.1, 0.4]),
        decode_seconds=draw.choice([0.0, 0.1, 0.4]),
        workspace_bytes=draw.choice([0, 0, 3]),
        **more,
    )


def block_forms(trace: Trace, costs: Costs, *, bytes_per_second: float = 2000.0, host: bool = True) -> Forms:
    """Alike forms for alike blocks: masks as bits, everything else as zeros (lossless), int8, int4 or over the link."""
    index = StepIndex(trace, costs)
    regions = []
    for view in index.views:
        can_send = host and index.neighbour(view.call.index) is not None
        values = [view.graph.values[value] for value in view.saved if value not in view.free]
        entries = tuple(_block_entry(value, can_send=can_send) for value in values)
        regions.append(RegionForms(name=view.call.name, call=view.call.call, values=entries))
    speeds = {"out_bytes_per_second": bytes_per_second, "in_bytes_per_second": bytes_per_second}
    link = LinkCost(name="host", latency_seconds=1e-3, **speeds)
    return Forms(regions=tuple(regions), link=link if host else None)


def _block_entry(value: Value, *, can_send: bool) -> ValueForms:
    size, seconds = value.bytes, value.bytes / 1e5
    is_mask = "bernoulli" in value.name
    if is_mask:
        forms = [compressed("bits", size // 8, seconds)]
    else:
        forms = [
            compressed("zeros", size * 3 // 4, 2 * seconds, workspace_bytes=size // 8),
            compressed("int8", size // 2, seconds, noise=0.006),
            compressed("int4", size // 4, 2 * seconds, noise=0.08),
        ]
    if can_send:
        forms.append(offloaded(size))
    return ValueForms(value=value.name, sensitivity=math.inf if is_mask else 0.02, forms=tuple(forms))


def compressed(name: str, held_bytes: int, seconds: float = 0.0, **more: Any) -> Form:
    """A codec that takes as long to encode as to decode, unless ``more`` says otherwise."""
    times = {"encode_seconds": seconds, "decode_seconds": seconds}
    return Form(name=name, decision=Decision.COMPRESS, held_bytes=held_bytes, **(times | more))


def offloaded(size: int, seconds: float = 0.0) -> Form:
    """All of a value over the link."""
    times = {"encode_seconds": seconds, "decode_seconds": seconds}
    return Form(name="host", decision=Decision.OFFLOAD, held_bytes=0, link_bytes=size, **times)


def forms_for(
    trace: Trace, forms: dict[str, Iterable[Form]], *, sensitivity: float = 0.5, link: LinkCost | None = None
) -> Forms:
    """The given forms, by the values' names, in every region that has a value of that name."""
    regions = []
    for call in trace.regions:
        names = {value.name for value in call.graph.values}
        entries = tuple(
            ValueForms(value=name, sensitivity=sensitivity, forms=tuple(given))
            for name, given in forms.items()
            if name in names
        )
        regions.append(RegionForms(name=call.name, call=call.call, values=entries))
    return Forms(regions=tuple(regions), link=link)


def random_choice(draw: random.Random, view: RegionView, *, may_drop_boundary: bool = False) -> Choice:
    """Any state for every value that may be decided."""
    kept, packed = set(), set()
    for value in view.decided:
        entry = view.forms.get(value)
        states = ["keep", *(["drop"] if value in view.droppable else [])]
        state = draw.choice([*states, *(form.name for form in (entry.forms if entry is not None else ()))])
        if state == "keep":
            kept.add(value)
        elif state != "drop":
            packed.add((value, state))
    is_dropped = may_drop_boundary and view.call.index > 0 and draw.random() < 0.5
    return Choice(frozenset(kept), frozenset(packed), is_dropped)
