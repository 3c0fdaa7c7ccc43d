"""A directory of checkpoints in; whole ones by step, a place to write the next one, and its appearance at once, out.

A checkpoint is written under a name that begins with a dot and renamed when it is complete, which is one step of the file
system: a process that is killed at any moment leaves the old checkpoints and at most a dotted directory, which the next save
removes.
``latest`` holds the name of the checkpoint to go on from; to go back, write another name into it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from plimsoll.errors import CheckpointMismatch, CheckpointUnusable
from plimsoll.resuming.manifest import Manifest, decode_manifest

MANIFEST = "checkpoint.json"
TENSORS = "tensors"
EXTRAS = "extras.pt"
_LATEST = "latest"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_PART = ".part"


def rank_file(rank: int) -> str:
    """The name of the file with what belongs to one rank alone."""
    return f"rank-{rank:05d}.pt"


def plan_file(rank: int | None) -> str:
    """The name of the file with one rank's plan; ``None``: of the plan that all ranks follow."""
    return "plan.json" if rank is None else f"plan-{rank:05d}.json"


class CheckpointDirectory:
    """The checkpoints of one run.

    Args:
        path: need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def complete(self) -> dict[Path, Manifest]:
        """Every checkpoint whose manifest can be read, in the order in which they were written."""
        found: dict[Path, Manifest] = {}
        for place in self._named():
            with contextlib.suppress(CheckpointUnusable):  # a damaged one must not stand in the way of the next
                found[place] = self.read(place)
        return dict(sorted(found.items(), key=lambda entry: entry[1].sequence))

    def read(self, place: Path) -> Manifest:
        """A checkpoint's manifest.

        Raises:
            CheckpointUnusable: it cannot be read, is damaged, or a newer Plimsoll wrote it.
        """
        with explained(place, "read"):
            content = (place / MANIFEST).read_bytes()
        return decode_manifest(content, place)

    def latest(self) -> Path | None:
        """The checkpoint that ``latest`` names; the last one written, where it names none that is whole."""
        with explained(self.path, "read"):
            pointer = self.path / _LATEST
            name = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else ""
        if _NAME.fullmatch(name) and (self.path / name / MANIFEST).is_file():
            return self.path / name
        return next(reversed(self.complete()), None)

    def find(self, step: int | None) -> tuple[Path, Manifest]:
        """The checkpoint of a step, or the latest.

        Raises:
            CheckpointMismatch: there is none.
            CheckpointUnusable: it cannot be read.
        """
        named = self._named()
        place = self.latest() if step is None else next((p for p, n in reversed(named.items()) if n == step), None)
        if place is None:
            steps = sorted(set(named.values()))
            raise CheckpointMismatch(
                f"{self.path} holds no checkpoint" + ("." if step is None else f" of step {step}."),
                why=f"it holds steps {', '.join(map(str, steps))}" if steps else "nothing has been saved there yet",
                next="give another step or directory; latest_step(directory) is None where there is nothing to go on from",
            )
        return place, self.read(place)

    def next_sequence(self) -> int:
        """The number of the next save."""
        return 1 + max((manifest.sequence for manifest in self.complete().values()), default=0)

    def begin(self, step: int) -> Path:
        """Remove what killed processes have left, and make the directory to write the next checkpoint into."""
        with explained(self.path, "written"):
            self.path.mkdir(parents=True, exist_ok=True)
            for leftover in self.path.glob(f".*{_PART}"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            part = self.path / f".{_step_name(step)}.{os.getpid()}{_PART}"
            (part / TENSORS).mkdir(parents=True)
        return part

    def publish(self, part: Path, step: int) -> Path:
        """Make a complete directory a checkpoint, and the latest one."""
        with explained(self.path, "written"):
            target = self.path / _step_name(step)
            again = 0
            while target.exists():  # a run that went back has come to this step once more
                again += 1
                target = self.path / f"{_step_name(step)}.{again}"
            for directory in (part / TENSORS, part):
                sync_directory(directory)
            part.rename(target)
            sync_directory(self.path)
            write_file(self.path / f".{_LATEST}{_PART}", f"{target.name}\n".encode())
            (self.path / f".{_LATEST}{_PART}").replace(self.path / _LATEST)
            sync_directory(self.path)
        return target

    def prune(self, keep: int) -> None:
        """Remove all but the ``keep`` checkpoints that were written last."""
        outdated = list(self.complete())[:-keep]
        with explained(self.path, "written"):
            for place in outdated:
                hidden = place.rename(place.with_name(f".{place.name}{_PART}"))  # half of one must never be seen
                shutil.rmtree(hidden)

    def _named(self) -> dict[Path, int]:
        """The step of every checkpoint; of two of one step the later one comes later."""
        with explained(self.path, "read"):
            entries = list(self.path.iterdir()) if self.path.is_dir() else []
            matches = [(match, place) for place in entries if (match := _NAME.fullmatch(place.name))]
            whole = [(int(m[1]), int(m[2] or 0), place) for m, place in matches if (place / MANIFEST).is_file()]
        return {place: step for step, _, place in sorted(whole)}


def write_file(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(path: Path, verb: str) -> Iterator[None]:
    """Turn what the file system refuses into an error that says so.

    Raises:
        CheckpointUnusable: the block met an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointUnusable(
            f"{path} cannot be {verb}.",
            why=f"{type(error).__name__}: {error}",
            next="free some space, or give a directory that all ranks share and may write to; whole checkpoints are kept",
        ) from error


def _step_name(step: int) -> str:
    return f"step-{step:08d}"
