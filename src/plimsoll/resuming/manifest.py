"""What a checkpoint says about itself: the step, who wrote it, and every file with its size and checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import ClassVar
from zlib import crc32

import msgspec

from plimsoll.errors import CheckpointUnusable
from plimsoll.units import MIB

SCHEMA_VERSION = 1
_CHUNK_BYTES = 4 * MIB


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint; ``name`` is relative to it, ``crc32`` is that of all its bytes."""

    name: str
    bytes: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds. ``sequence`` grows with every save: of two checkpoints the larger one was written later.

    ``own`` names values that are neither sharded nor equal on all ranks (running statistics, for one): each rank keeps its own.
    """

    KIND: ClassVar[str] = "checkpoint"

    schema_version: int = SCHEMA_VERSION
    step: int
    sequence: int
    world_size: int
    model: str
    has_optimizer: bool
    has_compression: bool
    plan_fingerprint: str | None
    own: tuple[str, ...]
    versions: dict[str, str]
    files: tuple[FileRecord, ...]


def record_file(root: Path, path: Path) -> FileRecord:
    """Size and checksum of a file, read back from where it was written."""
    code = size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            code, size = crc32(chunk, code), size + len(chunk)
    return FileRecord(name=path.relative_to(root).as_posix(), bytes=size, crc32=code)


def check_file(root: Path, record: FileRecord) -> None:
    """Refuse a file that is not the one that was written.

    Raises:
        CheckpointUnusable: it is gone, of another size, or its bytes have changed.
    """
    try:
        found = record_file(root, root / record.name)
    except OSError as error:
        raise damaged(root, f"{record.name}: {error.strerror or type(error).__name__}") from error
    if found.bytes != record.bytes:
        raise damaged(root, f"{record.name} has {found.bytes} bytes, {record.bytes} were written")
    if found.crc32 != record.crc32:
        raise damaged(root, f"{record.name} has its {record.bytes} bytes, but not those that were written")


def encode_manifest(manifest: Manifest) -> bytes:
    """As indented JSON with its tag."""
    fields = {"plimsoll": Manifest.KIND} | msgspec.to_builtins(manifest)
    return msgspec.json.format(msgspec.json.encode(fields), indent=2)


def decode_manifest(content: bytes, source: Path) -> Manifest:
    """Read a manifest.

    Raises:
        CheckpointUnusable: it is no manifest, or a newer Plimsoll wrote it.
    """
    try:
        fields = msgspec.json.decode(content, type=dict[str, object])
        version = fields.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise CheckpointUnusable(
                f"{source} is a checkpoint of schema {version}; this version reads schema {SCHEMA_VERSION} and older.",
                why="a newer Plimsoll wrote it",
                next="upgrade Plimsoll, or go on from an older checkpoint: step=",
            )
        return msgspec.convert(fields, Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise damaged(source, str(error)) from error


def plan_fingerprint(plan: str) -> str | None:
    """What a plan's JSON comes to, in short; ``None`` without a plan."""
    return hashlib.sha256(plan.encode()).hexdigest()[:16] if plan else None


def damaged(path: Path, why: str) -> CheckpointUnusable:
    """The error for a checkpoint that is there but is not what was written."""
    return CheckpointUnusable(
        f"{path} is damaged.",
        why=why,
        next="go on from another checkpoint: step=, or delete this one; nothing has been loaded",
    )
