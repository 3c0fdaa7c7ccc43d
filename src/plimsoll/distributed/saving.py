"""A run as it stands in, a checkpoint on disk out: whole or not there, on all ranks or on none."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.store import to_json
from plimsoll.distributed.everyone import Everyone
from plimsoll.errors import CheckpointUnusable, InvalidOption, RanksDiffer
from plimsoll.resuming.directory import (
    EXTRAS,
    MANIFEST,
    TENSORS,
    CheckpointDirectory,
    explained,
    plan_file,
    rank_file,
    write_file,
)
from plimsoll.resuming.entries import entries_of
from plimsoll.resuming.manifest import (
    FileRecord,
    Manifest,
    damaged,
    encode_manifest,
    plan_fingerprint,
    record_file,
)
from plimsoll.resuming.own import differing, digests, summary
from plimsoll.resuming.plain import check_plain, pack, write_plain
from plimsoll.resuming.randomness import random_state
from plimsoll.resuming.tensors import write_tensors

TIMEOUT_SECONDS = 600.0


class Resumable(Protocol):
    """State that goes with a run and belongs to one rank, as that of gradient compression does."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, text, tensors and containers of them."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Take over what ``state_dict`` gave."""


@dataclass(frozen=True, slots=True)
class _Content:
    """What a rank saves."""

    entries: dict[str, Any]
    table: dict[str, str]
    state: dict[str, Any]
    plan: str
    extra: bytes
    has_optimizer: bool


def save_checkpoint(
    directory: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    plan: Plan | None = None,
    compression: Resumable | None = None,
    extra: Any = None,
    keep: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Path:
    """Save everything that a run needs to go on as if it had never stopped. All ranks call it together, between two steps.

    Tensors are written by ``torch.distributed.checkpoint``, each rank its shards, under names that no plan and no wrapper
    changes. Nobody sees the checkpoint before every rank's files are on the disk: it appears by one renaming. A call that
    fails leaves the run and all earlier checkpoints as they were, and nothing else.

    Args:
        directory: of the run's checkpoints, the same for all ranks; made if it is not there.
        step: how many steps have been taken.
        model: managed or not; plain, under DDP, FSDP2 or tensor parallelism.
        optimizer: with its state and the options of its groups.
        plan: kept beside it; the run may be resumed with it, with another one or with none.
        compression: state of gradient compression, which is each rank's own.
        extra: what else this rank wants back: position in the data, a scheduler's or a generator's state. Numbers, text,
            tensors, and lists and dicts of them; small, for all ranks read all of it.
        keep: remove all but so many checkpoints, the oldest first, once this one is there.
        timeout_seconds: how long ranks wait for each other.

    Returns:
        Where the checkpoint is.

    Raises:
        CheckpointUnusable: some rank cannot write: no space, no permission, not the same directory.
        InvalidOption: something in it that could not be read back.
        RanksDiffer: the ranks are not at the same step, or save different things.
        RankFailed, RankMissing: another rank failed, or did not come.

    Example:
        >>> save_checkpoint("runs/7", step=400, model=model, optimizer=optimizer, keep=3)  # doctest: +SKIP
        PosixPath('runs/7/step-00000400')
    """
    everyone = Everyone.here(timeout_seconds)
    home = CheckpointDirectory(Path(directory))
    with everyone.together("collecting a checkpoint"):
        _check_counts(step, keep)
        content = _collect(model, optimizer, plan, compression, extra)
    is_common_plan = _agree(everyone, step, home, content)
    own = _own_names(everyone, content)
    with everyone.together("checking what ranks keep for themselves"):  # before the collectives that writing takes
        kept = {name: value for name, value in content.entries.items() if name in own}
        check_plain("the model or the optimizer, in what only this rank has,", kept)
    part = _begin(everyone, home, step)
    try:
        with everyone.together("writing a checkpoint"), explained(home.path, "written"):
            mine = _write(content, own, part, everyone, is_common_plan=is_common_plan)
        told = everyone.exchange("files of a checkpoint", msgspec.json.encode((mine, content.extra)))
        place = part
        with everyone.together("publishing a checkpoint"):
            if everyone.is_first:
                manifest = _manifest(step, type(model).__name__, content, own, everyone.size)
                place = _publish(home, part, manifest, told)
                if keep is not None:
                    home.prune(keep)
    except BaseException:
        if everyone.is_first:
            shutil.rmtree(part, ignore_errors=True)  # it is complete and renamed, or of no use
        raise
    return home.path / everyone.exchange("place of a checkpoint", place.name.encode())[0].decode()


def _check_counts(step: int, keep: int | None) -> None:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise InvalidOption(
                f"{name}={value!r} is no number from {least} on.",
                why="steps are counted from 0, and the checkpoint that was just saved is always kept",
                next=f"give {name}= a whole number of at least {least}",
            )


def _collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan | None,
    compression: Resumable | None,
    extra: Any,
) -> _Content:
    """Everything that this rank has to save; nothing is copied but the random streams."""
    parameter = next(model.parameters(), None)
    state = {
        "random": random_state(torch.device("cpu") if parameter is None else parameter.device),
        "compression": None if compression is None else compression.state_dict(),
    }
    check_plain("compression=", state["compression"])
    check_plain("extra=", extra)
    entries = entries_of(model, optimizer)
    return _Content(
        entries=entries,
        table=digests(entries),
        state=state,
        plan="" if plan is None else to_json(plan),
        extra=pack(extra),
        has_optimizer=optimizer is not None,
    )


def _agree(everyone: Everyone, step: int, home: CheckpointDirectory, content: _Content) -> bool:
    """Whether all ranks follow one plan.

    Raises:
        RanksDiffer: they are about to save different things.
    """
    offer = {
        "step": str(step),
        "directory": str(home.path.resolve()),
        "an optimizer": str(content.has_optimizer),
        "compression": str(content.state["compression"] is not None),
    }
    plan = plan_fingerprint(content.plan)
    told = everyone.exchange("what to save", msgspec.json.encode((offer, plan)))
    offers = [msgspec.json.decode(said, type=tuple[dict[str, str], str | None]) for said in told]
    for name in offer:
        said = [values[name] for values, _ in offers]
        if len(set(said)) > 1:
            other = next(rank for rank, value in enumerate(said) if value != said[0])
            raise RanksDiffer(
                f"Ranks save different checkpoints: {name} is {said[0]} on rank 0 and {said[other]} on rank {other}.",
                why="a checkpoint is what all ranks have at one step",
                next="call save_checkpoint on all ranks after the same step, with the same arguments",
                ranks=(0, other),
            )
    return len({fingerprint for _, fingerprint in offers}) == 1


def _own_names(everyone: Everyone, content: _Content) -> frozenset[str]:
    """Names of what every rank has to keep for itself; tables go around only where something differs."""
    told = everyone.exchange("what all have alike", summary(content.table).encode())
    if len(set(told)) == 1:
        return frozenset()
    tables = everyone.exchange("what ranks have", msgspec.json.encode(content.table))
    return differing(msgspec.json.decode(table, type=dict[str, str]) for table in tables)


def _begin(everyone: Everyone, home: CheckpointDirectory, step: int) -> Path:
    """The directory to write into, which all ranks see."""
    with everyone.together("making a directory for a checkpoint"):
        name = home.begin(step).name if everyone.is_first else ""
    part = home.path / everyone.exchange("directory of a checkpoint", name.encode())[0].decode()
    with everyone.together("finding the directory of a checkpoint"):
        if not part.is_dir():
            raise CheckpointUnusable(
                f"{home.path} is not the same directory on all ranks.",
                why=f"rank 0 has made {part.name} there, and rank {everyone.rank} does not see it",
                next="give a directory on a file system that all ranks share",
            )
    return part


def _write(
    content: _Content, own: frozenset[str], part: Path, everyone: Everyone, *, is_common_plan: bool
) -> list[FileRecord]:
    """This rank's files, and what was written into them."""
    shared = {name: value for name, value in content.entries.items() if name not in own}
    kept = {name: value for name, value in content.entries.items() if name in own}
    write_tensors(shared, part / TENSORS, is_alone=everyone.is_alone)
    written = [part / rank_file(everyone.rank), *(part / TENSORS).glob(f"__{everyone.rank}_*")]
    write_plain({**content.state, "own": kept}, written[0])
    if everyone.is_first:
        written.append(part / TENSORS / ".metadata")
    if content.plan and (everyone.is_first or not is_common_plan):
        written.append(part / plan_file(None if is_common_plan else everyone.rank))
        write_file(written[-1], content.plan.encode())
    return [record_file(part, path) for path in written]


def _manifest(step: int, model: str, content: _Content, own: frozenset[str], world_size: int) -> Manifest:
    return Manifest(
        step=step,
        sequence=0,
        world_size=world_size,
        model=model,
        has_optimizer=content.has_optimizer,
        has_compression=content.state["compression"] is not None,
        plan_fingerprint=plan_fingerprint(content.plan),
        own=tuple(sorted(own)),
        versions={"plimsoll": version("plimsoll"), "torch": str(torch.__version__)},
        files=(),
    )


def _publish(home: CheckpointDirectory, part: Path, manifest: Manifest, told: Sequence[bytes]) -> Path:
    """On the first rank: check that every rank's files are here, write what is common, and let the checkpoint appear."""
    said = [msgspec.json.decode(one, type=tuple[list[FileRecord], bytes]) for one in told]
    with explained(home.path, "written"):
        write_plain([extra for _, extra in said], part / EXTRAS)
        files = [*(record for records, _ in said for record in records), record_file(part, part / EXTRAS)]
        for record in files:
            if (part / record.name).stat().st_size != record.bytes:
                raise damaged(part, f"{record.name} is not what its rank has written")
        manifest = msgspec.structs.replace(manifest, files=tuple(files), sequence=home.next_sequence())
        write_file(part / MANIFEST, encode_manifest(manifest))
        return home.publish(part, manifest.step)
