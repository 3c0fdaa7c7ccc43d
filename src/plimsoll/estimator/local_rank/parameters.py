"""A group of layers and a degree in, the cuts of their parameters and the attributes of one rank out."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from plimsoll.errors import InvalidLayout
from plimsoll.estimator.local_rank.edits import Edits, Shard
from plimsoll.estimator.local_rank.groups import Group, Heads, widths
from plimsoll.estimator.local_rank.roles import is_conv1d

_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_GROUPINGS = ("num_key_value_groups", "n_rep")
_HEAD_WIDTHS = ("all_head_size", "inner_dim", "split_size")
_MLP_WIDTHS = ("intermediate_size", "intermediate_dim")
_KEYS_AND_VALUES = frozenset(["k_proj", "v_proj", "wk", "wv"])
_IN_PARTS = {"c_attn": (3, 2), "gate_up_proj": (2,)}
"""Layers that are several layers side by side, each of which is divided."""


def divide_group(group: Group, holder: nn.Module, tp: int, edits: Edits) -> tuple[str, ...]:
    """Cut the parameters of a group and set the attributes that its forward derives shapes from.

    Args:
        group: the layers.
        holder: the module that holds the columns.
        tp: the degree of tensor parallelism.
        edits: takes the changes.

    Returns:
        What a user should know about it.

    Raises:
        InvalidLayout: heads or widths that ``tp`` does not divide.
    """
    notes: tuple[str, ...] = ()
    if group.heads is not None:
        notes = _check_heads(group, group.heads, tp)
        _localise_attention(holder, group.heads, tp, edits)
    else:
        edits.scale(holder, _MLP_WIDTHS, lambda width: width // tp)
    for path, module in group.columns.items():
        dim = 1 if is_conv1d(module) else 0
        parts, kept = _column_share(path, module, group.heads, tp)
        shard = Shard(dim=dim, kept=kept, ranks=tp, group="tp", parts=parts)
        edits.shard(module._parameters["weight"], shard)
        edits.shard(module._parameters.get("bias"), Shard(dim=0, kept=kept, ranks=tp, group="tp", parts=parts))
        _set_width(module, parts * kept, edits)
    inputs = widths(group.row_module)[0]
    _check_width(group.row, inputs, tp)
    row_dim = 0 if is_conv1d(group.row_module) else 1
    edits.shard(group.row_module._parameters["weight"], Shard(dim=row_dim, kept=inputs // tp, ranks=tp, group="tp"))
    edits.scale(group.row_module, ("in_features", "nx"), lambda width: width // tp)
    return notes


def _set_width(module: nn.Module, outputs: int, edits: Edits) -> None:
    edits.scale(module, ("out_features", "nf"), lambda _: outputs)


def _check_heads(group: Group, heads: Heads, tp: int) -> tuple[str, ...]:
    divides_keys = heads.keys % tp == 0 or tp % heads.keys == 0
    if heads.queries % tp or not divides_keys:
        possible = [
            degree
            for degree in range(1, heads.queries + 1)
            if heads.queries % degree == 0 and (heads.keys % degree == 0 or degree % heads.keys == 0)
        ]
        counts = f"{heads.queries} attention heads"
        if heads.keys != heads.queries:
            counts += f" and {heads.keys} key-value heads"
        raise InvalidLayout(
            f"Tensor parallelism over {tp} ranks cannot divide the {counts} of {group.parent}.",
            why="a head stays whole on one rank",
            next=f"take one of tp={', '.join(map(str, possible))}",
        )
    if heads.keys < tp:
        return (
            f"{heads.keys} key-value heads on {tp} ranks: each is held by {tp // heads.keys} of them, as in Megatron, "
            "so the shares of its projections add up to more than the whole",
        )
    return ()


def _localise_attention(holder: nn.Module, heads: Heads, tp: int, edits: Edits) -> None:
    edits.scale(holder, _QUERY_COUNTS, lambda _: heads.local_queries(tp))
    edits.scale(holder, _KEY_COUNTS, lambda _: heads.local_keys(tp))
    edits.scale(holder, _GROUPINGS, lambda _: heads.local_queries(tp) // heads.local_keys(tp))
    edits.scale(holder, _HEAD_WIDTHS, lambda width: width // tp)


def _column_share(path: str, module: nn.Module, heads: Heads | None, tp: int) -> tuple[int, int]:
    """Of how many parts, and how much of each part's outputs, one rank keeps."""
    name = path.rpartition(".")[2]
    outputs = widths(module)[1]
    if name in _KEYS_AND_VALUES and heads is not None:
        return 1, outputs // heads.keys * heads.local_keys(tp)
    parts = 1
    if name in _IN_PARTS:
        whole = heads.queries * heads.size if heads is not None else outputs // 2
        parts = outputs // whole
        if parts not in _IN_PARTS[name] or parts * whole != outputs:
            raise _unsupported_width(path, outputs, _IN_PARTS[name], whole)
    if name == "query_key_value" and heads is not None and outputs != 3 * heads.queries * heads.size:
        raise _unsupported_width(path, outputs, (3,), heads.queries * heads.size)
    _check_width(path, outputs // parts, tp)
    return parts, outputs // parts // tp


def _unsupported_width(path: str, outputs: int, parts: tuple[int, ...], whole: int) -> InvalidLayout:
    return InvalidLayout(
        f"unsupported: {path} makes {outputs} outputs, not {' or '.join(str(p * whole) for p in parts)}.",
        why="queries, keys and values in one layer are only divided where each is as wide as the others",
        next="leave tensor parallelism out for this model",
    )


def _check_width(path: str, width: int, tp: int) -> None:
    if width % tp:
        possible = [degree for degree in range(1, min(width, 128) + 1) if width % degree == 0]
        raise InvalidLayout(
            f"Tensor parallelism over {tp} ranks cannot divide the {width} features of {path}.",
            why=f"{width} is no multiple of {tp}",
            next=f"take one of tp={', '.join(map(str, possible))}",
        )


def divide_head_biases(biases: Mapping[str, nn.Module], tp: int, edits: Edits) -> None:
    """Cut embeddings that have one column per head (T5's relative positions)."""
    for path, module in biases.items():
        weight = module._parameters["weight"]
        assert weight is not None
        _check_width(path, weight.shape[1], tp)
        edits.shard(weight, Shard(dim=1, kept=weight.shape[1] // tp, ranks=tp, group="tp"))
        edits.scale(module, ("embedding_dim",), lambda width: width // tp)
