"""Numbers, text, tensors and containers of them in, a file out that can be read without running any code; and back."""

from __future__ import annotations

import io
import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch

from plimsoll.errors import InvalidOption
from plimsoll.resuming.manifest import damaged

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MAPPINGS = (dict, OrderedDict, Counter)
"""Types themselves: ``torch.load`` refuses their subclasses (named tuples, default dicts, tensors of other libraries)."""


def check_plain(what: str, value: Any) -> None:
    """Refuse what could not be read back.

    Args:
        what: the option that the value was given as, for the message.
        value: anything.

    Raises:
        InvalidOption: there is something else than numbers, text, tensors, lists, tuples, sets and dicts in it.
    """
    if type(value) in _MAPPINGS:
        parts = [*value.keys(), *value.values()]
    elif type(value) in (list, tuple, set):
        parts = list(value)
    elif type(value) in (*_ATOMS, *_TENSORS):
        return
    else:
        raise InvalidOption(
            f"{what} holds a {type(value).__module__}.{type(value).__qualname__}.",
            why="what each rank keeps for itself is numbers, text, tensors, lists and dicts: reading it back runs no code",
            next="give its state instead, as its state_dict() does, or torch.from_numpy(array)",
        )
    for part in parts:
        check_plain(what, part)


def pack(value: Any) -> bytes:
    """The bytes of a plain value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> Any:
    """The value of ``pack``'s bytes."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def write_plain(value: Any, path: Path) -> None:
    """Write a plain value, and wait until it is on the disk."""
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def read_plain(path: Path) -> Any:
    """Read what ``write_plain`` wrote.

    Raises:
        CheckpointUnusable: it cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise whatever a damaged file makes them run into
        raise damaged(path, f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}") from error
