"""Stores what a probe must restore or resume: weights and random state in memory, and the state of both arms (training without
and with the plan) in a run directory.

Files in the directory are written whole or not at all. An arm's state contains its whole log. The separate log file (JSON
lines, for people and scripts) is written again from that state when a run resumes, so a half-written log does no harm.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils._pytree import KeyPath, keystr, tree_map_with_path

from plimsoll.analysis.probe.evidence import BASELINE, PLAN, ArmLog
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.files import FileRefused, ReadLimits, read_file, whole_file
from plimsoll.artifacts.store import from_json
from plimsoll.artifacts.verdict import Verdict
from plimsoll.errors import InvalidProbe, ProbeRunMismatch, ProbeRunUnusable
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.recorder.untouched import KeptState, RandomState, untouched
from plimsoll.tracing.torch_internals import preserving_versions
from plimsoll.units import MIB

_IDENTITY = "run.json"
_VERDICT = "verdict.json"
_DATA = "data.json"
_LIMITS = ReadLimits(most_bytes=128 * MIB)


def seed_everything(seed: int) -> None:
    """Seed the global random generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """A context that saves the state of the random generators, and restores it when the block ends.

    So random numbers drawn inside the block do not affect code outside.
    """
    before = RandomState()
    try:
        yield
    finally:
        before.put_back()


class Weights(msgspec.Struct, kw_only=True):
    """Data: copies, on the host, of a model's parameters and buffers.

    Of a sharded parameter, only this rank's shard is copied. Buffers are stored by name, because a forward may register some.
    """

    parameters: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]


def take_weights(model: nn.Module) -> Weights:
    """Return copies of all parameters and buffers of a model; the copies are on the host."""
    return Weights(
        parameters=[parameter.detach().to("cpu", copy=True) for parameter in _parameters(model)],
        buffers={name: buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers()},
    )


def put_weights(model: nn.Module, weights: Weights) -> None:
    """Write saved weights into the model's own tensors, in place.

    A buffer that the model does not have, or has in another shape, becomes a new tensor: a forward may register or enlarge it.
    """
    _put_parameters(_parameters(model), weights)
    device = next(model.parameters()).device
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, value in weights.buffers.items():
            path, _, own_name = name.rpartition(".")
            if path not in modules:  # made by a forward, which makes it again
                continue
            buffers = modules[path]._buffers
            buffer = buffers.get(own_name)
            if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                buffer.copy_(value)
            else:
                buffers[own_name] = value.to(device if buffer is None else buffer.device, copy=True)


def _put_parameters(parameters: Sequence[torch.Tensor], weights: Weights) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, weights.parameters, strict=True):
            parameter.copy_(value)


@contextlib.contextmanager
def trainable_copy(model: nn.Module) -> Iterator[Weights]:
    """A context for training the model: when the block ends, the model is restored, with its tensors' version counters.

    It yields the original weights. They are stored on the host, so that the device holds only one set of weights.
    """
    # Collected before training: a failing step of a sharded model may leave gathered parameters in place of the shards.
    parameters = _parameters(model)
    tensors = [*parameters, *model.buffers()]
    with own_randomness(), preserving_versions(tuple(tensors)), untouched(model):
        original = take_weights(model)
        try:
            yield original
        finally:
            _put_parameters(parameters, original)  # `untouched` restores the buffers


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return [part for parameter in model.parameters() for part in dense_parts(parameter)]


class ArmState(Weights, kw_only=True):
    """The stored state of one arm (the training without or with the plan).

    It has the weights on the host, the optimizer's state, the log, and the checksum of the batches drawn so far.
    """

    optimizer: dict[str, Any]
    log: ArmLog
    data_checksum: int


def take_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state and settings as tensors, numbers, texts and containers of these, which a run directory holds.

    Raises:
        InvalidProbe: the optimizer holds an object of another type.
    """

    def stored(path: KeyPath, value: Any) -> Any:
        if isinstance(value, np.generic):  # a learning rate from numpy
            value = value.item()
        if value is None or isinstance(value, torch.Tensor | bool | int | float | complex | str):
            return value
        raise InvalidProbe(
            f"The optimizer {type(optimizer).__name__} holds a {type(value).__name__}, which a probe cannot store: "
            f"state_dict(){keystr(path)}.",
            why="an arm's state is written to files, which hold only tensors, numbers and texts: reading them runs no code",
            next="pass an optimizer whose state and settings are tensors, numbers and texts",
        )

    return cast("dict[str, Any]", tree_map_with_path(stored, optimizer.state_dict()))


def put_optimizer(optimizer: torch.optim.Optimizer, held: dict[str, Any]) -> None:
    """Give an optimizer the state and the settings that ``take_optimizer`` returned, each tensor in its own dtype."""
    optimizer.load_state_dict(held)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, saved in held["state"].items():
        # `load_state_dict` converts state to the dtype of its parameter: float32 averages of bfloat16 parameters lose bits.
        state = optimizer.state[parameters[index]]
        for key, value in saved.items():
            if isinstance(value, torch.Tensor) and value.dtype is not state[key].dtype:
                state[key] = value.to(state[key].device)


class ModuleState:
    """Remembers a model's attributes, generators, parts and buffers, and restores them at the start of each chunk.

    The stored state of an arm contains only weights and buffers. A chunk must depend only on its arm's stored state, so all
    other state begins anew. Copies of tensors are on the host.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = KeptState(model, lambda tensor: tensor.to("cpu", copy=True))

    def put_back(self) -> None:
        """Restore the state. Iterators that the model holds are copied first, so that steps do not advance the originals."""
        self._kept.put_back()
        self._kept.lend_iterators()


class SeenData(msgspec.Struct, frozen=True, kw_only=True):
    """Data: how many batches a run has drawn, and their checksum."""

    batches: int
    checksum: int


class RunDirectory:
    """Reads and writes the directory that stores a probe's run.

    Args:
        path: the directory, which is created if necessary.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def claim(self, identity: Mapping[str, str]) -> None:
        """Begin a run in this directory, or continue the run that it contains.

        Args:
            identity: a mapping from the name of each part that determines the run's result to its text or checksum.

        Raises:
            ProbeRunMismatch: the directory contains another run, or other files.
            ProbeRunUnusable: the directory cannot be read or written.
        """
        wanted = dict(identity)
        with self._explained():
            self.path.mkdir(parents=True, exist_ok=True)
            place = self.path / _IDENTITY
            if not place.exists():
                strangers = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
                if strangers:
                    raise ProbeRunMismatch(
                        f"{self.path} is not empty, and does not contain a probe.",
                        why=f"it contains {', '.join(strangers[:5])}",
                        next="give an empty directory, or a directory that does not exist yet",
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
                f"{self.path} contains another probe, which differs in {', '.join(differing)}.",
                why="; ".join(f"{name} {here[name]}, not {asked[name]}" for name in differing),
                next="to resume that probe, give the same model, plan, data and settings; or give another directory for --run",
            )

    def load(self, arm: str) -> ArmState | None:
        """Read the state of one arm (the training without or with the plan) after its last whole chunk of steps.

        Return ``None`` if the arm has not finished a chunk.

        Raises:
            ProbeRunUnusable: the file exists but cannot be read.
        """
        place = self.path / f"{arm}.pt"
        with self._explained():
            if not place.exists():
                return None
            if not place.is_file():
                raise FileRefused("it is not a regular file")
        try:
            held = torch.load(place, map_location="cpu", weights_only=True)
            log = msgspec.json.decode(held.pop("log"), type=ArmLog)
            return ArmState(log=log, **held)
        except Exception as error:  # for a damaged file, torch and pickle raise many kinds of errors
            raise self._damaged(place.name, error) from error

    def save(self, arm: str, state: ArmState) -> None:
        """Write the state of one arm (the training without or with the plan) and, as a separate file, its log."""
        held = msgspec.structs.asdict(state) | {"log": msgspec.json.encode(state.log)}
        with self._explained():
            self._write(f"{arm}.pt", lambda file: torch.save(held, file))
            self.write_log(arm, state.log)

    def write_log(self, arm: str, log: ArmLog) -> None:
        """Write the log of one arm (the training without or with the plan) as a file of JSON lines."""
        with self._explained():
            self._write(f"{arm}.jsonl", lambda file: file.write(b"".join(line + b"\n" for line in log.lines())))

    def verdict(self) -> Verdict | None:
        """Return the stored verdict if the run is finished, or ``None`` if it is not.

        Raises:
            ProbeRunUnusable: the verdict's file contains another artifact.
        """
        place = self.path / _VERDICT
        with self._explained():
            if not place.exists():
                return None
            content = read_file(place, _LIMITS)
        found = from_json(content, source=str(place))
        if not isinstance(found, Verdict):
            raise ProbeRunUnusable(
                f"{place} contains a {found.KIND}, not a verdict.",
                why="another file was written over the verdict of this run",
                next="delete the directory and start again",
            )
        return found

    def seen(self) -> SeenData:
        """Return which data a finished run has drawn.

        Raises:
            ProbeRunUnusable: the file cannot be read.
        """
        with self._explained():
            content = read_file(self.path / _DATA, _LIMITS)
        try:
            return msgspec.json.decode(content, type=SeenData)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise self._damaged(_DATA, error) from error

    def finish(self, verdict: Verdict, seen: SeenData) -> None:
        """Write the verdict and which data it is based on. Delete the stored states of both trainings, which are not needed
        any more.
        """
        with self._explained():
            # First, because a run with a verdict is finished.
            self._write(_DATA, lambda file: file.write(msgspec.json.encode(seen)))
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
                next="free some space, or give a directory that you have permission to write to; completed chunks are kept",
            ) from error

    def _damaged(self, name: str, error: Exception) -> ProbeRunUnusable:
        return ProbeRunUnusable(
            f"{self.path / name} is damaged.",
            why=f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}",
            next="delete the directory and start again",
        )
