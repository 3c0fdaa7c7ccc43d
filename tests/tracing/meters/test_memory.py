"""The peak meter against allocations of known size."""

import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from plimsoll.tracing.meters.memory import MeasurementLost, PeakMeter, storage_bytes

KIB = 1024


def _make(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_peak_counts_what_is_alive_at_once():
    with PeakMeter("cpu") as meter:
        first = _make(100)
        second = _make(50)
        del first
        third = _make(70)
    assert meter.peak_bytes == 150 * KIB
    assert meter.resident_bytes == 120 * KIB
    del second, third


def test_an_empty_block_needs_nothing():
    with PeakMeter("cpu") as meter:
        pass
    assert (meter.peak_bytes, meter.resident_bytes) == (0, 0)


def test_views_are_counted_once():
    with PeakMeter("cpu") as meter:
        base = _make(64)
        views = [base[1:], base.view(64, KIB), base.expand(3, -1)]
    assert meter.peak_bytes == 64 * KIB
    assert len(views) == 3


def test_memory_from_before_is_seen_when_it_is_let_go():
    old = _make(300)
    with PeakMeter("cpu") as meter:
        first = _make(100)
        del old
        second = _make(250)
    assert meter.peak_bytes == 100 * KIB
    assert meter.resident_bytes == 50 * KIB
    del first, second


def test_gradients_from_before_are_seen_when_they_are_let_go():
    weight = torch.nn.Parameter(torch.zeros(1024))
    weight.sum().backward()
    with PeakMeter("cpu") as meter:
        weight.grad = None
    assert meter.resident_bytes == -4096


def test_memory_that_only_a_view_holds_is_seen_when_it_is_let_go():
    view = _make(8)[10:20]
    with PeakMeter("cpu") as meter:
        del view
    assert meter.resident_bytes == -8 * KIB


def test_an_address_used_again_between_meters_has_its_new_size():
    with PeakMeter("cpu"):
        block = _make(64)
    del block
    for size in (64, 48, 32):  # likely to get the same address as before
        block = _make(size)
        with PeakMeter("cpu") as meter:
            del block
        assert meter.resident_bytes == -size * KIB


def test_memory_that_another_thread_lets_go_counts_until_its_place_is_taken():
    places = set()
    with ThreadPoolExecutor(1) as elsewhere, PeakMeter("cpu") as meter:
        for _ in range(20):
            held = [_make(64)]
            places.add(held[0].data_ptr())
            elsewhere.submit(held.clear).result()
    assert 64 * KIB <= meter.peak_bytes <= len(places) * 64 * KIB


def test_windows_have_their_own_peaks():
    with PeakMeter("cpu") as meter:
        meter.mark("forward")
        first = _make(100)
        scratch = _make(30)
        del scratch
        meter.mark("backward")
        second = _make(10)
        del first
    assert meter.window("start").peak_bytes == 0
    assert meter.window("forward").peak_bytes == 130 * KIB
    assert meter.window("forward").resident_bytes == 100 * KIB
    assert meter.window("backward").peak_bytes == 110 * KIB
    assert meter.window("backward").resident_bytes == 10 * KIB
    assert [bytes_ for _, bytes_ in meter.timeline] == [size * KIB for size in (100, 130, 100, 110, 10)]
    del second


def test_backward_is_measured_op_by_op():
    x = torch.zeros(1024, requires_grad=True)
    with PeakMeter("cpu") as meter:
        y = x.exp()
        meter.mark("backward")
        y.sum().backward()
    # exp's output, the sum and its gradient of one element each, and then the gradient of x.
    assert meter.window("start").peak_bytes == 4096
    assert 8192 <= meter.peak_bytes <= 8192 + 8
    assert meter.peak_bytes_without([x.grad]) < 4096 + 16


def test_memory_of_record_function_blocks_counts():
    with PeakMeter("cpu") as meter, torch.profiler.record_function("block"):
        block = _make(16)
    assert meter.peak_bytes == 16 * KIB
    del block


def test_an_exception_leaves_no_profiler_behind():
    with pytest.raises(ZeroDivisionError), PeakMeter("cpu"):
        1 / 0  # noqa: B018
    with PeakMeter("cpu") as meter:
        block = _make(1)
    assert meter.peak_bytes == KIB
    del block


def test_environment_is_left_alone(monkeypatch):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    with PeakMeter("cpu"):
        assert "KINETO_LOG_LEVEL" not in os.environ
    monkeypatch.setenv("KINETO_LOG_LEVEL", "3")
    with PeakMeter("cpu"):
        pass
    assert os.environ["KINETO_LOG_LEVEL"] == "3"


def test_storage_bytes_counts_shared_storages_once():
    base = torch.zeros(10)
    assert storage_bytes([base, base[2:], torch.zeros(5)]) == 60
    assert storage_bytes([base, torch.empty(3, device="meta")], "cpu") == 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_windows_have_their_own_peaks():
    with PeakMeter("cuda") as meter:
        first = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        meter.mark("second")
        second = torch.empty(1 << 21, dtype=torch.uint8, device="cuda")
        del first
    assert meter.window("start").peak_bytes == 1 << 20
    assert meter.window("second").peak_bytes == 3 << 20
    assert meter.resident_bytes == 2 << 20
    del second


def test_a_meter_whose_profiler_was_ended_by_another_says_that_nothing_was_measured():
    with pytest.raises(MeasurementLost) as raised, PeakMeter(), torch.profiler.profile():
        torch.zeros(1024)
    assert "other code ended it" in raised.value.why


def test_an_error_of_the_block_is_raised_even_if_another_profiler_ended_the_measurement():
    with pytest.raises(ZeroDivisionError), PeakMeter(), torch.profiler.profile():
        raise ZeroDivisionError


@pytest.mark.long
def test_an_error_while_memory_is_measured_ends_the_process_as_without_a_meter():
    code = "import plimsoll.tracing.meters.memory as m; m.PeakMeter('cpu').__enter__(); raise SystemExit(7)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7


def test_garbage_that_goes_inside_hides_nothing_of_the_peak():
    garbage = [torch.zeros(1 << 16)]
    garbage.append(garbage)
    del garbage
    with PeakMeter() as meter:
        gc.collect()
        made = torch.zeros(1 << 10)
    assert meter.peak_bytes == made.nbytes
    assert meter.resident_bytes == made.nbytes


_FREED_INSIDE = """
import ctypes, pathlib, torch
from plimsoll.tracing.meters.memory import PeakMeter
level = ctypes.c_int.in_dll(ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib/libc10.so")), "FLAGS_caffe2_log_level")
before, older = level.value, torch.zeros(1000)
with PeakMeter(held=()):
    del older
    torch.zeros(1000)
assert level.value == before, level.value
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the name of torch's library differs")
def test_torchs_allocator_writes_nothing_about_older_memory_while_a_meter_runs():
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    with_meter = subprocess.run([sys.executable, "-c", _FREED_INSIDE], capture_output=True, text=True, env=environment)
    assert (with_meter.returncode, with_meter.stderr) == (0, "")


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the name of torch's library differs")
def test_a_log_level_that_the_user_has_set_stays_in_force():
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "WARNING"}
    run = subprocess.run([sys.executable, "-c", _FREED_INSIDE], capture_output=True, text=True, env=environment)
    assert run.returncode == 0
    assert "Memory block of unknown size" in run.stderr
