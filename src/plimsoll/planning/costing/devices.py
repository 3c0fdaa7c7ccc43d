"""Looks up a device by name, for planning with a roofline on a machine that does not have the device.

The figures are in ``devices.toml``, each with its source and its assumptions.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from plimsoll.artifacts.files import FileRefused, ReadLimits, decode_json, read_file
from plimsoll.errors import PlimsollError, UnknownDevice
from plimsoll.units import GIB, parse_bytes

_FILE = ".json"
_LIMITS = ReadLimits(most_bytes=1 << 20)
_MOST_CORRECTION = 10.0
_TERA = 1e12
_GIGA = 1e9
_CLOCK_BY_POWER = 0.5
"""The clock is proportional to the power limit raised to this exponent: dynamic power is clock · voltage², and a lower clock
needs less voltage. 0.5 is an assumption, between 1/3 (voltage proportional to the clock) and 1 (constant voltage)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Data: the figures of one device.

    ``peak_flops_per_second`` maps the dtype names of traces (``f32``, ``bf16``, …) to the peak of dense arithmetic.
    ``tf32`` is the peak for f32 convolutions on an NVIDIA device by default; f32 matrix products use ``f32``.
    ``memory_bytes`` is the memory that the driver leaves to programs. ``launch_seconds`` is the least time of one op.
    ``achieved_arithmetic`` is the share of the peak that large matrix products reach, ``achieved_attention`` the share of
    fused attention (cuDNN's is ``cudnn_attention`` times as fast), ``achieved_bandwidth`` and ``achieved_link`` the shares of
    the bandwidths. ``multiprocessors`` is how many tiles of a product run at a time, and ``watts`` is the power limit as
    delivered; both are 0 if not known.

    Links are per direction and device: ``link_bytes_per_second`` to the other devices of a node (0 for a single device),
    ``network_bytes_per_second`` to other nodes, ``host_link_bytes_per_second`` to the host's memory.
    ``host_bandwidth_bytes_per_second`` is the bandwidth of the memory of a node's host, all its ``host_sockets``
    together; by default that of eight channels of DDR4-3200. ``aliases`` are other names that drivers and people use.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    peak_flops_per_second: dict[str, float]
    launch_seconds: float
    achieved_arithmetic: float
    achieved_bandwidth: float
    source: str
    achieved_attention: float = 0.3
    cudnn_attention: float = 1.0
    multiprocessors: int = 0
    watts: float = 0.0
    link_bytes_per_second: float = 0.0
    network_bytes_per_second: float = 0.0
    ranks_per_node: int = 8
    achieved_link: float = 0.8
    host_link_bytes_per_second: float = 0.0
    host_bandwidth_bytes_per_second: float = 204.8e9
    host_sockets: int = 2
    aliases: tuple[str, ...] = ()
    is_corrected: bool = False
    is_described: bool = False
    """Whether a text with three figures describes the device, and the catalogue does not have it."""
    achieved_in: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Maps a year to two shares of the peak that the kernels of that year reached: of matrix products, and of fused attention.
    The mapping is empty if they are not known."""

    def flops_per_second(self, dtype: str) -> float:
        """Return the device's peak of dense arithmetic for a dtype, in FLOPs per second.

        A dtype without a peak of its own (integers, booleans) gets the peak of f32.
        """
        family = "f8" if dtype.startswith("float8") else dtype
        return self.peak_flops_per_second.get(family, self.peak_flops_per_second["f32"])


class DeviceCorrection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Data: factors that say how many times as fast one machine's device is as the catalogue says.

    There is one factor each for matrix products, memory, links and kernel launches.
    """

    device: str
    arithmetic: float = 1.0
    bandwidth: float = 1.0
    links: float = 1.0
    launches: float = 1.0
    source: str = ""


def read_correction(path: Path) -> Device:
    """Return the corrected device that a file describes; ``plimsoll estimate --save-device`` writes such files.

    Raises:
        UnknownDevice: the file cannot be read or has another format, or the catalogue does not have the corrected device.
    """
    try:
        found: DeviceCorrection = decode_json(read_file(path, _LIMITS), _LIMITS, DeviceCorrection)
    except (FileRefused, ValueError) as error:
        raise UnknownDevice(
            f"{path} does not describe a device.",
            why=str(error),
            next="name a device from the catalogue, or give a file that --save-device wrote",
        ) from error
    base = find_device(found.device) if not found.device.endswith(_FILE) else None
    factors = (found.arithmetic, found.bandwidth, found.links, found.launches)
    if base is None or not all(0 < factor < _MOST_CORRECTION for factor in factors):
        raise UnknownDevice(
            f"{path} does not describe a device.",
            why=f"its factors are {', '.join(map(str, factors))}, for device {found.device!r}",
            next="give a file that --save-device wrote: its factors are between 0 and 10, and its device is in the catalogue",
        )
    return replace(
        base,
        achieved_arithmetic=base.achieved_arithmetic * found.arithmetic,
        achieved_attention=base.achieved_attention * found.arithmetic,
        achieved_bandwidth=base.achieved_bandwidth * found.bandwidth,
        achieved_link=base.achieved_link * found.links,
        launch_seconds=base.launch_seconds / found.launches,
        source=f"{base.source}; corrected by {found.source or path}",
        is_corrected=True,
    )


@functools.cache
def known_devices() -> tuple[Device, ...]:
    """Return the devices of the catalogue, each with its figures."""
    text = resources.files(__package__).joinpath("devices.toml").read_text(encoding="utf-8")
    return tuple(_device(name, table) for name, table in tomllib.loads(text).items())


def find_device(name: str) -> Device:
    """Return the device called ``name``; case, spaces, dashes and the vendor's name do not matter.

    ``name`` may also be the path of a correction file. After an ``@`` it may say how a system differs: its power limit
    (``H100-SXM@500W``), its network per device (``A100-80GB@50Gb/s``), or the year of its kernels (``H100-SXM@2023``).

    Any other GPU is described by the memory that its driver leaves to programs, its dense peak in 16 bits and its bandwidth:
    ``24GiB+165TFLOPS+1008GB/s``. Its peak in f32 is then half of that in 16 bits, as on a GeForce. What kernels reach and its
    links (PCIe 4.0) are assumed.

    Raises:
        UnknownDevice: the device does not exist, or the change is not possible; the error lists what is known.

    Example:
        >>> find_device("NVIDIA H100 SXM").name
        'H100-SXM'
        >>> find_device("24GiB+165TFLOPS+1008GB/s").flops_per_second("bf16")
        165000000000000.0
        >>> find_device("H100@400Gb/s@500W").network_bytes_per_second
        50000000000.0
    """
    if not isinstance(name, str):
        raise UnknownDevice(
            f"{name!r} is not a device.", why="a device is named by a str", next="give a name, such as 'H100-SXM'"
        )
    if name.endswith(_FILE):
        return read_correction(Path(name))
    name, *changes = name.split("@")
    devices = _devices_by_key()
    found = _described(name) if "+" in name else devices.get(_key(name))
    if found is not None:
        return functools.reduce(_changed, changes, found)
    closest = difflib.get_close_matches(_key(name), devices, n=3, cutoff=0.4)
    close = list(dict.fromkeys(devices[key].name for key in closest))
    raise UnknownDevice(
        f"No device is called {name!r}.",
        why=f"the catalogue has {', '.join(device.name for device in known_devices())}",
        next=f"try {' or '.join(repr(each) for each in close)}"
        if close
        else "use one of these, or plan on the device itself",
    )


def _described(name: str) -> Device:
    """Return the device that a text with three figures describes: memory, peak and bandwidth.

    Raises:
        UnknownDevice: the text does not have these figures.
    """
    match = re.fullmatch(r"([\d.]+ ?[KMGT]i?B)\+([\d.]+) ?TFLOPS\+([\d.]+) ?GB/s", name.replace(" ", ""), re.IGNORECASE)
    try:
        memory_bytes, peak, bandwidth = (
            (parse_bytes(match[1]), float(match[2]), float(match[3])) if match else (0, 0, 0)
        )
    except (ValueError, PlimsollError):
        memory_bytes = peak = bandwidth = 0
    if not (memory_bytes > 0 and 0 < peak < math.inf and 0 < bandwidth < math.inf):
        raise UnknownDevice(
            f"{name!r} does not describe a device.",
            why="a description has three positive figures: memory, dense peak in 16 bits, and memory bandwidth",
            next="write for example 24GiB+165TFLOPS+1008GB/s",
        )
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_second=bandwidth * _GIGA,
        peak_flops_per_second={
            "bf16": peak * _TERA,
            "f16": peak * _TERA,
            "tf32": peak * _TERA / 2,
            "f32": peak * _TERA / 2,
            "f64": peak * _TERA / 128,
        },
        launch_seconds=4e-6,
        achieved_arithmetic=0.7,
        achieved_bandwidth=0.85,
        source="the figures of its description; the rest is assumed",
        link_bytes_per_second=32 * _GIGA,
        network_bytes_per_second=25 / 8 * _GIGA,
        host_link_bytes_per_second=32 * _GIGA,
        achieved_link=0.6,
        is_described=True,
    )


def _changed(device: Device, change: str) -> Device:
    """Return a copy of the device with one change, given as text after the ``@`` of a device's name.

    The change is another power limit (``500W``), another network (``50Gb/s``), or the kernels of another year (``2023``).
    """
    if change.strip() in device.achieved_in:
        arithmetic, attention = device.achieved_in[change.strip()]
        clock = device.achieved_arithmetic / find_device(device.name.partition("@")[0]).achieved_arithmetic
        return replace(
            device,
            name=f"{device.name}@{change.strip()}",
            achieved_arithmetic=arithmetic * clock,
            achieved_attention=attention * clock,
        )
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(W|Gb/s)", change.strip())
    if match is None or not 0 < float(match[1]) < math.inf:
        years = f", or the year of its kernels: {', '.join(device.achieved_in)}" if device.achieved_in else ""
        raise UnknownDevice(
            f"{change!r} is not a valid change of {device.name}.",
            why=f"after an @, give a power limit in watts, or the network speed per device{years}",
            next=f"write {device.name}@500W or {device.name}@100Gb/s",
        )
    amount, name = float(match[1]), f"{device.name}@{change.strip()}"
    is_given = re.search(rf"@[\d.]+ ?{match[2]}", device.name) is not None
    if is_given or (match[2] == "W" and not device.watts):
        raise UnknownDevice(
            f"{device.name} cannot have the change {change!r}.",
            why=f"a change in {match[2]} is given already"
            if is_given
            else "the catalogue does not have the power limit that the vendor gives it, to compare with",
            next=f"leave @{change.strip()} out",
        )
    if match[2] == "Gb/s":
        return replace(device, name=name, network_bytes_per_second=amount / 8 * _GIGA)
    clock = min(1.0, amount / device.watts) ** _CLOCK_BY_POWER
    return replace(
        device,
        name=name,
        achieved_arithmetic=device.achieved_arithmetic * clock,
        achieved_attention=device.achieved_attention * clock,
    )


def _key(name: str) -> str:
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"nvidia|amd|instinct|geforce|tesla|generic", "", text)


@functools.cache
def _devices_by_key() -> Mapping[str, Device]:
    by_name = {_key(device.name): device for device in known_devices()}
    return by_name | {_key(alias): device for device in known_devices() for alias in device.aliases}


def _device(name: str, table: dict[str, Any]) -> Device:
    return Device(
        name=name,
        aliases=tuple(table.pop("aliases", ())),
        memory_bytes=int(table.pop("memory_gib") * GIB),
        bandwidth_bytes_per_second=table.pop("bandwidth_gigabytes_per_second") * _GIGA,
        peak_flops_per_second={dtype: peak * _TERA for dtype, peak in table.pop("peak_teraflops").items()},
        link_bytes_per_second=table.pop("link_gigabytes_per_second") * _GIGA,
        network_bytes_per_second=table.pop("network_gigabits_per_second") / 8 * _GIGA,
        host_link_bytes_per_second=table.pop("host_link_gigabytes_per_second", 0) * _GIGA,
        **(
            {"host_bandwidth_bytes_per_second": table.pop("host_memory_gigabytes_per_second") * _GIGA}
            if "host_memory_gigabytes_per_second" in table
            else {}
        ),
        achieved_in={year: (shares[0], shares[1]) for year, shares in table.pop("achieved_in", {}).items()},
        **table,
    )
