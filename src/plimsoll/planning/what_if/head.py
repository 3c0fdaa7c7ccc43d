"""A trace in, where its linear head and its cross-entropy over many classes are out.

The loss is the largest log-softmax outside of regions; the head is the matrix product before it whose arithmetic is that of
one parameter (classes, features) and some rows, so nothing is guessed from names.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from plimsoll.artifacts.trace import Category, Phase, Trace, TraceParameter

_LOG_SOFTMAX, _CAP = "_log_softmax", "tanh"
_ITEM_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
_LEAST_CLASSES = 2
_BOTH_GRADIENTS = 2


class HeadAndLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The head and the loss of one step: sizes, and the ticks at which they begin and end.

    ``logit_storages`` are those of logits, their casts and caps, their log-softmax and their gradients. ``weight_gradients``
    and ``hidden_gradients`` are what backward makes of them, ``weight_casts`` the copies of the weight in another dtype that
    were made for the head alone.
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
    """Gradients of the weight in the head's dtype, where the parameter's is another."""
    weight_casts: tuple[int, ...]
    logit_bytes: int
    """Of one logit as the head makes it."""
    is_capped: bool
    """Whether a tanh bends the logits before the loss."""
    is_mixed: bool
    """Whether the weight is held in another dtype than the logits are made in."""

    @property
    def gradients_found(self) -> int:
        """Whether backward makes a gradient of the weight's size, and one of the hidden states': of two weights with which
        the arithmetic is explained, the head is the one of which more is seen.
        """
        return bool(self.hidden_gradients) + bool(self.weight_gradients or self.passing_gradients)

    @property
    def bytes(self) -> int:
        """Bytes of all logits as they come out of the head."""
        return self.rows * self.classes * self.logit_bytes


def find_head(trace: Trace) -> HeadAndLoss | None:
    """The head and the loss, ``None`` where the step has none of that kind (or the trace does not list parameters).

    Args:
        trace: of the step, with or without regions.
    """
    born: dict[int, list[int]] = {}
    for storage in trace.storages:
        born.setdefault(storage.born, []).append(storage.id)
    losses = [
        (trace.storages[storage].bytes, tick)
        for tick, op in enumerate(trace.ops)
        if op.name == _LOG_SOFTMAX and op.phase is Phase.FORWARD and op.region < 0
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


def _candidates(trace: Trace, total_bytes: int, item: int) -> Iterator[TraceParameter]:
    """Matrices that have as many rows as the log-softmax could have columns, largest first, one of each shape and size."""
    distinct = {
        (p.shape, p.bytes): p for p in trace.parameters
    }  # of an embedding and a head alike, the head: it comes last
    for parameter in sorted(distinct.values(), key=lambda p: -p.bytes):
        fits = item and len(parameter.shape) == 2 and parameter.shape[0] >= _LEAST_CLASSES
        if fits and total_bytes % (parameter.shape[0] * item) == 0:
            yield parameter


def _head_before(
    trace: Trace, born: dict[int, list[int]], parameter: TraceParameter, loss_tick: int, rows: int
) -> HeadAndLoss | None:
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
    """Whether a storage holds one value per logit (of all rows, or of all but the one that a shift leaves out)."""
    return bytes_ % classes == 0 and rows // 2 <= bytes_ // classes // 2 <= 4 * rows


def _cast_gradients(trace: Trace, narrow: tuple[int, ...], parameter: TraceParameter) -> tuple[int, ...]:
    """The gradient that the parameter gets, made of the narrow one."""
    after = min((trace.storages[s].born for s in narrow), default=len(trace.ops))
    found = [
        s.id
        for s in trace.storages
        if s.born > after and s.bytes == parameter.bytes and s.category is Category.GRADIENT
    ]
    return tuple(found[:1])


def _weight_casts(trace: Trace, first: int, bytes_: int) -> tuple[int, ...]:
    """The copy of the weight that is made right before the head."""
    before = [s for s in trace.storages if 0 <= s.born < first and s.bytes == bytes_ and s.region < 0]
    return tuple(s.id for s in before[-1:])
