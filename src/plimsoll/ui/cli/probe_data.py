"""Chooses the real data that a target built from a configuration is probed with, and says in words what it is.

Language models get the source of Python's standard library, a byte per token; image classifiers get scikit-learn's digits
where that is installed. Both are pieces that do not overlap, in an order drawn once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from plimsoll.estimator.targets.target import Target
from plimsoll.ui.demo.corpus import VOCABULARY, read_corpus

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Data:
    """What to train on, and what it is in words (nothing: the stream describes itself)."""

    batches: Any
    description: str = ""


class PickedBatches(Sequence[dict[str, Any]]):
    """Batches that are put together when they are asked for.

    Args:
        columns: tensors whose first dimension counts the examples, by argument name.
        batch: examples per batch.
        device: where batches go.
    """

    def __init__(self, columns: dict[str, torch.Tensor], *, batch: int, device: torch.device) -> None:
        import torch

        count = len(next(iter(columns.values())))
        self._columns = columns
        self._order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        self._batch = batch
        self._device = device

    def __len__(self) -> int:
        return len(self._order) // self._batch

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        picks = self._order[place * self._batch : (place + 1) * self._batch]
        return {name: column[picks].to(self._device) for name, column in self._columns.items()}


def data_for(target: Target) -> Data:
    """The data that a target is probed with: its own stream, real data for a configuration, else its one batch."""
    if target.batches is not None:
        return Data(target.batches)
    if not target.is_configured:
        return Data(target.batch)
    if target.batch.keys() == {"input_ids", "labels"} and target.batch["labels"].dim() > 1:
        return _text(target)
    if "pixel_values" in target.batch:
        return _digits(target)
    return Data(target.batch, "one random batch: no real data is known for this architecture")


def _text(target: Target) -> Data:
    import torch

    model: Any = target.model
    batch, sequence = target.batch["input_ids"].shape
    vocabulary = model.config.get_text_config().vocab_size
    if vocabulary < VOCABULARY:
        return Data(target.batch, f"one random batch: a vocabulary of {vocabulary} has no room for bytes")
    text = torch.frombuffer(bytearray(read_corpus()), dtype=torch.uint8)
    pieces = text[: len(text) // sequence * sequence].view(-1, sequence).long()
    if len(pieces) < batch:
        return Data(target.batch, f"one random batch: the standard library does not fill {batch} × {sequence} tokens")
    found = PickedBatches({"input_ids": pieces, "labels": pieces}, batch=batch, device=target.batch["input_ids"].device)
    return Data(found, f"Python's standard library, a byte per token, {len(found)} batches of {batch} × {sequence}")


def _digits(target: Target) -> Data:
    import torch
    from torch.nn.functional import interpolate

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return Data(target.batch, "one random batch: scikit-learn, which has real images, is not installed")
    model: Any = target.model
    pixels = target.batch["pixel_values"]
    batch, channels, height, width = pixels.shape
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=pixels.dtype)[:, None]
    large = interpolate(images, size=(height, width), mode="bilinear", align_corners=False)
    classes = model.config.num_labels
    labels = torch.tensor(digits.target).remainder(classes)
    columns = {"pixel_values": large.expand(-1, channels, -1, -1), "labels": labels}
    found = PickedBatches(columns, batch=batch, device=pixels.device)
    modulo = "" if classes >= 10 else f" (the digit modulo {classes})"
    return Data(found, f"scikit-learn's handwritten digits{modulo}, {len(found)} batches of {batch}")
