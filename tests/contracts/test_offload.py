"""Offloading through the public interface, in good and bad weather: no bit changes, and no fault reaches the optimizer."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import plimsoll
import steps
from engine.offload.simulated import SimulatedLink
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.receipt import ReceiptVerdict
from plimsoll.engine.apply import apply_plan
from plimsoll.engine.offload import disk as disk_link
from plimsoll.engine.offload import disk_file
from plimsoll.engine.offload.disk_file import is_in_memory
from plimsoll.engine.offload.open import default_link_name
from plimsoll.errors import OffloadFailed

ROWS, WIDTH = 256, 64

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(is_in_memory(tempfile.gettempdir()), reason="the directory for temporary files is in RAM"),
]


def build(device):
    torch.manual_seed(0)
    return steps.Stack(3, WIDTH).to(device)


def rows(device, index=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index)).to(device)


@pytest.fixture(scope="module")
def offload(device):
    """Everything that may go to the disk goes; from a GPU it goes through host memory."""
    return plimsoll.plan(build(device), rows(device), loss=steps.mean_square, strategy="offload", link="disk")


@pytest.fixture(scope="module")
def by_default(device):
    """The same over the link that the device has by default."""
    return plimsoll.plan(build(device), rows(device), loss=steps.mean_square, strategy="offload")


@pytest.fixture(scope="module")
def budgeted(device, offload):
    """A budget under which the cheapest plan recomputes and offloads."""
    budget = int(offload.floor_bytes + 0.5 * (offload.baseline_peak_bytes - offload.floor_bytes))
    return plimsoll.plan(
        build(device),
        rows(device),
        budget,
        loss=steps.mean_square,
        allow=("recompute", "offload"),
        overrides=("blocks.0*up::addmm#0=offload",),
    )


def test_offloaded_inputs_leave_the_device_and_everything_else_is_recomputed(device):
    plan = plimsoll.plan(build(device), rows(device), loss=steps.mean_square, strategy="offload-inputs")
    full = plimsoll.plan(build(device), rows(device), loss=steps.mean_square, strategy="full")

    receipt = plimsoll.verify(build(device), rows(device), plan, loss=steps.mean_square, steps=1)

    *sent, last = [region.packed.keys() for region in plan.regions]
    assert sent == [{"input:0"}, {"input:0"}]
    assert not last
    assert [region.dropped for region in plan.regions] == [region.dropped for region in full.regions]
    assert receipt.exit_code == 0


class Trainer:
    """A model, its optimizer, and steps of both."""

    def __init__(self, device):
        self.device = device
        self.model = build(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self, index):
        """Gradients of one step, always with the same dropout."""
        self.optimizer.zero_grad()
        torch.manual_seed(index)
        steps.mean_square(self.model(rows(self.device, index))).backward()
        return [p.grad.clone() for p in self.model.parameters()]

    def step(self, index):
        gradients = self.backward(index)
        self.optimizer.step()
        return gradients

    def state(self):
        return copy.deepcopy([*self.model.state_dict().values(), *_tensors(self.optimizer.state_dict()["state"])])


def _tensors(state):
    return [leaf for entry in state.values() for leaf in entry.values() if isinstance(leaf, torch.Tensor)]


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def forms(plan):
    return {d.form for region in plan.regions for d in region.decisions if d.decision is Decision.OFFLOAD}


@pytest.mark.parametrize("name", ["offload", "budgeted", "by_default"])
def test_training_is_bit_equal_and_the_plan_s_claims_hold(name, device, request):
    plan = request.getfixturevalue(name)
    assert forms(plan) == {default_link_name(device) if name != "offload" else "disk"}
    plain, managed = Trainer(device), Trainer(device)
    with plimsoll.apply(managed.model, plan):
        for index in range(3):
            assert equal(plain.step(index), managed.step(index))
            managed.model.eval()
            with torch.no_grad():
                managed.model(rows(device, 9))
            managed.model.train()
    assert equal(plain.state(), managed.state())
    receipt = plimsoll.verify(build(device), rows(device), plan, loss=steps.mean_square, steps=2)
    assert receipt.verdict is ReceiptVerdict.VERIFIED, receipt
    assert receipt.measured_peak_bytes < receipt.measured_baseline_peak_bytes
    assert receipt.measured_peak_bytes <= (plan.budget_bytes or plan.predicted_peak_bytes * 1.02)


def full(fd):
    return SimpleNamespace(f_bavail=10, f_blocks=100_000_000, f_frsize=4096)


class Faulty:
    """Makes a method of the backing file fail from its n-th call on."""

    def __init__(self, method, first):
        self.original = getattr(disk_file.BackingFile, method)
        self.first = first
        self.calls = 0

    def __get__(self, file, kind):
        def run(data, offset):
            self.calls += 1
            if self.calls > self.first:
                raise OSError(errno.EIO, "the disk is broken")
            return self.original(file, data, offset)

        return run


def full_disk(patch):
    patch.setattr(os, "fstatvfs", full)


def failing_write(first):
    return lambda patch: patch.setattr(disk_file.BackingFile, "write", Faulty("write", first))


def failing_read(first):
    return lambda patch: patch.setattr(disk_file.BackingFile, "read", Faulty("read", first))


def lost_bytes(patch):
    patch.setattr(
        disk_file.BackingFile, "write", lambda self, data, offset: os.pwrite(self._fd, bytes(len(data)), offset)
    )


WEATHER = {
    "a full disk": full_disk,
    "the first write fails": failing_write(0),
    "a later write fails": failing_write(6),
    "the first read fails": failing_read(0),
    "a later read fails": failing_read(4),
    "the disk loses bytes": lost_bytes,
}


@pytest.mark.parametrize("weather", WEATHER)
@pytest.mark.parametrize("before", [0, 2])
def test_a_fault_ends_in_offload_failed_and_the_same_step_succeeds_once_it_is_gone(weather, before, offload, device):
    if weather == "a full disk" and before:
        pytest.skip("the file has its length by then")
    plain, managed = Trainer(device), Trainer(device)
    with plimsoll.apply(managed.model, offload):
        for index in range(before):
            plain.step(index)
            managed.step(index)
        state = managed.state()
        with pytest.MonkeyPatch.context() as patch:
            WEATHER[weather](patch)
            for _ in range(2):
                with pytest.raises(OffloadFailed) as failure:
                    managed.step(before)
                assert failure.value.next
                assert equal(state, managed.state())
        for index in range(before, before + 2):
            assert equal(plain.step(index), managed.step(index))
    assert equal(plain.state(), managed.state())


def test_a_slow_link_only_makes_the_step_slower(offload, device):
    now = 0.0

    def carry(nbytes):
        nonlocal now
        now += nbytes / 50e6

    plain, managed = Trainer(device), Trainer(device)
    with apply_plan(managed.model, offload, link=SimulatedLink(carry=carry)):
        for index in range(2):
            start = now
            assert equal(plain.step(index), managed.step(index))
            # No time passes but on the link: there are two ways, and every byte takes each once.
            assert now - start == pytest.approx(2 * offload.offloaded_bytes / 50e6, rel=0.02)


def test_the_file_lies_where_the_system_keeps_temporary_files(offload, device, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    managed = Trainer(device)
    with plimsoll.apply(managed.model, offload):
        before = _files_of("self", tmp_path)
        managed.step(0)
        assert len(before) == 1
        assert not list(tmp_path.iterdir())
    del managed
    gc.collect()
    deadline = time.monotonic() + 60  # the writing thread closes the file when it runs again
    while _files_of("self", tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _files_of("self", tmp_path)


def test_a_directory_in_ram_is_refused_before_anything_is_installed(offload, device, monkeypatch):
    monkeypatch.setattr(disk_link, "is_in_memory", lambda directory: True)
    model = build(device)
    with pytest.raises(OffloadFailed, match="RAM"):
        plimsoll.apply(model, offload)
    assert all("forward" not in module.__dict__ for module in model.modules())


CHILD = """
    import sys, torch, plimsoll, steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = steps.Stack(3, {width}).to({device!r})
    optimizer = torch.optim.AdamW(model.parameters())
    plimsoll.apply(model, plimsoll.load({plan!r}))
    while True:
        steps.mean_square(model(torch.randn({rows}, {width}, device={device!r}))).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("stepped", flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list open files")
def test_a_killed_training_leaves_nothing_on_the_disk(offload, device, tmp_path):
    directory = tmp_path / "temporary"
    directory.mkdir()
    path = tmp_path / "plan.json"
    offload.save(path)
    script = textwrap.dedent(CHILD).format(width=WIDTH, rows=ROWS, plan=str(path), device=device.type)
    environment = {
        **os.environ,
        "TMPDIR": str(directory),
        "PYTHONPATH": os.pathsep.join([str(Path(steps.__file__).parent), *sys.path]),
    }
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert [child.stdout.readline() for _ in range(3)] == ["stepped\n"] * 3
        # One file for offloaded tensors, and one for the copies that early inspections compare with.
        assert 1 <= len(_files_of(child.pid, directory)) <= 2
        assert not files_below(directory)
    finally:
        child.kill()
        child.wait()
    child.stdout.close()
    assert not files_below(directory)


def files_below(directory):
    """With a name; torch before 2.11 leaves an empty directory there."""
    return [path for path in directory.rglob("*") if path.is_file()]


def _files_of(pid, directory):
    """What a process has open below a directory, with a name or without."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith(str(directory)):
                found.append(target)
    return found
