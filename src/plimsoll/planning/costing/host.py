"""Computes the costs of using a device's host: seconds of copies and of optimizer steps, and forms of offloaded activations."""

from __future__ import annotations

import os
from collections.abc import Sequence

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Form, Forms, LinkCost, RegionForms, ValueForms
from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import OpSpec, RegionCall, Trace
from plimsoll.errors import InvalidLayout
from plimsoll.planning.costing.devices import Device
from plimsoll.units import MIB

HOST, HOST_COPY, HOST_STEP = "host", "host_copy", "host_step"
"""Names in traces of work on the host. ``host`` is the group of such ops. Its ops are ``host_copy``, a copy between device and
host, and ``host_step``, an optimizer's step on the host."""
HOST_LINK_SHARE = 0.8
_HOST_STEP_SHARE = 0.44
"""The share of the host's memory bandwidth that a vectorised, threaded optimizer step reaches: 56 of 128 GB/s."""
_LEAST_SENT_BYTES = MIB
"""Values with fewer bytes than this are not offloaded, because they are not worth a transfer."""


def host_memory_bytes() -> int | None:
    """Return the memory of this machine in bytes, or ``None`` if the operating system does not say it."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_link(device: Device) -> LinkCost:
    """Return the speed and latency of the link between a device and its host.

    Source: a link reaches four fifths of its peak (25 of 32 GB/s for pinned memory over PCIe 4.0).

    Raises:
        InvalidLayout: the catalogue does not list a host link for this device.
    """
    if not device.host_link_bytes_per_second:
        raise InvalidLayout(
            f"unsupported: copies between {device.name} and its host.",
            why="the catalogue does not have a link between them",
            next="use a GPU from the catalogue, or keep everything on the device",
        )
    speed = device.host_link_bytes_per_second * HOST_LINK_SHARE
    return LinkCost(
        name=HOST, out_bytes_per_second=speed, in_bytes_per_second=speed, latency_seconds=device.launch_seconds
    )


def host_seconds(spec: OpSpec, device: Device, layout: Layout | None) -> float:
    """Return the seconds of a copy between device and host, or of an optimizer's step on the host for all ranks of a node.

    The step is bound by the host's memory, which the processes of a node share. One process uses the memory of one socket.

    Source: Ren et al. 2021 (ZeRO-Offload), table 4: about half a second for a billion parameters. That is 56 GB/s for 28 bytes
    per parameter, on a socket with six channels of DDR4-2666 (128 GB/s). Known weakness: a loop over parameters in eager
    torch, or an optimizer that is not vectorised, takes several times as long.

    Raises:
        InvalidLayout: the catalogue does not list a host link for this device.
    """
    if spec.name == HOST_STEP:
        ranks = min(1 if layout is None else layout.ranks, device.ranks_per_node)
        used = min(1.0, ranks / device.host_sockets)
        speed = device.host_bandwidth_bytes_per_second * used * _HOST_STEP_SHARE
        return spec.moved_bytes * ranks / speed
    link = host_link(device)
    return spec.moved_bytes / link.in_bytes_per_second + link.latency_seconds


def host_forms(trace: Trace, device: Device) -> Forms:
    """Return the forms that Plimsoll itself may use to hold saved values of the blocks (regions) on the host.

    A form (codec or offload) is a way to store a value. The last block keeps its values, because no later block hides its
    transfers.

    Example:
        >>> host_forms(trace, find_device("H100")).link.name  # doctest: +SKIP
        'host'

    Raises:
        InvalidLayout: the catalogue does not list a host link for this device.
    """
    return _forms(trace.regions[:-1], host_link(device), _LEAST_SENT_BYTES)


def host_forms_of_switches(trace: Trace, device: Device) -> Forms:
    """Return the forms that a framework's own switches may use to hold saved values of the blocks on the host.

    A form (codec or offload) is a way to store a value. All blocks have such forms, the last block included, for values of any
    size.

    Raises:
        InvalidLayout: the catalogue does not list a host link for this device.
    """
    return _forms(trace.regions, host_link(device), 1)


def _forms(calls: Sequence[RegionCall], link: LinkCost, least_bytes: int) -> Forms:
    regions = (RegionForms(name=call.name, call=call.call, values=_sent(call, least_bytes)) for call in calls)
    return Forms(regions=tuple(regions), link=link)


def _sent(call: RegionCall, least_bytes: int) -> tuple[ValueForms, ...]:
    saved = {slot.value for slot in call.graph.slots if slot.is_managed}
    values = (value for value in call.graph.values if value.id in saved or value.origin is Origin.INPUT)
    return tuple(
        ValueForms(
            value=value.name,
            forms=(Form(name=HOST, decision=Decision.OFFLOAD, held_bytes=0, link_bytes=value.bytes),),
        )
        for value in values
        if value.bytes >= least_bytes and value.origin not in (Origin.PARAMETER, Origin.BUFFER)
    )
