"""Directories in RAM are told from directories on disks, by what the system lists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plimsoll.engine.offload.filesystem import is_in_memory


def mounts_of(directory: Path, kind: str) -> str:
    device = os.stat(directory).st_dev
    return (
        "1 0 0:999 / /elsewhere rw - tmpfs tmpfs rw\n"
        f"2 0 {os.major(device)}:{os.minor(device)} / /here rw shared:1 master:2 - {kind} source rw\n"
    )


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("ramfs", True), ("ext4", False), ("overlay", False)])
def test_the_type_of_the_directorys_own_device_decides(tmp_path: Path, kind: str, expected: bool):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(mounts_of(tmp_path, kind))
    assert is_in_memory(str(tmp_path), mounts) is expected


def test_a_system_that_does_not_say_is_believed_to_have_a_disk(tmp_path: Path):
    assert not is_in_memory(str(tmp_path), tmp_path / "missing")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no shared memory mount")
def test_shared_memory_is_in_memory():
    assert is_in_memory("/dev/shm")
