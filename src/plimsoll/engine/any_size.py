"""Derive the recipe (the ops that rebuild dropped tensors) for an input size or a constant that was never recorded, from
recordings at other sizes or constants.

Recordings of one region (a module that the plan decides about) at several sizes differ only in numbers: sizes, strides,
offsets, bounds of slices, bytes. If each number is constant or an expression of the region's input sizes (see
``planning.expressions``), the recording of any other size can be written down without watching a call. Three recordings are
needed: two suggest an expression, and the third must confirm it, op by op and bit for bit. If no expression or more than one
expression fits a number, the call is recorded. A call with a size of 0 or 1 is recorded too, because such sizes select other
kernels. At one size, constants that differ from call to call become inputs of the recipe if the call's own arguments contain
them (see ``open_numbers``).

A derived recipe is never trusted blindly: before anything is dropped, the call's torch calls are compared with the derived
ones, and the tensors that the call saves are compared with the derived sizes. Samples and inspections check a derived recipe
like any other recipe.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from plimsoll.artifacts.plan import RegionPlan
from plimsoll.artifacts.region import RegionGraph
from plimsoll.engine.open_numbers import Derivation, Given, given_by, may_stand
from plimsoll.engine.program import OpenProgram, Program, Shared
from plimsoll.engine.record import Recording
from plimsoll.engine.replay_plan import ReplayPlan
from plimsoll.engine.torch_calls import Constant, Number, Outsider, Several, Stream, TorchCall, Unknown
from plimsoll.planning.expressions import Dimensions, Expression, Fitter, Sizes
from plimsoll.tracing.recorder.recorder import RecordedOp, RecordedValue, Ref

# An offset and a factor fit any two numbers, so only a third recording can confirm an expression.
LEAST_RECORDINGS = 3
MOST_RECORDINGS = 8
"""How many different recordings a family may have at most. A family is a group of recordings of one region that differ in
numbers only.

With more, Plimsoll stops deriving recipes for other sizes from the family, and records the region at each size.
"""

Change = Callable[[Any], Any]
"""A function that is applied to one number (a size, stride or constant) of a recording, and returns the number to put in its
place.
"""

_FROM_WHOLE: tuple[tuple[Callable[[int], float], Callable[[float], float]], ...] = (
    (float, lambda value: value),
    (lambda whole: 1 / whole, lambda value: 1 / value),
    (lambda whole: whole**-0.5, lambda value: value**-2),
    (math.sqrt, lambda value: value**2),
)
"""Pairs of functions: one that Python code applies to a whole number such as a size (for means, or the scale of attention), and
its inverse. They find the size behind a recorded float.
"""
_WHOLE: tuple[tuple[Callable[[int], int], Callable[[int], int]], ...] = ((int, int),)


class Recordings:
    """Stores all recordings of one region. A recording holds the torch calls and ops of one call of the region.

    They are stored by signature (shapes and dtypes of the inputs, and other state), and in families: groups of recordings that
    differ in numbers only. Recordings for other sizes are derived from a family.

    ``most`` is how many signatures are stored at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._watched: dict[Any, dict[Stream, Recording]] = {}
        self._families: dict[Any, list[_Family]] = {}

    def add(self, signature: tuple[Any, ...], recording: Recording) -> None:
        """Store the recording of a call with this signature (shapes and dtypes of its inputs, and other state).

        If recipes for other sizes may be derived from the recording, add it to its family too (recordings that differ in
        numbers only).
        """
        if len(self._watched) >= self._most and signature not in self._watched:
            del self._watched[next(iter(self._watched))]
        watched = self._watched.setdefault(signature, {})
        watched[recording.stream] = recording
        if len(watched) > MOST_RECORDINGS:
            del watched[next(iter(watched))]
        # Such regions are recorded at each size: the torch calls of unseen code do not show whether it acts differently there.
        if recording.region.layouts or recording.is_self_compiling or recording.has_unseen_callers:
            return
        skeleton, sizes = _split(signature)
        families = self._families.setdefault(skeleton, [])
        numbers: list[Number] = []
        bare = replace(_with_numbers(recording, _noting(numbers)), not_rebuildable={})
        family = next((each for each in families if each.bare == bare), None)
        if family is None:
            family = _Family(bare, recording)
            families.append(family)
        family.add(sizes, tuple(numbers), recording)

    def opened(self, signature: tuple[Any, ...]) -> list[Opened]:
        """Return recordings for calls with this signature (shapes and dtypes of inputs, other state). Numbers that change
        from call to call are replaced by placeholders.

        Such a recording can be used for any call that differs from the recorded calls only in these numbers, if the numbers
        follow from the call's arguments.
        """
        skeleton, sizes = _split(signature)
        return [opened for family in self._families.get(skeleton, ()) for opened in family.opened(sizes)]

    def at(self, signature: tuple[Any, ...]) -> tuple[Recording | Resized, ...]:
        """Return the recordings for calls with this signature (shapes and dtypes of inputs, other state), one for each known
        sequence of torch calls.

        If the signature was never recorded, they are derived from recordings at other sizes.
        """
        watched = self._watched.get(signature)
        if watched is not None:
            return tuple(watched.values())
        skeleton, sizes = _split(signature)
        found = (family.at(sizes) for family in self._families.get(skeleton, ()))
        return tuple(resized for resized in found if resized is not None)


class _Family:
    """A group of recordings (of torch calls and ops) of one region that differ only in numbers. ``bare`` is any of them with 0
    for each number.
    """

    def __init__(self, bare: Recording, first: Recording) -> None:
        self.bare = bare
        self._first = first
        self._points: dict[Sizes, tuple[Number, ...]] = {}
        self._not_rebuildable: dict[int, str] = {}
        self._open: _OpenRecording | None = None
        self._follows_sizes = True
        self._alike: dict[Sizes, list[_AlikeRecordings]] = {}

    def add(self, sizes: Sizes, numbers: tuple[Number, ...], recording: Recording) -> None:
        """Add a recording (of one call's torch calls and ops) to this family, made at these input sizes.

        If an earlier recording at the same sizes has other numbers, the numbers depend on data. Then recordings for other sizes
        cannot be derived.
        """
        self._follows_sizes &= self._points.setdefault(sizes, numbers) == numbers
        self._not_rebuildable.update(recording.not_rebuildable)
        self._open = None
        groups = self._alike.setdefault(sizes, [])
        group = next((each for each in groups if each.fits(recording)), None)
        if group is None and len(groups) < MOST_RECORDINGS:
            group = _AlikeRecordings(recording)
            groups.append(group)
        if group is not None:
            group.add(recording)

    def opened(self, sizes: Sizes) -> list[Opened]:
        """Return recordings at these input sizes. Numbers that change from call to call are replaced by placeholders, so the
        recordings can be used for calls with any such numbers.
        """
        found = (group.opened(self._not_rebuildable) for group in self._alike.get(sizes, ()))
        return [opened for opened in found if opened is not None]

    def at(self, sizes: Sizes) -> Resized | None:
        """Return a recording for these sizes, derived from the recordings at other sizes. Return ``None`` if it cannot be
        derived.
        """
        if not self._follows_sizes or not LEAST_RECORDINGS <= len(self._points) <= MOST_RECORDINGS:
            return None
        if self._open is None:
            first = replace(self._first, not_rebuildable=self._not_rebuildable)
            self._open = _OpenRecording(first, tuple(self._points.values()))
            self._rules = _SizeRules(tuple(self._points), self._open.unknowns)
        numbers = self._rules.numbers_at(sizes)
        return None if numbers is None else Resized(self._open, numbers)


class _AlikeRecordings:
    """Recordings at one input size that differ in numbers only, and whose torch calls returned tensors with equal numbers of
    dimensions.

    The sizes and strides of these returned tensors count as inputs of the call: they may depend on the contents of tensors, or
    on a number that determines a size inside of torch (``torch.arange``).
    """

    def __init__(self, first: Recording) -> None:
        self._first = first
        self._numbers: list[tuple[Number, ...]] = []
        self._opened: Opened | None = None
        self._is_settled = False

    def fits(self, recording: Recording) -> bool:
        """Return whether a recording belongs to this group: whether its torch calls returned tensors with the same numbers of
        dimensions.
        """
        return _ranks(recording.stream) == _ranks(self._first.stream)

    def add(self, recording: Recording) -> None:
        """Add the numbers (sizes, strides, constants) of one more recording to this group."""
        noted: list[Number] = []
        _with_numbers(recording, _noting(noted), with_results=True)
        numbers = tuple(noted)
        if len(self._numbers) < MOST_RECORDINGS and numbers not in self._numbers:
            self._numbers.append(numbers)
            self._is_settled = False

    def opened(self, not_rebuildable: Mapping[int, str]) -> Opened | None:
        """Return one recording for all calls of this group. Numbers that change from call to call are replaced by placeholders.

        Return ``None`` if there are too few recordings, or if a call's numbers do not follow from its arguments.
        """
        known = self._numbers
        if not self._is_settled and len(known) >= LEAST_RECORDINGS:
            first = replace(self._first, not_rebuildable=not_rebuildable)
            opened = Opened(first, known)
            if 0 < len(opened.special) <= len(known) - LEAST_RECORDINGS:
                opened = Opened(first, [each for place, each in enumerate(known) if place not in opened.special])
            self._opened = opened if opened.is_told else None
        self._is_settled = True
        return self._opened


class _OpenRecording:
    """A recording whose changing numbers are placeholders (`Unknown`), and the programs that were made from it. A program drops
    and rebuilds a call's tensors.

    ``points`` has the numbers of several recordings; ``with_results`` says whether they include the sizes and strides of
    tensors that torch calls returned. ``unknowns`` has, for each placeholder, its value in each recording.
    """

    def __init__(self, first: Recording, points: Sequence[tuple[Number, ...]], *, with_results: bool = False) -> None:
        self.unknowns: list[tuple[Number, ...]] = []
        self._known: dict[tuple[str, ...], Unknown] = {}
        columns = iter([self._described(values) for values in zip(*points, strict=True)])
        self.recording = _with_numbers(first, lambda _: next(columns), with_results=with_results)
        self._calls = [at for at, call in enumerate(self.recording.stream) if _is_open(call)]
        self._plans: dict[tuple[int, bool], ReplayPlan] = {}
        self._programs: dict[tuple[int, bool], Program] = {}

    def stream(self, fill: Change) -> Stream:
        """Return the recorded sequence of torch calls, with the function ``fill`` applied to each placeholder number."""
        calls = list(self.recording.stream)
        for at in self._calls:
            calls[at] = _call(calls[at], fill)
        return tuple(calls)

    def program(self, plan: RegionPlan, shared: Shared, numbers: tuple[Number, ...], *, is_linked: bool) -> Program:
        """Return the program for calls with these numbers. A program drops and rebuilds the call's tensors as the plan says.

        It takes over the order of reads in backward from the program for other numbers. ``is_linked`` is as in
        `Recording.program`.
        """
        key = (id(plan), is_linked)
        if key not in self._plans:
            self._plans[key] = self.recording.replay_plan(plan, shared, is_linked=is_linked)
        made = self._fill(self._plans[key], numbers)
        program = self.recording.serve(made, plan, shared, like=self._programs.get(key))
        self._programs[key] = program
        return program

    def _fill(self, plan: ReplayPlan, numbers: tuple[Number, ...]) -> ReplayPlan:
        """Return a copy of a replay plan (what happens to each value of the region) with numbers filled in where each call is
        checked: in the sizes and strides of saved tensors.

        Recipes get their numbers later, when they are bound to a call.
        """
        fill = _filling(numbers)
        region = self.recording.region
        return plan.at(
            numbers,
            replace(region, slot_geometries=tuple([geometry.changed(fill) for geometry in region.slot_geometries])),
        )

    def _described(self, values: tuple[Number, ...]) -> Number | Unknown:
        """Describe one number of the recording from its values in several recordings: the number itself if all are equal, else
        a placeholder (`Unknown`).
        """
        name = tuple(map(repr, values))  # distinguishes 1 from 1.0
        if len(set(name)) == 1:
            return values[0]
        if name not in self._known:
            self._known[name] = Unknown(len(self.unknowns), is_positive=values[-1] > 0)
            self.unknowns.append(values)
        return self._known[name]


class _SizeRules:
    """Computes the changing numbers of a recording from the sizes of the inputs. Each number has an expression that was fitted
    to the recordings.

    ``sizes`` has the input sizes of the recordings, and ``unknowns`` has for each changing number its value in each recording.
    """

    def __init__(self, sizes: tuple[Sizes, ...], unknowns: Sequence[tuple[Number, ...]]) -> None:
        self._dimensions = Dimensions(sizes)
        self._fitter = Fitter(self._dimensions.points)
        self._rules = [self._rule(values) for values in unknowns]

    def numbers_at(self, sizes: Sizes) -> tuple[Number, ...] | None:
        """Return all changing numbers of the recording at other input sizes, or ``None`` if one of them cannot be computed
        there.
        """
        if not self._dimensions.can_tell(sizes):
            return None
        dimensions = self._dimensions.of(sizes)
        numbers = tuple([rule(dimensions) for rule in self._rules])
        return None if None in numbers else numbers  # type: ignore[return-value]

    def _rule(self, values: tuple[Number, ...]) -> Callable[[Sizes], Number | None]:
        for make, unmake in _FROM_WHOLE if isinstance(values[0], float) else _WHOLE:
            wholes = tuple(_nearest_whole(value, unmake) for value in values)
            if all(whole and make(whole) == value for whole, value in zip(wholes, values, strict=True)):
                return functools.partial(_exact, self._fitter.fit(wholes), make)
        return lambda _: None


class Opened:
    """A recording at one input size whose changing numbers are placeholders. It makes the program for calls that differ only in
    these numbers.

    ``is_told`` says whether all placeholders can be computed from a call's arguments. ``special`` has the indices of recordings
    with a number that may select other operations, such as 0: calls with these numbers need their own recipes.
    """

    def __init__(self, first: Recording, points: Sequence[tuple[Number, ...]]) -> None:
        self._open = _OpenRecording(first, points, with_results=True)
        unknowns = self._open.unknowns
        given = given_by(self.stream)
        known = {index: unknowns[index] for index in given or ()}
        self._rules = [Derivation(values, known) for values in unknowns]
        self._example = {index: values[-1] for index, values in known.items()}
        self.special = {
            place
            for values in known.values()
            for place, value in enumerate(values)
            if not may_stand(value, type(values[-1]), is_positive=values[-1] > 0)
        }
        self.is_told = given is not None and all(self._rules) and not self.special

    @property
    def stream(self) -> Stream:
        """The sequence of torch calls of the region, with placeholders for the numbers that change from call to call."""
        return self._open.recording.stream

    def numbers(self, given: Given) -> tuple[Number, ...] | None:
        """Return all changing numbers of a call, computed from ``given``, the numbers among the call's arguments. Return
        ``None`` if a number cannot be computed.
        """
        numbers = tuple([rule.number(given) for rule in self._rules])
        return None if None in numbers else numbers  # type: ignore[return-value]

    def program(self, plan: RegionPlan, shared: Shared, *, is_linked: bool) -> OpenProgram:
        """Return the program for these calls under a plan. For each call, it computes the changing numbers and gets the recipes
        for them (the ops that rebuild dropped tensors).

        ``is_linked`` is as in `Recording.program`.
        """
        make = functools.partial(self._open.program, plan, shared, is_linked=is_linked)
        return OpenProgram(self.numbers, make, self._example)


class Resized:
    """Takes the place of a `Recording` for an input size that was never recorded. It is derived from recordings of the region
    at other sizes.
    """

    def __init__(self, recording: _OpenRecording, numbers: tuple[Number, ...]) -> None:
        self._open = recording
        self._numbers = numbers

    @property
    def stream(self) -> Stream:
        """The sequence of torch calls that the region makes at this size."""
        return self._open.stream(_filling(self._numbers))

    def program(self, plan: RegionPlan, shared: Shared, *, is_linked: bool) -> Program:
        """Return the program that drops and rebuilds tensors in calls of this size under a plan."""
        return self._open.program(plan, shared, self._numbers, is_linked=is_linked)


def _nearest_whole(value: Number, unmake: Callable[[Any], Number]) -> int:
    """Invert a function on a whole number: return the whole number nearest to ``unmake(value)``, or 0 if that overflows or
    divides by zero.
    """
    try:
        return round(unmake(value))
    except (OverflowError, ZeroDivisionError):
        return 0


def _exact(expression: Expression, make: Callable[[int], Number], dimensions: Sizes) -> Number | None:
    """Return ``make`` of the expression's value at these input sizes. Return ``None`` if the expression is only a guess, or if
    its value is not a whole number.
    """
    value = expression.exactly_at(dimensions)
    return make(value.numerator) if expression.is_known and value.denominator == 1 else None


def _split(signature: tuple[Any, ...]) -> tuple[Any, Sizes]:
    """Split a signature (the description of a call's inputs and state) in two: the signature without input sizes, and a tuple
    of these sizes.

    The sizes 0 and 1 stay in the signature, because they select other kernels.
    """
    generation, described, *rest = signature
    sizes: list[int] = []

    def bare(value: Any) -> Any:
        if type(value) is int and value > 1:
            sizes.append(value)
            return ...
        return tuple(map(bare, value)) if isinstance(value, tuple) else value

    skeleton = (generation, bare(described), *rest)
    return skeleton, tuple(sizes)


def _noting(numbers: list[Number]) -> Change:
    """Return a function that collects numbers: it appends its argument to ``numbers`` and returns 0."""

    def note(number: Any) -> int:
        numbers.append(number)
        return 0

    return note


def _filling(numbers: tuple[Number, ...]) -> Change:
    """Return a function that replaces a placeholder (`Unknown`) by the number with its index in ``numbers``, and returns any
    other number unchanged.
    """
    return lambda number: numbers[number.index] if type(number) is Unknown else number


def _with_numbers(recording: Recording, change: Change, *, with_results: bool = False) -> Recording:
    """Return a copy of a recording with ``change`` applied to each of its numbers, always in the same order.

    ``with_results`` includes the sizes and strides of the tensors that the torch calls returned.
    """
    region = recording.region
    return replace(
        recording,
        stream=tuple([_call(call, change, with_results=with_results) for call in recording.stream]),
        graph=_graph(recording.graph, change),
        region=replace(
            region,
            ops=tuple([_op(op, change) for op in region.ops]),
            values=tuple([_value(value, change) for value in region.values]),
            slot_geometries=tuple([geometry.changed(change) for geometry in region.slot_geometries]),
            output_refs=tuple([ref and _ref(ref, change) for ref in region.output_refs]),
        ),
    )


def _graph(graph: RegionGraph, change: Change) -> RegionGraph:
    """Return a copy of a recorded graph with ``change`` applied to the bytes of each value.

    Its cost keys (op names with shapes) are cleared, because nothing uses them when the plan runs.
    """
    return msgspec.structs.replace(
        graph,
        values=tuple([msgspec.structs.replace(value, bytes=change(value.bytes)) for value in graph.values]),
        ops=tuple([op if not op.cost_key else msgspec.structs.replace(op, cost_key="") for op in graph.ops]),
    )


def _value(value: RecordedValue, change: Change) -> RecordedValue:
    return replace(value, bytes=change(value.bytes), base=value.base.changed(change))


def _op(op: RecordedOp, change: Change) -> RecordedOp:
    return replace(
        op,
        args=_argument(op.args, change),
        kwargs={name: _argument(value, change) for name, value in op.kwargs.items()},
        outputs=tuple([ref and _ref(ref, change) for ref in op.outputs]),
        cost_key="",
    )


def _argument(value: Any, change: Change) -> Any:
    if _is_number(value):
        return change(value)
    if isinstance(value, Ref):
        return _ref(value, change)
    if isinstance(value, tuple | list):
        return type(value)([_argument(item, change) for item in value])
    return value


def _is_number(value: Any) -> bool:
    return type(value) is int or type(value) is Unknown or (type(value) is float and math.isfinite(value))


def _ref(ref: Ref, change: Change) -> Ref:
    return Ref(ref.value, ref.geometry.changed(change))


def _call(call: TorchCall, change: Change, *, with_results: bool = False) -> TorchCall:
    """Return a copy of a recorded torch call with ``change`` applied to its numbers.

    Bare integers among the recorded arguments are indices of tensors, and are not changed.
    """
    made = call.made if isinstance(call.made, int) else tuple([_looks(looks, change) for looks in call.made])
    return TorchCall(
        call.func,
        tuple([_described(value, change) for value in call.args]),
        tuple([(name, _described(value, change)) for name, value in call.kwargs]),
        made,
        tuple([(tensor, _described(value, change)) for tensor, value in call.reads]),
        tuple([_described(value, change) for value in call.lies]),
        tuple([_described(value, change) for value in call.results]) if with_results else call.results,
    )


def _ranks(stream: Stream) -> list[list[int]]:
    """Return, for each torch call of a recorded sequence, the numbers of dimensions of the tensors that it returned."""
    return [[len(result.items[0].items) for result in call.results] for call in stream]


def _is_open(call: TorchCall) -> bool:
    """Return whether a recorded torch call contains a placeholder for a number that changes from call to call (`Unknown`)."""
    numbers: list[Any] = []
    _call(call, _noting(numbers))
    return any(type(number) is Unknown for number in numbers)


def _described(value: Any, change: Change) -> Any:
    """Return a recorded argument of a torch call with ``change`` applied to each number in it. Floats are stored as text."""
    if isinstance(value, Constant):
        held = value.value
        if value.kind is float and type(held) is str:
            held = float(held)
        if value.kind not in (int, float) or not _is_number(held):
            return value
        changed = change(held)
        return Constant(value.kind, repr(changed) if type(changed) is float else changed)
    if isinstance(value, Several):
        return Several(value.kind, tuple([_described(item, change) for item in value.items]))
    return Outsider(_looks(value.looks, change)) if isinstance(value, Outsider) else value


def _looks(looks: tuple[Any, ...], change: Change) -> tuple[Any, ...]:
    kind, is_parameter, shape, stride, *rest = looks
    shape, stride = (tuple([change(number) for number in numbers]) for numbers in (shape, stride))
    return (kind, is_parameter, shape, stride, *rest)
