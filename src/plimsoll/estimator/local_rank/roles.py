"""Determines how the ranks of a tensor-parallel group share each weight matrix of a model.

The caller's ``roles=`` comes first, then the model's own plan (transformers' ``base_model_tp_plan`` and ``_tp_plan``), then
common names. A matrix in a block that none of these covers is an error, not a guess: a block divided by half would compute
something else.

Source: column- and row-parallel layers of Shoeybi et al. 2019, section 3.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from plimsoll.errors import InvalidLayout

# Common names of weights: a module's last name, or its last two. The families: Llama and relatives (q_proj, gate_proj),
# GPT-2 (c_attn, c_fc), BERT (query, intermediate.dense), T5 (q, wi_0), CLIP, ViT and Whisper (fc1), GPT-NeoX and
# BLOOM (query_key_value), DistilBERT (q_lin), Meta's own Llama (wq, w1), multi-head latent attention (kv_b_proj).
QUERY_KEY_VALUE = re.compile(
    r"[qkv]_proj|query|key|value|[qkv]|w[qkv]|[qkv]_lin|c_attn|q_attn|query_key_value|q_b_proj|kv_b_proj"
)
"""Names of the column-parallel layers that are divided by whole attention heads."""
_COLUMNS = (
    rf"{QUERY_KEY_VALUE.pattern}|gate_proj|up_proj|gate_up_proj|c_fc|fc1|fc_in|lin1|wi|wi_0|wi_1|w1|w3|dense_h_to_4h|"
    r"intermediate\.dense"
)
_ROWS = (
    r"o_proj|out_proj|c_proj|o|wo|out_lin|down_proj|fc2|fc_out|lin2|w2|dense_4h_to_h|"
    r"output\.dense|attention\.dense|self_attention\.dense"
)
_REPLICATED = re.compile(r"(.*\.)?(gate|router|shared_expert_gate)")
_WORDS = re.compile(r"(.*\.)?(embed_tokens|wte|word_embeddings|shared|token_embedding|embed_in)")


class Role(enum.StrEnum):
    """How the ranks of a tensor-parallel group share a weight.

    ``COLUMN``: each rank computes some of the outputs. ``ROW``: each takes some of the inputs, and the results are summed.
    ``VOCABULARY``: each holds some words of an embedding or head. ``REPLICATE``: each holds the whole weight. ``LATENT``:
    each holds the whole weight, and its output is the input of column-parallel layers (the compressed keys of multi-head latent
    attention), so its gradient is summed. ``EXPERTS``: a stack of experts, each divided like an MLP. ``HEADS``: one column
    per attention head.
    """

    COLUMN = "colwise"
    ROW = "rowwise"
    VOCABULARY = "vocab"
    REPLICATE = "replicate"
    LATENT = "latent"
    EXPERTS = "experts"
    HEADS = "heads"


_OF_USERS = (Role.COLUMN, Role.ROW, Role.VOCABULARY, Role.REPLICATE)

_STYLES = {
    "colwise": Role.COLUMN,
    "packed_colwise": Role.COLUMN,
    "rowwise": Role.ROW,
    "moe_tp_experts": Role.EXPERTS,
    "replicated_with_grad_allreduce": Role.REPLICATE,
}
"""For each style in transformers' own plans, the role of a module within a block."""
_NAMED = {
    Role.COLUMN: re.compile(rf"(.*\.)?({_COLUMNS})"),
    Role.ROW: re.compile(rf"(.*\.)?({_ROWS})"),
    Role.LATENT: re.compile(r"(.*\.)?(q_a_proj|kv_a_proj_with_mqa)"),
}
"""For each role, a pattern for the names of matrices that have it. The roles are tried in this order."""


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return a mapping from path to module of the repeated blocks: the members of the model's outermost module lists."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{block}.") for block in found)
        if not inside and isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            members = {f"{path}.{name}" if path else name: member for name, member in module.named_children()}
            found.update({name: member for name, member in members.items() if any(member.children())})
    return found


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: torch's, or transformers' ``Conv1D``, whose weight is ``[in, out]``."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is GPT-2's linear layer ``Conv1D``, whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and module._parameters.keys() == {"weight", "bias"}


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the matrices of all experts in stacks, tensors of shape ``[experts, …, …]``."""
    stacks = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.dim() == 3]
    return len(stacks) > 1 and "down_proj" in module._parameters


class RoleBook:
    """Finds the role of a module by its path: how tensor-parallel ranks share the module's weight.

    It records which of the caller's patterns matched a module.
    """

    def __init__(self, model: nn.Module, overrides: Mapping[str, str] | None) -> None:
        self._plan = _own_plan(model)
        self._overrides = {
            re.compile(_stars(pattern)): _role_of_user(role) for pattern, role in (overrides or {}).items()
        }
        self._matched: set[re.Pattern[str]] = set()

    def role(self, path: str, module: nn.Module) -> Role | None:
        """Return the role of a module inside a block, or ``None`` if the role is unknown."""
        found = self.override(path)
        if found is not None:
            _check_kind(found, path, module)
            return found
        if is_experts(module):
            return Role.EXPERTS
        for pattern, style in self._plan.items():
            if not pattern.fullmatch(path):
                continue
            if style not in _STYLES:
                raise InvalidLayout(
                    f"The model's own tensor-parallel plan gives {path} the style {style!r}, which is not supported.",
                    why=f"the supported styles are {', '.join(_STYLES)}",
                    next="set the role of this layer with roles=, or leave tensor parallelism out",
                )
            return _STYLES[style]
        if isinstance(module, nn.Embedding):
            return Role.HEADS if path.endswith("relative_attention_bias") else None
        return _by_name(path, is_matrix=is_linear(module))

    def override(self, path: str) -> Role | None:
        """Return the role that the caller gave for a path, or ``None``."""
        for pattern, role in self._overrides.items():
            if pattern.fullmatch(path):
                self._matched.add(pattern)
                return role
        return None

    def check_all_matched(self, model: nn.Module) -> None:
        """Refuse patterns of the caller that did not match any module."""
        for pattern in self._overrides.keys() - self._matched:
            raise InvalidLayout(
                f"The pattern {pattern.pattern!r} in roles= does not match any weight of {type(model).__name__}.",
                why="a role without a layer would not have an effect",
                next='use module paths, with * for one level: {"*.layers.*.attn.qkv": "colwise"}',
            )


def _check_kind(role: Role, path: str, module: nn.Module) -> None:
    if role is Role.REPLICATE or (role is not Role.VOCABULARY and is_linear(module)):
        return
    raise InvalidLayout(
        f"The role {role.value!r} is not supported for {path}, a {type(module).__name__} inside a block.",
        why="inside blocks, only linear layers are divided (by outputs or inputs); all other modules stay whole",
        next=f'use roles={{"{path}": "replicate"}} to keep it whole on every rank',
    )


def _by_name(path: str, *, is_matrix: bool) -> Role | None:
    if _REPLICATED.fullmatch(path):
        return Role.REPLICATE
    return next((role for role, names in _NAMED.items() if is_matrix and names.fullmatch(path)), None)


def words_of(model: nn.Module, blocks: Mapping[str, nn.Module], book: RoleBook) -> dict[str, nn.Module]:
    """Return a mapping from path to module that has the word embeddings, and the heads whose outputs are the same words."""
    outside = {
        path: module for path, module in model.named_modules() if not any(_is_inside(path, block) for block in blocks)
    }
    said = {path: book.override(path) for path in outside}
    tables: dict[str, nn.Module] = {
        path: module
        for path, module in outside.items()
        if isinstance(module, nn.Embedding)
        and (said[path] is Role.VOCABULARY or (said[path] is None and _WORDS.fullmatch(path)))
    }
    shapes = {tuple(table.get_parameter("weight").shape) for table in tables.values()}
    heads: dict[str, nn.Module] = {
        path: module
        for path, module in outside.items()
        if isinstance(module, nn.Linear)
        and (said[path] is Role.VOCABULARY or (said[path] is None and tuple(module.weight.shape) in shapes))
    }
    return tables | heads


def _is_inside(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


def matrices_of(block: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module for each module of a block that holds a weight of two or more dimensions itself."""
    for name, module in block.named_modules():
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        if any(parameter.dim() > 1 for parameter in parameters):
            yield (f"{prefix}.{name}" if name else prefix), module


def _own_plan(model: nn.Module) -> dict[re.Pattern[str], str]:
    plan: dict[str, str] = {}
    for module in model.modules():
        config: Any = vars(module).get("config")
        plan.update(getattr(config, "base_model_tp_plan", None) or {})
    return {re.compile(f"(.*\\.)?{_stars(pattern)}"): style for pattern, style in plan.items()}


def _stars(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "[^.]*")


def _role_of_user(text: str) -> Role:
    known = {role.value: role for role in _OF_USERS}
    if text not in known:
        raise InvalidLayout(
            f"{text!r} is not a role for tensor parallelism.",
            why="colwise divides a layer's outputs, rowwise its inputs, vocab the vocabulary; replicate keeps the layer whole",
            next='pass roles={"layers.*.attn.wq": "colwise", "layers.*.attn.wo": "rowwise"}',
        )
    return known[text]
