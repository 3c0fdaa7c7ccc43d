"""Predicts the trace and the peak of a step if its head and its loss over many classes were computed chunk by chunk.

The head is the linear layer that makes the logits. Both are found without names: the loss is the largest log-softmax outside of
regions (module calls), and the head is the matrix product before the loss whose arithmetic matches one parameter (classes,
features) and a number of rows.

The changed step is the step under ``plimsoll.chunked``. It does not store all logits, only one chunk of them while the loss is
computed. The gradients of the hidden states and of the weight are alive from the head's forward on, because they are computed
there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from plimsoll.artifacts.trace import Category, Phase, Storage, Trace, TraceParameter
from plimsoll.errors import InvalidOption
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.units import format_bytes, parse_bytes

_LOG_SOFTMAX, _CAP = "_log_softmax", "tanh"
_ITEM_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
_LEAST_CLASSES = 2
_BOTH_GRADIENTS = 2
_WIDE_BYTES = 4
"""The bytes of one logit in float32, because losses are computed in float32. If the head's output has wider logits, their bytes
are used instead."""
LEAST_ROWS = 128
"""The smallest default number of rows in a chunk: with fewer rows the device's matrix units would idle."""


class HeadAndLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the head (the linear layer that makes the logits) and the loss of one step.

    ``rows`` is the number of hidden states, ``features`` the size of one, ``classes`` the number of logits of one.
    ``first_tick`` is the tick (position among the ops) of the head's op, ``loss_tick`` the tick after the log-softmax. The
    other fields with several numbers are ids of storages. ``logit_storages`` are those of logits, their casts and caps, their
    log-softmax and gradients. ``weight_gradients`` and ``hidden_gradients`` are the gradients that the head's backward makes.
    ``weight_casts`` are copies of the weight in another dtype, made only for the head.
    """

    weight: str
    rows: int
    features: int
    classes: int
    first_tick: int
    loss_tick: int
    logit_storages: tuple[int, ...]
    hidden_gradients: tuple[int, ...]
    weight_gradients: tuple[int, ...]
    passing_gradients: tuple[int, ...]
    """Ids of the storages of the weight's gradient in the head's dtype, if the parameter itself has another dtype."""
    weight_casts: tuple[int, ...]
    logit_bytes: int
    """The bytes that one logit takes in the head's output."""
    is_capped: bool
    """True if a tanh caps the logits before the loss."""
    is_mixed: bool
    """True if the dtype of the weight is not the dtype of the logits, as under autocast."""

    @property
    def gradients_found(self) -> int:
        """How many gradients of the head were found in backward: one of the weight and one of the hidden states.

        The number is used to choose: if two weights match the head's arithmetic, the weight with more gradients found is taken.
        """
        return bool(self.hidden_gradients) + bool(self.weight_gradients or self.passing_gradients)

    @property
    def all_gradients(self) -> tuple[int, ...]:
        """The ids of the storages of all gradients that the head's matrix products compute in backward."""
        return (*self.hidden_gradients, *self.weight_gradients, *self.passing_gradients)

    @property
    def bytes(self) -> int:
        """The bytes that all logits take in the head's output."""
        return self.rows * self.classes * self.logit_bytes


def find_head(trace: Trace, *, is_divided: bool = False) -> HeadAndLoss | None:
    """Return the head and the loss of a traced step.

    ``None`` if the step does not have a loss over classes, or if its trace does not list parameters.

    Args:
        trace: the step's trace, with or without regions.
        is_divided: also find a loss over logits that are divided among tensor-parallel ranks.
    """
    born: dict[int, list[int]] = {}
    for storage in trace.storages:
        born.setdefault(storage.born, []).append(storage.id)
    losses = [
        (trace.storages[storage].bytes, tick)
        for tick, op in enumerate(trace.ops)
        if op.phase is Phase.FORWARD and op.region < 0
        if op.name == _LOG_SOFTMAX or (is_divided and _is_divided_loss(trace, tick))
        for storage in born.get(tick, ())
    ]
    for total_bytes, loss_tick in sorted(losses, reverse=True):
        item = _ITEM_BYTES.get(trace.specs[trace.ops[loss_tick].cost_key].dtype, 0)
        best: HeadAndLoss | None = None
        for parameter in _candidates(trace, total_bytes, item):
            found = _head_before(trace, born, parameter, loss_tick, total_bytes // (parameter.shape[0] * item))
            if found is not None and (best is None or found.gradients_found > best.gradients_found):
                best = found
            if best is not None and best.gradients_found == _BOTH_GRADIENTS:
                break
        if best is not None:
            return best
    return None


def _is_divided_loss(trace: Trace, tick: int) -> bool:
    """Return True if the op at this tick (position among the ops) belongs to a loss over logits divided among tensor-parallel
    ranks.

    Such a loss subtracts the largest logit after a reduction over the ranks.
    """
    before = [trace.specs[trace.ops[at].cost_key] for at in range(max(tick - 2, 0), tick)]
    names = [trace.ops[at].name for at in range(max(tick - 2, 0), tick)]
    return trace.ops[tick].name == "sub" and names[:1] == ["amax"] and before[-1].group == "tp"


def _candidates(trace: Trace, total_bytes: int, item: int) -> Iterator[TraceParameter]:
    """Yield the parameters that can be the head's weight: matrices with as many rows as the loss may have classes.

    ``total_bytes`` are the bytes of all logits, ``item`` the bytes of one. The largest matrix comes first. Of matrices with
    equal shape and size only one is included.
    """
    distinct = {
        (p.shape, p.bytes): p for p in trace.parameters
    }  # if embedding and head are alike, the later one wins: the head
    for parameter in sorted(distinct.values(), key=lambda p: -p.bytes):
        fits = item and len(parameter.shape) == 2 and parameter.shape[0] >= _LEAST_CLASSES
        if fits and total_bytes % (parameter.shape[0] * item) == 0:
            yield parameter


def _head_before(
    trace: Trace, born: dict[int, list[int]], parameter: TraceParameter, loss_tick: int, rows: int
) -> HeadAndLoss | None:
    """Return the head that has this parameter as its weight and makes the logits of the loss; ``None`` if it is not found."""
    classes, features = parameter.shape
    one_row_flops = 2 * classes * features

    def is_product(tick: int) -> bool:
        flops = trace.specs[trace.ops[tick].cost_key].flops
        return flops % one_row_flops == 0 and rows <= flops // one_row_flops < 2 * rows + 2

    ticks = [t for t in range(loss_tick) if trace.ops[t].phase is Phase.FORWARD and trace.ops[t].region < 0]
    first = next((t for t in reversed(ticks) if is_product(t) and born.get(t)), None)
    if first is None:
        return None
    spec = trace.specs[trace.ops[first].cost_key]
    rows = spec.flops // one_row_flops
    item = _ITEM_BYTES.get(spec.dtype, 4)
    products = [t for t in range(loss_tick, len(trace.ops)) if trace.ops[t].phase is Phase.BACKWARD and is_product(t)]
    made = [storage for tick in products for storage in born.get(tick, ())]
    of_hidden = tuple(s for s in made if trace.storages[s].bytes == rows * features * item)
    of_weight = tuple(s for s in made if trace.storages[s].bytes == classes * features * item and s not in of_hidden)
    end = max(products, default=loss_tick)
    element_bytes = parameter.bytes // (classes * features)
    is_mixed = element_bytes != item
    gradients = _cast_gradients(trace, of_weight, parameter) if is_mixed else of_weight
    logits = tuple(
        storage.id
        for storage in trace.storages
        if first <= storage.born <= end and storage.id not in made and _is_logit(storage.bytes, classes, rows)
        if storage.region < 0 and storage.category not in (Category.GRADIENT, Category.PARAMETER)
    )
    return HeadAndLoss(
        weight=parameter.name,
        rows=rows,
        features=features,
        classes=classes,
        first_tick=first,
        loss_tick=loss_tick + 1,
        logit_storages=logits,
        hidden_gradients=of_hidden,
        weight_gradients=gradients,
        passing_gradients=of_weight if is_mixed else (),
        weight_casts=_weight_casts(trace, first, classes * features * item) if is_mixed else (),
        logit_bytes=item,
        is_capped=any(trace.ops[tick].name == _CAP for tick in range(first, loss_tick)),
        is_mixed=is_mixed,
    )


def _is_logit(bytes_: int, classes: int, rows: int) -> bool:
    """Return True if a storage of this size may hold one number for each logit.

    A shift of the labels may leave out one row, and numbers may have different widths, so the size need not match exactly.
    """
    return bytes_ % classes == 0 and rows // 2 <= bytes_ // classes // 2 <= 4 * rows


def _cast_gradients(trace: Trace, narrow: tuple[int, ...], parameter: TraceParameter) -> tuple[int, ...]:
    """Return the id of the storage of the parameter's own gradient if it is cast from another dtype; else an empty tuple.

    ``narrow`` are the storages of the gradient in the head's dtype, before the cast.
    """
    after = min((trace.storages[s].born for s in narrow), default=len(trace.ops))
    found = [
        s.id
        for s in trace.storages
        if s.born > after and s.bytes == parameter.bytes and s.category is Category.GRADIENT
    ]
    return tuple(found[:1])


def _weight_casts(trace: Trace, first: int, bytes_: int) -> tuple[int, ...]:
    """Return the id of the storage of the last copy of the weight in another dtype, made before the head runs.

    The tuple is empty if no such copy is made.
    """
    before = [s for s in trace.storages if 0 <= s.born < first and s.bytes == bytes_ and s.region < 0]
    return tuple(s.id for s in before[-1:])


def with_chunked_loss(trace: Trace, head: HeadAndLoss, chunk_rows: int | None = None) -> Trace:
    """Return the step's trace under ``plimsoll.chunked``.

    Args:
        trace: the step's trace.
        head: the result of ``find_head`` for it.
        chunk_rows: rows of one chunk; ``None`` for the default of ``chunk_loss``.
    """
    rows = chunk_rows or default_rows(head)
    gone = {*head.logit_storages, *head.passing_gradients}
    early = {*head.hidden_gradients, *head.weight_gradients}
    storages: list[Storage] = []
    for storage in trace.storages:
        if storage.id in gone:
            storages.append(msgspec.structs.replace(storage, bytes=0))
        elif storage.id in early:
            storages.append(msgspec.structs.replace(storage, born=head.first_tick))
        elif storage.id in head.weight_casts:
            storages.append(msgspec.structs.replace(storage, dies=head.loss_tick))
        else:
            storages.append(storage)
    storages.append(
        Storage(
            id=len(storages),
            bytes=min(rows, head.rows) * head.classes * chunk_logit_bytes(head),
            category=Category.TEMPORARY,
            label="one chunk of logits",
            born=head.first_tick,
            dies=head.loss_tick,
        )
    )
    return msgspec.structs.replace(trace, storages=tuple(storages), workspaces=_workspaces(trace, head))


def default_rows(head: HeadAndLoss) -> int:
    """Return how many rows (hidden states) one chunk of the loss has by default."""
    return chunk_rows_for(head.rows, head.features, head.classes, element_bytes=max(head.logit_bytes, _WIDE_BYTES))


def chunk_logit_bytes(head: HeadAndLoss) -> int:
    """Return the bytes that one logit takes while its chunk of the loss is computed.

    They are the sum of the logit's own bytes, of a float32 copy if the logit is narrower, of the tanh if logits are capped, and
    under autocast of a block of the weight's gradient.
    """
    is_narrow = head.logit_bytes < _WIDE_BYTES
    cap_bytes = max(head.logit_bytes, _WIDE_BYTES) if head.is_capped else 0
    block_bytes = head.logit_bytes if head.is_mixed else 0
    return head.logit_bytes + (_WIDE_BYTES if is_narrow else 0) + cap_bytes + block_bytes


def _workspaces(trace: Trace, head: HeadAndLoss) -> dict[str, int]:
    """Return the bytes of the trace's workspaces (memory that an op frees when it ends) for each op, without ops that only the
    head and the loss run.

    With chunks, such an op works on only one chunk.
    """
    last = max((trace.storages[s].born for s in head.hidden_gradients), default=head.loss_tick)
    inside = range(head.first_tick, last + 1)
    outside = {op.cost_key for tick, op in enumerate(trace.ops) if tick not in inside or op.region >= 0}
    gone = {trace.ops[tick].cost_key for tick in inside} - outside
    return {key: size for key, size in trace.workspaces.items() if key not in gone}


def peak_with_chunked_loss(simulation: Simulation) -> int | None:
    """Return the peak in bytes, with the same choices (what to keep or recompute), that the step would have if its loss were
    computed in chunks.

    ``None`` if the peak cannot be predicted: the step needs a head with a loss over classes, and the chunked step must have the
    same values to decide about.
    """
    before = simulation.index
    head = find_head(before.trace)
    if head is None:
        return None
    chunked = with_chunked_loss(before.trace, head)
    index = StepIndex(chunked, before.costs, before.forms, in_flight=before.waiting + 1).scheduled(before.transfers)
    if any(view.decided != other.decided for view, other in zip(index.views, before.views, strict=True)):
        return None
    return run_choices(index, simulation.choices).peak_bytes


def chunk_rows_for(
    rows: int,
    features: int,
    classes: int,
    *,
    element_bytes: int,
    chunk_bytes: int | str | None = None,
    chunk_rows: int | None = None,
) -> int:
    """Return the number of rows that are computed at once.

    By default the logits of one chunk take as many bytes as the hidden states, but have at least 128 rows.

    Args:
        rows: the number of hidden states.
        features: the size of one hidden state.
        classes: the number of classes of the head (the vocabulary).
        element_bytes: bytes of one logit while the loss is computed.
        chunk_bytes: the most bytes for the logits of one chunk.
        chunk_rows: the number of rows itself.

    Raises:
        InvalidOption: both are given, a number below one is given, or the bytes are less than one row's logits.
        InvalidBudget: ``chunk_bytes`` is not an amount of memory.

    Example:
        >>> chunk_rows_for(8192, 4096, 131072, element_bytes=4)
        256
    """
    if chunk_bytes is not None and chunk_rows is not None:
        raise InvalidOption(
            f"chunk_bytes={chunk_bytes!r} and chunk_rows={chunk_rows!r} were both given.",
            why="both set the size of a chunk: the number of rows follows from the bytes",
            next="give only one of them, or neither",
        )
    if chunk_rows is not None:
        if not isinstance(chunk_rows, int) or isinstance(chunk_rows, bool) or chunk_rows < 1:
            raise InvalidOption(
                f"chunk_rows={chunk_rows!r} is not a valid number of rows.",
                why="it must be a whole number, 1 or more",
                next="give chunk_rows=1024, or leave it out",
            )
        return min(chunk_rows, max(rows, 1))
    row_bytes = classes * element_bytes
    if chunk_bytes is not None:
        most_bytes = parse_bytes(chunk_bytes)
        if most_bytes < row_bytes:
            raise InvalidOption(
                f"chunk_bytes={chunk_bytes!r} is less than the logits of one row.",
                why=f"{classes} classes of {element_bytes} bytes take {format_bytes(row_bytes)}",
                next=f"give chunk_bytes={row_bytes} or more",
            )
        return min(most_bytes // row_bytes, max(rows, 1))
    return min(max(math.ceil(rows * features / classes), LEAST_ROWS), max(rows, 1))
