"""A device's name in, its figures out: the catalogue that a roofline plans with when the device is not here. No torch.

Every figure names its source. Peaks are *dense* (vendors like to print twice that, for 2:4 sparsity). ``memory_bytes`` is
what the driver leaves to programs, which is less than what is soldered on.

What a kernel achieves of a peak is an assumption, stated per device in ``achieved_arithmetic`` and
``achieved_bandwidth``: large matrix products reach 60 to 80% of the dense peak on the accelerators here and streaming
kernels 80 to 92% of the bandwidth. Ratios between plans hardly depend on it; absolute seconds do.

Links are given per direction and device: ``link_bytes_per_second`` to the other devices of a node (all NVLink or xGMI links
together; PCIe where there are none), ``network_bytes_per_second`` to other nodes. The network is a property of a system and
not of a device, so what is given is that of the vendor's own (or a usual) eight-way system. ``achieved_link`` is the share of
both that collectives reach on large messages, the bus bandwidth of nccl-tests over the peak. Published reference figures: 230
to 250 of 300 GB/s on eight A100, 460 to 480 on eight H100 of which the switch reduces (peak 450 without that), 35 to 45 of 64
on eight H100 over PCIe. So 0.8 with NVLink and 0.6 over PCIe; the rest (0.7 for xGMI, 0.8 for networks) is assumed.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from plimsoll.errors import UnknownDevice
from plimsoll.units import GIB

_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device. ``peak_flops_per_second`` is keyed by the dtype names of traces (``f32``, ``bf16``, …).

    ``tf32`` is what an NVIDIA device uses for f32 convolutions unless told otherwise; f32 matrix products use ``f32``.
    ``launch_seconds`` is the least that one op takes, however small. ``link_bytes_per_second`` is 0 for a device that works
    alone.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    peak_flops_per_second: dict[str, float]
    launch_seconds: float
    achieved_arithmetic: float
    achieved_bandwidth: float
    source: str
    link_bytes_per_second: float = 0.0
    network_bytes_per_second: float = 0.0
    ranks_per_node: int = 8
    achieved_link: float = 0.8

    def flops_per_second(self, dtype: str) -> float:
        """Dense peak for ``dtype``; what has no peak of its own (integers, booleans) runs like f32."""
        family = "f8" if dtype.startswith("float8") else dtype
        return self.peak_flops_per_second.get(family, self.peak_flops_per_second["f32"])


def find_device(name: str) -> Device:
    """The device called ``name``; case, spaces, dashes and the vendor's name do not matter.

    Raises:
        UnknownDevice: no such device; the error shows the closest names.

    Example:
        >>> find_device("NVIDIA H100 SXM").name
        'H100-SXM'
    """
    found = _DEVICES_BY_KEY.get(_key(name))
    if found is not None:
        return found
    closest = difflib.get_close_matches(_key(name), _DEVICES_BY_KEY, n=3, cutoff=0.4)
    close = list(dict.fromkeys(_DEVICES_BY_KEY[key].name for key in closest))
    raise UnknownDevice(
        f"No device is called {name!r}.",
        why=f"the catalogue has {', '.join(device.name for device in DEVICES)}",
        next=f"try {' or '.join(repr(each) for each in close)}"
        if close
        else "pick one of these, or plan on the device",
    )


def _key(name: str) -> str:
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"nvidia|amd|instinct|geforce|tesla|generic", "", text)


def _accelerator(
    name: str,
    *,
    gib: float,
    gigabytes_per_second: float,
    teraflops: dict[str, float],
    source: str,
    link_gigabytes_per_second: float,
    network_gigabits_per_second: float,
    achieved: float = 0.7,
    achieved_link: float = 0.8,
) -> Device:
    return Device(
        name=name,
        memory_bytes=int(gib * GIB),
        bandwidth_bytes_per_second=gigabytes_per_second * _GIGA,
        peak_flops_per_second={dtype: each * _TERA for dtype, each in teraflops.items()},
        launch_seconds=4e-6,
        achieved_arithmetic=achieved,
        achieved_bandwidth=0.85,
        source=source,
        link_bytes_per_second=link_gigabytes_per_second * _GIGA,
        network_bytes_per_second=network_gigabits_per_second / 8 * _GIGA,
        achieved_link=achieved_link,
    )


_HOPPER_SXM = {"f64": 34.0, "f32": 67.0, "tf32": 494.7, "bf16": 989.4, "f16": 989.4, "f8": 1978.9}
_AMPERE = {"f64": 9.7, "f32": 19.5, "tf32": 156.0, "bf16": 312.0, "f16": 312.0}

DEVICES: tuple[Device, ...] = (
    _accelerator(
        "A100-40GB",
        gib=39.4,
        gigabytes_per_second=1555,
        teraflops=_AMPERE,
        source='NVIDIA, "A100 Tensor Core GPU" datasheet (SXM4, 40 GB); memory: total that CUDA reports',
        link_gigabytes_per_second=300,  # NVLink 600 GB/s both ways; DGX A100: one 200 Gb/s port per GPU
        network_gigabits_per_second=200,
    ),
    _accelerator(
        "A100-80GB",
        gib=79.1,
        gigabytes_per_second=2039,
        teraflops=_AMPERE,
        source='NVIDIA, "A100 Tensor Core GPU" datasheet (SXM4, 80 GB); memory: total that CUDA reports',
        link_gigabytes_per_second=300,  # NVLink 600 GB/s both ways; DGX A100: one 200 Gb/s port per GPU
        network_gigabits_per_second=200,
    ),
    _accelerator(
        "H100-SXM",
        gib=79.1,
        gigabytes_per_second=3350,
        teraflops=_HOPPER_SXM,
        source='NVIDIA, "H100 Tensor Core GPU" datasheet (SXM5, half of the sparse peaks); memory: total that CUDA reports',
        achieved=0.65,
        link_gigabytes_per_second=450,  # NVLink 900 GB/s both ways; DGX H100: one 400 Gb/s port per GPU
        network_gigabits_per_second=400,
    ),
    _accelerator(
        "H100-PCIe",
        gib=79.1,
        gigabytes_per_second=2000,
        teraflops={"f64": 26.0, "f32": 51.0, "tf32": 378.0, "bf16": 756.0, "f16": 756.0, "f8": 1513.0},
        source='NVIDIA, "H100 Tensor Core GPU" datasheet (PCIe, half of the sparse peaks); memory: total that CUDA reports',
        achieved=0.6,
        link_gigabytes_per_second=64,  # PCIe 5.0 x16, 64 GB/s each way, without bridges
        network_gigabits_per_second=200,  # assumed: two GPUs to a 400 Gb/s port
        achieved_link=0.6,
    ),
    _accelerator(
        "H200",
        gib=139.8,
        gigabytes_per_second=4800,
        teraflops=_HOPPER_SXM,
        source='NVIDIA, "H200 Tensor Core GPU" datasheet (SXM, half of the sparse peaks); memory: total that CUDA reports',
        achieved=0.65,
        link_gigabytes_per_second=450,  # NVLink 900 GB/s both ways; DGX H200: one 400 Gb/s port per GPU
        network_gigabits_per_second=400,
    ),
    _accelerator(
        "B200",
        gib=178.3,
        gigabytes_per_second=7670,
        teraflops={"f64": 37.0, "f32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "f16": 2250.0, "f8": 4500.0},
        source=(
            'NVIDIA, "HGX B200" datasheet, an eighth of it (half of the sparse peaks); bandwidth: bus width × clock that '
            "the driver reports (the datasheet says 8 TB/s); memory: total that CUDA reports (pytorch/ao pull request 4002)"
        ),
        achieved=0.65,
        link_gigabytes_per_second=900,  # NVLink 1.8 TB/s both ways; DGX B200: one 400 Gb/s port per GPU
        network_gigabits_per_second=400,
    ),
    _accelerator(
        "MI300X",
        gib=191.6,
        gigabytes_per_second=5300,
        teraflops={"f64": 81.7, "f32": 163.4, "tf32": 653.7, "bf16": 1307.4, "f16": 1307.4, "f8": 2614.9},
        source='AMD, "Instinct MI300X Accelerator" data sheet; memory: 192 GiB less what the driver keeps',
        achieved=0.5,
        link_gigabytes_per_second=448,  # seven xGMI links of 64 GB/s each way (AMD, "CDNA 3" white paper)
        network_gigabits_per_second=400,  # assumed: one 400 Gb/s port per GPU
        achieved_link=0.7,
    ),
    _accelerator(
        "L40S",
        gib=44.4,
        gigabytes_per_second=864,
        teraflops={"f64": 1.4, "f32": 91.6, "tf32": 183.0, "bf16": 362.0, "f16": 362.0, "f8": 733.0},
        source='NVIDIA, "L40S GPU" datasheet; f64 is 1/64 of f32; memory: total that CUDA reports with ECC on',
        link_gigabytes_per_second=32,  # PCIe 4.0 x16, 32 GB/s each way
        network_gigabits_per_second=100,  # assumed: four GPUs to a 400 Gb/s port
        achieved_link=0.6,
    ),
    _accelerator(
        "RTX-4090",
        gib=23.6,
        gigabytes_per_second=1008,
        teraflops={"f64": 1.3, "f32": 82.6, "tf32": 82.6, "bf16": 165.2, "f16": 165.2, "f8": 330.3},
        source='NVIDIA, "Ada GPU Architecture" whitepaper, appendix A (f32 accumulation); memory: total that CUDA reports',
        achieved=0.8,
        link_gigabytes_per_second=32,  # PCIe 4.0 x16, 32 GB/s each way
        network_gigabits_per_second=25,  # assumed
        achieved_link=0.6,
    ),
    Device(
        name="laptop-CPU",
        memory_bytes=16 * GIB,
        bandwidth_bytes_per_second=51.2 * _GIGA,
        peak_flops_per_second={"f64": 0.32 * _TERA, "f32": 0.64 * _TERA},
        launch_seconds=3e-6,
        achieved_arithmetic=0.5,
        achieved_bandwidth=0.7,
        source=(
            "no product: 8 cores at 2.5 GHz with two 8-wide f32 FMA units each (Intel and AMD optimization manuals), two "
            "channels of DDR4-3200 (JEDEC JESD79-4); 16-bit floats run at the speed of f32"
        ),
    ),
)

_ALIASES = {
    "A100-SXM4-40GB": "A100-40GB",
    "A100-PCIE-40GB": "A100-40GB",
    "A100": "A100-80GB",
    "A100-SXM": "A100-80GB",
    "A100-SXM4-80GB": "A100-80GB",
    "H100": "H100-SXM",
    "H100 80GB HBM3": "H100-SXM",
    "4090": "RTX-4090",
    "cpu": "laptop-CPU",
    "laptop": "laptop-CPU",
}
"""What drivers and people call them."""

_DEVICES_BY_NAME = {device.name: device for device in DEVICES}
_DEVICES_BY_KEY = {_key(name): device for name, device in _DEVICES_BY_NAME.items()} | {
    _key(alias): _DEVICES_BY_NAME[name] for alias, name in _ALIASES.items()
}
