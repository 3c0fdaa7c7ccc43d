"""Batches of bytes from Python's standard library: real text that every machine already has."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VOCABULARY = 256
"""One token per byte."""

_MOST_BYTES = 4_000_000


def read_corpus() -> bytes:
    """The source text of the standard library's own modules, in alphabetical order, up to 4 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(root.glob("*.py")):
        text = path.read_bytes()
        parts.append(text)
        size += len(text)
        if size >= _MOST_BYTES:
            break
    return b"\n".join(parts)


class Batches:
    """Draws the same batches in the same order for the same seed.

    Args:
        corpus: the text.
        batch: examples per batch.
        sequence: bytes per example.
        seed: of the draws.
    """

    def __init__(self, corpus: bytes, *, batch: int, sequence: int, seed: int) -> None:
        import torch

        self._tokens = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
        self._random = torch.Generator().manual_seed(seed)
        self._batch = batch
        self._sequence = sequence

    def draw(self) -> dict[str, torch.Tensor]:
        """The next batch as a transformers model takes it: tokens, which are their own labels."""
        import torch

        starts = torch.randint(len(self._tokens) - self._sequence, (self._batch,), generator=self._random)
        rows = [self._tokens[start : start + self._sequence] for start in starts.tolist()]
        tokens = torch.stack(rows).long()
        return {"input_ids": tokens, "labels": tokens}
