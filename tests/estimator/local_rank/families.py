"""Tiny models of the families that tensor parallelism knows, with batches of source text that train them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import zoo
from steps import Net

Sample = tuple[nn.Module, dict[str, Any]]

WORDS = 96
_TEXT = inspect.getsource(textwrap).encode()


def text(batch: int = 2, sequence: int = 16) -> torch.Tensor:
    """Characters of Python's own source as tokens below ``WORDS``."""
    return torch.tensor(list(_TEXT[: batch * sequence])).remainder(WORDS).view(batch, sequence)


def labelled(batch: int = 2, sequence: int = 16) -> dict[str, torch.Tensor]:
    """A text that is its own label."""
    return {"input_ids": text(batch, sequence), "labels": text(batch, sequence)}


def narrow(name: str, **changes: Any) -> nn.Module:
    """A model of the zoo that reads ``text``, in bf16 and without memory."""
    with torch.device("meta"):
        return zoo.build(name, vocab_size=WORDS, **changes).bfloat16()


def _pixels(size: int) -> torch.Tensor:
    return text(2, 3 * size * size).view(2, 3, size, size) / WORDS


_LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": WORDS, "use_cache": False}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
_ROUTED = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}


def llama(keys: int = 4) -> Sample:
    sizes = {"intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": keys, "vocab_size": WORDS}
    return zoo.build("llama", **sizes), labelled()


def qwen3() -> Sample:
    config = transformers.Qwen3Config(**_LLAMA, **_HEADS, head_dim=8)
    return transformers.Qwen3ForCausalLM(config).train(), labelled()


def mixtral() -> Sample:
    return zoo.build("mixtral", **_LLAMA, **_HEADS, experts_implementation="grouped_mm"), labelled()


def qwen3_moe() -> Sample:
    config = transformers.Qwen3MoeConfig(**_LLAMA, **_HEADS, **_ROUTED, head_dim=8, num_experts=8, mlp_only_layers=[0])
    return transformers.Qwen3MoeForCausalLM(config).train(), labelled()


def deepseek(query_rank: int | None = 16) -> Sample:
    experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    sizes = {**_LLAMA, **_HEADS, **_ROUTED, **experts, **latent}
    config = transformers.DeepseekV3Config(**sizes, q_lora_rank=query_rank)
    return transformers.DeepseekV3ForCausalLM(config).train(), labelled()


def gpt2(words: int = WORDS) -> Sample:
    return zoo.build("gpt2", vocab_size=words), labelled()


def vit() -> Sample:
    sizes = {"intermediate_size": 48, "image_size": 24, "patch_size": 8, "num_labels": 2}
    model = zoo.build("vit", **sizes, problem_type="single_label_classification")
    return model, {"pixel_values": _pixels(24), "labels": torch.tensor([0, 1])}


def clip() -> Sample:
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = zoo.build("clip", vision_config={**tower, "image_size": 24, "patch_size": 8})
    ids = text().remainder(zoo.VOCABULARY)
    return model, {"input_ids": ids, "pixel_values": _pixels(24), "return_loss": True}


def whisper() -> Sample:
    both = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
    towers = {f"{tower}_{name}": size for tower in ("encoder", "decoder") for name, size in both.items()}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8}
    config = transformers.WhisperConfig(vocab_size=WORDS, d_model=32, use_cache=False, **towers, **ends, **lengths)
    features = text(2, 8 * 32).view(2, 8, 32) / WORDS
    model = transformers.WhisperForConditionalGeneration(config).train()
    return model, {"input_features": features, "labels": text(2, 8)}


FAMILIES: dict[str, Callable[[], Sample]] = {
    "llama": llama,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3-moe": qwen3_moe,
    "deepseek": deepseek,
    "gpt2": gpt2,
    "bert": lambda: (zoo.build("bert", intermediate_size=48, vocab_size=WORDS), labelled()),
    "vit": vit,
    "clip": clip,
    "t5": lambda: (zoo.build("t5", d_ff=48, vocab_size=WORDS), labelled()),
    "whisper": whisper,
}
ENCODER_DECODERS = ("t5", "whisper")
EXPERTS = ("mixtral", "qwen3-moe", "deepseek")


def block(first: str, second: str, lay: Callable[..., torch.Tensor] = lambda x: x) -> Net:
    """An attention-free block with layers of any names; ``lay`` may give its input another shape."""

    def run(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = lay(x)
        return x + net.get_submodule(second)(net.get_submodule(first)(x).relu())

    return Net(run, **{first: nn.Linear(8, 16), second: nn.Linear(16, 8)})


def plain(first: str = "fc1", second: str = "fc2") -> nn.Module:
    """A stack of blocks without configuration, embedding or head."""
    return nn.Sequential(block(first, second), block(first, second))
