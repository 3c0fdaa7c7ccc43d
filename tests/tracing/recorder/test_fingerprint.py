"""A fingerprint names a model's structure, a signature names a call; neither looks at values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plimsoll.tracing.recorder.fingerprint import fingerprint, signature


def model(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4))


def test_fingerprint_starts_with_the_class_and_ignores_values_and_the_device():
    assert fingerprint(model()).startswith("Sequential-")
    assert fingerprint(model()) == fingerprint(model()) == fingerprint(model().to("meta"))


@pytest.mark.parametrize(
    "other",
    [
        model(5),
        model().double(),
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        model().requires_grad_(False),
    ],
    ids=["shape", "dtype", "class", "frozen"],
)
def test_fingerprint_tells_structures_apart(other: nn.Module):
    assert fingerprint(model()) != fingerprint(other)


def test_fingerprint_tells_tied_weights_and_regions_apart():
    tied, free = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    tied[1].weight = tied[0].weight
    assert fingerprint(tied) != fingerprint(free)
    assert fingerprint(model(), ["0"]) != fingerprint(model(), ["1"])


def test_signature_reads_like_the_call():
    text = signature(model(), (torch.ones(2, 4),), {"flag": True, "labels": torch.ones(2, dtype=torch.int64)})
    assert text == "f32[2x4]; flag=True; labels=i64[2]; training; loss: output"


def test_signature_shows_what_changes_the_path():
    x = (torch.ones(2, 4),)
    plain = model()
    texts = {signature(plain, x, {}), signature(plain, x, {}, loss=torch.sum)}
    with torch.autocast("cpu", torch.bfloat16):
        texts.add(signature(plain, x, {}))
    texts.add(signature(plain.eval(), x, {}))
    plain(x[0]).sum().backward()
    texts.add(signature(plain, x, {}))
    assert len(texts) == 5
