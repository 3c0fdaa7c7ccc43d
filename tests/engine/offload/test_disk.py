"""The disk link in ordinary weather: real files, random orders, bounds, and nothing left over."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.engine.offload import disk, disk_file
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.errors import OffloadFailed
from plimsoll.units import MIB

OPERATIONS = ("store", "settle", "prefetch", "read", "drop")
PAGE = 4096


def fd_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def numbered(index: int, length: int) -> torch.Tensor:
    return torch.arange(index, index + length, dtype=torch.int32)


class GatedWrites:
    """Holds every write back until it is let through; counts what is under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        self.begun.release()
        assert self.gate.wait(10)
        return self._pwrite(fd, data, offset)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 20_000)), max_size=40),
    st.sampled_from([1, 2]),
)
def test_any_order_of_operations_brings_the_right_bytes_back(steps: list[tuple[str, int, int]], workers: int):
    with tempfile.TemporaryDirectory() as directory, DiskLink(directory, workers=workers) as link:
        tickets: list[tuple[disk.DiskTicket, torch.Tensor]] = []
        for index, (operation, which, length) in enumerate(steps):
            if operation == "store" or not tickets:
                tickets.append((link.store(numbered(index, length)), numbered(index, length)))
            elif operation == "drop":
                del tickets[which % len(tickets)]
            else:
                ticket, expected = tickets[which % len(tickets)]
                result = getattr(ticket, operation)()
                assert operation != "read" or torch.equal(result, expected)
        for ticket, expected in tickets:
            assert torch.equal(ticket.read(), expected)
        assert link.extents.taken_bytes >= sum(-(-expected.nbytes // PAGE) * PAGE for _, expected in tickets)
        tickets.clear()
        ticket = expected = result = None
        link.close()
        assert (link.extents.end_bytes, link.extents.holes) == (0, ())


def test_space_is_used_again_and_the_file_does_not_grow(disk: DiskLink):
    for _ in range(20):
        tickets = [disk.store(numbered(index, 100_000)) for index in range(5)]
        for ticket in tickets:
            ticket.settle()
        assert disk.extents.end_bytes <= 2 * 5 * 401_408
        del ticket, tickets


def test_nothing_can_be_seen_in_the_directory(disk: DiskLink, tmp_path: Path):
    disk.store(numbered(0, 100_000)).settle()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("is_known", [False, True], ids=["no such flag", "a file system that refuses it"])
def test_without_nameless_files_the_name_is_removed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
):
    real_open, nameless = os.open, os.O_TMPFILE

    def refuse(path, flags, *rest, **more):
        if flags & nameless == nameless:
            raise OSError(95, "Operation not supported")
        return real_open(path, flags, *rest, **more)

    if is_known:
        monkeypatch.setattr(os, "open", refuse)
    else:
        monkeypatch.delattr(os, "O_TMPFILE")
    with DiskLink(str(tmp_path)) as link:
        assert os.listdir(tmp_path) == []
        assert torch.equal(link.store(numbered(7, 1000)).read(), numbered(7, 1000))


def test_storing_waits_while_too_much_is_on_its_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writes = GatedWrites(monkeypatch)
    with DiskLink(str(tmp_path), most_in_flight_bytes=MIB) as link:
        tickets = [link.store(torch.zeros(MIB // 2, dtype=torch.uint8)) for _ in range(2)]
        assert link._transport.out_bytes == MIB
        third = threading.Thread(target=lambda: tickets.append(link.store(torch.ones(1, dtype=torch.uint8))))
        third.start()
        third.join(0.1)
        assert third.is_alive()
        assert link._transport.out_bytes == MIB
        writes.gate.set()
        third.join(10)
        assert not third.is_alive()
        for ticket in tickets:
            ticket.settle()
        assert link._transport.out_bytes == 0


def test_a_tensor_larger_than_the_bound_goes_alone(tmp_path: Path):
    with DiskLink(str(tmp_path), most_in_flight_bytes=1000) as link:
        assert torch.equal(link.store(numbered(0, 100_000)).read(), numbered(0, 100_000))


def test_no_more_threads_than_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = threading.active_count()
    writes = GatedWrites(monkeypatch)
    with DiskLink(str(tmp_path), workers=2) as link:
        tickets = [link.store(numbered(index, 10)) for index in range(20)]
        assert threading.active_count() - before == 2
        writes.gate.set()
        assert [int(ticket.read()[0]) for ticket in tickets] == list(range(20))
    assert threading.active_count() == before


def test_a_copy_that_no_thread_has_taken_up_runs_where_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    writes = GatedWrites(monkeypatch)
    with DiskLink(str(tmp_path), workers=1) as link:
        blocking = link.store(numbered(0, 10))
        writes.begun.acquire()
        waiting = link.store(numbered(5, 10))
        settling = threading.Thread(target=waiting.settle)
        settling.start()
        assert writes.begun.acquire(timeout=10)
        writes.gate.set()
        settling.join()
        assert int(blocking.read()[0]) == 0
        assert int(waiting.read()[0]) == 5


def test_a_ticket_dropped_while_its_write_is_under_way_keeps_its_space_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    writes = GatedWrites(monkeypatch)
    with DiskLink(str(tmp_path), workers=1) as link:
        source = numbered(0, 10)
        alive = weakref.ref(source)
        dropped = link.store(source)
        del source
        writes.begun.acquire()
        del dropped
        assert alive() is not None
        assert link.extents.taken_bytes == PAGE
        after = link.store(numbered(100, 10))
        writes.gate.set()
        assert int(after.read()[0]) == 100
        link.close()
        assert alive() is None
        assert link.extents.taken_bytes == PAGE


def test_closing_with_work_under_way_waits_and_leaks_neither_threads_nor_files(tmp_path: Path):
    threads, fds = threading.active_count(), fd_count()
    for _ in range(3):
        link = DiskLink(str(tmp_path))
        tickets = [link.store(numbered(index, 200_000)) for index in range(10)]
        tickets[0].prefetch()
        link.close()
        for ticket in tickets:
            ticket.settle()
        assert int(tickets[0].read()[0]) == 0, "it had been fetched before"
        with pytest.raises(OffloadFailed):
            tickets[1].read()
    assert (threading.active_count(), fd_count()) == (threads, fds)


def test_a_link_that_is_forgotten_gives_its_file_back(tmp_path: Path):
    before = fd_count()
    link = DiskLink(str(tmp_path))
    ticket = link.store(numbered(0, 1000))
    del link
    assert int(ticket.read()[0]) == 0
    del ticket
    assert fd_count() == before


def test_most_bytes_bounds_the_file(tmp_path: Path):
    with DiskLink(str(tmp_path), most_bytes=3 * PAGE) as link:
        tickets = [link.store(torch.zeros(PAGE, dtype=torch.uint8)) for _ in range(3)]
        with pytest.raises(OffloadFailed) as failure:
            link.store(torch.zeros(5, dtype=torch.uint8))
        assert "12.0 KiB" in failure.value.found
        for ticket in tickets:
            ticket.settle()
        del ticket, tickets[1]
        link.store(torch.zeros(5, dtype=torch.uint8)).settle()


def test_a_default_directory_in_ram_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "is_in_memory", lambda directory: True)
    with pytest.raises(OffloadFailed) as failure:
        DiskLink()
    assert tempfile.gettempdir() in failure.value.found


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(OffloadFailed) as failure:
        DiskLink(str(tmp_path / "missing"))
    assert "missing" in failure.value.found
    assert "No such file" in failure.value.why


def test_room_is_asked_for_once_for_every_height(disk: DiskLink, monkeypatch: pytest.MonkeyPatch):
    asked = []
    real_fstatvfs = os.fstatvfs
    monkeypatch.setattr(disk_file.os, "fstatvfs", lambda fd: asked.append(fd) or real_fstatvfs(fd))
    for index in range(10):
        disk.store(numbered(index, 1000)).settle()
    assert len(asked) == 1


def test_copies_count_their_cpu_time(disk: DiskLink):
    ticket = disk.store(torch.zeros(4 * MIB, dtype=torch.uint8))
    ticket.read()
    taken = disk.copy_cpu_seconds
    assert taken.out_seconds > 0
    assert taken.in_seconds > 0
