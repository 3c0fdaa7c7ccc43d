"""Decides which training steps are metered (their peak is measured): steps in a situation (shapes, existing gradients, waiting
forwards) that no metered step covers, and samples of the others.

Metering a step on a CPU needs torch's profiler, so most steps are not metered. A forward may run more operations than earlier
ones (layers that are dropped at random), which is known only when it has ended. Then all following steps are metered until one
runs as much.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from plimsoll.session.batch_shapes import Shapes, covers, shown, standing_in
from plimsoll.tracing.recorder.fingerprint import AUTOCAST

_MOST_TRIES = 3
"""After this many failed measurements of steps in one situation (shapes, gradients, waiting forwards), treat it as known."""

_ENOUGH = 6
"""If tensors in lists vary in size, a call is not metered once this many metered calls together bound it."""


_ALL_FIRST = 16
"""Meter every one of the first 16 steps."""
_SHARE_LATER = 1 / 16
"""From then on, meter a sixteenth of the steps. A metered step takes 3 to 4% longer than others; a step of a few milliseconds,
half as long again.
"""
_GOLDEN = 0.6180339887498949


_MORE = 1.01
"""A forward counts as running more operations than another if it makes more than this multiple of the other's autograd
nodes.
"""


_MOST_WAITED = 16
"""Meter at most this many steps while waiting for one that runs as many operations as the largest."""


_TENSOR = re.compile(r"\b([a-z]+[0-9]*\w*)\[([0-9]+(?:x[0-9]+)*)?\]")


class Situation(NamedTuple):
    """The facts that determine the peak of a training step under a given plan and that are known before the step, as data."""

    shapes: Shapes
    accumulates: bool = False
    in_flight: int = 1
    reduces: bool = True
    """False if gradients wait after their backward for a later reduction."""
    thawed: frozenset[int] = frozenset()
    """Parameters that were frozen when the plan was made and are trained now, as indices into the list of frozen parameters."""

    def is_within(self, other: Situation) -> bool:
        """Return True if a step in the situation (shapes, gradients, waiting forwards) ``other`` needs at least as much memory
        as a step in this one.
        """
        return covers(other.shapes, self.shapes) and self.is_alike(other)

    def is_alike(self, other: Situation) -> bool:
        """Return True if a step in the situation (shapes, gradients, waiting forwards) ``other`` needs at least as much memory
        as a step in this one, apart from the shapes of their batches.
        """
        return (
            self.accumulates <= other.accumulates
            and self.in_flight <= other.in_flight
            and self.reduces is other.reduces
            and self.thawed <= other.thawed
        )

    @property
    def turn(self) -> tuple[bool, bool]:
        """The kind of micro-batch (first, middle or last of a step), as ``(accumulates, reduces)``."""
        return self.accumulates, self.reduces

    def differences(self, known: Iterable[Situation]) -> str:
        """Describe what is new compared with the ``known`` situations (shapes, gradients, waiting forwards)."""
        known = tuple(known)
        found = []
        if not any(covers(other.shapes, self.shapes) for other in known):
            before = " or ".join(dict.fromkeys(other.shown for other in known)) or "none"
            found.append(f"its batch is {self.shown}, and the plan was made for {before}")
        if not any(self.in_flight <= other.in_flight for other in known):
            found.append(f"{self.in_flight} forwards of the model wait for one backward")
        if self.accumulates and not any(other.accumulates for other in known):
            found.append("gradients of an earlier backward already exist")
        if not any(self.reduces is other.reduces for other in known):
            found.append("it reduces gradients that waited" if self.reduces else "its gradients wait to be reduced")
        if not any(self.thawed <= other.thawed for other in known):
            found.append(f"{len(self.thawed)} of its parameters were frozen before")
        return "; ".join(found)

    @property
    def shown(self) -> str:
        """The batch's shapes as text, such as ``i64[2x512], i64[2x512]``."""
        return shown(self.shapes)


def planned_situation(signature: str, in_flight: int) -> Situation:
    """Return the situation (shapes of the batch, existing gradients, waiting forwards) of the step that a plan was made for.

    ``signature`` is the text in a plan that describes this step. ``in_flight`` is the number of forwards that wait for one
    backward.
    """
    found = _TENSOR.findall(signature)
    shapes = tuple((kind, tuple(int(size) for size in sizes.split("x") if size)) for kind, sizes in found)
    shapes += tuple((part, ()) for part in signature.split("; ") if part.startswith(AUTOCAST))
    return Situation(shapes, "accumulating" in signature, in_flight)


class MeteredSituations:
    """The situations (shapes, gradients, waiting forwards) of the steps whose memory was measured under the current plan. It
    decides which steps are measured next.
    """

    def __init__(self, known: Iterable[Situation] = ()) -> None:
        self._known = list(known)
        self._seen = set(self._known)
        self._tries: Counter[Situation] = Counter()
        self._current: Situation | None = None
        self._due: set[tuple[bool, bool]] = set()
        self._metered_nodes = self._most_nodes = self._waits = 0
        self._steps = 0
        """How many steps have begun."""
        self.is_sample = False
        """Whether the step that began last is metered although nothing about it is new."""
        self.has_run_more = False
        """Whether the last metered step had a known shape and a forward that ran more than in all metered steps before."""

    def expect(self) -> None:
        """See to it that the memory of the next steps is measured, even if steps like them were measured under other plans.

        Called when a plan is applied that has not run before. Micro-batches that begin without gradients, that begin with
        gradients, and that reduce gradients over ranks are measured once each.
        """
        self._due = {situation.turn for situation in (*self._known, *self._seen)}

    def begin(self, situation: Situation, *, may_sample: bool = True) -> bool:
        """Return True if the memory of the step that begins now should be measured, because no step in this situation (shapes,
        gradients, waiting forwards) was measured, or as a sample.

        Samples of known situations are measured, because nothing else shows what the loop makes and frees between forward and
        backward. After the first steps, samples are taken only with ``may_sample``. After three failed attempts, return False.
        """
        self._current = None
        self._steps += 1
        is_known = (
            situation in self._seen or any(map(situation.is_within, self._known)) or self._have_standing_in(situation)
        )
        is_due = situation.turn in self._due or self._waits > 0
        is_new = is_due or not is_known
        is_sampled = _is_sampled(self._steps) and (may_sample or self._steps <= _ALL_FIRST)
        self.is_sample = not is_new and is_sampled and self._tries[situation] < _MOST_TRIES
        if not (is_new or self.is_sample) or self._tries[situation] == _MOST_TRIES:
            self._seen.add(situation)
            return False
        self._waits = max(0, self._waits - 1)
        self._tries[situation] += 1
        self._current = situation
        return True

    def _have_standing_in(self, situation: Situation) -> bool:
        """Return True if enough metered (measured) steps together bound the memory of a step whose lists hold tensors of other
        sizes.
        """
        alike = [each.shapes for each in self._known if situation.is_alike(each)]
        return len(alike) >= _ENOUGH and len(standing_in(alike, situation.shapes)) >= _ENOUGH

    def ran(self, nodes: int) -> None:
        """Note that a step has ended, with ``nodes`` autograd nodes in its largest forward.

        If no metered step has made as many, the following steps are metered until one does.
        """
        if nodes > _MORE * self._most_nodes:
            self._most_nodes, self._waits = nodes, _MOST_WAITED
        if self._most_nodes <= _MORE * self._metered_nodes:
            self._waits = 0

    def know(self, situation: Situation) -> None:
        """Treat the situation (shapes, gradients, waiting forwards) as measured: the user was warned about it already."""
        self._known.append(situation)

    def ended(self, nodes: int, in_flight: int) -> str:
        """Return, as text, why the step that began last may need another peak than earlier steps. The step is over and its peak
        is known.

        Args:
            nodes: the autograd nodes of its largest forward.
            in_flight: how many forwards waited at once.
        """
        before, self._metered_nodes = self._metered_nodes, max(self._metered_nodes, nodes)
        self.has_run_more = False
        if self._current is None:
            return "nothing about the step is new: other memory was allocated on the device, or the model has changed"
        self._due.discard(self._current.turn)
        self._tries.pop(self._current, None)
        current = self._current._replace(in_flight=max(in_flight, self._current.in_flight))
        cause = current.differences(self._known) if self._known else ""
        self._known.append(current)
        return cause or self._run_more(nodes, before) or "it needed more than was predicted"

    def estimated(self, nodes: int, cause: str) -> str:
        """Return the text that explains why a step exceeded its limit. The step was not metered, and its peak was only
        estimated.
        """
        more = self._run_more(nodes, self._metered_nodes)
        return f"{more or cause}; the step was not measured, and this is an estimate"

    def _run_more(self, nodes: int, before: int) -> str:
        self.has_run_more = 0 < _MORE * before < nodes
        if not self.has_run_more:
            return ""
        return f"its forward ran more operations than in all earlier steps ({nodes} autograd nodes, not {before})"


def _is_sampled(step: int) -> bool:
    """Whether the step with this number is one of the samples that are metered.

    Multiples of the golden ratio are spread evenly, also over every n-th step. So a loop that does something in every n-th step
    meets a sample there about as often as elsewhere; samples in every 32nd step would miss it for ever, or hit it each time.
    """
    return step <= _ALL_FIRST or step * _GOLDEN % 1.0 < _SHARE_LATER
