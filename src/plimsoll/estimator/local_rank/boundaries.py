"""Hooks the collectives of tensor and sequence parallelism around the groups of each block.

A group is the column-parallel layers and the row-parallel layer of an attention or MLP. Without sequence parallelism the
residual stream is whole on every rank: Megatron's f before the columns (sums the gradient), its g after the row (sums the
result). With it the residual stream is ``[batch, sequence / tp, hidden]``: split before the first block, gathered before the
columns, reduced and scattered after the row. It is gathered again after the norm that follows the blocks, or after the last
block if such a norm does not exist or the head is not vocabulary-parallel.

Autograd saves what torch's own sequence parallelism saves: the gathered input of a column-parallel layer. (Megatron-LM saves
this rank's part of it and gathers again in backward; a planner may choose that too.)

The sequence is always dimension 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from plimsoll.errors import InvalidLayout
from plimsoll.estimator.local_rank.collectives import all_gather, enter, leave, reduce_scatter, split, unsplit
from plimsoll.estimator.local_rank.cuts import Edits
from plimsoll.estimator.local_rank.groups import DividedBlock, Group

_GROUP = "tp"
_SEQUENCE = 1
_LATENT_FED = frozenset(["q_b_proj", "kv_b_proj"])
"""Names of the column-parallel layers whose input is a latent (compressed keys or queries).

The sum of the latent's gradients is hooked after the layer that makes the latent.
"""

Change = Callable[[torch.Tensor], torch.Tensor]


class Boundaries:
    """Hooks collectives before and after the layers of a model, for one tensor-parallel group of ``tp`` ranks."""

    def __init__(self, modules: Mapping[str, nn.Module], tp: int, edits: Edits, *, sequence_parallel: bool) -> None:
        self._modules = modules
        self._tp = tp
        self._edits = edits
        self._splits_sequence = sequence_parallel
        self._streams: set[tuple[int, ...]] = set()
        edits.at_end(self._streams.clear)

    def around_block(self, block: DividedBlock) -> None:
        """Hook collectives around every group of a block. A mixture of experts is one group with everything in its module."""
        mixtures = sorted({path.rpartition(".")[0] for path in block.experts})
        for path in mixtures:
            if path == block.path:
                raise InvalidLayout(
                    f"Tensor parallelism does not support {path}, because its experts are directly in the block.",
                    why="tokens are gathered before and summed after the module that contains router and experts",
                    next="leave tensor parallelism out for this model; expert parallelism works",
                )
            self._before_inputs(path, self._enter)
            self._after(path, self._leave)
        for group in block.groups:
            if not any(group.row.startswith(f"{path}.") for path in mixtures):
                self._around_group(group, block.path)

    def around_stream(self, blocks: Iterable[str], heads: Collection[str]) -> list[str]:
        """Hook collectives for sequence parallelism into the residual stream: split it before the first block of each stack,
        gather it at the end.

        Returns the paths of the norms after the blocks, which work on the divided sequence.
        """
        stacks: dict[str, list[str]] = {}
        for path in blocks:
            stacks.setdefault(path.rpartition(".")[0], []).append(path)
        norms: list[str] = []
        for stack, members in stacks.items():
            self._before_inputs(members[0], self._split)
            # Not right before the head: some models view the hidden states with the whole length of the sequence between norm
            # and head, and would continue with half the logits
            # (docs/project/lab-notes.md, "Where a divided sequence is gathered").
            norm = self._norm_after(stack)
            if heads and norm is not None:  # only a divided head reads it: each rank has a part of its gradient
                self._after(norm, self._enter)
                norms.append(norm)
            else:
                self._after(members[-1], self._unsplit)
        if not norms:
            self.around_heads(heads)
        return norms

    def around_heads(self, heads: Iterable[str]) -> None:
        """Hook the all-reduce of the gradient before each vocabulary-parallel head, whose input is whole on every rank."""
        for path in heads:
            self._before_inputs(path, self._sum_gradient)

    def _norm_after(self, stack: str) -> str | None:
        """Return the path of the norm after a stack of blocks, or ``None``: the first later sibling whose parameters are all
        vectors.
        """
        if not stack:
            return None
        parent, _, name = stack.rpartition(".")
        siblings = list(self._modules[parent].named_children())
        after = siblings[[sibling for sibling, _ in siblings].index(name) + 1 :]
        for sibling, module in after:
            parameters = list(module.parameters())
            if parameters and all(parameter.dim() == 1 for parameter in parameters):
                return f"{parent}.{sibling}" if parent else sibling
        return None

    def _around_group(self, group: Group, block: str) -> None:
        if group.latents:
            if self._splits_sequence:
                self._before_inputs(group.parent, self._unsplit)
            for path in group.latents:
                self._after(path, self._sum_gradient)
            for path in group.columns:
                if path.rpartition(".")[2] not in _LATENT_FED:
                    self._before_inputs(path, self._sum_gradient)
        elif self._splits_sequence and len(group.columns) > 1 and group.parent != block:
            self._before_inputs(group.parent, self._enter)
        else:
            self._before_columns(group)
        self._after(group.row, self._leave)

    def _before_columns(self, group: Group) -> None:
        """Hook a collective before the column-parallel layers of a group. Layers that read the same tensor share one
        collective.
        """
        memo = _Shared(self._enter)
        for path in group.columns:
            self._edits.hook(self._modules[path].register_forward_pre_hook(memo.first_argument))
        self._edits.hook(self._modules[group.row].register_forward_hook(memo.forget_after))
        self._edits.at_end(memo.forget)

    def _sum_gradient(self, x: torch.Tensor) -> torch.Tensor:
        return enter(x, self._tp, _GROUP)

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        if self._splits_sequence:
            return all_gather(self._checked(x, self._tp), _SEQUENCE, self._tp, _GROUP)  # type: ignore[no-any-return]
        return enter(x, self._tp, _GROUP)

    def _leave(self, x: torch.Tensor) -> torch.Tensor:
        if self._splits_sequence:
            return reduce_scatter(self._checked(x, 1), _SEQUENCE, self._tp, _GROUP)  # type: ignore[no-any-return]
        return leave(x, self._tp, _GROUP)

    def _unsplit(self, x: torch.Tensor) -> torch.Tensor:
        return unsplit(self._checked(x, self._tp), _SEQUENCE, self._tp, _GROUP)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        self._streams.add(tuple(x.shape[:2]))
        return split(self._checked(x, 1), _SEQUENCE, self._tp, _GROUP)

    def _checked(self, x: torch.Tensor, ranks: int) -> torch.Tensor:
        """Return ``x`` if it has the shape ``[batch, sequence, hidden]`` of the residual stream. Raise an error otherwise,
        because the model has then reshaped it in a way that the hooks do not expect.
        """
        if x.dim() != 3 or (x.shape[0], x.shape[1] * ranks) not in self._streams:
            expected = " or ".join(f"[{batch}, {size // ranks}, …]" for batch, size in sorted(self._streams))
            raise InvalidLayout(
                f"Sequence parallelism does not support hidden states of shape {list(x.shape)}.",
                why=f"the model reshapes them between the layers of its blocks, but shape {expected} is expected",
                next="leave sequence parallelism out for this model",
            )
        return x

    def _before_inputs(self, path: str, change: Change) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return _change_first(path, args, kwargs, change)

        self._edits.hook(self._modules[path].register_forward_pre_hook(before, with_kwargs=True))

    def _after(self, path: str, change: Change) -> None:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (change(output[0]), *output[1:])
            return change(output)

        self._edits.hook(self._modules[path].register_forward_hook(after))


class _Shared:
    """A collective that runs once for several layers that read the same tensor."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self._read: torch.Tensor | None = None
        self._changed: torch.Tensor | None = None

    def first_argument(self, module: nn.Module, args: Any) -> Any:
        if self._changed is None or args[0] is not self._read:
            self._read, self._changed = args[0], self._change(args[0])
        return (self._changed, *args[1:])

    def forget_after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.forget()

    def forget(self) -> None:
        self._read = self._changed = None


def _change_first(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> Any:
    """Return the arguments of a call with ``change`` applied to its hidden states.

    Hidden states are the first floating-point tensor, by position, then by keyword.
    """
    if args and _is_hidden(args[0]):
        return (change(args[0]), *args[1:]), kwargs
    names = ["hidden_states", *kwargs]
    name = next((name for name in names if _is_hidden(kwargs.get(name))), None)
    if name is None:
        raise InvalidLayout(
            f"Tensor parallelism does not support {path}, because its inputs do not include hidden states.",
            why="none of its arguments is a floating-point tensor",
            next="leave tensor parallelism out for this model",
        )
    return args, {**kwargs, name: change(kwargs[name])}


def _is_hidden(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1
