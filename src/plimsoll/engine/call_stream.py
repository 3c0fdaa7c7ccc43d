"""Check whether a call of a region (a module that the plan decides about) makes the same torch calls as a recorded call, before
anything is dropped.

Recipes (the ops that rebuild dropped tensors) contain the decisions of forward's Python code: constants, slices, which weight
is used, whether a layer is skipped. All of these reach torch as arguments of its functions. So a `TorchFunctionMode` compares
every torch call in a region with the recorded *stream* of calls: the function, its host arguments, and for each tensor which
earlier call made the tensor, or which parameter or input the tensor is. If Python state has changed since the recording, some
torch call differs, and the region keeps everything.

Host arguments are compared by type and value, never by hash alone (``1 == 1.0 == True``). Tensors are compared by identity
through weak references, because strong ones would raise forward's peak. A tensor from outside that is neither parameter nor
input must look like the recorded tensor; its contents may differ from call to call. Torch calls do not show everything: samples
and inspections catch the rest (constants inside a C++ extension, data that numpy changed).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling
from torch.overrides import resolve_name

from plimsoll.engine.hooks import Cell
from plimsoll.engine.modes import LowestMode
from plimsoll.engine.stream_matching import Matches, compile_stream
from plimsoll.engine.torch_calls import (
    Constant,
    Number,
    Outsider,
    References,
    Several,
    Stream,
    TorchCall,
    comparable,
    described_geometry,
    is_made_from_data,
    looks,
    unreplaced,
)
from plimsoll.tracing.recorder.calling import flat_tensors
from plimsoll.tracing.recorder.user_code import line_of_user

_ANSWERS = frozenset({bool, int, float, complex, str, torch.Size, torch.dtype, torch.device, torch.layout})
"""Types of results that are not tensors. A torch call that returns one of them only queries something, so it is not recorded or
compared.
"""
_READERS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
"""Functions that read a tensor's values without running an ATen op."""
_CHECKERS = frozenset({F.one_hot, F.gaussian_nll_loss})
"""Functions that read a tensor's values only to check them, or to find the sizes of their results."""
_SPLITTERS = frozenset({torch.tensor_split, torch.Tensor.tensor_split})
"""Functions that read the sizes of their results from a tensor's values, without running an ATen op."""
_PARTLY_UNSET = frozenset({torch.ctc_loss, F.ctc_loss})
"""Functions that save memory that they do not fill."""
_MARKS = frozenset(
    {torch.ops.profiler._record_function_exit._RecordFunction, torch.ops.profiler._record_function_exit.default}
)
"""Functions that end a ``record_function`` block. They name the code between in a profile, and do not touch tensors."""


def _never(args: object, kwargs: object, result: object, known: object) -> bool:
    """Return False for any torch call. Used as the matcher of a tree node that does not have exactly one next call."""
    return False


@dataclass(slots=True)
class Junction:
    """A node in the tree of all torch-call sequences (streams) that were recorded for one region.

    The node has the torch calls that may come next. If a sequence ends here, it also has the program that handles such calls.

    Nearly every node has one next call. This call's function, its matcher and the node after it are separate fields, because
    this look-up happens in every torch call.
    """

    branches: list[tuple[TorchCall, Matches, Junction]] = field(default_factory=list)
    program: Any = None
    func: Any = None
    """The torch function of the next call, if there is exactly one possible next call, else ``None``. It is ``None`` too if the
    guard has to look at what the next call saves.
    """
    matches: Matches = _never
    after: Junction | None = None

    def add(self, stream: Stream, program: Any) -> None:
        """Add the torch calls of a region (a stream) to the tree. The program (it drops and rebuilds a call's tensors) that
        handles such calls is stored at the last node.
        """
        place = self
        for call, matches in zip(stream, compile_stream(stream), strict=True):
            following = next((after for known, _, after in place.branches if known == call), None)
            if following is None:
                following = Junction()
                place.branches.append((call, matches, following))
                place.func, place.matches, place.after = call.func, matches, following
                if len(place.branches) > 1 or call.func in _PARTLY_UNSET:
                    place.func = None
            place = following
        place.program = program


def called(func: Any) -> str:
    """Return the name of a torch function, for messages."""
    return f"{resolve_name(func) or getattr(func, '__name__', func)}"


def references(tensors: Iterable[torch.Tensor | None]) -> References:
    """Return weak references to tensors that exist before a call: parameters, buffers and inputs. A tensor's number is its
    index in this list.
    """
    return References([_nothing if tensor is None else weakref.ref(tensor) for tensor in tensors])


class Alarm:
    """Counts steps, for all regions of a model. A step counts if a region made torch calls that match none of its recorded
    calls.

    It is shared because a change in one region will soon affect its neighbours too.
    """

    def __init__(self) -> None:
        self.count = 0
        """The number of steps that had unknown torch calls in at least one region."""
        self.has_wrong_number = False
        """Whether a tensor was rebuilt wrongly by a recipe that takes a number from each call instead of a recorded constant.
        """
        self.recorded_calls = 0
        """The number of calls that were recorded. A recorded call runs each op twice, which takes memory."""
        self._is_raised = False

    def begin_step(self) -> None:
        self._is_raised = False

    def sound(self) -> None:
        """Note that a region made torch calls that match none of its recorded calls. Several such calls in one step count as
        one.
        """
        self.count += not self._is_raised
        self._is_raised = True


class StreamGuard(LowestMode):
    """A function mode that checks during a call of a region whether its torch calls equal the torch calls that a recorded call
    made.

    ``root`` is the root of a tree of all recorded sequences of torch calls, which the mode follows. ``known`` are the tensors
    that exist before the call. ``saved`` is the list of cells (the objects that autograd holds instead of tensors), which grows
    during the call.
    """

    def __init__(self, root: Junction, known: References, saved: Sequence[weakref.ref[Cell]] = ()) -> None:
        self._known = known
        self._saved = saved
        self.partly_unset: set[int] = set()
        """The storages of saved tensors that were not filled. A second run gives other bytes in the rest."""
        self._place: Junction | None = root
        self.stranger: Any = None
        """The first torch function of this call that matches no recorded sequence of torch calls; ``None`` while all match."""
        self.where = ""
        """File and line of the user's code that called ``stranger``, the first torch function that matched no recorded
        sequence.
        """

    @property
    def program(self) -> Any:
        """The program that handles this call's saved tensors, or ``None`` if its torch calls match no recorded sequence."""
        return None if self._place is None else self._place.program

    @property
    def numbers(self) -> dict[int, Number]:
        """The numbers that this call passed to torch where its recording has placeholders (numbers that change from call to
        call), by the placeholder's index.
        """
        return self._known.numbers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_dynamo_compiling():  # Dynamo would bake the current position in the stream into the compiled code
            return func(*args, **(kwargs or {}))
        place = self._place
        if types or place is None or place.func is not func:
            func, before = unreplaced(func), len(self._saved)
            result = self.call(func, types, args, kwargs)
            if func in _PARTLY_UNSET:
                self._note_unset(args, kwargs, before)
            place = self._place
        else:  # nearly every call takes this path
            result = func(*args, **kwargs) if kwargs else func(*args)
        if place is not None:
            if place.func is func and place.matches(args, kwargs, result, self._known):
                self._place = place.after
            elif type(result) not in _ANSWERS:
                self._follow(place, func, args, kwargs, result)
        return result

    def _note_unset(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, before: int) -> None:
        """Note the storages that a torch call has made and saved. ``before`` is the number of tensors saved before it."""
        given = {each.untyped_storage()._cdata for each in flat_tensors((args, kwargs))}
        cells = [reference() for reference in self._saved[before:]]
        saved = [cell.tensor for cell in cells if cell is not None and cell.tensor is not None]
        self.partly_unset |= {each.untyped_storage()._cdata for each in saved} - given

    def _follow(
        self, place: Junction, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, result: Any
    ) -> None:
        """Compare a torch call with all calls that may come next in a recorded sequence. If none matches, this call of the
        region counts as unknown from here on.
        """
        for call, matches, following in place.branches:
            if (func is call.func or func == call.func) and matches(args, kwargs, result, self._known):
                self._place = following
                return
        if _leaves_a_trace(func, result):
            self._place, self.stranger, self.where = None, func, line_of_user()


class StreamRecorder(LowestMode):
    """A function mode that records all torch calls of a region (its stream). ``known`` are the tensors that exist before the
    call.
    """

    def __init__(self, known: References) -> None:
        super().__init__()
        self._known = known
        self._numbers = {id(tensor): number for number, ref in enumerate(known) if (tensor := ref()) is not None}
        self._calls: list[TorchCall] = []
        self.is_within = False
        """Whether a torch call is running. An op that runs outside of a torch call was run by code that this mode cannot see
        (TorchScript, extensions).
        """
        self.obstacle = ""
        """The reason why later calls cannot be compared with these recorded torch calls, or ""."""
        self.reads_values = False
        """Whether numbers of this call (sizes, indices, arguments) may come from the contents of tensors."""
        self._reads: list[tuple[torch.Tensor | None, Any]] = []
        self._is_sized_by_data = False

    def end(self) -> None:
        """Drop all weak references to tensors, because `torch.utils.swap_tensors` refuses tensors that have weak references."""
        self._known.clear()

    @property
    def stream(self) -> Stream:
        """The torch calls that were recorded so far."""
        return tuple(self._calls)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before, self.is_within = self.is_within, True
        outer = self._reads, self._is_sized_by_data
        self._reads, self._is_sized_by_data = [], False
        func = unreplaced(func)
        try:
            result = self.call(func, types, args, kwargs)
        finally:
            self.is_within = before
            reads, is_sized_by_data = self._reads, self._is_sized_by_data
            self._reads, self._is_sized_by_data = outer
        self.reads_values |= func in _READERS
        if not _leaves_a_trace(func, result):
            return result
        is_data = is_made_from_data(func) and bool(args) and not isinstance(args[0], torch.Tensor)
        described = tuple([self._describe(value) for value in args[is_data:]])
        named = tuple([(name, self._describe(value)) for name, value in (kwargs or {}).items()])
        made = flat_tensors(result)
        results = tuple([described_geometry(tensor) for tensor in made])
        is_sized_by_data |= func in _SPLITTERS or (func in _CHECKERS and bool(reads))
        self.reads_values |= is_sized_by_data
        # What is made from data is a leaf: recipes read this call's tensor.
        found = () if is_data or func in _CHECKERS else self._numbers_read(func, reads)
        self._calls.append(
            TorchCall(
                func,
                described,
                named,
                tuple([looks(tensor) for tensor in made]) if is_data else len(made),
                found,
                results if found or is_sized_by_data else (),
                results,
            )
        )
        for tensor in made:
            self._number(tensor)
        return result

    def note_read(self, tensors: list[torch.Tensor], value: Any) -> None:
        """Note that an op has read ``value`` from these tensors.

        If Python code gets the value and passes it to torch, later calls are compared with it there. But a torch call may read
        a number itself (``table[index]``); its arguments do not show this number.
        """
        self.reads_values = True
        self._reads.append((tensors[0] if len(tensors) == 1 else None, value))
        if not self.is_within:
            self.obstacle = "code that PyTorch does not call (TorchScript, an extension) reads a tensor's value"

    def note_size(self) -> None:
        """Note that the sizes of the results of an op depend on the contents of its arguments."""
        self.reads_values = self._is_sized_by_data = True

    def _numbers_read(
        self, func: Any, reads: list[tuple[torch.Tensor | None, Any]]
    ) -> tuple[tuple[int, Constant], ...]:
        """Return the values that a torch call has read from tensors itself: pairs of a tensor's number and the value.

        If the torch call made such a tensor itself, set ``obstacle``, because later calls cannot be compared.
        """
        found = {}
        for tensor, value in reads:
            number = self._numbers.get(id(tensor))
            if number is None or self._known[number]() is not tensor:
                self.obstacle = f"{called(func)} reads the value of a tensor that it makes itself"
            else:
                found[number] = Constant(type(value), comparable(value))
        return tuple(found.items())

    def _number(self, tensor: torch.Tensor) -> None:
        self._numbers[id(tensor)] = len(self._known)
        self._known.append(weakref.ref(tensor))

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self._numbers.get(id(value))
            if number is not None and self._known[number]() is value:
                return number
            self._number(value)
            return Outsider(looks(value))
        if isinstance(value, tuple | list):
            return Several(type(value), tuple([self._describe(item) for item in value]))
        if isinstance(value, slice):
            return Several(slice, tuple([self._describe(item) for item in (value.start, value.stop, value.step)]))
        if isinstance(value, dict):
            return Several(type(value), tuple([self._describe(item) for item in value.items()]))
        return Constant(type(value), comparable(value))


def _leaves_a_trace(func: Any, result: Any) -> bool:
    """Return whether a torch call may have made or changed a tensor: it returned a tensor or ``None``.

    Calls that only mark a profile return ``None`` too, but do not count.
    """
    if isinstance(result, torch.Tensor):
        return True
    if result is None:
        return func not in _MARKS
    return type(result) not in _ANSWERS and bool(flat_tensors(result))


def _nothing() -> None:
    """Return ``None``. It takes the place of a weak reference to a parameter that does not exist."""
