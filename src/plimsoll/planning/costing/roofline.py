"""Computes the seconds of every op of a trace by a roofline, for a device that this machine does not have.

    seconds = max(flops / (peak · achieved), bytes / (bandwidth · achieved)) + launch

The achieved share of the peak depends on the op (``achieved_share``). Collectives have a group, and their seconds depend on the
links instead (see ``links``).

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore architectures",
CACM 2009, eq. 1, plus a constant per launch. Known weakness: small matrix products and attention reach less of the peak than
large ones, caches make small ops faster than the bandwidth says, and the seconds of overlapping kernels are added up.
"""

from __future__ import annotations

import math

from plimsoll.artifacts.costs import Costs, CostSource, OpCost
from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.trace import OpSpec, Phase, Trace
from plimsoll.errors import InvalidLayout
from plimsoll.planning.costing.devices import Device
from plimsoll.planning.costing.host import HOST, host_seconds
from plimsoll.planning.costing.links import Collective, collective_seconds, group_of

_PRODUCTS = frozenset(["mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear"])
FUSED = "fused_with_the_op_before"
"""The name that traces give to an op that runs in the kernel of the op before it. Such an op does not cost a launch."""
_HOST_SLOT_SECONDS = 4e-6
"""The host's time for one saved tensor: its hooks in Python, on a 2024 server core with warm caches. It does not show while the
device lags behind the host."""
_HOST_REPLAY_SECONDS = 0.5e-6
"""The host's time for one recomputed op, in Python, measured on a 2024 server core."""


_TILES = {(256, 128): 1.0, (128, 128): 0.95, (128, 64): 0.8, (64, 64): 0.6}
"""Maps the size of a tile (rows, columns) to the speed of matrix products with such tiles, as a share of the speed with the
largest tiles. A tile is the part of the result that one multiprocessor computes at a time."""
_ATTENTION_BACKWARD = 0.8
"""The FLOPs per second of fused attention in backward, as a share of those in forward."""


def peak_flops_per_second(spec: OpSpec, device: Device) -> float:
    """Return the peak of dense arithmetic for an op's dtype on a device, in FLOPs per second.

    F32 convolutions use the tf32 peak if the device has one.

    Example:
        >>> convolution = OpSpec(name="convolution", flops=1, moved_bytes=1, dtype="f32")
        >>> peak_flops_per_second(convolution, find_device("A100")) / 1e12  # doctest: +SKIP
        156.0
    """
    is_tf32 = spec.dtype == "f32" and "convolution" in spec.name and "tf32" in device.peak_flops_per_second
    return device.flops_per_second("tf32" if is_tf32 else spec.dtype)


def is_product(name: str) -> bool:
    """Return True if an op is a matrix product, a convolution or attention: compilers do not fuse them with other ops.

    Example:
        >>> is_product("addmm"), is_product("_scaled_dot_product_flash_attention_backward"), is_product("mul")
        (True, True, False)
    """
    return name in _PRODUCTS or "scaled_dot_product" in name or "convolution" in name


def roofline_seconds(spec: OpSpec, device: Device) -> float:
    """Return the predicted seconds of one op on a device.

    They are the time of the arithmetic or of the memory traffic, whichever is longer, plus the launch. Attention and products
    do not reach the full peak.
    """
    run_flops = spec.flops / 2 if spec.is_causal else spec.flops
    arithmetic = run_flops and run_flops / (peak_flops_per_second(spec, device) * achieved_share(spec, device))
    movement = spec.moved_bytes / (device.bandwidth_bytes_per_second * device.achieved_bandwidth)
    return max(arithmetic, movement) + (0.0 if spec.name == FUSED else device.launch_seconds)


def achieved_share(spec: OpSpec, device: Device) -> float:
    """Return the share of the device's peak that an op reaches. Attention has its own; for products it depends on their tiles.

    The multiprocessors compute a product's tiles in waves, one tile each. The last wave takes as long as the others, however
    few tiles it has. Smaller tiles fill the last wave better but are slower each: the best size counts, because libraries
    choose it.

    Example:
        >>> h100 = find_device("H100")  # doctest: +SKIP
        >>> product = OpSpec(name="mm", flops=0, moved_bytes=0, dtype="bf16", product=(1, 1024, 1024, 4096))
        >>> achieved_share(product, h100) < h100.achieved_arithmetic  # doctest: +SKIP
        True

    Source: NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and wave quantization.
    """
    if "attention" in spec.name:
        kernel = device.cudnn_attention if "cudnn" in spec.name else 1.0
        return device.achieved_attention * kernel * (_ATTENTION_BACKWARD if "backward" in spec.name else 1.0)
    if spec.product is None or not device.multiprocessors:
        return device.achieved_arithmetic
    batch, rows, columns, _ = spec.product
    return device.achieved_arithmetic * max(
        share * _filled(batch * math.ceil(rows / height) * math.ceil(columns / width), device.multiprocessors)
        for (tall, wide), share in _TILES.items()
        for height, width in ((tall, wide), (wide, tall))
    )


def _filled(tiles: int, multiprocessors: int) -> float:
    """Return the share of all multiprocessors' time that is spent on computing tiles, from 0 to 1.

    The rest is lost in the last round, when there are fewer tiles than multiprocessors. Each multiprocessor computes one tile
    at a time.
    """
    waves = tiles / multiprocessors
    return waves / max(math.ceil(waves), 1)


def roofline_costs(trace: Trace, device: Device, layout: Layout | None = None) -> Costs:
    """Return the predicted seconds of each op of ``trace`` on ``device``.

    The spread of each op is 0, because a roofline does not estimate its own error.

    Args:
        trace: a trace, with or without collectives.
        device: a device with its peaks and links.
        layout: the sizes of the groups, for the trace of one rank of several.

    Raises:
        InvalidLayout: the trace has collectives and no layout is given, or the device's links are not known.

    Example:
        >>> roofline_costs(trace, find_device("H100-SXM"))  # doctest: +SKIP
    """
    alone = {key: _seconds(spec, device, layout) for key, spec in trace.specs.items()}
    return Costs(
        device=device.name,
        source=CostSource.ROOFLINE,
        ops={key: OpCost(seconds=_exposed(spec, key, alone, layout)) for key, spec in trace.specs.items()},
        slot_seconds=_HOST_SLOT_SECONDS,
        replay_seconds=_HOST_REPLAY_SECONDS,
        memory_bytes=device.memory_bytes,
    )


def _seconds(spec: OpSpec, device: Device, layout: Layout | None) -> float:
    """Return the predicted seconds of one op, collective, or op that uses the host, as if nothing else ran at the same time."""
    if not spec.group:
        return roofline_seconds(spec, device)
    if spec.group == HOST:
        return host_seconds(spec, device, layout)
    if layout is None:
        raise InvalidLayout(
            f"The trace has collectives over the {spec.group} group, but the size of this group is unknown.",
            why="the time of a collective depends on the number of ranks and on their nodes",
            next="pass the layout that the model was divided with",
        )
    group = group_of(layout, spec.group)
    return collective_seconds(
        _kind(spec), spec.moved_bytes, group.ranks, device, stride=group.stride, copies=spec.copies
    )


def _exposed(spec: OpSpec, key: str, alone: dict[str, float], layout: Layout | None) -> float:
    """Return the seconds of an op that the step waits for: those that are not hidden behind matrix products.

    A collective comes before or after each of the products that run at the same time, so half of their time hides it. The
    collective's first piece is never hidden.
    """
    if not spec.beside or layout is None:
        return alone[key]
    hidden = sum(alone[product] for product in spec.beside) / 2
    return max(alone[key] - hidden, alone[key] / group_of(layout, spec.group).ranks)


def _kind(spec: OpSpec) -> Collective:
    """Return the kind of collective that an op is, from its name: ``plimsoll.all_reduce_`` is an ``all_reduce``."""
    return Collective.ALL_TO_ALL if spec.copies else Collective(spec.name.rpartition(".")[2].removesuffix("_"))


def optimizer_seconds(trace: Trace, costs: Costs) -> float:
    """Return the seconds of all ops of the optimizer's step in a trace; 0 if the trace does not have such a step."""
    ops = (op for op in trace.ops if op.phase is Phase.OPTIMIZER and op.cost_key in costs.ops)
    return sum(costs.ops[op.cost_key].seconds for op in ops)
