"""Entries of a rank in, a digest of those that are not sharded out: what differs between ranks cannot be kept once for all.

Sharded tensors say themselves which part is whose. All others are taken to be equal everywhere, and are written once; but
running statistics of norms are not, nor are tensors of models that are divided by hand, nor layers of different pipeline
stages that go by one name. Those are found here by shape, dtype and a digest of their bits, and kept by every rank for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_CHUNK_ELEMENTS = 1 << 20
_FACTOR, _MODULUS = 0x9E3779B97F4A7C15, 1 << 64
"""An odd factor, 2⁶⁴ over the golden ratio: its multiples weigh places, and its powers weigh chunks."""


def digests(entries: Mapping[str, Any]) -> dict[str, str]:
    """Shape, dtype and bits of every entry that is not sharded, in short."""
    return {name: _digest(value) for name, value in entries.items() if not isinstance(value, DTensor)}


def summary(table: Mapping[str, str]) -> str:
    """One word that differs where a table does."""
    return hashlib.sha256(repr(sorted(table.items())).encode()).hexdigest()


def differing(tables: Iterable[Mapping[str, str]]) -> frozenset[str]:
    """Names of entries that two of these ranks have with different contents."""
    seen: dict[str, str] = {}
    found = set()
    for table in tables:
        for name, digest in table.items():
            if seen.setdefault(name, digest) != digest:
                found.add(name)
    return frozenset(found)


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {_bits_of(value)}"
    if isinstance(value, dict):
        return repr({key: _digest(part) for key, part in value.items()})
    if isinstance(value, list | tuple):
        return repr([_digest(part) for part in value])
    return repr(value)


def _bits_of(value: torch.Tensor) -> int:
    """One number for the bits and their order, modulo 2⁶⁴, as integers of torch wrap."""
    flat = value.detach().reshape(-1)
    bits = flat.view(_BITS.get(flat.element_size(), torch.int64))
    weights = torch.arange(1, min(len(bits), _CHUNK_ELEMENTS) + 1, device=bits.device) * (_FACTOR - _MODULUS)
    total = 0
    for chunk in bits.split(_CHUNK_ELEMENTS):
        total = (total * _FACTOR + int((chunk * weights[: len(chunk)]).sum())) % _MODULUS
    return total
