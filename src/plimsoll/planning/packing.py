"""The forms of a region's values in, the modes that the cut weighs and the prices at which it is worth sweeping out.

One price of memory is not enough where values have other forms: a lossy form spends a budget of error that all regions
share, and a transfer is free only until its window is full. So the sweep is repeated with error priced, without lossy
forms, and with the link open to some values only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Set

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Form
from plimsoll.planning.cut import Mode, Prices
from plimsoll.planning.errors import sensitivity
from plimsoll.planning.step import RegionView, StepIndex
from plimsoll.planning.transfers import windows_of

_ERROR_PRICES = (0.01, 0.1, 1.0, 10.0)
"""In units of: all seconds of the region for all of its share of the error budget."""
_WINDOW_SHARES = (1.0, 0.5)


def modes_of(view: RegionView) -> dict[int, tuple[Mode, ...]]:
    """The forms of every value as the cut sees them; transfers count as hidden."""
    entries = {value: view.forms[value].forms for value in view.decided if value in view.forms}
    modes = {value: tuple(_mode(view, value, form) for form in forms) for value, forms in entries.items()}
    # An infinite error can never be paid for.
    usable = {value: tuple(mode for mode in found if mode.squared_error < math.inf) for value, found in modes.items()}
    return {value: found for value, found in usable.items() if found}


def _mode(view: RegionView, value: int, form: Form) -> Mode:
    squared_error = (sensitivity(view, value) * form.noise) ** 2 if form.noise else 0.0
    return Mode(form.name, form.held_bytes, form.seconds, squared_error, form.is_private)


def packing_prices(view: RegionView, prices: Prices, squared_error: float) -> Iterator[Prices]:
    """The same prices without lossy forms, and with error priced."""
    if not any(mode.squared_error for modes in prices.modes.values() for mode in modes):
        return
    lossy = {(v, mode.form) for v, modes in prices.modes.items() for mode in modes if mode.squared_error}
    yield _without(prices, lossy)
    if math.isinf(squared_error):
        return
    total_seconds = sum(prices.op_seconds)
    for share in _ERROR_PRICES:
        yield dataclasses.replace(prices, error_price=share * total_seconds / max(squared_error, 1e-30))


def limit_offload(index: StepIndex, view: RegionView, prices: Prices) -> Iterator[Prices]:
    """The same prices without the link, and with as many values on it as its window takes: largest or dearest first."""
    offloaded = {
        (value, form.name): form.link_bytes
        for value in prices.modes
        for form in view.forms[value].forms
        if form.decision is Decision.OFFLOAD
    }
    link, after = index.forms.link, index.neighbour(view.call.index)
    if not offloaded or link is None or after is None:
        return
    yield _without(prices, offloaded.keys())
    out_window, in_window = windows_of(index, view.call, after)
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
    """Seconds of the op that makes a value; large for what no op makes again."""
    producer = view.graph.values[value].producer
    return prices.op_seconds[producer] if producer >= 0 else sum(prices.op_seconds)
