"""Temporarily turns a model into one rank's part of it; afterwards the model is restored exactly.

The result is the first rank of every group. Parameters are replaced by local ones, attributes that forward derives shapes from
(numbers of heads, widths, vocabulary sizes) are set to local values, and stand-in collectives are hooked in where ranks of a
real run would communicate. A stand-in collective is an op whose result has the real collective's shape but sends nothing.
Inside ``with``, the step is an ordinary step of an ordinary model, so the usual tracer works.

Source: the layers of Shoeybi et al. 2019 (tensor parallelism), Korthikanti et al. 2022 (sequence parallelism) and Lepikhin et
al. 2021 (expert parallelism).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from plimsoll.errors import InvalidLayout
from plimsoll.estimator.local_rank.boundaries import Boundaries
from plimsoll.estimator.local_rank.cuts import (
    Edits,
    Shard,
    divide_experts,
    divide_group,
    divide_head_biases,
    divide_widths,
    fuse_experts,
)
from plimsoll.estimator.local_rank.groups import DividedBlock, read_block
from plimsoll.estimator.local_rank.roles import RoleBook, blocks_of, is_experts, words_of
from plimsoll.estimator.local_rank.vocabulary import VocabularyLoss, divide_words
from plimsoll.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalModel:
    """Says how a model was divided among ranks, as data.

    ``shards`` says by name how each divided parameter was cut (parameters that every rank holds whole are left out).
    ``summed_gradients`` names parameters that every rank holds whole while its gradient is only partial: these gradients are
    summed over the tensor-parallel group once a step, before the optimizer. ``notes`` are for the user.
    """

    shards: Mapping[str, tuple[Shard, ...]]
    summed_gradients: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def localised(
    model: nn.Module,
    *,
    tp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    roles: Mapping[str, str] | None = None,
    moe: str = "",
) -> Iterator[LocalModel]:
    """Turn ``model`` into one rank's part of it inside the ``with`` statement.

    Estimates run what one rank would run, because formulas per layer do not cover layers that they were not written for
    (``docs/project/design/an-estimate-runs-one-rank.md``).

    Args:
        model: on the meta device, or with real tensors (the local parameters are then copies of the first rank's share).
        tp: degree of tensor parallelism.
        ep: degree of expert parallelism; experts are divided by ``tp`` as well.
        sequence_parallel: divide the residual stream along the sequence (dimension 1) within the tensor-parallel group.
        roles: how ranks share weights that neither the model's plan nor common names cover: maps module paths (``*``
            matches one level) to ``colwise``, ``rowwise``, ``vocab`` or ``replicate``.
        moe: the kernels of experts: ``fused``, ``deepep``, or empty for the model's own.

    Yields:
        How the model was divided.

    Raises:
        InvalidLayout: degrees that do not divide heads, widths or experts; a model with unknown weights;
            sequence parallelism without tensor parallelism, or in an encoder-decoder.

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.fc1, self.fc2 = nn.Linear(4, 16), nn.Linear(16, 4)
        ...     def forward(self, x):
        ...         return x + self.fc2(self.fc1(x).relu())
        >>> model = nn.Sequential(Block(), Block())
        >>> with localised(model, tp=4) as local:
        ...     print(model[0].fc1.weight.shape, local.shards["0.fc2.weight"][0].dim)
        torch.Size([4, 4]) 1
        >>> model[0].fc1.weight.shape
        torch.Size([16, 4])
    """
    _check_degrees(model, tp, ep, sequence_parallel=sequence_parallel)
    edits = Edits()
    with contextlib.ExitStack() as stack:
        stack.callback(edits.undo)
        divided = _Division(model, edits)
        local_classes = divided.divide_tensors(tp, roles, sequence_parallel=sequence_parallel) if tp > 1 else 0
        if ep > 1 or moe:
            divided.divide_experts(ep, moe)
        shards = edits.swap_parameters(model)
        if local_classes:
            stack.enter_context(VocabularyLoss(local_classes, tp))
        summed = divided.partial_gradients(shards, sequence_parallel=sequence_parallel)
        notes = [*divided.notes, *_note_on_sums(model, summed, tp)]
        yield LocalModel(shards=shards, summed_gradients=summed, notes=tuple(dict.fromkeys(notes)))


class _Division:
    """Divides one model: finds its blocks, cuts their parameters and hooks collectives around them."""

    def __init__(self, model: nn.Module, edits: Edits) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._edits = edits
        self._blocks: list[DividedBlock] = []
        self._norms: list[str] = []
        self.notes: list[str] = []

    def divide_tensors(self, tp: int, roles: Mapping[str, str] | None, *, sequence_parallel: bool) -> int:
        """Apply tensor parallelism to each block, to embeddings and to heads.

        Return the number of classes that this rank's part of the head has, or 0 if no head is divided.
        """
        model, edits = self._model, self._edits
        book = RoleBook(model, roles)
        blocks = blocks_of(model)
        read = [read_block(path, block, book) for path, block in blocks.items()]
        self._blocks = [block for block in read if block.groups or block.experts]
        if not self._blocks:
            raise _nothing_to_divide(model, blocks)
        words = words_of(model, {block.path: self._modules[block.path] for block in self._blocks}, book)
        book.check_all_matched(model)
        boundaries = Boundaries(self._modules, tp, edits, sequence_parallel=sequence_parallel)
        for block in self._blocks:
            for group in block.groups:
                self.notes += divide_group(group, self._modules[group.parent], tp, edits)
            divide_head_biases(block.biases, tp, edits)
            divide_widths(block.experts, tp, edits)
            boundaries.around_block(block)
        heads = [path for path, module in words.items() if isinstance(module, nn.Linear)]
        if sequence_parallel:
            self._norms = boundaries.around_stream([block.path for block in self._blocks], heads)
        else:
            boundaries.around_heads(heads)
        local = divide_words(words, model, tp, edits)
        for module in words.values():
            size = module.get_parameter("weight").shape[0]
            if size % tp:
                self.notes.append(
                    f"{size} words on {tp} ranks: the estimate is for the first rank, which holds {local} words"
                )
        return local if heads else 0

    def divide_experts(self, ep: int, kernels: str) -> None:
        """Divide every stack of experts among ranks, and install the kernels that experts run with."""
        experts = {path: module for path, module in self._modules.items() if is_experts(module)}
        if not experts:
            raise InvalidLayout(
                f"{type(self._model).__name__} does not have experts "
                + (f"that {ep} ranks could divide." if ep > 1 else f"for the kernels of moe={kernels}."),
                why="experts are found as stacked matrices with a down_proj, and the model does not contain any",
                next="leave expert parallelism out: ep=1" if ep > 1 else "leave moe= out",
            )
        if ep > 1:
            divide_experts(experts, ep, self._edits, kernels)
        if kernels:
            fuse_experts(experts, self._edits)

    def partial_gradients(self, shards: Mapping[str, object], *, sequence_parallel: bool) -> tuple[str, ...]:
        """Return the names of parameters that each rank holds whole, but whose gradient on a rank is only a part of the sum
        over ranks.
        """
        inside = tuple(f"{scope}." for scope in self._scopes(sequence_parallel=sequence_parallel))
        groups = [group for block in self._blocks for group in block.groups]
        whole = tuple(f"{group.row}.bias" for group in groups)
        whole += tuple(f"{group.parent}." for group in groups if group.latents)
        return tuple(
            name
            for name, _ in self._model.named_parameters()
            if name not in shards and not name.startswith(whole) and name.startswith(inside)
        )

    def _scopes(self, *, sequence_parallel: bool) -> Iterator[str]:
        """Yield the paths of the modules where ranks work on different data. Under sequence parallelism they are whole blocks.
        Otherwise they are the modules of attention and of experts. The norms after the blocks come first if they work on the
        divided sequence.
        """
        yield from self._norms
        for block in self._blocks:
            if sequence_parallel:
                yield block.path
                continue
            yield from {path.rpartition(".")[0] for path in block.experts}
            for group in block.groups:
                if group.heads is not None and group.parent != block.path:
                    yield group.parent


def _note_on_sums(model: nn.Module, names: Collection[str], tp: int) -> list[str]:
    """Return notes for the user: the gradients of the parameters ``names`` are summed over ranks once a step, which a trace of
    one micro-batch does not show.
    """
    if not names:
        return []
    size = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if name in names)
    return [
        f"once a step, the {tp} tensor-parallel ranks sum the gradients of the {len(names)} parameters that all of them hold "
        f"({format_bytes(size)}); the estimate does not include the time for that"
    ]


def _check_degrees(model: nn.Module, tp: int, ep: int, *, sequence_parallel: bool) -> None:
    for name, degree in (("tp", tp), ("ep", ep)):
        if degree < 1:
            raise InvalidLayout(
                f"{name}={degree} is not a valid degree of parallelism.",
                why="a group has at least 1 rank",
                next=f"use {name}=1 for no parallelism of this kind",
            )
    if sequence_parallel and tp == 1:
        raise InvalidLayout(
            "Sequence parallelism needs tensor parallelism.",
            why="it divides the residual stream among the ranks of the tensor-parallel group, and tp is 1",
            next="use tp=2 or more, leave sequence_parallel out, or divide the sequence with cp",
        )
    if sequence_parallel and _is_encoder_decoder(model):
        raise InvalidLayout(
            f"Sequence parallelism does not support {type(model).__name__}, because it is an encoder-decoder.",
            why="every layer of its decoder reads the encoder's output, so each layer would gather it again",
            next="leave sequence_parallel out",
        )


def _is_encoder_decoder(model: nn.Module) -> bool:
    config = vars(model).get("config")
    return bool(getattr(config, "is_encoder_decoder", False))


def _nothing_to_divide(model: nn.Module, blocks: Mapping[str, nn.Module]) -> InvalidLayout:
    kinds = sorted({type(block).__name__ for block in blocks.values()})
    found = f"its repeated blocks are {', '.join(kinds)}" if kinds else "it does not have repeated blocks"
    return InvalidLayout(
        f"Tensor parallelism does not support {type(model).__name__}.",
        why=f"{found}; no block with a column-parallel and a row-parallel layer was found",
        next='name the layers: roles={"layers.*.fc_a": "colwise", "layers.*.fc_b": "rowwise"}, or leave tp out',
    )
