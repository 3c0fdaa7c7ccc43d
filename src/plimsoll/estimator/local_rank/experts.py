"""Stacks of experts and degrees in, the experts of one rank out: cut by expert or width, tokens exchanged around them.

Expert parallelism: every rank sends each of its ``tokens · top_k`` rows to the rank that holds the row's expert, and gets as
many for its own experts: routing is taken to be balanced. The rows travel back after the experts; the weights of the
router travel along, so that the weighted sum over a token's experts is taken at home.

Source: the all-to-all dispatcher of GShard (Lepikhin et al. 2021, section 3.2). Known weakness: unbalanced routing is not
modelled; a rank whose experts are popular holds more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from plimsoll.errors import InvalidLayout
from plimsoll.estimator.local_rank.collectives import all_to_all
from plimsoll.estimator.local_rank.edits import Edits, Shard

_GROUP = "ep"
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_UP = ("gate_up_proj", "up_proj", "gate_proj", "gate_up_proj_bias", "up_proj_bias")


def divide_widths(experts: Mapping[str, nn.Module], tp: int, edits: Edits) -> None:
    """Tensor parallelism within each expert.

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
            if width % tp:
                raise InvalidLayout(
                    f"Tensor parallelism over {tp} ranks cannot divide the experts of {path}, which are {width} wide.",
                    why=f"{width} is no multiple of {tp}",
                    next="take a degree that divides it, or expert parallelism",
                )
            edits.shard(parameter, Shard(dim=dim, kept=width // tp, ranks=tp, group="tp", parts=parts))
        edits.scale(module, ("intermediate_dim", "intermediate_size"), lambda width: width // tp)


def _width_dim(name: str, *, is_transposed: bool) -> int:
    if name.endswith("_bias"):
        return 1
    return 2 if (name in _UP) == is_transposed else 1


def divide_experts(experts: Mapping[str, nn.Module], ep: int, edits: Edits) -> None:
    """Expert parallelism: some of the experts, and the exchange of tokens.

    Raises:
        InvalidLayout: the number of experts is no multiple of ``ep``.
    """
    for path, module in experts.items():
        stacks = [parameter for parameter in module._parameters.values() if parameter is not None]
        count = stacks[0].shape[0]
        if count % ep:
            possible = [degree for degree in range(1, count + 1) if count % degree == 0]
            raise InvalidLayout(
                f"Expert parallelism over {ep} ranks cannot divide the {count} experts of {path}.",
                why=f"{count} is no multiple of {ep}, and an expert stays whole on one rank",
                next=f"take one of ep={', '.join(map(str, possible))}",
            )
        for parameter in stacks:
            edits.shard(parameter, Shard(dim=0, kept=count // ep, ranks=ep, group=_GROUP))
        edits.scale(module, _COUNTS, lambda experts: experts // ep)
        exchange = _Exchange(ep, count // ep)
        edits.hook(module.register_forward_pre_hook(exchange.dispatch))
        edits.hook(module.register_forward_hook(exchange.combine))


class _Exchange:
    """Tokens to the ranks of their experts, and back."""

    def __init__(self, ep: int, local_experts: int) -> None:
        self._ep = ep
        self._local_experts = local_experts
        self._top_k = 1

    def dispatch(self, module: nn.Module, args: Any) -> Any:
        """``[tokens, hidden]`` with ``top_k`` experts each becomes ``[tokens · top_k, hidden]`` with one of this rank's."""
        hidden, index, weights = args
        self._top_k = index.shape[-1]
        rows = torch.arange(index.numel(), device=index.device)
        sent = hidden[rows // self._top_k]
        received = all_to_all(sent, self._ep, _GROUP)
        received_weights = all_to_all(weights.reshape(-1, 1), self._ep, _GROUP)
        return received, (rows % self._local_experts).unsqueeze(-1), received_weights

    def combine(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The rows back home, summed over each token's experts."""
        returned = all_to_all(output, self._ep, _GROUP)
        return returned.view(-1, self._top_k, returned.shape[-1]).sum(dim=1)
