"""Parses amounts of memory, formats bytes, seconds and rates with units, and checks counts.

All other modules take the binary units from here: the number 1024 appears in this file only.
"""

from __future__ import annotations

import math
import re
import reprlib

from plimsoll.errors import InvalidBudget, InvalidOption

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_BYTES_PER_UNIT = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1024**4,
}
_LARGE_UNITS = (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_MOST = 2**63 - 1
"""The largest amount or count that is accepted, because torch and JSON take 64-bit signed integers."""
_COUNT = re.compile(r"\s*([0-9][0-9_]{0,29}(?:\.[0-9]{1,12})?)\s*([kKmMbBgGtT]?)\s*")
_TEXT = re.compile(r"\s*([0-9][0-9_]{0,29}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")


def parse_bytes(amount: int | str) -> int:
    """Parse an int, or text with a binary or decimal unit, into bytes.

    Args:
        amount: ``70 * 2**30``, ``"70GiB"``, ``"80GB"``.

    Raises:
        InvalidBudget: the unit is missing, ambiguous (``"24G"``) or unknown, or the amount is not positive.

    Example:
        >>> parse_bytes("1.5GiB")
        1610612736
    """
    if isinstance(amount, bool) or not isinstance(amount, int | str):
        raise InvalidBudget(
            f"{amount!r} is not an amount of memory.",
            why=f"its type is {type(amount).__name__}; bytes are an int, or text with a unit",
            next=f'write {24 * GIB} or "24GiB"',
        )
    if isinstance(amount, int):
        bytes_ = amount
    else:
        match = _TEXT.fullmatch(amount)
        if match is None:
            is_negative = amount.lstrip().startswith("-")
            raise InvalidBudget(
                f"{reprlib.repr(amount)} is not an amount of memory.",
                why="a budget must be positive"
                if is_negative
                else "it is not a number with a unit after it, such as 24GiB or 1.5GiB",
                next='write "24GiB"',
            )
        number, unit = match.group(1).replace("_", ""), match.group(2)
        if unit.upper() in ("K", "M", "G", "T"):
            decimal = float(number) * _BYTES_PER_UNIT[unit.upper() + "B"]
            binary = float(number) * _BYTES_PER_UNIT[unit.upper() + "IB"]
            raise InvalidBudget(
                f"{amount!r} is ambiguous.",
                why=f"{number}{unit.upper()}B is {int(decimal):,} bytes, {number}{unit.upper()}iB is {int(binary):,} bytes",
                next=f'write "{number}{unit.upper()}iB" or "{number}{unit.upper()}B"',
            )
        if unit.upper() not in _BYTES_PER_UNIT:
            raise InvalidBudget(
                f"{amount!r} does not have a unit that Plimsoll knows.",
                why=f"its unit is {unit!r}" if unit else "text without a unit could mean bytes, MiB or GiB",
                next='use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, as in "24GiB"',
            )
        bytes_ = int(float(number) * _BYTES_PER_UNIT[unit.upper()])
    if bytes_ <= 0:
        raise InvalidBudget(
            f"{amount!r} is not a positive amount of memory.", why="a budget must be positive", next='write "24GiB"'
        )
    if bytes_ > _MOST:
        raise InvalidBudget(
            "The amount of memory is too large.",
            why=f"the largest accepted amount is {_MOST} bytes",
            next='write "24GiB"',
        )
    return bytes_


def parse_budget(amount: int | str) -> int:
    """Parse a budget as `parse_bytes` does, but refuse an int below 1024, which is almost always a number of GiB.

    Raises:
        InvalidBudget: as for `parse_bytes`, or such an int.

    Example:
        >>> parse_budget("24GiB")
        25769803776
    """
    bytes_ = parse_bytes(amount)
    if isinstance(amount, int) and bytes_ < KIB:
        raise InvalidBudget(
            f"{amount} is a budget of {amount} bytes.",
            why="an int without a unit counts bytes, and no training step fits in so few",
            next=f'write "{amount}GiB" or "{amount}MiB", or "{amount}B" if you mean bytes',
        )
    return bytes_


def parse_count(text: str, *, thousand: int = 1000) -> int:
    """Parse a whole number that may end in k, M, B or T, such as a number of tokens.

    Args:
        text: ``"10B"``, ``"1.5T"``, ``"32k"``, ``"4096"``.
        thousand: the factor of k. It is 1024 for lengths of sequences, where 32k means 32,768.

    Raises:
        InvalidOption: the text is not a positive whole number.

    Example:
        >>> parse_count("1.5B"), parse_count("32k", thousand=1024)
        (1500000000, 32768)
    """
    match = _COUNT.fullmatch(text)
    scales = {"": 1, "K": thousand, "M": thousand**2, "B": thousand**3, "G": thousand**3, "T": thousand**4}
    count = 0 if match is None else round(float(match[1].replace("_", "")) * scales[match[2].upper()], 6)
    if match is None or count != int(count) or not 0 < count <= _MOST:
        raise InvalidOption(
            f"{reprlib.repr(text)} is not a positive whole number.",
            why="it is a number, or a number with k, M, B or T after it, at most 2**63 - 1",
            next="write 4096, 32k or 10B",
        )
    return int(count)


def format_bytes(bytes_: float) -> str:
    """Return a number of bytes as text for people: ``7.3 GiB``, ``512.0 MiB``, ``17 B``."""
    sign, size = ("-" if bytes_ < 0 else ""), abs(bytes_)
    for unit, scale in _LARGE_UNITS:
        if size >= scale:
            return f"{sign}{size / scale:.{1 if size / scale < 1000 else 0}f} {unit}"
    return f"{sign}{size:.0f} B"


def format_bytes_up(bytes_: int) -> str:
    """Return a number of bytes as text like ``format_bytes``, but rounded up, so that the text can serve as a budget.

    Example:
        >>> format_bytes_up(1024 * 1024 + 1), format_bytes_up(1010 * 1024 * 1024 + 1)
        ('1.1 MiB', '1011 MiB')
    """
    for power in (4, 3, 2, 1):
        scale = 1024**power
        if bytes_ >= scale:
            shown = 1 if bytes_ >= 1000 * scale else 10  # as many digits as `format_bytes` shows
            return format_bytes(-(-bytes_ * shown // scale) * scale / shown)
    return format_bytes(bytes_)


def budget_text(bytes_: int) -> str:
    """Return a number of bytes as a ``budget=`` argument that the user can paste, rounded up by at most a thousandth.

    Example:
        >>> budget_text(43_234_567)
        'budget="41.24MiB"'
    """
    for unit, scale in _LARGE_UNITS:
        if bytes_ >= scale:
            digits = 3 - min(3, int(math.log10(bytes_ / scale)))
            steps = -(-bytes_ * 10**digits // scale)
            text = f"{steps / 10**digits:.{digits}f}{unit}"
            return f'budget="{text}"' if parse_bytes(text) >= bytes_ else f"budget={bytes_}"
    return f"budget={bytes_}"


def limit_text(bytes_: int) -> str:
    """Return a number of bytes as a ``budget=`` argument that the user can paste, rounded down by at most a hundredth.

    Example:
        >>> limit_text(43_234_567)
        'budget="41.23MiB"'
    """
    for unit, scale in _LARGE_UNITS:
        if bytes_ >= scale:
            return f'budget="{bytes_ * 100 // scale / 100:.2f}{unit}"'
    return f"budget={bytes_}"


def format_seconds(seconds: float) -> str:
    """Return a number of seconds as text for people: ``1.24 s``, ``14.0 ms``, ``0.8 µs``."""
    size = abs(seconds)
    if size >= 1:
        return f"{seconds:.2f} s"
    if size >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} µs"


def format_share(share: float) -> str:
    """Return a share (0.031) as text, a signed percentage: ``+3.1%``."""
    return f"{share * 100:+.1f}%"


def format_more(share: float) -> str:
    """Return a relative change (0.031 or -0.004) in words: ``3.1% more``, ``0.4% less``."""
    return f"{abs(share):.1%} {'more' if share >= 0 else 'less'}"


def format_rate(bytes_per_second: float) -> str:
    """Return a link's speed, given in bytes per second, as text in bits per second.

    Example:
        >>> format_rate(12.5e6)
        '100 Mbit/s'
    """
    bits = bytes_per_second * 8
    if math.isinf(bits):
        return "unlimited"
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= scale:
            return f"{bits / scale:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def check_count(name: str, count: object, *, least: int) -> None:
    """Raise InvalidOption unless ``count`` is a whole number from ``least`` to 2**63 - 1."""
    if isinstance(count, int) and not isinstance(count, bool) and least <= count <= _MOST:
        return
    raise InvalidOption(
        f"{name}={reprlib.repr(count)} is not a valid count.",
        why=f"it must be a whole number from {least} to 2**63 - 1",
        next=f"{name}={max(least, 1)}" + (f" or {name}=0" if least == 0 else ""),
    )
