"""Reads the devices that ``plimsoll estimate`` is asked about: several names, three figures of any GPU, and the price of each
for an hour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plimsoll.errors import InvalidOption, PlimsollError
from plimsoll.units import parse_count


def split_devices(text: str) -> list[str]:
    """Return the names of devices that ``--device`` lists, with commas between them."""
    names = [name.strip() for name in text.split(",")]
    if "" in names or len(set(map(_known_name, names))) < len(names):
        raise InvalidOption(
            f"--device {text!r} does not list different devices.",
            why="a name is empty" if "" in names else "a device is named twice",
            next="write for example --device H100-SXM,A100-80GB",
        )
    return names


def _known_name(name: str) -> str:
    """Return the catalogue's main name of a device, which may have aliases. Return an unknown name unchanged."""
    from plimsoll.planning.costing.devices import find_device

    try:
        return find_device(name).name
    except PlimsollError:
        return name


def describe_device(memory: str | None, flops: str | None, bandwidth: str | None) -> str | None:
    """Return the text that describes a GPU by its memory, its peak in teraFLOPS and its bandwidth in GB/s, or ``None`` if none
    of the three is given.

    Raises:
        InvalidOption: some are given, but not all.
    """
    figures = {"--device-memory": memory, "--device-flops": flops, "--device-bandwidth": bandwidth}
    missing = [name for name, value in figures.items() if value is None]
    if len(missing) == len(figures):
        return None
    if missing:
        raise InvalidOption(
            f"{' and '.join(missing)}: missing.",
            why="memory, peak and bandwidth together describe a GPU that is not in the catalogue",
            next="write for example --device-memory 24GiB --device-flops 165 --device-bandwidth 1008",
        )
    return f"{memory}+{flops}TFLOPS+{bandwidth}GB/s"


def read_price(tokens: str | None, price: str | None, devices: Sequence[str]) -> tuple[int | None, dict[str, float]]:
    """Return the number of tokens of the run, and the price of an hour of each device that has one.

    Raises:
        InvalidOption: a number is not positive, a price names another device, or ``--tokens`` is missing.
    """
    count = None if tokens is None else parse_count(tokens)
    if price is None:
        return count, {}
    if count is None:
        raise InvalidOption(
            "--price needs --tokens.",
            why="the price of a run is the price of an hour times the hours that its tokens take",
            next=f"add --tokens 10B to --price {price}",
        )
    prices: dict[str, float] = {}
    for part in price.split(","):
        name, equals, amount = part.rpartition("=")
        try:
            hourly = float(amount)
        except ValueError:
            hourly = math.nan
        is_known = not equals or (name.strip() in devices and name.strip() not in prices)
        if not 0 < hourly < math.inf or not is_known or (not equals and "," in price):
            raise InvalidOption(
                f"--price {price!r} is not the price of an hour.",
                why=f"{part!r} is neither a positive number nor DEVICE=NUMBER, once for a device of --device "
                f"{','.join(devices)}",
                next=f"write --price 2.5, or --price {','.join(f'{each}=2.5' for each in devices)}",
            )
        prices |= {name.strip(): hourly} if equals else dict.fromkeys(devices, hourly)
    return count, prices
