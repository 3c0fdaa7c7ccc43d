"""The names that the field gives to weights, by what they are to tensor parallelism: a module's last name, or its last two.

The families: Llama and its kin (``q_proj``, ``gate_proj``), GPT-2 (``c_attn``, ``c_fc``), BERT (``query``,
``intermediate.dense``), T5 (``q``, ``wi_0``), CLIP, ViT and Whisper (``fc1``), GPT-NeoX and BLOOM (``query_key_value``),
DistilBERT (``q_lin``), Meta's own Llama (``wq``, ``w1``), multi-head latent attention (``kv_b_proj``).
"""

from __future__ import annotations

QUERY_KEY_VALUE = frozenset(
    [
        "q_proj",
        "k_proj",
        "v_proj",
        "query",
        "key",
        "value",
        "q",
        "k",
        "v",
        "wq",
        "wk",
        "wv",
        "q_lin",
        "k_lin",
        "v_lin",
        "c_attn",
        "q_attn",
        "query_key_value",
        "q_b_proj",
        "kv_b_proj",
    ]
)
"""Column-parallel layers that are divided by whole heads."""

COLUMN_NAMES = QUERY_KEY_VALUE | frozenset(
    [
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "c_fc",
        "fc1",
        "fc_in",
        "lin1",
        "wi",
        "wi_0",
        "wi_1",
        "w1",
        "w3",
        "dense_h_to_4h",
        "intermediate.dense",
    ]
)
ROW_NAMES = frozenset(
    [
        "o_proj",
        "out_proj",
        "c_proj",
        "o",
        "wo",
        "out_lin",
        "down_proj",
        "fc2",
        "fc_out",
        "lin2",
        "w2",
        "dense_4h_to_h",
        "output.dense",
        "attention.dense",
        "self_attention.dense",
    ]
)
LATENT_NAMES = frozenset(["q_a_proj", "kv_a_proj_with_mqa"])
REPLICATED_NAMES = frozenset(["gate", "router", "shared_expert_gate"])
WORDS_NAMES = frozenset(["embed_tokens", "wte", "word_embeddings", "shared", "token_embedding", "embed_in"])
