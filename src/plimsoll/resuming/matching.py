"""What a checkpoint holds and what is here in, memory to read it into out; or an error that names what does not match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from plimsoll.errors import CheckpointMismatch
from plimsoll.resuming.entries import GROUP, MODEL, STATE, entries_of, host_copy_of, parameters_of, state_template
from plimsoll.resuming.tensors import Saved


def templates_for(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, saved: Mapping[str, Saved], own: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Memory on the host for what this rank needs, by name; and the names that it has no use for.

    Args:
        model: as it is divided here.
        optimizer: over parameters of it; ``None`` where only the model is loaded.
        saved: what the files of all ranks hold.
        own: what only this rank has.

    Raises:
        CheckpointMismatch: something is missing, or has another shape or dtype.
    """
    live = entries_of(model, optimizer)
    wanted = {name: value for name, value in live.items() if name.startswith(MODEL)}
    parameters = {} if optimizer is None else parameters_of(model, optimizer)
    absent = [name.removeprefix(MODEL) for name in wanted if name not in saved and name not in own]
    _refuse_absent(absent, "model", [name.removeprefix(MODEL) for name in saved if name.startswith(MODEL)])
    absent = [name for name in parameters if GROUP + name not in saved and GROUP + name not in own]
    _refuse_absent(absent, "optimizer", [name.removeprefix(GROUP) for name in saved if name.startswith(GROUP)])
    templates: dict[str, Any] = {}
    missed = []
    for name in (*saved, *own):
        entry = saved.get(name)
        parameter = _parameter_of(name)
        if name not in wanted and parameter not in parameters:
            missed.append(name)
        elif entry is None:
            _refuse_other_form(name, own[name], wanted.get(name))
        elif not isinstance(entry, TensorStorageMetadata):
            templates[name] = None
        elif name in wanted:
            _refuse_other_form(name, entry, wanted[name])
            templates[name] = host_copy_of(wanted[name])
        else:
            dtype = entry.properties.dtype
            templates[name] = state_template(name, entry.size, dtype, live, parameters[parameter])
    if optimizer is None:
        missed = [name for name in missed if name.startswith(MODEL)]
    return templates, missed


def _parameter_of(name: str) -> str:
    """The parameter that an entry of the optimizer is about; nothing for one of the model."""
    if name.startswith(GROUP):
        return name.removeprefix(GROUP)
    return name.removeprefix(STATE).partition("/")[0] if name.startswith(STATE) else ""


def _refuse_absent(absent: Sequence[str], what: str, saved: Sequence[str]) -> None:
    if absent:
        raise CheckpointMismatch(
            f"The checkpoint lacks {len(absent)} of the {what}'s values: {some_names(absent)}.",
            why=f"it was saved from another {what}, with {some_names(saved)}",
            next=f"make the {what} that the checkpoint was saved from, or give another directory",
        )


def _refuse_other_form(name: str, saved: Any, live: Any) -> None:
    """Refuse a value of the model whose shape or dtype has changed."""
    if not isinstance(live, torch.Tensor):
        return
    size, dtype = (
        (saved.size, saved.properties.dtype) if isinstance(saved, TensorStorageMetadata) else (saved.shape, saved.dtype)
    )
    if size != live.shape or dtype != live.dtype:
        raise CheckpointMismatch(
            f"{name.removeprefix(MODEL)!r} is {live.dtype}{list(live.shape)}; the checkpoint has {dtype}{list(size)}.",
            why="it was saved from another model, or from this one in another precision",
            next="make the model that the checkpoint was saved from, or give another directory",
        )


def some_names(names: Sequence[str]) -> str:
    """The first names, for a message."""
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown}, …" if len(names) > 3 else shown or "nothing"
