"""Recipes for any size: what a region does at a size at which nobody watched it follows from what it did at others.

Recordings of one region at several sizes differ in numbers alone: sizes, strides, offsets, bounds of slices, bytes. Where each
number is constant or an expression of the sizes that go into the region (see ``planning.expressions``), the recording of
any other size can be written down without watching a call. Three recordings are needed: what two of them suggest, the third
has to confirm, op by op and bit for bit. Where a number is not explained by one expression alone the call is watched; and so it
is where a size of 0 or 1 comes up, as that selects other kernels.

Nothing here is trusted with gradients: a call at such a size is compared with its stream of torch calls, and what it saves with
the sizes that were worked out, before anything is dropped. Samples and inspections follow it like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec

from plimsoll.artifacts.region import RegionGraph
from plimsoll.engine.call_stream import Constant, Outsider, Several, Stream, TorchCall
from plimsoll.engine.recording import Recording
from plimsoll.planning.expressions import Dimensions, Expression, Fitter, Sizes, power
from plimsoll.tracing.recorder.recorder import RecordedOp, Ref
from plimsoll.tracing.recorder.storages import Geometry

LEAST_RECORDINGS = 3
MOST_RECORDINGS = 8
"""A family that needs more is not worth it: its region is watched at every size."""

Number = int | float
Change = Callable[[Number], Number]
"""What becomes of one number of a recording."""

_FROM_WHOLE: tuple[tuple[Callable[[int], float], Callable[[float], float]], ...] = (
    (float, lambda value: value),
    (lambda whole: 1 / whole, lambda value: 1 / value),
    (lambda whole: whole**-0.5, lambda value: value**-2),
    (math.sqrt, lambda value: value**2),
)
"""How Python code makes other numbers of sizes, each with its inverse: scales of means and of attention."""
_WHOLE: tuple[tuple[Callable[[int], int], Callable[[int], int]], ...] = ((int, int),)


class Recordings:
    """What is known of one region: recordings by signature, and families of recordings that tell of other sizes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._watched: dict[Any, dict[Stream, Recording]] = {}
        self._families: dict[Any, list[_Family]] = {}
        self._is_trusted = True

    def distrust(self) -> None:
        """A recipe has made something else than forward did: from now on every signature is watched for itself."""
        self._is_trusted = False
        self._watched.clear()
        self._families.clear()

    def add(self, signature: tuple[Any, ...], recording: Recording) -> None:
        """A call with this signature was watched."""
        if not self._is_trusted:
            return
        if len(self._watched) >= self._most and signature not in self._watched:
            del self._watched[next(iter(self._watched))]
        self._watched.setdefault(signature, {})[recording.stream] = recording
        if recording.region.layouts or recording.is_self_compiling:
            return
        skeleton, sizes = _split(signature)
        families = self._families.setdefault(skeleton, [])
        bare, numbers = _numbers_of(recording)
        family = next((each for each in families if each.bare == bare), None)
        if family is None:
            family = _Family(bare, recording)
            families.append(family)
        family.add(sizes, numbers, recording.not_rebuildable)

    def at(self, signature: tuple[Any, ...]) -> tuple[Recording, ...]:
        """Recordings for the streams of calls with this signature: watched ones, else those that follow from other sizes."""
        watched = self._watched.get(signature)
        if watched is not None:
            return tuple(watched.values())
        skeleton, sizes = _split(signature)
        found = (family.at(sizes) for family in self._families.get(skeleton, ()))
        return tuple(recording for recording in found if recording is not None)


class _Family:
    """Recordings that differ in numbers alone."""

    def __init__(self, bare: Recording, first: Recording) -> None:
        self.bare = bare
        self._first = first
        self._points: dict[Sizes, tuple[Number, ...]] = {}
        self._not_rebuildable: dict[int, str] = {}
        self._rules: _Rules | None = None

    def add(self, sizes: Sizes, numbers: tuple[Number, ...], not_rebuildable: Mapping[int, str]) -> None:
        self._points[sizes] = numbers
        self._not_rebuildable.update(not_rebuildable)
        self._rules = None

    def at(self, sizes: Sizes) -> Recording | None:
        """The recording at other sizes; ``None`` where it cannot be told."""
        if not LEAST_RECORDINGS <= len(self._points) <= MOST_RECORDINGS:
            return None
        if self._rules is None:
            self._rules = _Rules(self._points)
        numbers = self._rules.at(sizes)
        if numbers is None:
            return None
        following = iter(numbers)
        resized = _resized(self._first, lambda _: next(following))
        return replace(resized, not_rebuildable=self._not_rebuildable)


class _Rules:
    """How every number of a recording follows from the sizes that vary."""

    def __init__(self, points: dict[Sizes, tuple[Number, ...]]) -> None:
        self._dimensions = Dimensions(tuple(points))
        self._fitter = Fitter(self._dimensions.points)
        self._found: dict[tuple[Any, ...], Callable[[Sizes], Number | None]] = {}
        self._columns = [self._rule(values) for values in zip(*points.values(), strict=True)]

    def at(self, sizes: Sizes) -> tuple[Number, ...] | None:
        """All numbers at other sizes; ``None`` if one of them is not known there."""
        if not self._dimensions.can_tell(sizes):
            return None
        dimensions = self._dimensions.of(sizes)
        values = {column: rule(dimensions) for column, rule in self._found.items()}
        if None in values.values():
            return None
        return tuple([values[column] for column in self._columns])  # type: ignore[misc]

    def _rule(self, values: tuple[Number, ...]) -> tuple[Any, ...]:
        """A name for a number's values at the known points, which tells 1 from 1.0; the rule of each is found once."""
        name = tuple(map(repr, values))
        if name not in self._found:
            self._found[name] = self._explained(values)
        return name

    def _explained(self, values: tuple[Number, ...]) -> Callable[[Sizes], Number | None]:
        first = values[0]
        if len(set(map(repr, values))) == 1:
            return lambda _: first
        for make, unmake in _FROM_WHOLE if isinstance(first, float) else _WHOLE:
            wholes = tuple(_nearest_whole(value, unmake) for value in values)
            if all(whole and make(whole) == value for whole, value in zip(wholes, values, strict=True)):
                found = self._fitter.fit(wholes)
                return lambda dimensions: _exact(found, dimensions, make)
        return lambda _: None


def _nearest_whole(value: Number, unmake: Callable[[Any], Number]) -> int:
    """0 where there is none."""
    try:
        return round(unmake(value))
    except (OverflowError, ZeroDivisionError):
        return 0


def _exact(expression: Expression, dimensions: Sizes, make: Callable[[int], Number]) -> Number | None:
    """The value; ``None`` where the expression is a guess, or does not give a whole number."""
    terms = zip(expression.terms, expression.coefficients, strict=True)
    value = sum((c * power(term, dimensions) for term, c in terms), Fraction(0))
    return make(value.numerator) if expression.is_known and value.denominator == 1 else None


def _split(signature: tuple[Any, ...]) -> tuple[Any, Sizes]:
    """A signature without the sizes of its inputs, and those. 0 and 1 stay: they select other kernels."""
    generation, described, *rest = signature
    sizes: list[int] = []

    def bare(value: Any) -> Any:
        if type(value) is int and value > 1:
            sizes.append(value)
            return ...
        return tuple(map(bare, value)) if isinstance(value, tuple) else value

    skeleton = (generation, bare(described), *rest)
    return skeleton, tuple(sizes)


def _numbers_of(recording: Recording) -> tuple[Recording, tuple[Number, ...]]:
    """A recording without its numbers, and those."""
    numbers: list[Number] = []

    def note(number: Number) -> Number:
        numbers.append(number)
        return 0

    bare = replace(_resized(recording, note), not_rebuildable={})
    return bare, tuple(numbers)


def _resized(recording: Recording, change: Change) -> Recording:
    """A recording with every number changed, in an order that is always the same."""
    region = recording.region
    return replace(
        recording,
        stream=tuple([_call(call, change) for call in recording.stream]),
        graph=_graph(recording.graph, change),
        region=replace(
            region,
            ops=tuple([_op(op, change) for op in region.ops]),
            values=tuple(
                [replace(v, bytes=change(v.bytes), base=_geometry(v.base, change)) for v in region.values]  # type: ignore[arg-type]
            ),
            slot_geometries=tuple([_geometry(geometry, change) for geometry in region.slot_geometries]),
            output_refs=tuple([ref and _ref(ref, change) for ref in region.output_refs]),
        ),
    )


def _graph(graph: RegionGraph, change: Change) -> RegionGraph:
    """Cost keys name sizes: they are left out, as nothing at work asks for them."""
    return msgspec.structs.replace(
        graph,
        values=tuple([msgspec.structs.replace(value, bytes=change(value.bytes)) for value in graph.values]),
        ops=tuple([msgspec.structs.replace(op, cost_key="") for op in graph.ops]),
    )


def _op(op: RecordedOp, change: Change) -> RecordedOp:
    return replace(
        op,
        args=_argument(op.args, change),
        kwargs={name: _argument(value, change) for name, value in op.kwargs.items()},
        outputs=tuple([ref and _ref(ref, change) for ref in op.outputs]),
        cost_key="",
    )


def _argument(value: Any, change: Change) -> Any:
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return change(value)
    if isinstance(value, Ref):
        return _ref(value, change)
    if isinstance(value, tuple | list):
        return type(value)([_argument(item, change) for item in value])
    return value


def _ref(ref: Ref, change: Change) -> Ref:
    return Ref(ref.value, _geometry(ref.geometry, change))


def _geometry(geometry: Geometry, change: Change) -> Geometry:
    size, stride = _whole(geometry.size, change), _whole(geometry.stride, change)
    return Geometry(size, stride, change(geometry.offset), geometry.dtype)  # type: ignore[arg-type]


def _whole(values: tuple[int, ...], change: Change) -> tuple[Any, ...]:
    return tuple([change(value) for value in values])


def _call(call: TorchCall, change: Change) -> TorchCall:
    """A torch call; whole numbers among its arguments stand for tensors, and stay."""
    made = call.made if isinstance(call.made, int) else tuple([_looks(looks, change) for looks in call.made])
    kwargs = tuple([(name, _described(value, change)) for name, value in call.kwargs])
    return TorchCall(call.func, tuple([_described(value, change) for value in call.args]), kwargs, made)


def _described(value: Any, change: Change) -> Any:
    if isinstance(value, Constant):
        if value.kind is int:
            return Constant(int, change(value.value))
        is_finite = value.kind is float and math.isfinite(float(value.value))
        return Constant(float, repr(change(float(value.value)))) if is_finite else value
    if isinstance(value, Several):
        return Several(value.kind, tuple([_described(item, change) for item in value.items]))
    return Outsider(_looks(value.looks, change)) if isinstance(value, Outsider) else value


def _looks(looks: tuple[Any, ...], change: Change) -> tuple[Any, ...]:
    kind, is_parameter, shape, stride, *rest = looks
    return (kind, is_parameter, _whole(shape, change), _whole(stride, change), *rest)
