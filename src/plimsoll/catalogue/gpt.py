"""Decoders of the GPT kind: GPT-2, GPT-3, and the models that Megatron was measured on. Dropout is on, as in training."""

from __future__ import annotations

from plimsoll.catalogue.model import TINY, CatalogueModel, catalogue_model

_GPT_2 = (
    "Radford et al. 2019, Language Models are Unsupervised Multitask Learners, table 2; model card openai-community/{}"
)
_MEGATRON = "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, table 3"


def _gpt_2(name: str, card: str, hidden: int, layers: int, heads: int) -> CatalogueModel:
    return catalogue_model(
        name,
        "GPT2LMHeadModel",
        batch=1,
        sequence=1024,
        source=_GPT_2.format(card),
        model_type="gpt2",
        vocab_size=50257,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        n_positions=1024,
        bos_token_id=50256,
        eos_token_id=50256,
    )


def _large(
    name: str, source: str, hidden: int, layers: int, heads: int, vocabulary: int, *, batch: int = 1
) -> CatalogueModel:
    return catalogue_model(
        name,
        "GPT2LMHeadModel",
        batch=batch,
        sequence=2048,
        source=source,
        note="its GELU is one kernel (the tanh form); its blocks are GPT-2's, whose attention takes no dense and sparse turns",
        model_type="gpt2",
        torch_dtype="bfloat16",
        vocab_size=vocabulary,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        n_positions=2048,
        activation_function="gelu_pytorch_tanh",
        bos_token_id=0,
        eos_token_id=0,
    )


MODELS = (
    catalogue_model(
        "gpt2-tiny",
        "GPT2LMHeadModel",
        batch=4,
        sequence=256,
        source=f"{TINY}; dropout on",
        model_type="gpt2",
        vocab_size=512,
        n_embd=256,
        n_layer=4,
        n_head=4,
        n_positions=1024,
        bos_token_id=0,
        eos_token_id=0,
    ),
    _gpt_2("gpt2-124m", "gpt2", 768, 12, 12),
    _gpt_2("gpt2-xl", "gpt2-xl", 1600, 48, 25),
    _large(
        "gpt3-175b",
        "Brown et al. 2020, Language Models are Few-Shot Learners, table 2.1",
        12288,
        96,
        96,
        50257,
    ),
    _large("megatron-22b", _MEGATRON, 6144, 48, 64, 51200, batch=4),
    _large("megatron-530b", _MEGATRON, 20480, 105, 128, 51200),
    _large("megatron-1t", _MEGATRON, 25600, 128, 160, 51200),
)
