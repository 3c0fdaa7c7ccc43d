"""Finds layers that compute together under tensor parallelism: column-parallel layers and the row-parallel layer after them.

A group is an attention or an MLP. Between its columns and its row every rank works on its own share; collectives run at both
ends. Attention is divided by whole heads: their number follows from the head size and the width of the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from plimsoll.errors import InvalidLayout
from plimsoll.estimator.local_rank.roles import QUERY_KEY_VALUE, Role, RoleBook, is_conv1d, matrices_of

_HEAD_SIZES = ("v_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


@dataclass(frozen=True, slots=True)
class Heads:
    """The number of query heads and of key-value heads of an attention, and the size of a value head."""

    queries: int
    keys: int
    size: int

    def local_queries(self, tp: int) -> int:
        """Return the number of query heads on one rank."""
        return self.queries // tp

    def local_keys(self, tp: int) -> int:
        """Return the number of key-value heads on one rank.

        With fewer heads than ranks, several ranks hold the same head (as in Megatron).
        """
        return max(1, self.keys // tp)


@dataclass(frozen=True, slots=True)
class Group:
    """The layers of one attention or MLP, as data.

    They are the column-parallel layers by path, their row-parallel layer, replicated layers in between (``latents``), and the
    heads of an attention.
    """

    parent: str
    """The path of the module that holds the column-parallel layers."""
    columns: Mapping[str, nn.Module]
    row: str
    row_module: nn.Module
    latents: tuple[str, ...] = ()
    heads: Heads | None = None


@dataclass(frozen=True, slots=True)
class DividedBlock:
    """One repeated block, as data: its groups of layers that compute together, and its stacks of experts."""

    path: str
    groups: tuple[Group, ...]
    experts: Mapping[str, nn.Module]
    biases: Mapping[str, nn.Module]
    """Embeddings with one column per attention head, by path."""


def read_block(path: str, block: nn.Module, book: RoleBook) -> DividedBlock:
    """Find the groups of layers in one block that compute together.

    ``groups`` is empty if the block is not a transformer block.

    Raises:
        InvalidLayout: a weight whose name is unknown, or a column-parallel layer without its row-parallel layer.
    """
    modules = dict(block.named_modules())
    roles: dict[str, Role] = {}
    unknown: list[str] = []
    for name, module in matrices_of(block, path):
        role = book.role(name, module)
        if role is None:
            unknown.append(f"{name} ({type(module).__name__})")
        else:
            roles[name] = role
    divided = {name for name, role in roles.items() if role in (Role.COLUMN, Role.ROW, Role.EXPERTS)}
    if divided and unknown:
        raise _unknown(block, path, unknown)
    at = {name: modules[name.removeprefix(path).removeprefix(".")] for name in roles}
    return DividedBlock(
        path=path,
        groups=_groups(roles, at, modules, path),
        experts={name: at[name] for name, role in roles.items() if role is Role.EXPERTS},
        biases={name: at[name] for name, role in roles.items() if role is Role.HEADS},
    )


def _groups(
    roles: Mapping[str, Role], at: Mapping[str, nn.Module], modules: Mapping[str, nn.Module], block: str
) -> tuple[Group, ...]:
    columns = [name for name, role in roles.items() if role is Role.COLUMN]
    rows = [name for name, role in roles.items() if role is Role.ROW]
    latents = [name for name, role in roles.items() if role is Role.LATENT]
    order = {name: place for place, name in enumerate(roles)}
    found: dict[str, list[str]] = {}
    left = list(columns)
    for row in rows:  # columns in the same module belong to the row, in whatever order they are defined
        beside = [name for name in columns if _parent(name) == _parent(row)]
        if beside and sum(_parent(other) == _parent(row) for other in rows) == 1:
            found[row] = beside
            left = [name for name in left if name not in beside]
    for row in rows:  # otherwise, the columns that are defined before the row
        if row not in found:
            found[row] = [name for name in left if order[name] < order[row]]
            left = [name for name in left if name not in found[row]]
    orphans = left + [row for row, members in found.items() if not members]
    if orphans:
        raise _unpaired(orphans)
    groups = []
    for row, members in found.items():
        parent = _parent(members[0])
        holder = modules[parent.removeprefix(block).removeprefix(".")]
        groups.append(
            Group(
                parent=parent,
                columns={name: at[name] for name in members},
                row=row,
                row_module=at[row],
                latents=tuple(name for name in latents if _parent(name) == parent),
                heads=_heads(parent, holder, members, at, at[row]),
            )
        )
    return tuple(groups)


def _heads(
    parent: str, holder: nn.Module, columns: Sequence[str], at: Mapping[str, nn.Module], row: nn.Module
) -> Heads | None:
    named = {name.rpartition(".")[2]: at[name] for name in columns}
    if not any(map(QUERY_KEY_VALUE.fullmatch, named)):
        return None
    known = {name: value for name, value in vars(holder).items() if isinstance(value, int)}
    width = widths(row)[0]
    sizes = [known[name] for name in _HEAD_SIZES if name in known]
    counts = [known[name] for name in _HEAD_COUNTS if name in known]
    if not sizes and not counts:
        raise InvalidLayout(
            f"Tensor parallelism cannot find how many attention heads {parent} has.",
            why=f"heads must stay whole, but it has none of the attributes {', '.join((*_HEAD_SIZES, *_HEAD_COUNTS))}",
            next="set one of these attributes on it, such as head_dim",
        )
    size = sizes[0] if sizes else width // counts[0]
    keys = next((widths(named[name])[1] // size for name in ("k_proj", "wk") if name in named), width // size)
    return Heads(queries=width // size, keys=keys, size=size)


def widths(module: nn.Module) -> tuple[int, int]:
    """Return the number of inputs and the number of outputs of a linear layer."""
    weight = module._parameters["weight"]
    assert weight is not None
    outputs, inputs = weight.shape
    return (outputs, inputs) if is_conv1d(module) else (inputs, outputs)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _unknown(block: nn.Module, path: str, unknown: Sequence[str]) -> InvalidLayout:
    return InvalidLayout(
        f"Tensor parallelism does not know how to divide {', '.join(unknown)} in {path} ({type(block).__name__}).",
        why="neither the model's own tensor-parallel plan nor the layer names tell, and a block is divided only as a whole",
        next=f'set it: roles={{"{unknown[0].split(" ")[0]}": …}} with "colwise" or "rowwise" (linear layers) or "replicate"',
    )


def _unpaired(orphans: Sequence[str]) -> InvalidLayout:
    return InvalidLayout(
        f"Tensor parallelism cannot divide {', '.join(orphans)}, because the matching layer is missing.",
        why="a column-parallel layer needs a row-parallel layer after it, and a row-parallel layer needs one before it",
        next='set the roles of both layers: roles={"…": "colwise", "…": "rowwise"}, or "replicate" for this one',
    )
