"""A model in, the role of each of its weight matrices under tensor parallelism out.

The model's own plan (transformers' ``base_model_tp_plan`` and ``_tp_plan``) comes first, then ``roles=`` of the caller over
it, then the names that the field uses. A matrix inside a block that none of them knows is an error, not a guess: half a block
divided would compute something else.

Source: column- and row-parallel layers of Shoeybi et al. 2019, section 3.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from plimsoll.errors import InvalidLayout
from plimsoll.estimator.local_rank.names import COLUMN_NAMES, LATENT_NAMES, REPLICATED_NAMES, ROW_NAMES, WORDS_NAMES


class Role(enum.StrEnum):
    """How the ranks of a tensor-parallel group share a weight.

    ``COLUMN``: each computes some of the outputs; ``ROW``: each takes some of the inputs, and the results are summed;
    ``VOCABULARY``: each holds some words of an embedding or of a head; ``REPLICATE``: each holds all. ``LATENT``:
    each holds all, and what it makes goes into column-parallel layers (the compressed keys of multi-head latent
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
"""Styles of transformers' plans, for modules within blocks."""


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Members of the model's outermost module lists, by path: what repeats."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{block}.") for block in found)
        if not inside and isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            members = {f"{path}.{name}" if path else name: member for name, member in module.named_children()}
            found.update({name: member for name, member in members.items() if any(member.children())})
    return found


def is_linear(module: nn.Module) -> bool:
    """A matrix product with a bias: torch's, or transformers' ``Conv1D`` (weight ``[in, out]``)."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and module._parameters.keys() == {"weight", "bias"}


def is_experts(module: nn.Module) -> bool:
    """A module that holds all experts' matrices in stacks, ``[experts, …, …]``."""
    stacks = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.dim() == 3]
    return len(stacks) > 1 and "down_proj" in module._parameters


class RoleBook:
    """Answers for the role of a module by its path; counts which of the caller's patterns were of use."""

    def __init__(self, model: nn.Module, overrides: Mapping[str, str] | None) -> None:
        self._plan = _own_plan(model)
        self._overrides = {_regex(pattern): _role_of_user(role) for pattern, role in (overrides or {}).items()}
        self._matched: set[re.Pattern[str]] = set()

    def role(self, path: str, module: nn.Module) -> Role | None:
        """The role of a module inside a block, ``None`` if nobody knows."""
        found = self.override(path)
        if found is not None:
            _check_kind(found, path, module)
            return found
        if is_experts(module):
            return Role.EXPERTS
        for pattern, style in self._plan.items():
            if pattern.fullmatch(path):
                return _role_of_style(style, path)
        if isinstance(module, nn.Embedding):
            return Role.HEADS if path.endswith("relative_attention_bias") else None
        return _by_name(path, is_matrix=is_linear(module))

    def override(self, path: str) -> Role | None:
        """What the caller says about it."""
        for pattern, role in self._overrides.items():
            if pattern.fullmatch(path):
                self._matched.add(pattern)
                return role
        return None

    def check_all_matched(self, model: nn.Module) -> None:
        """Refuse patterns that named nothing."""
        for pattern in self._overrides.keys() - self._matched:
            raise InvalidLayout(
                f"The pattern {pattern.pattern!r} in roles= matches no weight of {type(model).__name__}.",
                why="a role without a module would change nothing",
                next='use module paths, in which * stands for one level: {"*.layers.*.attn.qkv": "colwise"}',
            )


def _check_kind(role: Role, path: str, module: nn.Module) -> None:
    if role is Role.REPLICATE or (role is not Role.VOCABULARY and is_linear(module)):
        return
    raise InvalidLayout(
        f"unsupported: {path} as {role.value!r}, a {type(module).__name__} inside a block.",
        why="inside blocks linear layers are divided by their outputs or inputs, and anything else stays whole",
        next=f'roles={{"{path}": "replicate"}} leaves it whole on every rank',
    )


def _by_name(path: str, *, is_matrix: bool) -> Role | None:
    last = path.rpartition(".")[2]
    last_two = ".".join(path.split(".")[-2:])
    if last in REPLICATED_NAMES:
        return Role.REPLICATE
    if not is_matrix:
        return None
    for role, names in ((Role.COLUMN, COLUMN_NAMES), (Role.ROW, ROW_NAMES), (Role.LATENT, LATENT_NAMES)):
        if last in names or last_two in names:
            return role
    return None


def words_of(model: nn.Module, blocks: Mapping[str, nn.Module], book: RoleBook) -> dict[str, nn.Module]:
    """Embeddings of words, and the heads over the same words, by path."""
    outside = {
        path: module for path, module in model.named_modules() if not any(_is_inside(path, block) for block in blocks)
    }
    said = {path: book.override(path) for path in outside}
    tables: dict[str, nn.Module] = {
        path: module
        for path, module in outside.items()
        if isinstance(module, nn.Embedding)
        and (said[path] is Role.VOCABULARY or (said[path] is None and path.rpartition(".")[2] in WORDS_NAMES))
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
    """Modules of a block that hold a weight of two dimensions or more themselves."""
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


def _role_of_style(style: str, path: str) -> Role:
    if style not in _STYLES:
        raise InvalidLayout(
            f"unsupported: the model's own tensor-parallel plan gives {path} the style {style!r}.",
            why=f"known are {', '.join(_STYLES)}",
            next="pass its role with roles=, or leave tensor parallelism out",
        )
    return _STYLES[style]


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(_stars(pattern))


def _stars(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "[^.]*")


def _role_of_user(text: str) -> Role:
    known = {role.value: role for role in _OF_USERS}
    if text not in known:
        raise InvalidLayout(
            f"{text!r} is no role of a weight under tensor parallelism.",
            why="colwise divides the outputs, rowwise the inputs, vocab the words; replicate leaves it whole",
            next='pass roles={"layers.*.attn.wq": "colwise", "layers.*.attn.wo": "rowwise"}',
        )
    return known[text]
