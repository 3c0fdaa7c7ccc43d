"""Notices when the regions of a model (the modules that a plan decides about) run in a new order.

A plan keeps the most bytes in the regions whose backward begins first. If the same modules run in another order, each call
looks the same and forward saves as many bytes as before. But the peak of memory in backward may be higher.
"""

from __future__ import annotations

from plimsoll.engine.larger_calls import LargerCalls
from plimsoll.tracing.torch_internals import sequence_number

_MOVED = 1.25
"""A region counts as moved if it runs earlier or later within the model's forward by more than this factor.

Its place is the number of autograd nodes that forward made before it. The region has moved if this number is above the largest
earlier number, or below the smallest, by more than this factor. A plan manages only modules that it decides about, so if other
modules move, only this count shows it.
"""
_FEW_NODES = 4


class CallOrder:
    """Records which region has run directly after which other, and how many autograd nodes forward had made by then."""

    def __init__(self) -> None:
        self._previous = ""
        self._first_node = 0
        self._known: set[tuple[str, str]] = set()
        self._ranks: dict[str, int] = {"": -1}
        """A mapping from a region's name to its place (0, 1, 2 …). Regions are sorted by their first call."""
        self._nodes: dict[str, tuple[int, int]] = {}
        """A mapping from the name of a region to the smallest and the largest number of autograd nodes that forward made before
        it.
        """

    def begin_step(self) -> None:
        """Begin a forward of the model. The next region counts as its first one."""
        self._previous = ""
        self._first_node = sequence_number()

    def called(self, name: str, larger: LargerCalls) -> None:
        """Note that the region ``name`` is about to run. If it has never run directly after the previous region, or if it runs
        much earlier or later in forward than before, tell ``larger``, which reports such changes.
        """
        pair = (self._previous, name)
        self._previous = name
        nodes = sequence_number() - self._first_node
        fewest, most = self._nodes.get(name, (nodes, nodes))
        if pair not in self._known:
            self._meet(*pair, larger)
        elif nodes > _MOVED * most + _FEW_NODES or _MOVED * nodes + _FEW_NODES < fewest:
            text = f"modules run in another order: {name!r} runs after {nodes} autograd nodes of forward; in earlier "
            larger.say(f"{text}steps it ran after {fewest} to {most}", is_reordered=True)
        if not fewest <= nodes <= most or name not in self._nodes:
            self._nodes[name] = min(fewest, nodes), max(most, nodes)

    def _meet(self, previous: str, name: str, larger: LargerCalls) -> None:
        is_first_step = not self._known or name not in self._ranks
        self._known.add((previous, name))
        self._ranks.setdefault(name, len(self._ranks))
        # A region that follows an earlier one keeps the order, even if others were skipped between them.
        is_in_order = self._ranks[previous] < self._ranks[name] and previous
        if not (is_first_step or is_in_order):
            place = f"after {previous!r}" if previous else "first"
            text = f"modules run in another order: {name!r} runs {place}, which it did not do in earlier steps"
            larger.say(text, is_reordered=True)
