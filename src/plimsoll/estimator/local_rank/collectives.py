"""Ops that take the place of collectives on a single rank. Their results have the shapes of the real collectives' results.

Each of these stand-ins is an op of its own (``plimsoll::all_gather`` and so on), so a trace shows it, a planner sees its output
as a value with a producer and a price, and a fake trace knows its shape. Nothing is sent: every other rank is assumed to hold
what this rank holds (``all_gather`` repeats it, ``reduce_scatter`` keeps the first part, reductions change nothing). Shapes,
storages and what autograd saves are the same as for the real collective; values are not.

``group`` names the dimension of the layout (``tp``, ``ep``), ``ranks`` is its size.

Source: the conjugate pairs f/g and g/ḡ of Shoeybi et al. 2019 (section 3) and Korthikanti et al. 2022 (section 4.2).
"""

from __future__ import annotations

from typing import Any

import torch

from plimsoll.errors import InvalidLayout


@torch.library.custom_op("plimsoll::all_gather", mutates_args=())
def all_gather(x: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    """Return every rank's part concatenated along ``dim``. The stand-in repeats this rank's part."""
    return torch.cat([x] * ranks, dim)


@all_gather.register_fake
def _(x: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    return x.new_empty([size * ranks if axis == dim else size for axis, size in enumerate(x.shape)])


@torch.library.custom_op("plimsoll::reduce_scatter", mutates_args=())
def reduce_scatter(x: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    """Return this rank's part, along ``dim``, of the sum over ranks. The stand-in keeps the first part."""
    return _part(x, dim, ranks)


@reduce_scatter.register_fake
def _(x: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    return x.new_empty([size // ranks if axis == dim else size for axis, size in enumerate(x.shape)])


@torch.library.custom_op("plimsoll::all_to_all", mutates_args=())
def all_to_all(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Exchange rows between ranks in equal shares: each rank receives as many rows as it sends. The stand-in returns a copy."""
    return x.clone(memory_format=torch.contiguous_format)


@all_to_all.register_fake
def _(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("plimsoll::dispatch", mutates_args=())
def dispatch(x: torch.Tensor, rows: int, copies: float, group: str) -> torch.Tensor:
    """Send each row to ``copies`` ranks on average, never twice to the same rank; ``rows`` rows arrive here.

    The inverse call sums the rows of a token on its home rank.
    """
    return x[torch.arange(rows, device=x.device) % max(len(x), 1)]


@dispatch.register_fake
def _(x: torch.Tensor, rows: int, copies: float, group: str) -> torch.Tensor:
    return x.new_empty(rows, x.shape[1])


@torch.library.custom_op("plimsoll::all_reduce_", mutates_args=("x",))
def all_reduce_(x: torch.Tensor, ranks: int, group: str) -> None:
    """Reduce ``x`` over ranks in place, to their sum or maximum. The stand-in changes nothing."""


@all_reduce_.register_fake
def _(x: torch.Tensor, ranks: int, group: str) -> None:
    return None


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.call = inputs[1:]


def _gathered_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return reduce_scatter(gradient, *ctx.call), None, None, None


def _scattered_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return all_gather(gradient, *ctx.call), None, None, None


def _exchanged_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return all_to_all(gradient, *ctx.call), None, None


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.rows, ctx.call = inputs[0].shape[0], inputs[2:]


def _dispatched_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return dispatch(gradient, ctx.rows, *ctx.call), None, None, None


dispatch.register_autograd(_dispatched_gradient, setup_context=_keep_rows)
all_gather.register_autograd(_gathered_gradient, setup_context=_keep_shape)
reduce_scatter.register_autograd(_scattered_gradient, setup_context=_keep_shape)
all_to_all.register_autograd(_exchanged_gradient, setup_context=_keep_shape)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        ctx.call = (ranks, group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        all_reduce_(gradients[0], *ctx.call)
        return gradients[0], None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        all_reduce_(x, ranks, group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return gradients[0], None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
        ctx.call = (dim, ranks, group)
        return _part(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return all_gather(gradients[0], *ctx.call), None, None, None


class _Unsplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
        ctx.call = (dim, ranks)
        return all_gather(x, dim, ranks, group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return _part(gradients[0], *ctx.call), None, None, None


def enter(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Return ``x`` unchanged (the same memory); backward sums its gradient over ranks, in place. This is Megatron's f."""
    return _Enter.apply(x, ranks, group)  # type: ignore[no-any-return]


def leave(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Return the sum of ``x`` over ranks, in place as most training code does; backward is the identity.

    This is Megatron's g.
    """
    return _Leave.apply(x, ranks, group)  # type: ignore[no-any-return]


def split(x: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank has. Forward sends nothing; backward gathers the gradient.

    Raises:
        InvalidLayout: the size along ``dim`` is not a multiple of ``ranks``.
    """
    size = x.shape[dim]
    if size % ranks:
        raise InvalidLayout(
            f"Sequence parallelism cannot divide {size} positions among {ranks} ranks.",
            why=f"{size} is not a multiple of {ranks}, but every rank must hold the same number of positions",
            next=f"use a sequence of {size // ranks * ranks or ranks} or {(size // ranks + 1) * ranks}, "
            "or leave sequence parallelism out",
        )
    return _Split.apply(x, dim, ranks, group)  # type: ignore[no-any-return]


def unsplit(x: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    """Gather every rank's part, for work that all ranks repeat.

    The gradient is whole on each rank, and each rank keeps its part.
    """
    return _Unsplit.apply(x, dim, ranks, group)  # type: ignore[no-any-return]


def _part(x: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    return x.narrow(dim, 0, x.shape[dim] // ranks).clone(memory_format=torch.contiguous_format)
