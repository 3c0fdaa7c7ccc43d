"""Entries in, files of ``torch.distributed.checkpoint`` out, and back into other divisions over other ranks.

All ranks call these together. Each writes the shards that it has; what all have alike is written once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from plimsoll.errors import CheckpointUnusable
from plimsoll.resuming.manifest import damaged

Saved = BytesStorageMetadata | TensorStorageMetadata


def write_tensors(entries: dict[str, Any], directory: Path, *, is_alone: bool) -> None:
    """Write entries; every file is on the disk when this returns.

    Args:
        entries: by name.
        directory: exists, the same one for all ranks.
        is_alone: without a process group.

    Raises:
        CheckpointUnusable: on all ranks, if one cannot write.
    """
    writer = FileSystemWriter(directory, sync_files=True)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _quiet():
            save(entries, storage_writer=writer, planner=planner, no_dist=is_alone)
    except CheckpointException as error:
        raise CheckpointUnusable(
            f"The checkpoint cannot be written to {directory.parent.parent}.",
            why=_first_failure(error),
            next="free some space, or give a directory that all ranks share and may write to; whole checkpoints are kept",
        ) from error


def saved_entries(directory: Path) -> dict[str, Saved]:
    """What the files hold, by name: sizes and dtypes, no values.

    Raises:
        CheckpointUnusable: that cannot be read.
    """
    try:
        return dict(FileSystemReader(directory).read_metadata().state_dict_metadata)
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged(directory.parent, f"{type(error).__name__}: {error}") from error


def read_tensors(templates: dict[str, Any], directory: Path, *, is_alone: bool) -> Mapping[str, Any]:
    """Fill templates from the files.

    Args:
        templates: tensors to be filled in place, as this rank divides them; ``None`` for objects.
        directory: what ``write_tensors`` wrote, by any number of ranks.
        is_alone: without a process group.

    Raises:
        CheckpointUnusable: on all ranks, if one cannot read.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _quiet():
            load(templates, storage_reader=FileSystemReader(directory), planner=planner, no_dist=is_alone)
    except CheckpointException as error:
        raise damaged(directory.parent, _first_failure(error)) from error
    return templates


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _quiet() -> warnings.catch_warnings[None]:
    return warnings.catch_warnings(action="ignore", category=UserWarning)  # that no process group is there is known
