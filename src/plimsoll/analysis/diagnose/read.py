"""A file in, a ``Profile`` and the kind of file out: Chrome traces and Nsight Systems exports, told apart by their content."""

from __future__ import annotations

from pathlib import Path

from plimsoll.analysis.diagnose.chrome import read_chrome
from plimsoll.analysis.diagnose.nsys import read_nsys
from plimsoll.analysis.diagnose.profile import Profile
from plimsoll.artifacts.finding import ProfileOrigin
from plimsoll.errors import InvalidTrace

_SQLITE_MAGIC = b"SQLite format 3\x00"


def read_profiles(baseline: Path, plan: Path) -> tuple[Profile, Profile, ProfileOrigin]:
    """Read two traces of one kind.

    Raises:
        InvalidTrace: unreadable, not a trace, or one of each kind.
    """
    origins = [_origin(path) for path in (baseline, plan)]
    if origins[0] is not origins[1]:
        raise InvalidTrace(
            f"{baseline} and {plan} are of two kinds: {origins[0]} and {origins[1]}.",
            why="the two profilers time and name things differently, so their difference means nothing",
            next="give two traces of torch.profiler, or two Nsight Systems exports",
        )
    read = read_nsys if origins[0] is ProfileOrigin.NSYS else read_chrome
    return read(baseline), read(plan), origins[0]


def _origin(path: Path) -> ProfileOrigin:
    try:
        with path.open("rb") as file:
            start = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise InvalidTrace(
            f"{path} cannot be read.",
            why=error.strerror or type(error).__name__,
            next="give the path of a trace that torch.profiler or `nsys export --type sqlite` wrote",
        ) from error
    return ProfileOrigin.NSYS if start == _SQLITE_MAGIC else ProfileOrigin.CHROME
