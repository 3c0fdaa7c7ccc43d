"""Tiny models of the families that tensor parallelism knows, with batches of source text that train them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

Sample = tuple[nn.Module, dict[str, Any]]

WORDS = 96
_TEXT = inspect.getsource(textwrap).encode()


def text(batch: int = 2, sequence: int = 16) -> torch.Tensor:
    """Characters of Python's own source as tokens below ``WORDS``."""
    return torch.tensor(list(_TEXT[: batch * sequence])).remainder(WORDS).view(batch, sequence)


def _language(model: nn.Module) -> Sample:
    return model.train(), {"input_ids": text(), "labels": text()}


_LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": WORDS, "use_cache": False}


def llama(keys: int = 4) -> Sample:
    config = transformers.LlamaConfig(**_LLAMA, num_attention_heads=8, num_key_value_heads=keys)
    return _language(transformers.LlamaForCausalLM(config))


def qwen3() -> Sample:
    config = transformers.Qwen3Config(**_LLAMA, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    return _language(transformers.Qwen3ForCausalLM(config))


def mixtral() -> Sample:
    config = transformers.MixtralConfig(
        **_LLAMA, num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, experts_implementation="grouped_mm"
    )
    return _language(transformers.MixtralForCausalLM(config))


def qwen3_moe() -> Sample:
    config = transformers.Qwen3MoeConfig(
        **_LLAMA,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        experts_implementation="grouped_mm",
    )
    return _language(transformers.Qwen3MoeForCausalLM(config))


def deepseek(query_rank: int | None = 16) -> Sample:
    config = transformers.DeepseekV3Config(
        **_LLAMA,
        num_attention_heads=4,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=query_rank,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        experts_implementation="grouped_mm",
    )
    return _language(transformers.DeepseekV3ForCausalLM(config))


def gpt2(words: int = WORDS) -> Sample:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=words, n_positions=64, use_cache=False, **ends
    )
    return _language(transformers.GPT2LMHeadModel(config))


def bert() -> Sample:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    return _language(transformers.BertForMaskedLM(config))


def vit() -> Sample:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=24,
        patch_size=8,
        problem_type="single_label_classification",
    )
    pixels = text(2, 3 * 24 * 24).view(2, 3, 24, 24) / WORDS
    return transformers.ViTForImageClassification(config).train(), {
        "pixel_values": pixels,
        "labels": torch.tensor([0, 1]),
    }


def clip() -> Sample:
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={
            **tower,
            "vocab_size": WORDS,
            "max_position_embeddings": 16,
            "eos_token_id": 95,
            "bos_token_id": 94,
        },
        vision_config={**tower, "image_size": 24, "patch_size": 8},
        projection_dim=16,
    )
    pixels = text(2, 3 * 24 * 24).view(2, 3, 24, 24) / WORDS
    return transformers.CLIPModel(config).train(), {"input_ids": text(), "pixel_values": pixels, "return_loss": True}


def t5() -> Sample:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return _language(transformers.T5ForConditionalGeneration(config))


def whisper() -> Sample:
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    features = text(2, 8 * 32).view(2, 8, 32) / WORDS
    return transformers.WhisperForConditionalGeneration(config).train(), {
        "input_features": features,
        "labels": text(2, 8),
    }


FAMILIES: dict[str, Callable[[], Sample]] = {
    "llama": llama,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3-moe": qwen3_moe,
    "deepseek": deepseek,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "clip": clip,
    "t5": t5,
    "whisper": whisper,
}
ENCODER_DECODERS = ("t5", "whisper")
EXPERTS = ("mixtral", "qwen3-moe", "deepseek")


class Block(nn.Module):
    """An attention-free block with layers of any names."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.add_module(first, nn.Linear(8, 16))
        self.add_module(second, nn.Linear(16, 8))
        self._names = (first, second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.get_submodule(name) for name in self._names)
        out: torch.Tensor = second(first(x).relu())
        return x + out


def plain(first: str = "fc1", second: str = "fc2") -> nn.Module:
    """A stack of blocks without configuration, embedding or head."""
    return nn.Sequential(Block(first, second), Block(first, second))
