"""Counts parameters and arithmetic of a model from its configuration, without torch, before anything is built.

The counts are exact for the kinds of models in ``_COUNTS``, which tests compare with the built models. For other kinds the
number of parameters is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plimsoll.estimator.targets.recipe import Recipe, facts_of

_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2}
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_QWEN_WITH_BIASES = ("qwen2",)
_NORMED_HEADS = ("qwen3", "qwen3_moe")
_TIED_BY_DEFAULT = ("gpt2",)


def count_parameters(recipe: Recipe) -> int | None:
    """Return the number of parameters (elements) of the model that a recipe (its configuration) describes; a tied parameter
    counts once.

    Return ``None`` if the kind of model is not one of those that this module counts, or if the configuration lacks a size.

    Example:
        >>> from plimsoll.estimator.targets.recipe import find_recipe
        >>> count_parameters(find_recipe("llama-3-8b"))
        8030261248
    """
    count = _COUNTS.get(str(recipe.fields.get("model_type")))
    if (
        count is None
        or recipe.library != "transformers"
        or not recipe.architecture.endswith(("CausalLM", "LMHeadModel"))
    ):
        return None
    try:
        return count(recipe.fields)
    except (KeyError, TypeError, ZeroDivisionError):  # a size is missing, or is not a number
        return None


def parameter_bytes(recipe: Recipe) -> int | None:
    """Return the bytes of the parameters in the configuration's own dtype, or ``None`` if they cannot be counted here."""
    count = count_parameters(recipe)
    name = next((recipe.fields[key] for key in _DTYPE_FIELDS if recipe.fields.get(key) is not None), "float32")
    each = _DTYPE_BYTES.get(str(name).removeprefix("torch."))
    return None if count is None or each is None else count * each


def count_step_flops(recipe: Recipe, *, batch: int | None = None, sequence: int | None = None) -> int | None:
    """Return the arithmetic of one forward and backward in FLOPs: 6 per parameter and token, 12 per layer, width and attended
    position. Return ``None`` if the sizes are unknown.

    Example:
        >>> from plimsoll.estimator.targets.recipe import find_recipe
        >>> f"{count_step_flops(find_recipe('llama-3-8b')):.1e}"
        '5.0e+14'
    """
    facts, count = facts_of(recipe, batch=batch, sequence=sequence), count_parameters(recipe)
    if count is None or facts.tokens is None or facts.sequence is None or facts.layers is None or facts.hidden is None:
        return None
    return facts.tokens * (6 * count + 12 * facts.layers * facts.hidden * facts.sequence)


def _llama(fields: Mapping[str, Any], experts: int = 0) -> int:
    """Count a decoder with rotary positions and gated feed-forward layers; with ``experts``, every layer has that many."""
    kind, hidden, layers = fields["model_type"], fields["hidden_size"], fields["num_hidden_layers"]
    heads = fields["num_attention_heads"]
    kv_heads = fields["num_key_value_heads"] if kind != "llama" else fields.get("num_key_value_heads") or heads
    width = fields.get("head_dim") or (128 if kind in _NORMED_HEADS else hidden // heads)
    queries, keys = heads * width, kv_heads * width
    attention = hidden * (queries + 2 * keys) + queries * hidden
    if kind in _QWEN_WITH_BIASES:
        attention += queries + 2 * keys
    elif fields.get("attention_bias"):
        attention += queries + 2 * keys + hidden
    attention += 2 * width if kind in _NORMED_HEADS else 0
    inner = fields["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"]
    one = 3 * hidden * inner + (2 * inner + hidden if fields.get("mlp_bias") else 0)
    feed_forward = one * experts + hidden * experts if experts else one
    table = fields["vocab_size"] * hidden
    return int(layers * (attention + feed_forward + 2 * hidden) + hidden + table * (1 if _is_tied(fields) else 2))


def _mixture(fields: Mapping[str, Any]) -> int:
    if fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1:
        raise KeyError("dense layers between the others")
    return _llama(fields, fields["num_experts" if "num_experts" in fields else "num_local_experts"])


def _gpt2(fields: Mapping[str, Any]) -> int:
    hidden, layers = fields["n_embd"], fields["n_layer"]
    inner = fields.get("n_inner") or 4 * hidden
    attention = 4 * hidden * hidden + 4 * hidden
    feed_forward = 2 * hidden * inner + inner + hidden
    table = fields["vocab_size"] * hidden
    tables = table * (1 if _is_tied(fields) else 2) + fields["n_positions"] * hidden
    return int(layers * (attention + feed_forward + 4 * hidden) + 2 * hidden + tables)


def _is_tied(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("tie_word_embeddings", fields["model_type"] in _TIED_BY_DEFAULT))


_COUNTS: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama),
    **dict.fromkeys(("mixtral", "qwen3_moe"), _mixture),
    "gpt2": _gpt2,
}
"""For each kind of model (``model_type``), the function that counts its parameters."""
