"""Numbers that a recording replaces by placeholders: constants that Python code passes to torch and that change from call to
call.

A recipe (the ops that rebuild a dropped tensor) contains the constants of forward. If a constant changes in each call (a
schedule, a count), each call would have to be recorded again. So if recordings of equal calls differ only in numbers, the
number that a torch call gets becomes an input of the recipe. Each number in the recorded operations needs three recordings: two
suggest where the number comes from, and the third confirms it. Later calls take the number from their own arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from plimsoll.engine.torch_calls import Constant, Number, Outsider, Several, Stream, TorchCall, Unknown

Given = Mapping[int, Number]
"""The numbers that one call passes to torch where its recording has placeholders. The key is the placeholder's index."""

_DERIVED: tuple[Callable[[Number], Number], ...] = (
    float,
    lambda number: 1 - number,
    lambda number: 1 / number,
    lambda number: 1 / (1 - number),
    lambda number: -number,
    lambda number: number * number,
    lambda number: number**-0.5,
    lambda number: number**0.5,
)
"""Functions that torch applies to a number before an operation gets it.

Dropout, for example, keeps with probability 1 - p, and divides by 1 - p.
"""


_CONFIRMED = 3
"""How many different points a line must go through to be accepted, because any two points are on some line."""


def may_stand(number: Any, kind: Any, *, is_positive: bool) -> bool:
    """Return whether a call with this number in place of a recorded one runs the same ops.

    The numbers 0 and 1, and numbers of another sign, may select other operations.
    """
    return type(number) is kind and math.isfinite(number) and number not in (0, 1) and bool(number > 0) is is_positive


class Derivation:
    """How one number in a recipe (the recorded operations that rebuild a tensor) follows from the numbers that Python code has
    passed to torch in the same call, such as ``1 - p`` from dropout's ``p``.

    All ways that hold in every recorded call are kept. Two numbers may be related in the recorded calls (``p`` and ``1 - p``
    are both passed to torch) but not in a later one, and it is unknown which of the two the operation depends on. So the recipe
    is used for a later call only if all ways give the same number in it.
    """

    def __init__(self, values: tuple[Number, ...], given: Mapping[int, tuple[Number, ...]]) -> None:
        self._ways: list[tuple[int, Callable[[Number], Number | None]]] = [
            (index, change)
            for index, known in given.items()
            for change in (_unchanged, *_DERIVED)
            if all(_same(_value(change, one), other) for one, other in zip(known, values, strict=True))
        ]
        if not self._ways and all(type(value) is int for value in values):
            # bytes, strides and offsets are multiples of sizes
            whole = {index: known for index, known in given.items() if all(type(one) is int for one in known)}
            lines = ((index, _line(known, values)) for index, known in whole.items())
            self._ways = [(index, line) for index, line in lines if line is not None]

    def __bool__(self) -> bool:
        """Return whether at least one way to derive the number was found."""
        return bool(self._ways)

    def number(self, given: Given) -> Number | None:
        """Return the number for a later call that passes the numbers ``given`` to torch. Return ``None`` if the ways to derive
        the number disagree.
        """
        first, *others = [_value(change, given[index]) for index, change in self._ways]
        return first if first is not None and all(_same(other, first) for other in others) else None


def _unchanged(number: Number) -> Number:
    return number


def _line(known: tuple[Number, ...], values: tuple[Number, ...]) -> Callable[[Number], Number | None] | None:
    """Return the linear function (a factor and a constant) that maps these whole numbers to these values, or ``None`` if there
    is none.

    Two points suggest the line and a third one must confirm it. A line through 0 needs only two points.
    """
    points = sorted(set(zip(known, values, strict=True)))
    (low, first), (high, last) = points[0], points[-1]
    factor = Fraction(last - first) / Fraction(high - low) if high != low else Fraction(0)
    constant = Fraction(first) - factor * Fraction(low)
    if any(factor * one + constant != value for one, value in points) or (constant and len(points) < _CONFIRMED):
        return None

    def value(number: Number) -> Number | None:
        found = factor * Fraction(number) + constant
        return found.numerator if found.denominator == 1 else None

    return value


def _value(change: Callable[[Number], Number | None], number: Number) -> Number | None:
    try:
        return change(number)
    except (ArithmeticError, ValueError):
        return None


def _same(one: Any, other: Number) -> bool:
    return type(one) is type(other) and one == other


def given_by(stream: Stream) -> set[int] | None:
    """Return the indices of the placeholders (numbers that change from call to call) that stand among the arguments of the
    recorded torch calls.

    Return ``None`` if sizes of tensors from outside the region (a module that the plan decides about) change too, because these
    cannot be derived.
    """
    found: set[int] = set()

    def note(value: Any) -> bool:
        if isinstance(value, Several):
            return all(map(note, value.items))
        if isinstance(value, Outsider):
            return not has_unknown(value.looks)
        if isinstance(value, Constant) and isinstance(value.value, Unknown):
            found.add(value.value.index)
        return True

    for call in stream:
        named = (value for pairs in (call.kwargs, call.reads) for _, value in pairs)
        if not all(map(note, (*call.args, *named, *call.results))) or has_unknown(call.made):
            return None
    return found


def has_unknown(value: Any) -> bool:
    """Return whether a part of the description of a torch call contains a placeholder for a changing number."""
    if isinstance(value, Several):
        return any(map(has_unknown, value.items))
    if isinstance(value, Constant):
        return isinstance(value.value, Unknown)
    return isinstance(value, Unknown) or (isinstance(value, tuple) and any(map(has_unknown, value)))


def numbers_in(stream: Stream, pattern: Stream) -> dict[int, Number] | None:
    """Return the numbers that a recorded sequence of torch calls has where ``pattern``, an equal sequence, has placeholders.
    The key is the placeholder's index.

    Return ``None`` if the sequence differs from the pattern in anything else.
    """
    found: dict[int, Number] = {}
    if len(stream) != len(pattern):
        return None
    fits = all(_call_fits(call, expected, found) for call, expected in zip(stream, pattern, strict=True))
    return found if fits else None


def _call_fits(call: TorchCall, pattern: TorchCall, found: dict[int, Number]) -> bool:
    if call == pattern and not any(map(has_unknown, pattern.results)):
        return True
    if call.func != pattern.func or call.made != pattern.made:
        return False
    # arguments with names are pairs, like the numbers that were read
    one, other = ((each.args, each.kwargs, each.reads, each.results) for each in (call, pattern))
    return _fits(one, other, found)


def _fits(value: Any, pattern: Any, found: dict[int, Number]) -> bool:
    if isinstance(pattern, Constant) and isinstance(pattern.value, Unknown):
        if not isinstance(value, Constant) or value.kind is not pattern.kind:
            return False
        number = float(value.value) if value.kind is float else value.value
        is_known = found.setdefault(pattern.value.index, number) == number
        return is_known and may_stand(number, pattern.kind, is_positive=pattern.value.is_positive)
    if isinstance(pattern, Several):
        is_alike = isinstance(value, Several) and (value.kind, len(value.items)) == (pattern.kind, len(pattern.items))
        return is_alike and all(_fits(one, other, found) for one, other in zip(value.items, pattern.items, strict=True))
    if isinstance(pattern, tuple):
        is_alike = isinstance(value, tuple) and len(value) == len(pattern)
        return is_alike and all(_fits(one, other, found) for one, other in zip(value, pattern, strict=True))
    return bool(value == pattern)
