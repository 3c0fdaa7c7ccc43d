"""The chunked head and loss against full logits: values, gradients, memory, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from plimsoll.chunked import linear_cross_entropy
from plimsoll.engine.chunked_loss import loss as chunked_loss
from plimsoll.errors import InvalidLoss, InvalidOption
from plimsoll.tracing.meters.memory import PeakMeter

ROWS, FEATURES, CLASSES = 37, 12, 53


def sample(dtype: torch.dtype = torch.float64, *, rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight, bias and labels, some of which do not count."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(rows, FEATURES), torch.randn(CLASSES, FEATURES), torch.randn(CLASSES)
    labels = torch.randint(0, CLASSES, (rows,))
    labels[::5] = -100
    return *(tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)), labels


def doubled(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64, to differentiate by."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def full(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **how: Any) -> torch.Tensor:
    """The same with all logits."""
    logits = F.linear(hidden, weight, how.pop("bias", None)) * how.pop("scale", 1.0)
    softcap = how.pop("softcap", None)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits if logits.dtype is torch.float64 else logits.float(), labels, **how)


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a weighted sum of the losses, so that every row has a scale of its own."""
    weights = torch.linspace(0.5, 2.0, max(loss.numel(), 1), dtype=loss.dtype).reshape(loss.shape)
    return torch.autograd.grad((loss * weights).sum(), tensors)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"softcap": 3.0},
        {"scale": 0.25},
        {"label_smoothing": 0.2, "softcap": 2.0, "scale": 2.0},
    ],
    ids=["plain", "smoothed", "capped", "scaled", "all three"],
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_losses_and_gradients_are_those_of_full_logits(reduction: str, options: dict[str, float], has_bias: bool):
    hidden, weight, bias, labels = sample()
    inputs = (hidden, weight, bias) if has_bias else (hidden, weight)
    given = {"bias": bias} if has_bias else {}
    expected = full(hidden, weight, labels, reduction=reduction, **given, **options)  # type: ignore[arg-type]
    found = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_rows=8, **given, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(found, *inputs), gradients(expected, *inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_rows", [1, 7, 36, 37, 1000])
def test_the_size_of_chunks_does_not_change_what_is_computed(chunk_rows: int):
    hidden, weight, _, labels = sample()
    expected = gradients(full(hidden, weight, labels), hidden, weight)
    found = gradients(linear_cross_entropy(hidden, weight, labels, chunk_rows=chunk_rows), hidden, weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_narrow_gradients_are_within_rounding_of_those_in_float64(dtype: torch.dtype, tolerance: float):
    hidden, weight, _, labels = sample(dtype)
    exact = doubled(hidden, weight)
    expected = gradients(full(*exact, labels), *exact)
    found = gradients(linear_cross_entropy(hidden, weight, labels, chunk_rows=8), hidden, weight)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is dtype
        assert (one.double() - other).norm() <= tolerance * other.norm()


def test_the_factor_of_a_narrow_gradient_is_not_rounded():
    hidden, weight, _, labels = sample(torch.bfloat16, rows=700)
    exact = doubled(hidden, weight)
    labels[::5] = 0
    (expected,) = gradients(full(*exact, labels), exact[1])
    (found,) = gradients(linear_cross_entropy(hidden, weight, labels, chunk_rows=350), weight)
    length = (found.double() * expected).sum() / expected.square().sum()  # 1 / 700 is 0.13% off in bfloat16
    assert length.item() == pytest.approx(1.0, abs=6e-4)


def test_loss_scaling_does_not_overflow_in_float16():
    hidden, weight, _, labels = sample(torch.float16)
    small = hidden * 1e-4
    found = linear_cross_entropy(small, weight, labels, reduction="sum", chunk_rows=8) * 2.0**17
    expected = full(small, weight, labels, reduction="sum") * 2.0**17
    torch.testing.assert_close(gradients(found, weight), gradients(expected, weight), rtol=2e-2, atol=1e-1)


def test_a_wider_sum_over_chunks_is_at_least_as_close():
    hidden, weight, _, labels = sample(torch.bfloat16, rows=400)
    exact = doubled(hidden, weight)
    (expected,) = gradients(full(*exact, labels), exact[1])
    errors = []
    for dtype in (None, torch.float32):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_rows=4, accumulate_dtype=dtype)
        (found,) = gradients(loss, weight)
        errors.append(float((found.double() - expected).norm() / expected.norm()))
    assert errors[1] < errors[0] < 2e-2


def test_autocast_computes_the_logits_in_its_dtype_and_keeps_the_weights_gradient_in_float32():
    hidden, weight, _, labels = sample(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = full(hidden, weight, labels)
        found = linear_cross_entropy(hidden, weight, labels, chunk_rows=8)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for one, other in zip(gradients(found, hidden, weight), gradients(expected, hidden, weight), strict=True):
        assert one.dtype is torch.float32
        assert (one - other).norm() <= 1e-2 * other.norm()


def test_gradients_accumulate_over_micro_batches():
    hidden, weight, _, labels = sample()
    for half in (slice(0, 20), slice(20, None)):
        linear_cross_entropy(hidden[half], weight, labels[half], reduction="sum", chunk_rows=8).backward()
    expected = torch.autograd.grad(full(hidden, weight, labels, reduction="sum"), (hidden, weight))
    torch.testing.assert_close((hidden.grad, weight.grad), expected, rtol=1e-12, atol=1e-12)


def test_no_label_that_counts_gives_nan_and_a_gradient_of_zero_as_torch_does():
    hidden, weight, _, labels = sample()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), chunk_rows=8)
    assert loss.isnan()
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("kind", ["trained", "frozen", "evaluated"])
def test_a_large_vocabulary_costs_one_chunk(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunked_loss, "torch_has_one", lambda: False)
    rows, features, classes, chunk_rows = 256, 8, 131072, 16
    hidden = torch.randn(rows, features, requires_grad=True)
    weight = torch.randn(classes, features).requires_grad_(kind != "frozen")
    labels = torch.randint(0, classes, (rows,))
    with PeakMeter("cpu") as meter, torch.set_grad_enabled(kind != "evaluated"):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_rows=chunk_rows)
        if kind != "evaluated":
            loss.backward()
    chunk_bytes = chunk_rows * classes * 4
    gradients_of = {"trained": [hidden, weight], "frozen": [hidden], "evaluated": []}[kind]
    gradient_bytes = sum(tensor.numel() * 4 for tensor in gradients_of)
    assert meter.peak_bytes <= 1.02 * (chunk_bytes + gradient_bytes)
    assert meter.peak_bytes < 0.1 * 3 * rows * classes * 4


def test_a_byte_limit_bounds_the_chunk():
    hidden, weight, _, labels = sample(torch.float32)
    linear_cross_entropy(hidden, weight, labels, chunk_bytes="1KiB").backward()
    with pytest.raises(InvalidOption, match="less than the logits of one row"):
        linear_cross_entropy(hidden, weight, labels, chunk_bytes=CLASSES * 4 - 1)


def test_torchs_own_is_used_where_it_holds_nothing_more(monkeypatch: pytest.MonkeyPatch):
    if not chunked_loss.torch_has_one():
        pytest.skip("this torch has no chunked cross-entropy")
    used = []
    own = F.linear_cross_entropy
    monkeypatch.setattr(F, "linear_cross_entropy", lambda *args, **kwargs: used.append(kwargs) or own(*args, **kwargs))
    hidden, weight, _, labels = sample(torch.float32)
    linear_cross_entropy(hidden, weight, labels, chunk_rows=8)
    assert not used
    linear_cross_entropy(hidden, weight.detach(), labels, chunk_rows=8)
    linear_cross_entropy(hidden, weight, labels, reduction="none", chunk_rows=8)
    assert [kwargs["options"].batch_chunk_size for kwargs in used] == [8, 8]


def test_without_torchs_own_ours_computes_the_same(monkeypatch: pytest.MonkeyPatch):
    hidden, weight, _, labels = sample()
    expected = gradients(full(hidden, weight, labels, reduction="none"), hidden, weight)
    monkeypatch.setattr(chunked_loss, "torch_has_one", lambda: False)
    found = gradients(linear_cross_entropy(hidden, weight, labels, reduction="none", chunk_rows=8), hidden, weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_it_is_not_differentiated_twice_not_forwards_and_not_again():
    hidden, weight, _, labels = sample()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_rows=8)
    with pytest.raises(InvalidLoss, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidLoss, match="Backward ran twice"):
        loss.backward()
    with pytest.raises(InvalidLoss, match=r"torch\.func"):
        torch.func.grad(lambda h: linear_cross_entropy(h, weight, labels))(hidden.detach())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(hidden.detach(), torch.ones_like(hidden))
        with pytest.raises(InvalidLoss, match="forward mode"):
            linear_cross_entropy(dual, weight, labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, "do not match"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, "logits_to_keep"),
        ({"labels": torch.zeros(3)}, "class indices"),
        ({"bias": torch.zeros(2)}, "one number per class"),
        ({"reduction": "max"}, "reduction='max' is not supported"),
        ({"label_smoothing": 2.0}, "not between 0 and 1"),
        ({"softcap": 0.0}, "is not a positive, finite number"),
        ({"accumulate_dtype": torch.int64}, "cannot hold gradients"),
        ({"chunk_rows": 0}, "not a valid number of rows"),
        ({"chunk_rows": 1, "chunk_bytes": 4096}, "both given"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object], message: str):
    given = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(7, 4), "labels": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises((InvalidLoss, InvalidOption), match=message):
        linear_cross_entropy(**{**given, **change})  # type: ignore[arg-type]
