"""Dense decoders of the Llama kind: Llama 2, Llama 3, Qwen3."""

from __future__ import annotations

from plimsoll.catalogue.model import TINY, CatalogueModel, catalogue_model

_LLAMA_2 = "Touvron et al. 2023, Llama 2, table 1 and section 2.2; meta-llama/Llama-2 model cards"
_LLAMA_3 = "Grattafiori et al. 2024, The Llama 3 Herd of Models, table 3"
_QWEN_3 = "Yang et al. 2025, Qwen3 Technical Report, table 1; model card {}"


def _llama_2(name: str, hidden: int, intermediate: int, layers: int, heads: int) -> CatalogueModel:
    return catalogue_model(
        name,
        "LlamaForCausalLM",
        batch=1,
        sequence=4096,
        source=_LLAMA_2,
        model_type="llama",
        torch_dtype="bfloat16",
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )


def _llama_3(name: str, hidden: int, intermediate: int, layers: int, heads: int) -> CatalogueModel:
    return catalogue_model(
        name,
        "LlamaForCausalLM",
        batch=1,
        sequence=8192,
        source=_LLAMA_3,
        model_type="llama",
        torch_dtype="bfloat16",
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    )


def _qwen_3(
    name: str, card: str, hidden: int, intermediate: int, layers: int, heads: int, *, is_tied: bool = False
) -> CatalogueModel:
    return catalogue_model(
        name,
        "Qwen3ForCausalLM",
        batch=1,
        sequence=4096,
        source=_QWEN_3.format(card),
        model_type="qwen3",
        torch_dtype="bfloat16",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=is_tied,
    )


MODELS = (
    catalogue_model(
        "llama-tiny",
        "LlamaForCausalLM",
        batch=4,
        sequence=256,
        source=TINY,
        model_type="llama",
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    ),
    catalogue_model(
        "qwen3-tiny",
        "Qwen3ForCausalLM",
        batch=4,
        sequence=256,
        source=TINY,
        model_type="qwen3",
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    ),
    _llama_2("llama-2-7b", 4096, 11008, 32, 32),
    _llama_2("llama-2-13b", 5120, 13824, 40, 40),
    _llama_3("llama-3-8b", 4096, 14336, 32, 32),
    _llama_3("llama-3-70b", 8192, 28672, 80, 64),
    _llama_3("llama-3-405b", 16384, 53248, 126, 128),
    _qwen_3("qwen3-0.6b", "Qwen/Qwen3-0.6B", 1024, 3072, 28, 16, is_tied=True),
    _qwen_3("qwen3-8b", "Qwen/Qwen3-8B", 4096, 12288, 36, 32),
    _qwen_3("qwen3-32b", "Qwen/Qwen3-32B", 5120, 25600, 64, 64),
)
