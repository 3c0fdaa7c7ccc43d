"""The catalogue: names, figures, sources."""

import pytest

from plimsoll.errors import UnknownDevice
from plimsoll.planning.costing.devices import find_device, known_devices
from plimsoll.units import GIB


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_every_device_is_complete_and_names_its_source(device):
    assert len(device.source) > 20
    assert 10 * GIB < device.memory_bytes < 300 * GIB
    assert 0 < device.achieved_arithmetic <= 1
    assert 0 < device.achieved_bandwidth <= 1
    assert device.launch_seconds > 0
    peaks = device.peak_flops_per_second
    assert peaks["f64"] <= peaks["f32"] <= device.flops_per_second("bf16")
    assert peaks["f32"] > device.bandwidth_bytes_per_second
    assert find_device(device.name) is device


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100-sxm", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 3060", "RTX-3060"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX-4060-Ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX-4070-Ti-SUPER"),
        ("NVIDIA GeForce RTX 4080", "RTX-4080"),
        ("NVIDIA GeForce RTX 5080", "RTX-5080"),
        ("NVIDIA TITAN RTX", "Titan-RTX"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX A5000", "RTX-A5000"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("cpu", "laptop-CPU"),
    ],
)
def test_devices_are_found_by_what_drivers_call_them(text, name):
    assert find_device(text).name == name


@pytest.mark.parametrize(("text", "known", "close"), [("H10", "MI300X", "'H100-SXM'"), ("???", "RTX-4090", "")])
def test_unknown_device_shows_all_names_and_the_closest(text, known, close):
    with pytest.raises(UnknownDevice) as caught:
        find_device(text)
    assert known in caught.value.why
    assert close in caught.value.next


def test_dtypes_without_a_peak_of_their_own_run_like_f32():
    h100 = find_device("H100")
    assert h100.flops_per_second("i64") == h100.flops_per_second("f32")
    assert h100.flops_per_second("float8_e4m3fn") > h100.flops_per_second("bf16")


def test_a_power_limit_slows_arithmetic_and_leaves_memory():
    h100, limited = find_device("H100-SXM"), find_device("h100@500W")
    assert limited.name == "H100-SXM@500W"
    assert 500 / 700 < limited.achieved_arithmetic / h100.achieved_arithmetic < 1
    assert limited.bandwidth_bytes_per_second == h100.bandwidth_bytes_per_second
    assert find_device("H100@900W").achieved_arithmetic == h100.achieved_arithmetic


@pytest.mark.parametrize("name", ["RTX-4090@225W", "B200@500W", "L40S@175W", "MI300X@375W"])
def test_half_of_the_vendors_power_limit_slows_every_common_card(name):
    card, limited = find_device(name.partition("@")[0]), find_device(name)
    assert limited.achieved_arithmetic == pytest.approx(0.5**0.5 * card.achieved_arithmetic)


def test_an_rtx_4060_ti_has_eight_lanes_to_its_host():
    card, wide = find_device("RTX-4060-Ti"), find_device("RTX-4070")
    assert card.host_link_bytes_per_second == wide.host_link_bytes_per_second / 2
    assert card.link_bytes_per_second == wide.link_bytes_per_second / 2


def test_the_a100_with_40_gb_for_pcie_has_no_nvlink():
    pcie, nvlink = find_device("NVIDIA A100-PCIE-40GB"), find_device("NVIDIA A100-SXM4-40GB")
    assert pcie.memory_bytes == nvlink.memory_bytes
    assert pcie.link_bytes_per_second < 0.2 * nvlink.link_bytes_per_second
    assert pcie.achieved_arithmetic == pytest.approx(find_device("A100-40GB@250W").achieved_arithmetic, rel=0.02)


def test_a_network_is_given_in_gigabits_to_each_device():
    assert find_device("A100@50Gb/s@300W").network_bytes_per_second == 6.25e9


@pytest.mark.parametrize("change", ["500", "fast", "2kW", ""])
def test_what_a_device_cannot_have_is_refused(change):
    with pytest.raises(UnknownDevice, match="is not a valid change"):
        find_device(f"H100@{change}")


@pytest.mark.parametrize(
    "name", ["TPU-v5e@100W", "24GiB+165TFLOPS+1008GB/s@200W", "H100@500W@500W", "A100@50Gb/s@9Gb/s"]
)
def test_a_change_without_effect_is_refused(name):
    with pytest.raises(UnknownDevice, match="cannot have the change"):
        find_device(name)


def test_kernels_of_an_earlier_year_reach_less_under_whatever_limit():
    now, then = find_device("H100"), find_device("H100@2023")
    assert (then.achieved_arithmetic, then.achieved_attention) == (0.59, 0.21)
    assert now.achieved_arithmetic > then.achieved_arithmetic
    both = [find_device(name) for name in ("H100@500W@2023", "H100@2023@500W")]
    assert both[0].achieved_arithmetic == pytest.approx(both[1].achieved_arithmetic)
    assert both[0].achieved_arithmetic / then.achieved_arithmetic == pytest.approx((500 / 700) ** 0.5)
    with pytest.raises(UnknownDevice, match="2023"):
        find_device("A100@2023")
    with pytest.raises(UnknownDevice, match="the year of its kernels: 2023"):
        find_device("H100@2019")


def test_three_figures_describe_any_card():
    card = find_device("24GiB+165TFLOPS+1008GB/s")
    known = find_device("RTX-4090")
    assert card.memory_bytes == 24 * GIB
    assert card.flops_per_second("bf16") == pytest.approx(known.flops_per_second("bf16"), rel=0.01)
    assert card.flops_per_second("f32") == pytest.approx(known.flops_per_second("f32"), rel=0.01)
    assert card.bandwidth_bytes_per_second == known.bandwidth_bytes_per_second
    assert find_device("24 GiB + 165 tflops + 1008 GB/s @ 100Gb/s").memory_bytes == card.memory_bytes


@pytest.mark.parametrize(
    "text", ["24GiB+165TFLOPS", "24GiB+many+1GB/s", "0GiB+1TFLOPS+1GB/s", "24GiB+0TFLOPS+9GB/s", "H100+1"]
)
def test_a_description_without_its_figures_is_refused(text: str):
    with pytest.raises(UnknownDevice, match="does not describe a device"):
        find_device(text)
