"""Finds for one region the lower convex hull of (bytes held, seconds of recomputation), by varying the price of memory.

A choice says which saved values of a region (module call) are kept, recomputed or stored in another form.

At one price of a byte, a minimum cut (see ``cut``) finds the cheapest choice of values to keep. A *sweep* does this for many
prices, by bisection. Every cut gives a point and a supporting line. A price between two neighbouring points either finds a new
point below their chord or proves that none exists. So the sweep is exact, and the lines bound *every* choice of the region,
found or not.

One price is not enough if values have other forms: a lossy form spends an error budget that all regions share, and a transfer
is free only until its window is full. So the sweep is repeated with error and link priced, without lossy forms, and with the
link open to some values only. The lines of a priced sweep hold for every choice, so they are added to the bound. The lines of
a sweep without lossy forms are added too: every other choice has at least the smallest of the lossy errors.

Source: the parametric-search idea of Eisner and Severance (1976).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Form
from plimsoll.planning.cut import Cut, Mode, Network, Offers, Prices, solve_cuts
from plimsoll.planning.step import RegionView, StepIndex

_POINTS_AT_MOST = 48
_TOLERANCE = 1e-6
"""A new point is added to the hull only if it lies below the chord between its neighbours by more than this share. Smaller
distances may come from the rounding of capacities."""
_LEAST_STEP = 1e-4
"""Two ways of holding a value count as equally large if their bytes differ by less than this share of the bytes of the region.

Otherwise the small difference would only raise the highest price of a byte that the search tries.
"""
_ERROR_PRICES = (0.01, 0.1, 1.0, 10.0)
"""The search tries these prices of gradient error. Their unit is the seconds of all ops of the region, divided by the squared
error that one region may spend.
"""
_LINK_SHARES = (0.3, 0.6, 1.0)
"""The search tries these prices for a byte sent over the link (to host memory or disk). They are shares of the price of a byte
held on the device.
"""
_WINDOW_SHARES = (1.0, 0.5)
"""A transfer's window is the compute that hides the transfer. The search offloads values until these shares of the window are
full."""


@dataclass(frozen=True, slots=True)
class Line:
    """Data: a lower bound of the seconds that a region adds, for each of its choices (what to keep or recompute).

    ``seconds >= value_seconds - price · bytes - error price · error² - link price · bytes sent``
    """

    price_seconds_per_byte: float
    value_seconds: float
    error_price: float = 0.0
    link_price: float = 0.0


@dataclass(frozen=True, slots=True)
class Hull:
    """Data: a lower convex hull of the choices of a region, by bytes held and seconds added.

    It has the choices at the hull's vertices, most bytes first, and lines: lower bounds of seconds that hold for all choices.
    """

    cuts: tuple[Cut, ...]
    lines: tuple[Line, ...]


class Sweeper:
    """Finds lower convex hulls (bytes held, seconds) for one region, and for regions with the same graph and costs.

    Each hull is the result of a sweep, a search at many prices of a byte. Hulls are cached.
    """

    def __init__(self, view: RegionView) -> None:
        self._network = Network(view)
        self._known: dict[Hashable, Hull] = {}

    def sweep(self, wanted: Sequence[Prices]) -> list[Hull]:
        """Return a list with the lower convex hull (bytes held, seconds) for each entry of ``wanted``.

        The seconds of a hull count recomputed ops, encoding and decoding, but not Plimsoll's own time. The sweeps run side by
        side: the next prices of all sweeps are solved as one flow.
        """
        keys = [_key(prices) for prices in wanted]
        new = {key: prices for key, prices in zip(keys, wanted, strict=True) if key not in self._known}
        bisections = {key: _Bisection(self._network.view, prices) for key, prices in new.items()}
        running = list(bisections.values())
        while running := [bisection for bisection in running if bisection.asked]:
            requests = [(bisection.offers, np.array(bisection.asked)) for bisection in running]
            for bisection, cuts in zip(running, solve_cuts(self._network, requests), strict=True):
                bisection.take(cuts)
        self._known |= {key: bisection.hull() for key, bisection in bisections.items()}
        return [self._known[key] for key in keys]


def _key(prices: Prices) -> Hashable:
    return tuple(prices.held_bytes.items()), prices.op_seconds, tuple(prices.modes.items()), prices.error_price


class _Bisection:
    """The state of one sweep: a search, at many prices of a byte, for the choices that need the fewest seconds for their bytes.

    They are the points on the lower convex hull (bytes held, seconds) of one region. The state has the points and lines found,
    and the prices to solve next (``asked``). Each price in ``asked`` is the slope between two neighbouring points that may have
    another point between them.
    """

    def __init__(self, view: RegionView, prices: Prices) -> None:
        self.offers = Offers(view, prices)
        modes = (mode for modes in prices.modes.values() for mode in modes)
        self._total_seconds = sum(prices.op_seconds) + sum(mode.seconds for mode in modes)
        smallest = min((b for b in _steps(prices) if b > 0), default=0.0)
        held_bytes = sum(prices.held_bytes[v] for v in view.everything)
        keep = Cut(view.everything, frozenset(), frozenset(), frozenset(), held_bytes, 0.0, 0.0)
        self._found = [keep]
        self._lines: list[Line] = []
        self._pairs: list[tuple[Cut, Cut]] = []
        self.asked = [0.0]
        if smallest > 0 and self._total_seconds > 0:
            # At this price even the smallest step of bytes is worth more than running everything again.
            self.asked.append(2 * self._total_seconds / smallest)

    def take(self, cuts: Sequence[Cut]) -> None:
        """Add the cheapest choices found at the prices in ``asked`` to the hull, and set ``asked`` to the next prices.

        There is one cut (a cheapest choice with its costs) for each price in ``asked``.
        """
        error_price = self.offers.prices.error_price
        self._lines += [Line(p, cut.lower_value, error_price) for p, cut in zip(self.asked, cuts, strict=True)]
        if not self._pairs:
            # The cut at price 0 (it drops values that are free to rebuild) counts only if no higher price was asked.
            self._found.append(cuts[-1])
            pairs = [(self._found[0], cuts[-1])] if len(cuts) > 1 else []
        else:
            pairs = []
            for (more, less), price, middle in zip(self._pairs, self.asked, cuts, strict=True):
                chord = price * more.held_bytes + more.seconds
                least = chord - _TOLERANCE * max(chord, self._total_seconds)
                if price * middle.held_bytes + middle.seconds < least and len(self._found) < _POINTS_AT_MOST:
                    self._found.append(middle)
                    pairs += [(more, middle), (middle, less)]
        self._pairs = [(more, less) for more, less in pairs if more.held_bytes > less.held_bytes]
        if len(self._found) >= _POINTS_AT_MOST:
            self._pairs = []
        self.asked = [(less.seconds - more.seconds) / (more.held_bytes - less.held_bytes) for more, less in self._pairs]

    def hull(self) -> Hull:
        """Return the result of this sweep (search at many prices of a byte): the lower convex hull (bytes held, seconds) of all
        points, and the lines.
        """
        found = sorted(self._found, key=lambda cut: (-cut.held_bytes, cut.seconds))
        return Hull(cuts=tuple(found), lines=tuple(self._lines))


def _steps(prices: Prices) -> list[float]:
    """Return the differences in bytes between the ways to hold each value of a region, as one list.

    Ways are: unchanged, compressed, or not at all. Differences too small to matter are left out.
    """
    steps = list(prices.held_bytes.values())
    least = sum(steps) * _LEAST_STEP
    for value, modes in prices.modes.items():
        levels = sorted({prices.held_bytes[value], *(mode.held_bytes for mode in modes)})
        steps += [more - less for less, more in itertools.pairwise(levels) if more - less > least]
    return steps


def modes_of(view: RegionView) -> dict[int, tuple[Mode, ...]]:
    """Return a mapping from values of a region to the forms (codecs, links) that a minimum cut may choose for them.

    Transfers count as hidden by compute, so their seconds are left out. Forms with an infinite error are left out too.
    """
    entries = {value: view.forms[value].forms for value in view.decided if value in view.forms}
    modes = {value: tuple(_mode(view, value, form) for form in forms) for value, forms in entries.items()}
    # No limit allows an infinite error.
    usable = {value: tuple(mode for mode in found if mode.squared_error < math.inf) for value, found in modes.items()}
    return {value: found for value, found in usable.items() if found}


def _mode(view: RegionView, value: int, form: Form) -> Mode:
    squared_error = (view.sensitivity(value) * form.noise) ** 2 if form.noise else 0.0
    return Mode(form.name, form.held_bytes, form.seconds, squared_error, form.link_bytes, form.is_private)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Data: the prices of one sweep, a search for the cheapest choices at many prices of a byte.

    With a ``link_share``, a byte sent costs this share of the price of a byte held. If ``least_error`` is not 0, forms (codecs
    or offload) are missing from the prices, and each choice that uses a missing form has at least this squared error.
    """

    prices: Prices
    link_share: float = 0.0
    least_error: float = 0.0

    def lines(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yield the lines that this sweep found, changed to hold for all choices.

        A line is a lower bound of the seconds that a region adds. A price on error makes the lines valid also for choices with
        forms (codecs, offloading) that the sweep's prices leave out.
        """
        for line in lines:
            yield Line(
                line.price_seconds_per_byte,
                line.value_seconds,
                line.value_seconds / self.least_error if self.least_error else line.error_price,
                line.price_seconds_per_byte * self.link_share,
            )


def packing_sweeps(prices: Prices, squared_error: float) -> Iterator[Sweep]:
    """Yield sweeps: sets of prices for the search, with different costs of storing a value in another form (codec or offload).

    The sweeps have a price on gradient error, or a price on bytes sent, or no lossy forms.

    Args:
        prices: the prices with all forms, and without a price on error.
        squared_error: the squared error that one region may spend.
    """
    modes = [(value, mode) for value, found in prices.modes.items() for mode in found]
    lossy = {(value, mode.form): mode.squared_error for value, mode in modes if mode.squared_error}
    error_prices = [0.0]
    if lossy and 0 < squared_error < math.inf:
        error_prices += [share * sum(prices.op_seconds) / squared_error for share in _ERROR_PRICES]
    for link_share in (0.0, *(_LINK_SHARES if any(mode.link_bytes for _, mode in modes) else ())):
        charged = dataclasses.replace(prices, modes=_charge(prices, link_share))
        for error_price in error_prices:
            if link_share or error_price:
                yield Sweep(dataclasses.replace(charged, error_price=error_price), link_share)
        if lossy:
            yield Sweep(_without(charged, lossy.keys()), link_share, min(lossy.values()))


def _charge(prices: Prices, link_share: float) -> dict[int, tuple[Mode, ...]]:
    """Return the forms (codecs, links) of each value with a price for sending.

    The price is a share of the bytes sent, which is added to the bytes that the form holds on the device.
    """
    return {
        value: tuple(dataclasses.replace(m, held_bytes=m.held_bytes + link_share * m.link_bytes) for m in modes)
        for value, modes in prices.modes.items()
    }


def limit_offload(index: StepIndex, view: RegionView, prices: Prices) -> Iterator[Prices]:
    """Yield variants of the prices of a region that allow offloading only for as many values as compute can hide.

    Values are taken in one of two orders: the largest first, or those that are dearest to recompute (per byte) first.
    """
    offloaded = {
        (value, form.name): form.link_bytes
        for value in prices.modes
        for form in view.forms[value].forms
        if form.decision is Decision.OFFLOAD
    }
    link, after = index.forms.link, index.neighbour(view.call.index)
    if not offloaded or link is None or after is None:
        return
    out_window, in_window = index.transfer_windows(view.call, after)
    room = min(out_window * link.out_bytes_per_second, in_window * link.in_bytes_per_second)
    orders: tuple[Callable[[tuple[int, str]], float], ...] = (
        lambda key: -offloaded[key],
        lambda key: -_producer_seconds(view, prices, key[0]) / max(offloaded[key], 1),
    )
    for order in orders:
        for share in _WINDOW_SHARES:
            chosen, used = set(), 0
            for key in sorted(offloaded, key=order):
                if used + offloaded[key] <= share * room:
                    chosen.add(key)
                    used += offloaded[key]
            yield _without(prices, offloaded.keys() - chosen)


def _without(prices: Prices, banned: Set[tuple[int, str]]) -> Prices:
    modes = {v: tuple(m for m in modes if (v, m.form) not in banned) for v, modes in prices.modes.items()}
    return dataclasses.replace(prices, modes=modes)


def _producer_seconds(view: RegionView, prices: Prices, value: int) -> float:
    """Return the seconds of the op that makes a value, to rank values for offloading.

    For an input of the region, return the seconds of all ops, so that it comes first.
    """
    producer = view.graph.values[value].producer
    return prices.op_seconds[producer] if producer >= 0 else sum(prices.op_seconds)
