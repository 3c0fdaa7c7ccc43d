"""A checkpoint in, the run that it was saved from out: all is read and checked before anything is changed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.store import load_plan
from plimsoll.distributed.everyone import Everyone
from plimsoll.distributed.saving import TIMEOUT_SECONDS, Resumable
from plimsoll.errors import CheckpointMismatch, RanksDiffer
from plimsoll.resuming.directory import EXTRAS, TENSORS, CheckpointDirectory, explained, plan_file, rank_file
from plimsoll.resuming.entries import set_model, set_optimizer
from plimsoll.resuming.manifest import Manifest, check_file
from plimsoll.resuming.matching import some_names, templates_for
from plimsoll.resuming.plain import read_plain, unpack
from plimsoll.resuming.randomness import reseed, restore_random_state
from plimsoll.resuming.tensors import read_tensors, saved_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What was loaded. ``extras`` is what each rank gave as ``extra=``, by rank."""

    path: Path
    step: int
    plan: Plan | None
    extras: tuple[Any, ...]
    world_size: int
    rank: int
    saved_world_size: int

    @property
    def extra(self) -> Any:
        """What this rank gave as ``extra=``.

        Raises:
            CheckpointMismatch: there were more or fewer ranks then: which one's it should be is for the caller to say.
        """
        if self.world_size != self.saved_world_size:
            raise CheckpointMismatch(
                f"{self.path} was saved by {self.saved_world_size} ranks; this run has {self.world_size}.",
                why="extra= is what each rank gave for itself, so there is none that belongs to this rank",
                next="choose from .extras, which has all of them: .extras[0] where all gave the same",
            )
        return self.extras[self.rank]


@dataclass(frozen=True, slots=True)
class _Target:
    """What a checkpoint is loaded into."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    compression: Resumable | None
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None, compression: Resumable | None) -> _Target:
        parameter = next(model.parameters(), None)
        return cls(model, optimizer, compression, torch.device("cpu") if parameter is None else parameter.device)


def latest_step(directory: str | Path) -> int | None:
    """The step of the checkpoint to go on from, ``None`` where there is none: the run begins.

    Args:
        directory: of the run's checkpoints.

    Raises:
        CheckpointUnusable: it cannot be read.

    Example:
        >>> latest_step("no/such/run") is None
        True
    """
    home = CheckpointDirectory(Path(directory))
    place = home.latest()
    return None if place is None else home.read(place).step


def load_checkpoint(
    directory: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    compression: Resumable | None = None,
    step: int | None = None,
    reseed_with: int | None = None,
    drop_residuals: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Checkpoint:
    """Put a run back to where it was saved. All ranks call it together.

    With as many ranks as then, training goes on bit for bit as if it had never stopped. With more or fewer, model and
    optimizer are divided anew; what belongs to one rank alone (random streams, residuals of gradient compression) cannot
    be, and is refused unless it is given up by name. A call that fails has changed nothing on any rank.

    Args:
        directory: of the run's checkpoints, the same for all ranks.
        model: of the same parameters and buffers, divided and managed in whatever way.
        optimizer: over the same parameters; without one only the model is loaded.
        compression: state of gradient compression, if the run goes on with it.
        step: of the checkpoint; by default the latest.
        reseed_with: where the number of ranks has changed, begin new random streams from this number and the rank.
        drop_residuals: go on without what the checkpoint keeps for ``compression``.
        timeout_seconds: how long ranks wait for each other.

    Returns:
        The step, the plan and what was given as ``extra=``.

    Raises:
        CheckpointMismatch: of another model, optimizer or number of ranks, or there is none.
        CheckpointUnusable: damaged, or of a newer schema.
        RanksDiffer: the ranks see different checkpoints.
        RankFailed, RankMissing: another rank failed, or did not come.

    Example:
        >>> if latest_step("runs/7") is not None:  # doctest: +SKIP
        ...     checkpoint = load_checkpoint("runs/7", model=model, optimizer=optimizer)
    """
    everyone = Everyone.here(timeout_seconds)
    target = _Target.of(model, optimizer, compression)
    with everyone.together("finding a checkpoint"):
        place, manifest = CheckpointDirectory(Path(directory)).find(step)
        _check_parts(place, manifest, target, drop_residuals=drop_residuals)
        _check_world(place, manifest, everyone, reseed_with, drop_residuals=drop_residuals)
    _refuse_different(everyone, place, manifest)
    with everyone.together("checking the files of a checkpoint"):
        for record in manifest.files[everyone.rank :: everyone.size]:
            check_file(place, record)
    with everyone.together("comparing a checkpoint with the model"):
        is_resized = manifest.world_size != everyone.size
        kept = {} if is_resized else read_plain(place / rank_file(everyone.rank))
        saved = saved_entries(place / TENSORS)
        templates, missed = templates_for(model, optimizer, saved, kept.get("own", {}))
    _refuse_leftovers(everyone, missed)
    with everyone.together("reading a checkpoint"):
        loaded = {**read_tensors(templates, place / TENSORS, is_alone=everyone.is_alone), **kept.get("own", {})}
        checkpoint = _describe(place, manifest, everyone)
    state = None if is_resized or drop_residuals else kept["compression"]
    with _undone_on_failure(target), everyone.together("loading a checkpoint"):
        if optimizer is not None:
            set_optimizer(model, optimizer, loaded)
        if compression is not None and state is not None:
            compression.load_state_dict(state)
    set_model(model, loaded)  # copies into memory that is there: nothing is left that could fail
    if not is_resized:
        restore_random_state(kept["random"], target.device)
    elif reseed_with is not None:
        reseed(reseed_with, everyone.rank)
    return checkpoint


def _check_parts(place: Path, manifest: Manifest, target: _Target, *, drop_residuals: bool) -> None:
    if target.optimizer is not None and not manifest.has_optimizer:
        raise CheckpointMismatch(
            f"{place} holds no state of an optimizer.",
            why="it was saved without optimizer=",
            next="load the model alone: leave optimizer= out",
        )
    if target.compression is not None and not manifest.has_compression and not drop_residuals:
        raise CheckpointMismatch(
            f"{place} holds no state of gradient compression.",
            why="it was saved without compression=, so compression would start without residuals",
            next="leave compression= out, or begin anew with drop_residuals=True",
        )
    if target.compression is None and manifest.has_compression and not drop_residuals:
        raise CheckpointMismatch(
            f"{place} holds the state of gradient compression, and nothing here takes it.",
            why="residuals are parts of gradients that are still to be applied; going on without them loses them",
            next="pass compression=, or give them up with drop_residuals=True",
        )


def _check_world(
    place: Path, manifest: Manifest, everyone: Everyone, reseed_with: int | None, *, drop_residuals: bool
) -> None:
    if manifest.world_size == everyone.size:
        return
    sizes = f"{place} was saved by {manifest.world_size} ranks; this run has {everyone.size}."
    if manifest.own:
        raise CheckpointMismatch(
            sizes,
            why=f"{len(manifest.own)} values differed between ranks without being sharded, {manifest.own[0]!r} for one; "
            "nobody but the rank that had it can take it up",
            next=f"resume on {manifest.world_size} ranks, and make them equal (synchronised norms, a broadcast) before saving",
        )
    if manifest.has_compression and not drop_residuals:
        raise CheckpointMismatch(
            sizes,
            why="residuals of gradient compression belong to one rank each, and are parts of gradients still to be applied",
            next=f"give them up with drop_residuals=True, or resume on {manifest.world_size} ranks",
        )
    if reseed_with is None:
        raise CheckpointMismatch(
            sizes,
            why="model and optimizer can be divided anew, but random streams belong to one rank each",
            next=f"begin new streams with reseed_with=0, or resume on {manifest.world_size} ranks for the same bits",
        )


def _refuse_different(everyone: Everyone, place: Path, manifest: Manifest) -> None:
    told = everyone.exchange("which checkpoint", msgspec.json.encode((place.name, manifest.sequence, manifest.step)))
    if len(set(told)) > 1:
        other = next(rank for rank, said in enumerate(told) if said != told[0])
        raise RanksDiffer(
            f"Rank {other} sees another checkpoint than rank 0.",
            why=f"rank 0: {told[0].decode()}; rank {other}: {told[other].decode()}",
            next="give all ranks the same directory, on a file system that they share, and the same step=",
            ranks=(0, other),
        )


def _refuse_leftovers(everyone: Everyone, missed: Sequence[str]) -> None:
    """Refuse a checkpoint that holds something for which no rank has a place."""
    told = everyone.exchange("what has no place", msgspec.json.encode(sorted(missed)))
    common = sorted(set.intersection(*(set(msgspec.json.decode(said, type=list[str])) for said in told)))
    if common:
        raise CheckpointMismatch(
            f"The checkpoint holds {len(common)} values that are not in the model or the optimizer: {some_names(common)}.",
            why="it was saved from another model, or from an optimizer over more parameters",
            next="make what the checkpoint was saved from, or give another directory",
        )


def _describe(place: Path, manifest: Manifest, everyone: Everyone) -> Checkpoint:
    with explained(place, "read"):
        plans = [place / plan_file(None), place / plan_file(everyone.rank)]
        plan = next((load_plan(path) for path in plans if path.exists()), None)
    return Checkpoint(
        path=place,
        step=manifest.step,
        plan=plan,
        extras=tuple(unpack(extra) for extra in read_plain(place / EXTRAS)),
        world_size=everyone.size,
        rank=everyone.rank,
        saved_world_size=manifest.world_size,
    )


@contextlib.contextmanager
def _undone_on_failure(target: _Target) -> Iterator[None]:
    """Put optimizer and compression back as they were, if the block fails here or on another rank."""
    with contextlib.ExitStack() as undo:
        if target.optimizer is not None:
            before = {"state": target.optimizer.state, "param_groups": target.optimizer.param_groups}
            undo.callback(target.optimizer.__setstate__, before)
        if target.compression is not None:
            undo.callback(target.compression.load_state_dict, copy.deepcopy(target.compression.state_dict()))
        yield
        undo.pop_all()
