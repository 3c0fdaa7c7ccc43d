"""Changes to a model in, the same model without them out: parameters, attributes and hooks, put back in reverse order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, slots=True)
class Shard:
    """How one rank's share of a parameter is cut: along ``dim``, from each of ``parts`` equal parts, ``kept`` of it.

    ``ranks`` is the size of the group that shares it, ``group`` its dimension of the layout.
    """

    dim: int
    kept: int
    ranks: int
    group: str
    parts: int = 1

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The share of the first rank, on memory of its own."""
        pieces = tensor.chunk(self.parts, self.dim) if self.parts > 1 else (tensor,)
        return torch.cat([piece.narrow(self.dim, 0, self.kept) for piece in pieces], self.dim)


class Edits:
    """Notes what is done to a model, and undoes it."""

    def __init__(self) -> None:
        self._shards: dict[int, list[Shard]] = {}
        self._tables: list[tuple[dict[str, Any], str, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._on_undo: list[Callable[[], None]] = []

    def shard(self, parameter: nn.Parameter | None, shard: Shard) -> None:
        """Cut the parameter so, wherever the model uses it (once, where two modules share it)."""
        if parameter is not None:
            shards = self._shards.setdefault(id(parameter), [])
            if shard not in shards:
                shards.append(shard)

    def set(self, owner: object, name: str, value: Any) -> None:
        """Set an attribute that ``owner`` has itself."""
        table = vars(owner)
        self._tables.append((table, name, table[name]))
        table[name] = value

    def scale(self, owner: object, names: Iterable[str], change: Callable[[int], int]) -> None:
        """Set each of those attributes that ``owner`` has as an int."""
        for name in names:
            value = vars(owner).get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                self.set(owner, name, change(value))

    def hook(self, handle: RemovableHandle) -> None:
        """Remove the hook at the end."""
        self._handles.append(handle)

    def at_end(self, call: Callable[[], None]) -> None:
        """Let go of what a hook holds."""
        self._on_undo.append(call)

    def swap_parameters(self, model: nn.Module) -> dict[str, tuple[Shard, ...]]:
        """Put the local parameters in their places; how each was cut, by name."""
        cut = {name: tuple(self._shards[id(p)]) for name, p in model.named_parameters() if id(p) in self._shards}
        local: dict[int, nn.Parameter] = {}
        for module in model.modules():
            table: dict[str, Any] = module._parameters
            for name, parameter in table.items():
                if id(parameter) not in self._shards:
                    continue
                if id(parameter) not in local:
                    local[id(parameter)] = _cut(parameter, self._shards[id(parameter)])
                self._tables.append((table, name, parameter))
                table[name] = local[id(parameter)]
        return cut

    def undo(self) -> None:
        """Everything as it was."""
        for handle in self._handles:
            handle.remove()
        for table, name, value in reversed(self._tables):
            table[name] = value
        for call in self._on_undo:
            call()


def _cut(parameter: nn.Parameter, shards: Iterable[Shard]) -> nn.Parameter:
    share = parameter.detach()
    for shard in shards:
        share = shard.cut(share)
    return nn.Parameter(share, requires_grad=parameter.requires_grad)
