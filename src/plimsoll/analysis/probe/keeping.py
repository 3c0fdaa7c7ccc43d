"""Keeps what a probe has to put back or take up again: weights and random state in memory, both arms in a run directory.

Files in the directory appear whole or not at all. An arm's state carries its whole log, so the log beside it (JSON lines, for
people and scripts) is written again from there when a run is taken up: what a killed process left half-written does not matter.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch
from torch import nn

from plimsoll.analysis.probe.evidence import BASELINE, PLAN, ArmLog
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.files import FileRefused, ReadLimits, read_file, whole_file
from plimsoll.artifacts.store import from_json
from plimsoll.artifacts.verdict import Verdict
from plimsoll.errors import ProbeRunMismatch, ProbeRunUnusable
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.recorder.untouched import RandomState, untouched
from plimsoll.tracing.torch_internals import preserving_versions
from plimsoll.units import MIB

_IDENTITY = "run.json"
_VERDICT = "verdict.json"
_LIMITS = ReadLimits(most_bytes=128 * MIB)


def seed_everything(seed: int) -> None:
    """Start all generators from one number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Whatever is drawn inside changes nothing outside."""
    before = RandomState()
    try:
        yield
    finally:
        before.put_back()


class Weights(msgspec.Struct, kw_only=True):
    """Parameters (of sharded ones this rank's shards) and buffers on the host."""

    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]


def take_weights(model: nn.Module) -> Weights:
    """A copy of all parameters and buffers."""
    return Weights(
        parameters=[parameter.detach().to("cpu", copy=True) for parameter in _parameters(model)],
        buffers=[buffer.detach().to("cpu", copy=True) for buffer in model.buffers()],
    )


def put_weights(model: nn.Module, weights: Weights, parameters: Sequence[torch.Tensor] | None = None) -> None:
    """Write parameters and buffers into the model's own tensors (or into these ``parameters``, where it has others now)."""
    with torch.no_grad():
        for parameter, value in zip(parameters or _parameters(model), weights.parameters, strict=True):
            parameter.copy_(value)
        for buffer, value in zip(model.buffers(), weights.buffers, strict=True):
            buffer.copy_(value)


@contextlib.contextmanager
def trainable_copy(model: nn.Module) -> Iterator[Weights]:
    """Let the block train the model; afterwards everything is as it was, the version counters of its tensors as well.

    What the model held is kept on the host, so that the device has room for one set of weights only.
    """
    # Now, while all are there: a step of a sharded model that fails may leave gathered ones in their places.
    parameters = _parameters(model)
    tensors = [*parameters, *model.buffers()]
    with own_randomness(), preserving_versions(tuple(tensors)), untouched(model):
        original = take_weights(model)
        try:
            yield original
        finally:
            put_weights(model, original, parameters)


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return [part for parameter in model.parameters() for part in dense_parts(parameter)]


class ArmState(Weights, kw_only=True):
    """Where one arm stands: tensors on the host, the optimizer's state, the log so far, and what it has seen of the data."""

    optimizer: dict[str, Any]
    log: ArmLog
    data_checksum: int


class RunDirectory:
    """Keeps a run.

    Args:
        path: made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def claim(self, identity: Mapping[str, str]) -> None:
        """Begin a run here, or go on with the one that is here.

        Args:
            identity: everything that decides what the run gives, each part with its fingerprint.

        Raises:
            ProbeRunMismatch: the directory holds another run, or something else.
            ProbeRunUnusable: it cannot be read or written.
        """
        wanted = dict(identity)
        with self._explained():
            self.path.mkdir(parents=True, exist_ok=True)
            place = self.path / _IDENTITY
            if not place.exists():
                strangers = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
                if strangers:
                    raise ProbeRunMismatch(
                        f"{self.path} is not empty, and holds no probe.",
                        why=f"found {', '.join(strangers[:5])}",
                        next="give an empty directory, or one that does not exist",
                    )
                self._write(_IDENTITY, lambda file: file.write(msgspec.json.format(msgspec.json.encode(wanted))))
                return
            content = read_file(place, _LIMITS)
        try:
            found = msgspec.json.decode(content, type=dict[str, str])
        except (msgspec.DecodeError, UnicodeError) as error:
            raise self._damaged(_IDENTITY, error) from error
        if found != wanted:
            missing = dict.fromkeys({**found, **wanted}, "not given")
            here, asked = missing | found, missing | wanted
            differing = [name for name in missing if here[name] != asked[name]]
            raise ProbeRunMismatch(
                f"{self.path} holds another probe, which differs in {', '.join(differing)}.",
                why="; ".join(f"{name} {here[name]}, not {asked[name]}" for name in differing),
                next="give the same model, plan, data and settings to go on with it, or another directory for --run",
            )

    def load(self, arm: str) -> ArmState | None:
        """An arm's state after its last whole chunk; ``None`` before the first.

        Raises:
            ProbeRunUnusable: it is there, but cannot be read.
        """
        place = self.path / f"{arm}.pt"
        with self._explained():
            if not place.exists():
                return None
            if not place.is_file():
                raise FileRefused("it is no regular file")
        try:
            held = torch.load(place, map_location="cpu", weights_only=True)
            log = msgspec.json.decode(held.pop("log"), type=ArmLog)
            return ArmState(log=log, **held)
        except Exception as error:  # torch and pickle raise whatever a damaged file makes them run into
            raise self._damaged(place.name, error) from error

    def save(self, arm: str, state: ArmState) -> None:
        """Keep an arm's state and log."""
        held = msgspec.structs.asdict(state) | {"log": msgspec.json.encode(state.log)}
        with self._explained():
            self._write(f"{arm}.pt", lambda file: torch.save(held, file))
            self.write_log(arm, state.log)

    def write_log(self, arm: str, log: ArmLog) -> None:
        """Write the log as JSON lines."""
        with self._explained():
            self._write(f"{arm}.jsonl", lambda file: file.write(b"".join(line + b"\n" for line in log.lines())))

    def verdict(self) -> Verdict | None:
        """The verdict of a finished run.

        Raises:
            ProbeRunUnusable: something else is in its place.
        """
        place = self.path / _VERDICT
        with self._explained():
            if not place.exists():
                return None
            content = read_file(place, _LIMITS)
        found = from_json(content, source=str(place))
        if not isinstance(found, Verdict):
            raise ProbeRunUnusable(
                f"{place} holds a {found.KIND}.",
                why="something else was written over the verdict of this run",
                next="delete the directory and start again",
            )
        return found

    def finish(self, verdict: Verdict) -> None:
        """Keep the verdict; the arms' weights are not needed any more."""
        with self._explained():
            self._write(_VERDICT, lambda file: file.write(to_json(verdict).encode()))
            for arm in (BASELINE, PLAN):
                (self.path / f"{arm}.pt").unlink(missing_ok=True)

    def _write(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        with whole_file(self.path / name) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, FileRefused) as error:  # torch's writer reports a full disk as a RuntimeError
            raise ProbeRunUnusable(
                f"The run directory {self.path} cannot be used.",
                why=f"{type(error).__name__}: {error}",
                next="free some space, or give a directory that you may write to; whole chunks that are there are kept",
            ) from error

    def _damaged(self, name: str, error: Exception) -> ProbeRunUnusable:
        return ProbeRunUnusable(
            f"{self.path / name} is damaged.",
            why=f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}",
            next="delete the directory and start again",
        )
