"""A ``Choice``: what one region (module call) does with its saved values (the tensors that autograd saves), and its costs apart
from memory.

A choice says which values are kept and which are *packed*: held in another form, compressed or offloaded over a link (to host
memory or disk). All other values are rebuilt. Forms cost seconds and gradient error, and they take room at the other end of the
link. ``Limits`` bounds the sum over all regions.

*Seconds.* Values that a region sends leave while the next region's forward runs, and come back while that region's backward
runs. Each region and direction has its own window, so regions do not compete. If a transfer takes longer than its window, the
step waits for the rest of it.

*Error.* A value in a lossy form changes the gradient through its own slots, and through every dropped slot whose recipe starts
from it. Each slot adds (sensitivity of its value · noise of the form)². The model assumes that noise passes through recipes
unchanged and that noises are independent; the actual error is measured when a plan is run once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Form
from plimsoll.planning.replay_schedule import recipe_ops
from plimsoll.planning.step import RegionView, StepIndex, provider_of

Packed = frozenset[tuple[int, str]]
"""A set of pairs (value, form). The value is an id in the graph of a region. The form is the name of the codec that compresses
the value, or of the link that offloads it.
"""


@dataclass(frozen=True)
class Choice:
    """Data: what one region does with its saved values.

    ``kept`` values are held unchanged, ``packed`` values in another form (compressed or offloaded). All other values that can
    be rebuilt are rebuilt in backward. With ``is_boundary_dropped`` the region's input is not held either: the region before
    rebuilds it.
    """

    kept: frozenset[int]
    packed: Packed = frozenset()
    is_boundary_dropped: bool = False

    @cached_property
    def forms(self) -> dict[int, str]:
        """A mapping from each packed (compressed or offloaded) value to the name of its form, which is a codec or a link."""
        return dict(self.packed)

    def without(self, values: frozenset[int]) -> Choice:
        """Return a copy of this choice that does not hold the given values: neither kept, nor compressed, nor offloaded."""
        if not values:
            return self
        packed = frozenset((value, form) for value, form in self.packed if value not in values)
        return Choice(self.kept - values, packed, self.is_boundary_dropped)

    def as_is(self, values: frozenset[int]) -> Choice:
        """Return a copy of this choice that keeps the given values unchanged, if they were compressed or offloaded."""
        packed = frozenset((value, form) for value, form in self.packed if value not in values)
        if len(packed) == len(self.packed):
            return self
        return Choice(self.kept | (self.forms.keys() & values), packed, self.is_boundary_dropped)


@dataclass(frozen=True, slots=True)
class Limits:
    """Data: limits on the gradient error and on the offloaded bytes of all regions together. Memory is limited elsewhere.

    ``squared_error`` limits the square of the relative gradient error. ``link_bytes`` limits the offloaded bytes; ``None`` if
    they are not limited.
    """

    squared_error: float = 0.0
    link_bytes: int | None = None

    def allow(self, squared_error: float, link_bytes: int) -> bool:
        """Return True if this squared error and these offloaded bytes are within the limits.

        The error may exceed its limit by a millionth, because the solver has that tolerance. An infinite error (a mask
        rebuilt from a lossy value) is a wrong gradient, which no limit allows.
        """
        if squared_error > self.squared_error * (1 + 1e-6) or math.isinf(squared_error):
            return False
        return self.link_bytes is None or link_bytes <= self.link_bytes

    def are_within(self, others: Limits) -> bool:
        """Return True if these limits are at least as strict as ``others``: what they allow, the others allow too."""
        if others.link_bytes is not None and (self.link_bytes is None or self.link_bytes > others.link_bytes):
            return False
        return self.squared_error <= others.squared_error


def forms_of(view: RegionView, choice: Choice) -> list[Form]:
    """Return a list with the form (codec or link to host memory or disk) of each value that a choice compresses or offloads.

    A choice says what a region does with its saved values.
    """
    return [view.form(value, name) for value, name in choice.packed]


def link_bytes(view: RegionView, choice: Choice) -> int:
    """Return the bytes that the offloaded values of a region take in host memory or on disk."""
    return sum(form.link_bytes for form in forms_of(view, choice))


def packing_seconds(index: StepIndex, view: RegionView, choice: Choice) -> float:
    """Return the seconds per step that the compressed and offloaded values of a region add.

    They are the seconds to encode and decode values, and to wait for the link.
    """
    forms = forms_of(view, choice)
    return sum(form.seconds for form in forms) + _waiting_seconds(index, view, forms)


def _waiting_seconds(index: StepIndex, view: RegionView, forms: list[Form]) -> float:
    """Return the seconds that the step waits for one region's transfers over the link, out and back together.

    A transfer makes the step wait for the part of its time that the compute of the next region does not hide. If the step's
    transfers follow another schedule, the seconds are taken from that schedule.
    """
    if index.transfers is not None:
        return index.transfers.waiting_seconds.get(view.call.index, 0.0)
    sent = [form.link_bytes for form in forms if form.decision is Decision.OFFLOAD]
    link, after = index.forms.link, index.neighbour(view.call.index)
    if not sent or link is None or after is None:
        return 0.0
    latency_seconds = len(sent) * link.latency_seconds
    out_seconds = latency_seconds + sum(sent) / link.out_bytes_per_second
    in_seconds = latency_seconds + sum(sent) / link.in_bytes_per_second
    out_window, in_window = index.transfer_windows(view.call, after)
    return max(0.0, out_seconds - out_window) + max(0.0, in_seconds - in_window)


def choice_error(view: RegionView, choice: Choice) -> float:
    """Return the squared relative gradient error that one region's compressed and offloaded values are expected to cause.

    The error is infinite if a value that must be exact (an index, a mask) would be rebuilt from a lossy form, or if another
    value would be rebuilt from a private form, which only the value's own slots (saved tensors) can use.
    """
    return _Noise(view, choice, {}).squared_error()


def step_error(index: StepIndex, choices: Sequence[Choice], linked: Mapping[int, frozenset[int]]) -> float:
    """Return the squared relative gradient error that the compressed and offloaded values of all regions should cause.

    ``choices`` has one choice (what to keep or recompute) for each region. ``linked`` maps each region whose input is dropped
    to the ids of the input values that are not held.
    """
    return sum(noise.squared_error() for noise in _noises(index, choices, linked))


def with_lossy_input(
    index: StepIndex, choices: Sequence[Choice], linked: Mapping[int, frozenset[int]]
) -> frozenset[int]:
    """Return the positions of the regions whose dropped input is rebuilt from values that are stored with loss.

    Arguments are as for `step_error`.
    """
    noises = _noises(index, choices, linked)
    return frozenset(at for at, noise in enumerate(noises) if any(noise.linked.values()))


def _noises(index: StepIndex, choices: Sequence[Choice], linked: Mapping[int, frozenset[int]]) -> list[_Noise]:
    noises: list[_Noise] = []
    for view, choice in zip(index.views, choices, strict=True):
        mine = linked.get(view.call.index, frozenset())
        given = {}
        if mine:
            provider = noises[provider_of(index, view, mine)]
            given = {value: provider.of_output(view.graph.values[value].storage) for value in mine}
        noises.append(_Noise(view, choice, given))
    return noises


def form_error(view: RegionView, choice: Choice, value: int) -> float:
    """Return the relative gradient error that one value of a region adds because a codec stores it with loss.

    The error comes from the saved tensors (slots) that hold the value, and from all values that are rebuilt from the value.
    """
    noise = view.form(value, choice.forms[value]).noise
    if not noise:
        return 0.0
    made = _Noise(view, choice, {})
    return noise * math.sqrt(sum(view.sensitivity(v) ** 2 for v in view.saved if value in made.leaves(v)))


class _Noise:
    """A computation for one region: the squared noise (relative error) that its values have when backward reads them.

    Noise comes from values that are stored with loss, and passes to all values rebuilt from them. ``linked`` maps the region's
    dropped inputs, which the region before rebuilds, to their squared noise.
    """

    def __init__(self, view: RegionView, choice: Choice, linked: Mapping[int, float]) -> None:
        forms = {value: view.form(value, form) for value, form in choice.packed if value not in linked}
        self.linked = linked
        self._view = view
        self._held = view.leaves | choice.kept | forms.keys() | linked.keys()
        self._private = {value for value, form in forms.items() if form.is_private}
        self._of_leaves = {value: form.noise**2 for value, form in forms.items()} | dict(linked)

    def squared_error(self) -> float:
        """Return the squared relative gradient error that the noise of all saved values causes."""
        # Most choices hold nothing lossy; then the recipes need not be walked.
        if not self._private and not any(self._of_leaves.values()):
            return 0.0
        total = 0.0
        for value in self._view.saved:
            noise = self.squared(value)
            if noise:
                # 0 · inf would be NaN for a value with sensitivity 0, but the value is wrong all the same.
                total += self._view.sensitivity(value) ** 2 * noise if math.isfinite(noise) else math.inf
        return total

    def squared(self, value: int) -> float:
        """Return the squared noise (relative error) of a value that backward reads from the value's own saved tensors.

        It is infinite if the value is rebuilt from another value's private form (codec or offload), which only that value's
        saved tensors use.
        """
        leaves = self.leaves(value)
        if self._private.intersection(leaves) - {value}:
            return math.inf
        return sum(self._of_leaves.get(leaf, 0.0) for leaf in leaves)

    def leaves(self, value: int) -> tuple[int, ...]:
        """Return the ids of the held values that a value is rebuilt from; if the value itself is held, only its own id."""
        return (value,) if value in self._held else recipe_ops(self._view.graph, value, self._held)[1]

    def of_output(self, storage: int) -> float:
        """Return the squared noise (relative error) of the region's output in ``storage``, as the next region receives it."""
        graph = self._view.graph
        outputs = [value for value in graph.outputs if graph.values[value].storage == storage]
        return max(math.inf if value in self._private else self.squared(value) for value in outputs)
