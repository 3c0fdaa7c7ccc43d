"""Constants that are others in every call become inputs of recipes: the bits of the plain model, and few recordings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plimsoll
from long_cases import some
from plimsoll.artifacts.decision import Engine
from plimsoll.errors import ReplayMismatch
from steps import mean_square

STEPS = 14
MOST_RECORDED_STEPS = 7
"""Three recordings make a number open, after a first surprise and some changes of an attribute."""


class Scheduled(nn.Module):
    """A block with a number that a schedule sets."""

    def __init__(self, act: Callable[[torch.Tensor, Any], torch.Tensor], *, is_attribute: bool) -> None:
        super().__init__()
        self.up, self.down, self._act = nn.Linear(16, 48), nn.Linear(48, 16), act
        self._numbers: list[Any] = [0]
        self._is_attribute = is_attribute

    def set(self, number: Any) -> None:
        self._numbers[0] = number
        if self._is_attribute:  # which is another reason to watch calls
            self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self._act(torch.tanh(self.up(x)), self._numbers[0]))


Act = Callable[[torch.Tensor, Any], torch.Tensor]
Number = Callable[[int], Any]


def share(step: int) -> float:
    return 0.1 + step / 100


def attention(x: torch.Tensor, number: float, **how: Any) -> torch.Tensor:
    heads = x.unflatten(-1, (3, 16)).transpose(0, 1)[None]
    return F.scaled_dot_product_attention(heads, heads, heads, **how)[0].transpose(0, 1).flatten(1)


def drawn(x: torch.Tensor, seed: int) -> torch.Tensor:
    return x * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


KINDS: dict[str, tuple[Act, Number]] = {
    "factor": (lambda x, t: torch.sin(x * t), share),
    "two numbers": (lambda x, t: torch.sin(x * t) * (1 - t / 3), share),
    "one number in two places": (lambda x, t: F.leaky_relu(torch.sin(x * t), t), share),
    "dropout": (lambda x, t: F.dropout(torch.sin(x), t), share),
    "dropout of attention": (lambda x, t: attention(x, t, dropout_p=t), share),
    "scale of attention": (lambda x, t: attention(x, t, scale=t), share),
    "momentum": (lambda x, t: F.batch_norm(x, torch.zeros(48), torch.ones(48), None, None, True, t), share),
    "eps": (lambda x, t: F.layer_norm(x, (48,), eps=t), share),
    "bounds": (lambda x, t: torch.sin(x.clamp(-t, t)), share),
    "temperature": (lambda x, t: F.softmax(x / t, -1), share),
    "exponent": (lambda x, t: torch.sin(x.abs() ** t), lambda step: 1.5 + step / 4),
    "weight of a sum": (lambda x, t: torch.sin(torch.add(x, x.square(), alpha=t)), share),
    "keyword": (lambda x, t: torch.sin(torch.lerp(input=x, end=x.square(), weight=t)), share),
    "shift": (lambda x, t: torch.sin(x.roll(t, 0)), lambda step: 2 + step),
    "column": (lambda x, t: torch.sin(x * x[:, t : t + 1]), lambda step: 2 + step),
    "negative": (lambda x, t: torch.sin(x * t), lambda step: -share(step)),
    "filling": (lambda x, t: torch.sin(x.masked_fill(x > 0, t)), share),
    "generator": (drawn, lambda step: 100 + step),
}


def stack(act: Act, *, is_attribute: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Scheduled(act, is_attribute=is_attribute) for _ in range(2)))


def trained(model: nn.Sequential, numbers: list[Any], rows: int = 24) -> Iterator[list[torch.Tensor]]:
    """The gradients of one step after the other."""
    for step, number in enumerate(numbers):
        torch.manual_seed(step)
        for block in model:
            block.set(number)
        model.zero_grad()
        mean_square(model(torch.randn(rows, 16))).backward()
        yield [parameter.grad.clone() for parameter in model.parameters()]


def assert_same_bits(act: Act, numbers: list[Any], recorded: list[int], *, is_attribute: bool = False) -> list[int]:
    """Train with and without a plan; how many calls were recorded in each step."""
    model = stack(act, is_attribute=is_attribute)
    plain = copy.deepcopy(model)
    for block in model:
        block.set(numbers[0])
    plan = plimsoll.plan(model, torch.randn(24, 16), loss=mean_square, strategy="full")
    counts = []
    with plimsoll.apply(model, plan) as handle:
        before = recorded[0]
        for expected, found in zip(trained(plain, numbers), trained(model, numbers), strict=True):
            assert all(map(torch.equal, expected, found))
            counts.append(recorded[0] - before)
            before = recorded[0]
        assert all(outcome.dropped_bytes for outcome in handle.outcomes())
    return counts


@pytest.mark.parametrize("is_attribute", [False, True])
@pytest.mark.parametrize("kind", some(KINDS, 3))
def test_a_number_that_changes_in_every_step_is_recorded_in_a_few(
    kind: str, recorded: list[int], *, is_attribute: bool
):
    act, number = KINDS[kind]
    counts = assert_same_bits(act, [number(step) for step in range(STEPS)], recorded, is_attribute=is_attribute)
    assert not any(counts[MOST_RECORDED_STEPS:])


@pytest.mark.parametrize(
    "special",
    some([0.0, 1.0, -0.3, float("inf"), 2, True], 2),
    ids=["zero", "one", "sign", "infinite", "integer", "bool"],
)
@pytest.mark.parametrize(
    "act", [lambda x, t: torch.sin(x * t), lambda x, t: torch.sin(torch.add(x, x.square(), alpha=t))]
)
def test_a_number_that_may_select_other_operations_has_recipes_of_its_own(
    act: Act, special: float, recorded: list[int]
):
    if special is True:
        act = lambda x, t: torch.sin(x * t)  # noqa: E731
    if special == float("inf"):
        act = lambda x, t: torch.sin(x.clamp(-t, t))  # noqa: E731
    numbers: list[Any] = [share(step) for step in range(8)]
    counts = assert_same_bits(act, [*numbers, special, *numbers[:3], special, special], recorded)
    assert not any(counts[MOST_RECORDED_STEPS:8])
    assert sum(counts[8:]) > 0


@pytest.mark.parametrize("ends", [0.0, 1.0])
def test_dropout_that_ends_at_nothing_or_everything_keeps_every_bit(ends: float, recorded: list[int]):
    numbers = [0.5 + (ends - 0.5) * step / 8 for step in range(9)]
    assert_same_bits(lambda x, t: F.dropout(torch.sin(x), t), [*numbers, *reversed(numbers)], recorded)


def test_two_numbers_that_were_equal_in_all_recordings_are_told_apart_later(recorded: list[int]):
    pairs = [(share(step), share(step) if step < 8 else share(step) / 2) for step in range(STEPS)]
    counts = assert_same_bits(lambda x, t: F.leaky_relu(torch.sin(x * t[0]), t[1]), pairs, recorded)
    assert counts[8] or counts[9]


def parting(step: int) -> float:
    return max(1 - share(step), 0.84)


RELATED: dict[str, tuple[Act, Callable[[int], float]]] = {
    "one minus the other": (lambda x, t: F.dropout(torch.sin(x), t[0], training=True) * torch.cos(x * t[1]), parting),
    "two dropouts": (lambda x, t: F.dropout(torch.sin(x), t[0]) + F.dropout(torch.cos(x), t[1]), parting),
    "a part of the tensor": (
        lambda x, t: torch.where(x > 0.5, F.dropout(x, t[0]) * x, torch.sin(x) * t[1]),
        parting,
    ),
    "a square root": (
        lambda x, t: F.dropout(torch.sin(x * t[1]), t[0]) * x,
        lambda step: max(share(step), 0.18) ** 0.5,
    ),
}


@pytest.mark.parametrize("kind", some(RELATED, 1))
def test_numbers_that_were_related_in_all_recordings_may_part_later(kind: str, recorded: list[int]):
    act, other = RELATED[kind]
    assert_same_bits(act, [(share(step), other(step)) for step in range(2 * STEPS)], recorded)


SIZED: dict[str, Act] = {
    "a slice that did nothing": lambda x, t: torch.sin(x * torch.arange(0.0, t)[:48].cos()),
    "one element": lambda x, t: torch.cat(
        [torch.sin(x[:, :1] * torch.arange(0.0, t)[:48].sum()), torch.cos(x[:, 1:])], 1
    ),
    "two results": lambda x, t: torch.sin(x * torch.arange(0.0, t)[:48].sort()[0]),
}


@pytest.mark.parametrize("kind", some(SIZED, 1))
def test_a_number_that_decides_a_size_inside_of_torch_is_recorded_when_the_size_changes(kind: str, recorded: list[int]):
    numbers = [47.1 + step % 7 / 10 for step in range(9)] + [52.5 + step / 10 for step in range(9)]
    counts = assert_same_bits(SIZED[kind], numbers, recorded)
    assert any(counts[9:])


def test_a_number_that_torch_turns_into_another_in_its_own_way_is_recorded_every_time(recorded: list[int]):
    numbers = [share(step) for step in range(STEPS)]
    counts = assert_same_bits(lambda x, t: F.alpha_dropout(torch.sin(x), t, training=True), numbers, recorded)
    assert all(counts)


def test_numbers_change_together_with_branches(recorded: list[int]):
    def act(x: torch.Tensor, number: tuple[int, float]) -> torch.Tensor:
        step, scale = number
        return torch.sin(x * scale) if step % 2 else torch.cos(x / scale)

    counts = assert_same_bits(act, [(step, share(step)) for step in range(2 * STEPS)], recorded)
    assert not any(counts[2 * MOST_RECORDED_STEPS :])


_CALLS = [0, 0]
"""Calls of the operator so far, and how many of them use the number unchanged."""


@torch.library.custom_op("open_numbers::hidden", mutates_args=())
def hidden(x: torch.Tensor, number: float) -> torch.Tensor:
    """Changes by state of its own, which no torch call shows."""
    _CALLS[0] += 1
    return torch.sin(x) * (number if _CALLS[0] <= _CALLS[1] else 1.1 * number)


def _save(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.number = inputs[1]


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient * ctx.saved_tensors[0].cos() * ctx.number, None


hidden.register_autograd(_differentiate, setup_context=_save)


def test_a_recipe_with_an_open_number_that_goes_wrong_is_found_and_not_used_again(recorded: list[int]):
    _CALLS[:] = [0, 10**9]
    model = stack(lambda x, t: torch.cos(hidden(x, t)))
    for block in model:
        block.set(share(0))
    plan = plimsoll.plan(model, torch.randn(24, 16), loss=mean_square, strategy="full")
    with plimsoll.apply(model, plan) as handle:
        for _ in trained(model, [share(step) for step in range(10)]):
            pass
        assert {outcome.engine for outcome in handle.outcomes()} == {Engine.RECIPE}
        before = recorded[0]
        _CALLS[1] = _CALLS[0] + len(model)  # what backward runs again is something else than what forward ran
        with pytest.raises(ReplayMismatch):
            next(trained(model, [share(10)]))
        _CALLS[1] = 10**9
        for _ in trained(model, [share(step) for step in range(11, 14)]):
            pass
        assert Engine.KEEP in {outcome.engine for outcome in handle.outcomes()}
        assert recorded[0] > before  # the other block, which may be wrong as well, is recorded again
