"""Cuts the parameters of layers and experts to one rank's share, and undoes every change to the model at the end.

Expert parallelism: every rank sends each of its ``tokens · top_k`` rows to the rank that holds the row's expert, and gets as
many rows for its own experts: routing is assumed to be balanced. The rows return after the experts. The weights of the router
travel with the rows, so that each token's weighted sum is computed on its home rank.

With DeepEP a token travels once to each rank that has any of its experts, and its rows are made there.

Fused kernels (``plimsoll_moe::permute`` and so on) move and save the same bytes as Transformer Engine's and Megatron-Core's.
Rows are copied in the order of experts and summed back by a map of ``[tokens, 2 · experts + 1]`` integers. The activation
multiplies by the router's weights too, so that only the outputs of matrix products are saved.

Source: the all-to-all dispatcher of GShard (Lepikhin et al. 2021, section 3.2); deepseek-ai/DeepEP, as Megatron-Core's
``fused_a2a.py`` calls it; Transformer Engine's ``permutation.py`` and Megatron-Core's ``weighted_bias_swiglu``. Known
weakness: unbalanced routing is not modelled; a rank with popular experts holds more. Routing limited to a few nodes
(DeepSeek-V3's) sends less than is assumed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from plimsoll.errors import InvalidLayout
from plimsoll.estimator.local_rank.collectives import all_to_all, dispatch
from plimsoll.estimator.local_rank.groups import Group, Heads, widths
from plimsoll.estimator.local_rank.roles import is_conv1d


@dataclass(frozen=True, slots=True)
class Shard:
    """How one rank's share of a parameter is cut, as data.

    The parameter is divided along ``dim`` into ``parts`` equal parts, and ``kept`` indices of each part are kept. ``ranks`` is
    the number of ranks that share the parameter. ``group`` names the layout's dimension that these ranks belong to (``tp``,
    ``ep``).
    """

    dim: int
    kept: int
    ranks: int
    group: str
    parts: int = 1

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the share of the first rank as a new tensor."""
        pieces = tensor.chunk(self.parts, self.dim) if self.parts > 1 else (tensor,)
        return torch.cat([piece.narrow(self.dim, 0, self.kept) for piece in pieces], self.dim)


class Edits:
    """Records the changes that are made to a model to turn it into one rank's part, and undoes them at the end."""

    def __init__(self) -> None:
        self._shards: dict[int, list[Shard]] = {}
        self._tables: list[tuple[dict[str, Any], str, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._on_undo: list[Callable[[], None]] = []

    def shard(self, parameter: nn.Parameter | None, shard: Shard) -> None:
        """Mark a parameter to be cut wherever the model uses it. A parameter that two modules share is cut once."""
        if parameter is not None:
            shards = self._shards.setdefault(id(parameter), [])
            if shard not in shards:
                shards.append(shard)

    def set(self, owner: object, name: str, value: Any) -> None:
        """Set an attribute in the instance's own ``__dict__``. The old value is restored at the end."""
        table = vars(owner)
        self._tables.append((table, name, table[name]))
        table[name] = value

    def scale(self, owner: object, names: Iterable[str], change: Callable[[int], int]) -> None:
        """Replace the value of each of these attributes by ``change`` of the value.

        Only ints in the instance's own ``__dict__`` are changed.
        """
        for name in names:
            value = vars(owner).get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                self.set(owner, name, change(value))

    def replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Replace the forward of ``module``. The module's hooks still run before and after it."""
        vars(module)["forward"] = forward
        self.at_end(lambda: vars(module).pop("forward"))

    def hook(self, handle: RemovableHandle) -> None:
        """Remember a hook's handle. The hook is removed when the changes are undone."""
        self._handles.append(handle)

    def at_end(self, call: Callable[[], None]) -> None:
        """Remember a function to call when the changes are undone, such as one that frees what a hook holds."""
        self._on_undo.append(call)

    def swap_parameters(self, model: nn.Module) -> dict[str, tuple[Shard, ...]]:
        """Replace each parameter that was marked by this rank's share of it.

        Return a mapping from each parameter's name to how it was cut.
        """
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
        """Restore the model: remove hooks, restore parameters and attributes, and call what was remembered for the end."""
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


_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_GROUPINGS = ("num_key_value_groups", "n_rep")
_HEAD_WIDTHS = ("all_head_size", "inner_dim", "split_size")
_MLP_WIDTHS = ("intermediate_size", "intermediate_dim")
_KEYS_AND_VALUES = frozenset(["k_proj", "v_proj", "wk", "wv"])
_IN_PARTS = {"c_attn": (3, 2), "gate_up_proj": (2,)}
"""For each layer name that combines several layers side by side (such as query, key and value), how many it may combine. Each
of them is divided among the ranks.
"""


def divide_group(group: Group, holder: nn.Module, tp: int, edits: Edits) -> tuple[str, ...]:
    """Cut the parameters of a group (an attention or an MLP), and set the attributes that its forward derives shapes from.

    ``holder`` is the module that holds the columns. Returns notes for the user.

    Raises:
        InvalidLayout: ``tp`` does not divide the heads or widths.
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
            why="each head must stay whole on one rank",
            next=f"use one of tp={', '.join(map(str, possible))}",
        )
    if heads.keys < tp:
        return (
            f"{heads.keys} key-value heads on {tp} ranks: {tp // heads.keys} ranks hold a copy of each head, as in Megatron; "
            "the ranks together hold more than one copy of the key and value projections",
        )
    return ()


def _localise_attention(holder: nn.Module, heads: Heads, tp: int, edits: Edits) -> None:
    edits.scale(holder, _QUERY_COUNTS, lambda _: heads.local_queries(tp))
    edits.scale(holder, _KEY_COUNTS, lambda _: heads.local_keys(tp))
    edits.scale(holder, _GROUPINGS, lambda _: heads.local_queries(tp) // heads.local_keys(tp))
    edits.scale(holder, _HEAD_WIDTHS, lambda width: width // tp)


def _column_share(path: str, module: nn.Module, heads: Heads | None, tp: int) -> tuple[int, int]:
    """Return two numbers: how many layers this layer combines side by side, and how many outputs of each of them one rank
    keeps.
    """
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
        f"Tensor parallelism does not support {path}: it has {outputs} outputs, not "
        f"{' or '.join(str(p * whole) for p in parts)}.",
        why="a layer that computes queries, keys and values together can be divided only if all three have the same width",
        next="leave tensor parallelism out for this model",
    )


def _check_width(path: str, width: int, tp: int) -> None:
    if width % tp:
        raise InvalidLayout(
            f"Tensor parallelism over {tp} ranks cannot divide the {width} features of {path}.",
            why=f"{width} is not a multiple of {tp}",
            next=f"use one of tp={_degrees_of(width)}",
        )


def _degrees_of(size: int) -> str:
    """List the divisors of a size up to 128, as text."""
    return ", ".join(str(degree) for degree in range(1, min(size, 128) + 1) if size % degree == 0)


def divide_head_biases(biases: Mapping[str, nn.Module], tp: int, edits: Edits) -> None:
    """Cut embeddings that have one column per attention head (T5's relative positions), so that each rank has its heads'
    columns.
    """
    for path, module in biases.items():
        weight = module._parameters["weight"]
        assert weight is not None
        _check_width(path, weight.shape[1], tp)
        edits.shard(weight, Shard(dim=1, kept=weight.shape[1] // tp, ranks=tp, group="tp"))
        edits.scale(module, ("embedding_dim",), lambda width: width // tp)


_GROUP = "ep"
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_UP = ("gate_up_proj", "up_proj", "gate_proj", "gate_up_proj_bias", "up_proj_bias")


def divide_widths(experts: Mapping[str, nn.Module], tp: int, edits: Edits) -> None:
    """Apply tensor parallelism within each expert: cut the width of its feed-forward layer.

    Raises:
        InvalidLayout: ``tp`` does not divide the experts' width.
    """
    for path, module in experts.items():
        known = vars(module)
        is_transposed = bool(known.get("is_transposed", False))
        is_packed = bool(known.get("is_concatenated", True))
        for name, parameter in module._parameters.items():
            if parameter is None or (name not in _UP and name != "down_proj"):
                continue
            parts = 2 if name.startswith("gate_up_proj") and is_packed else 1
            dim = _width_dim(name, is_transposed=is_transposed)
            width = parameter.shape[dim] // parts
            _check_width(f"the experts of {path}", width, tp)
            edits.shard(parameter, Shard(dim=dim, kept=width // tp, ranks=tp, group="tp", parts=parts))
        edits.scale(module, ("intermediate_dim", "intermediate_size"), lambda width: width // tp)


def _width_dim(name: str, *, is_transposed: bool) -> int:
    if name.endswith("_bias"):
        return 1
    return 2 if (name in _UP) == is_transposed else 1


def divide_experts(experts: Mapping[str, nn.Module], ep: int, edits: Edits, kernels: str = "") -> None:
    """Apply expert parallelism: keep a part of the experts, and exchange tokens between ranks.

    ``kernels`` names the kernels of the exchange: ``deepep``, or another text for the plain exchange.

    Raises:
        InvalidLayout: the number of experts is not a multiple of ``ep``.
    """
    for path, module in experts.items():
        stacks = [parameter for parameter in module._parameters.values() if parameter is not None]
        count = stacks[0].shape[0]
        if count % ep:
            raise InvalidLayout(
                f"Expert parallelism over {ep} ranks cannot divide the {count} experts of {path}.",
                why=f"{count} is not a multiple of {ep}, and each expert must stay whole on one rank",
                next=f"use one of ep={_degrees_of(count)}",
            )
        for parameter in stacks:
            edits.shard(parameter, Shard(dim=0, kept=count // ep, ranks=ep, group=_GROUP))
        edits.scale(module, _COUNTS, lambda experts: experts // ep)
        exchange = _DeepExchange(ep, count) if kernels == "deepep" else _Exchange(ep, count // ep)
        edits.hook(module.register_forward_pre_hook(exchange.dispatch))
        edits.hook(module.register_forward_hook(exchange.combine))


class _Exchange:
    """The exchange of tokens between expert-parallel ranks. Tokens are sent to the ranks that have their experts, and the
    results are sent back.
    """

    def __init__(self, ep: int, local_experts: int) -> None:
        self._ep = ep
        self._local_experts = local_experts
        self._top_k = 1

    def dispatch(self, module: nn.Module, args: Any) -> Any:
        """Turn ``[tokens, hidden]``, with ``top_k`` experts per token, into ``[tokens · top_k, hidden]`` with one local expert
        per row.
        """
        hidden, index, weights = args
        self._top_k = index.shape[-1]
        rows = torch.arange(index.numel(), device=index.device)
        sent = hidden[rows // self._top_k]
        received = all_to_all(sent, self._ep, _GROUP)
        received_weights = all_to_all(weights.reshape(-1, 1), self._ep, _GROUP)
        return received, (rows % self._local_experts).unsqueeze(-1), received_weights

    def combine(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the rows to their home ranks, and sum the rows of each token over its experts."""
        returned = all_to_all(output, self._ep, _GROUP)
        return returned.view(-1, self._top_k, returned.shape[-1]).sum(dim=1)


class _DeepExchange:
    """DeepEP's exchange of tokens. Each token is sent only once to each rank that has any of its experts, and the results are
    sent back.
    """

    def __init__(self, ep: int, experts: int) -> None:
        self._ep = ep
        self._experts = experts
        self._tokens = 0
        self._copies = 0.0

    def dispatch(self, module: nn.Module, args: Any) -> Any:
        """Turn ``[tokens, hidden]`` into the tokens that this rank receives.

        The number of token-expert pairs does not change.
        """
        hidden, index, weights = args
        self._tokens, self._copies = hidden.shape[0], expected_ranks(self._ep, self._experts, index.shape[-1])
        received = dispatch(hidden, math.ceil(self._tokens * self._copies), self._copies, _GROUP)
        return received, index.reshape(-1, 1), all_to_all(weights.reshape(-1, 1), self._ep, _GROUP)

    def combine(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return to each token's home rank the token's sums, one from each rank, and add them up there."""
        return dispatch(output, self._tokens, self._copies, _GROUP)


def expected_ranks(ep: int, experts: int, top_k: int) -> float:
    """Return how many of the ``ep`` ranks one token is sent to on average, if its ``top_k`` experts are drawn uniformly.

    Example:
        >>> round(expected_ranks(8, 256, 8), 2), expected_ranks(8, 8, 2)
        (5.29, 2.0)
    """
    others = experts - experts // ep
    return ep * (1 - math.comb(others, top_k) / math.comb(experts, top_k))


@torch.library.custom_op("plimsoll_moe::row_map", mutates_args=())
def row_map(x: torch.Tensor, experts: int) -> torch.Tensor:
    """Return a tensor with the shape of the map between tokens and rows in the order of experts, as 32-bit integers.

    Its values are zeros, because a trace needs only the shape.
    """
    return torch.zeros(x.shape[0], 2 * experts + 1, dtype=torch.int32, device=x.device)


@row_map.register_fake
def _(x: torch.Tensor, experts: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], 2 * experts + 1), dtype=torch.int32)


@torch.library.custom_op("plimsoll_moe::permute", mutates_args=())
def permute(x: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
    """Copy rows in the order of experts. If ``rows`` is smaller than the input, sum the rows of each token instead."""
    if rows < len(x):
        return x.new_zeros(rows, x.shape[1]).index_add_(0, torch.arange(len(x), device=x.device) % rows, x)
    return x[torch.arange(rows, device=x.device) % max(len(x), 1)]


@permute.register_fake
def _(x: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty(rows, x.shape[1])


@torch.library.custom_op("plimsoll_moe::activate", mutates_args=())
def activate(x: torch.Tensor, weights: torch.Tensor, width: int) -> torch.Tensor:
    """Apply the activation, the gate and the router's weight to every row, in one kernel."""
    gate, rest = x[:, :width], x[:, width:]
    out = torch.nn.functional.silu(gate.float()) * (rest.float() if rest.shape[1] else 1)
    return (out * weights[:, None].float()).to(x.dtype)


@activate.register_fake
def _(x: torch.Tensor, weights: torch.Tensor, width: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], width)


@torch.library.custom_op("plimsoll_moe::activate_backward", mutates_args=())
def activate_backward(
    gradient: torch.Tensor, x: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the activation's input and of the router's weights.

    Only their shapes are real; their values are zeros.
    """
    return torch.zeros_like(x), torch.zeros_like(weights)


@activate_backward.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weights)


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.rows = inputs[0].shape[0]
    ctx.save_for_backward(inputs[1])


def _permuted_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return permute(gradient, *ctx.saved_tensors, ctx.rows), None, None


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


def _activated_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return (*activate_backward(gradient, *ctx.saved_tensors), None)


permute.register_autograd(_permuted_gradient, setup_context=_keep_places)
activate.register_autograd(_activated_gradient, setup_context=_keep_inputs)


def fuse_experts(experts: Mapping[str, nn.Module], edits: Edits) -> None:
    """Run experts in Megatron-Core's fused kernels: one moves the rows, another activates them and applies their weights.

    Raises:
        InvalidLayout: the experts have biases, or a norm after each expert.
    """
    for path, module in experts.items():
        known = vars(module)
        if known.get("has_bias") or known.get("has_post_expert_norm"):
            raise InvalidLayout(
                f"moe= does not support the experts of {path}.",
                why="they have biases, or a norm after each expert, and the fused kernels do not support either",
                next="leave moe= out",
            )
        edits.replace_forward(module, _FusedExperts(module))


@dataclass(frozen=True, slots=True)
class _FusedExperts:
    """The forward of a stack of experts, computed in fused kernels."""

    module: nn.Module

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run ``[tokens, hidden]`` through the experts that ``index`` names per token.

        The activation multiplies by their ``weights``.
        """
        stacks, rows = self.module._parameters, index.numel()
        up, down = stacks.get("gate_up_proj", stacks.get("up_proj")), stacks["down_proj"]
        assert up is not None, "experts have a product before the activation"
        assert down is not None, "is_experts has looked"
        count, is_transposed = down.shape[0], bool(vars(self.module).get("is_transposed"))
        width = down.shape[1 if is_transposed else 2]
        ends = (torch.arange(1, count + 1, device=hidden.device) * (rows // count)).to(torch.int32)

        def product(x: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
            return nn.functional.grouped_mm(x, stack if is_transposed else stack.transpose(-2, -1), offs=ends)

        places = row_map(hidden, count)
        inner = product(permute(hidden, places, rows), up)
        outer = product(activate(inner, weights.reshape(-1), width), down)
        return permute(outer, places, hidden.shape[0])  # type: ignore[no-any-return]
