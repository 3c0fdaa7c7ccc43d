"""Computes a lower bound of a rank's seconds for all larger micro-batches, from the trace of one micro-batch.

Some costs do not grow with the micro-batch: launches, latencies, reads and casts of weights, and data-parallel collectives. In
a larger micro-batch, each sample pays a smaller share of them, so the bound leaves them out. The rest takes at least as long
per sample: arithmetic at the best share of the peak, the bytes of collectives that divide a layer, and the memory traffic of
other ops. Of these, ops are left out that change a tensor in place, or whose result is as large as a weight: they may add up or
cast gradients.
"""

from __future__ import annotations

from collections import Counter
from math import prod

import msgspec

from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.trace import Category, OpSpec, Phase, Trace
from plimsoll.estimator.parallelism.editing import BESIDE
from plimsoll.planning.costing.devices import Device
from plimsoll.planning.costing.roofline import is_product, roofline_costs

_NOT_PER_SAMPLE = frozenset(["dp", *BESIDE])
_MANY = 1 << 10
"""The micro-batch is enlarged by this factor to compute the lower bound. Launches and latencies then hardly count."""
_OF_SAMPLES = (Category.ACTIVATION, Category.TEMPORARY)
_ITEM_BYTES = (1, 2, 4, 8)


def least_seconds(trace: Trace, device: Device, layout: Layout) -> dict[Phase, float]:
    """Return lower bounds of the seconds of forward and of backward with any larger micro-batch, for as many samples as the
    trace's micro-batch has.

    Args:
        trace: one micro-batch's step on one rank, with its collectives.
        device: the device with its peaks and links.
        layout: the sizes of the groups.

    Example:
        >>> found = least_seconds(trace, find_device("H100"), layout)  # doctest: +SKIP
        >>> found[Phase.FORWARD] <= measure_rank(trace, costs).forward_seconds  # doctest: +SKIP
        True
    """
    weights = {prod(each.shape) * size for each in trace.parameters for size in _ITEM_BYTES}
    of_samples = {
        storage.born for storage in trace.storages if storage.bytes not in weights and storage.category in _OF_SAMPLES
    }
    specs = {key: _enlarged(spec) for key, spec in trace.specs.items() if spec.group not in _NOT_PER_SAMPLE}
    costs = roofline_costs(msgspec.structs.replace(trace, specs=specs), device, layout)
    counts = Counter(
        (op.phase, op.cost_key)
        for tick, op in enumerate(trace.ops)
        if op.cost_key in specs and (tick in of_samples or is_product(op.name) or specs[op.cost_key].group)
    )
    found = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0}
    for (phase, key), count in counts.items():
        if phase in found:
            found[phase] += count * costs.seconds_of(key) / _MANY
    return found


def _enlarged(spec: OpSpec) -> OpSpec:
    """Return the op as it would be in a micro-batch that is many times as large. Matrix products then move no bytes, and their
    tiles fill the device.
    """
    moved_bytes = 0 if is_product(spec.name) else spec.moved_bytes * _MANY
    return msgspec.structs.replace(spec, flops=spec.flops * _MANY, moved_bytes=moved_bytes, product=None)
