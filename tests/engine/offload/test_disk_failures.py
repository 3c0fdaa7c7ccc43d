"""The disk link in bad weather: full disks, short transfers, lost bytes, killed and forked processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from plimsoll.engine.offload import disk_file
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.errors import OffloadFailed
from plimsoll.units import GIB, MIB

TENSOR = torch.arange(100_000)


FRESH = """
    import os, resource, sys, torch
    from plimsoll.errors import OffloadFailed
    from plimsoll.engine.offload.disk import DiskLink

    # A forked child.
    with DiskLink(sys.argv[1]) as link:
        settled, under_way = link.store(torch.arange(1000)), link.store(torch.arange(10**6))
        settled.settle()
        child = os.fork()
        if not child:
            refused = 0
            for attempt in (lambda: link.store(torch.arange(3)), settled.read, settled.prefetch, under_way.settle):
                try:
                    attempt()
                except OffloadFailed as failure:
                    refused += "belongs to process" in failure.found
            link.close()
            del settled, under_way, link
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
        assert torch.equal(settled.read(), torch.arange(1000))
        assert torch.equal(under_way.read(), torch.arange(10**6))
        print("unharmed")

    # A limit on the size of files.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    with DiskLink(sys.argv[1]) as link:
        source = torch.arange(100_000)
        ticket = link.store(source)
        try:
            ticket.settle()
        except OffloadFailed as failure:
            print(failure.why)
        assert ticket.read() is source
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    # An end without closing anything.
    link = DiskLink(sys.argv[1])
    tickets = [link.store(torch.ones(2**20)) for _ in range(8)]
    tickets[0].prefetch()
    cycle = [tickets]
    cycle.append(cycle)
    print("done")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines that a fresh interpreter prints; it must end well and complain about nothing."""
    quiet = "-Wignore::DeprecationWarning"  # newer Pythons warn of every fork that has threads
    command = [sys.executable, quiet, "-c", textwrap.dedent(FRESH), str(tmp_path_factory.mktemp("fresh"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def full(free_bytes: int, total_bytes: int):
    return lambda fd: SimpleNamespace(f_bavail=free_bytes // 4096, f_blocks=total_bytes // 4096, f_frsize=4096)


def test_a_full_disk_is_told_when_storing_with_both_numbers(disk: DiskLink, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fstatvfs", full(300 * MIB, 100 * GIB))
    with pytest.raises(OffloadFailed) as failure:
        disk.store(torch.empty(50 * MIB, dtype=torch.uint8))
    assert "50.0 MiB" in failure.value.found
    assert disk.directory in failure.value.found
    assert "300.0 MiB are free" in failure.value.why
    assert disk.extents.taken_bytes == 0
    disk.store(torch.empty(40 * MIB, dtype=torch.uint8)).settle()


def test_what_was_promised_and_is_not_written_yet_counts(disk: DiskLink, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fstatvfs", full(300 * MIB, 100 * GIB))
    monkeypatch.setattr(disk_file.BackingFile, "write", lambda self, data, offset: None)
    half = torch.empty(30 * MIB, dtype=torch.uint8)
    ticket = disk.store(half)
    with pytest.raises(OffloadFailed) as failure:
        disk.store(half)
    assert "60.0 MiB" in failure.value.found
    ticket.settle()


def test_small_disks_keep_a_smaller_margin(disk: DiskLink, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fstatvfs", full(60 * MIB, 64 * MIB))
    disk.store(torch.zeros(MIB, dtype=torch.uint8)).settle()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_is_told_when_settling_and_keeps_the_source(
    disk: DiskLink, monkeypatch: pytest.MonkeyPatch, code: int
):
    def refuse(fd, data, offset):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuse)
    source = TENSOR.clone()
    ticket = disk.store(source)
    for _ in range(2):
        with pytest.raises(OffloadFailed) as failure:
            ticket.settle()
        assert os.strerror(code) in failure.value.why
        assert failure.value.__cause__.errno == code
    ticket.prefetch()
    assert ticket.read() is source
    assert disk._transport.out_bytes == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
def test_a_device_that_is_always_full_fails_a_real_write(disk: DiskLink):
    fd = os.open("/dev/full", os.O_RDWR)
    os.dup2(fd, disk._transport.file._fd)
    os.close(fd)
    ticket = disk.store(TENSOR)
    with pytest.raises(OffloadFailed) as failure:
        ticket.settle()
    assert failure.value.__cause__.errno == errno.ENOSPC
    assert torch.equal(ticket.read(), TENSOR)


def test_transfers_in_parts_are_carried_on(disk: DiskLink, monkeypatch: pytest.MonkeyPatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:9999], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:7777]], offset))
    assert torch.equal(disk.store(TENSOR).read(), TENSOR)


def test_a_disk_that_takes_nothing_is_an_error_not_a_hang(disk: DiskLink, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    with pytest.raises(OffloadFailed):
        disk.store(TENSOR).settle()


@pytest.mark.parametrize("is_prefetched", [False, True])
def test_a_read_that_fails_is_told_when_reading_and_may_be_tried_again(
    disk: DiskLink, monkeypatch: pytest.MonkeyPatch, is_prefetched: bool
):
    def refuse(fd, views, offset):
        raise OSError(errno.EIO, "Input/output error")

    ticket = disk.store(TENSOR)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", refuse)
        if is_prefetched:
            ticket.prefetch()
        with pytest.raises(OffloadFailed) as failure:
            ticket.read()
    assert "Input/output error" in failure.value.why
    assert torch.equal(ticket.read(), TENSOR)


def cut_short(fd: int) -> None:
    os.ftruncate(fd, 1000)


def changed(fd: int) -> None:
    os.pwrite(fd, b"\xff" * 4096, 0)


@pytest.mark.parametrize(("damage", "why"), [(cut_short, "ends after 1,000 of 800,000 bytes"), (changed, "checksum")])
def test_a_file_that_was_cut_short_or_changed_is_told(disk: DiskLink, damage, why: str):
    ticket = disk.store(TENSOR)
    ticket.settle()
    damage(disk._transport.file._fd)
    with pytest.raises(OffloadFailed) as failure:
        ticket.read()
    assert why in failure.value.why


@pytest.mark.long
def test_a_killed_process_leaves_nothing_behind(tmp_path: Path):
    script = """
        import sys, torch
        from plimsoll.engine.offload.disk import DiskLink
        link, source = DiskLink(sys.argv[1]), torch.ones(8 * 2**20, dtype=torch.uint8)
        link.store(source).settle()
        print("writing", flush=True)
        while True:
            link.store(source)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"writing\n"
    child.kill()
    assert child.wait(10) == -signal.SIGKILL
    child.stdout.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_a_forked_child_is_refused_file_limits_fail_a_real_write_and_a_process_may_end_without_closing(
    printed: list[str],
):
    assert printed[0] == "unharmed"
    assert "File too large" in printed[1]
    assert printed[2:] == ["done"]
