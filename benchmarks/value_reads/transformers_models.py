"""Models of transformers whose code reads values of tensors, small and with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BigBirdConfig,
    BigBirdForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeformableDetrConfig,
    DeformableDetrForObjectDetection,
    DetrConfig,
    DetrForObjectDetection,
    GptOssConfig,
    GptOssForCausalLM,
    LongformerConfig,
    LongformerForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ReformerConfig,
    ResNetConfig,
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrResNetConfig,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)
from transformers.models.reformer.modeling_reformer import ChunkReformerFeedForward, ReformerAttention
from transformers.models.rt_detr.modeling_rt_detr import RTDetrCSPRepLayer, RTDetrDecoderLayer, RTDetrEncoderLayer

from benchmarks.value_reads.stack import Batch, Kind, Stack, generator

_VOCABULARY, _TOKENS = 128, 128
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": _TOKENS + 2,
}
_CHOSEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
_DETECTOR: dict[str, Any] = {
    "d_model": 64,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_layers": 3,
    "num_queries": 30,
    "num_labels": 20,
}


def _eager(kind: Any, config: Any) -> nn.Module:
    config._experts_implementation = "eager"  # a loop over the experts that got rows
    config.use_cache = False
    model: nn.Module = kind(config)
    return model


def _mixtral() -> nn.Module:
    return _eager(MixtralForCausalLM, MixtralConfig(**_SIZES, num_key_value_heads=2, num_local_experts=6))


def _qwen3_moe() -> nn.Module:
    config = Qwen3MoeConfig(**_SIZES, **_CHOSEN, num_key_value_heads=2, moe_intermediate_size=128)
    return _eager(Qwen3MoeForCausalLM, config)


def _olmoe() -> nn.Module:
    return _eager(OlmoeForCausalLM, OlmoeConfig(**_SIZES, **_CHOSEN))


def _deepseek_v3() -> nn.Module:
    config = DeepseekV3Config(
        **_SIZES,
        num_key_value_heads=4,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )
    return _eager(DeepseekV3ForCausalLM, config)


def _gpt_oss() -> nn.Module:
    config = GptOssConfig(**_SIZES, num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2)
    return _eager(GptOssForCausalLM, config)


def _switch() -> nn.Module:
    config = SwitchTransformersConfig(
        vocab_size=_VOCABULARY, d_model=128, d_kv=32, d_ff=256, num_heads=4, num_experts=4, expert_capacity=24,
        num_layers=4, num_sparse_encoder_layers=2, num_decoder_layers=4, num_sparse_decoder_layers=2, decoder_start_token_id=0,
    )  # fmt: skip
    return _eager(SwitchTransformersForConditionalGeneration, config)


def _longformer() -> nn.Module:
    return LongformerForMaskedLM(LongformerConfig(**_SIZES, attention_window=16, pad_token_id=1))


def _big_bird() -> nn.Module:
    config = BigBirdConfig(**_SIZES, block_size=8, num_random_blocks=2, attention_type="block_sparse")
    return BigBirdForMaskedLM(config)


def _wav2vec2() -> nn.Module:
    config = Wav2Vec2Config(
        vocab_size=32, hidden_size=128, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, layerdrop=0.2,
        conv_dim=(32, 32), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, mask_time_prob=0.2,
        mask_time_length=4, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    return Wav2Vec2ForCTC(config)


class _ReformerLayer(nn.Module):
    """A layer of Reformer with ordinary residuals. Its own model has reversible ones, which save nothing to recompute."""

    def __init__(self, config: ReformerConfig, number: int) -> None:
        super().__init__()
        self.attention = ReformerAttention(config, number)
        self.feed_forward = ChunkReformerFeedForward(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(hidden_states=x).hidden_states
        return x + self.feed_forward(x)


def _reformer() -> nn.Module:
    config = ReformerConfig(
        hidden_size=128, feed_forward_size=256, num_attention_heads=4, attention_head_size=32, num_hashes=2,
        attn_layers=["lsh"] * 4, lsh_attn_chunk_length=16, num_buckets=16, max_position_embeddings=_TOKENS,
        lsh_attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return Stack(_ReformerLayer(config, number) for number in range(4))


class _Detection(nn.Module):
    """A detector of transformers, whose batch has padded boxes and their numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def gradient_checkpointing_enable(self, options: Mapping[str, bool]) -> None:
        self.model.gradient_checkpointing_enable(options)  # type: ignore[operator]

    def forward(
        self, pixel_values: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        labels = [
            {"boxes": box[:count], "class_labels": kind[:count]}
            for box, kind, count in zip(boxes, classes, counts.tolist(), strict=True)
        ]
        return self.model(pixel_values=pixel_values, labels=labels).loss  # type: ignore[no-any-return]


class _RealTimeDetection(_Detection):
    """RT-DETR. Its class does not checkpoint by itself: the layers of its encoder and decoder are checkpointed here."""

    def gradient_checkpointing_enable(self, options: Mapping[str, bool]) -> None:
        for module in self.model.modules():
            if isinstance(module, (RTDetrEncoderLayer, RTDetrDecoderLayer, RTDetrCSPRepLayer)):
                module.forward = partial(checkpoint, module.forward, **options)  # type: ignore[method-assign]


def _resnet(features: list[str]) -> ResNetConfig:
    return ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], layer_type="basic", out_features=features
    )


def _detr() -> nn.Module:
    config = DetrConfig(
        **_DETECTOR, encoder_layers=3, backbone_config=_resnet(["stage4"]), auxiliary_loss=True, decoder_layerdrop=0.1
    )
    return _Detection(DetrForObjectDetection(config))


def _deformable_detr() -> nn.Module:
    backbone = _resnet(["stage2", "stage3", "stage4"])
    config = DeformableDetrConfig(
        **_DETECTOR, encoder_layers=3, backbone_config=backbone, num_feature_levels=3, with_box_refine=True, two_stage=True,
        two_stage_num_proposals=30, disable_custom_kernels=True,
    )  # fmt: skip
    return _Detection(DeformableDetrForObjectDetection(config))


def _rt_detr() -> nn.Module:
    backbone = RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = RTDetrConfig(
        **_DETECTOR, backbone_config=backbone, encoder_hidden_dim=64, encoder_in_channels=[32, 64, 128],
        decoder_in_channels=[64, 64, 64], num_denoising=8,
    )  # fmt: skip
    return _RealTimeDetection(RTDetrForObjectDetection(config))


def _words(step: int) -> Batch:
    words = torch.randint(2, _VOCABULARY, (4, _TOKENS), generator=generator(step))
    return {"input_ids": words, "labels": words}


def _marked_words(step: int) -> Batch:
    words = _words(step)
    marks = torch.arange(_TOKENS)[None] < torch.tensor([1 + step % 5, 3, 2, 4])[:, None]
    return {**words, "attention_mask": torch.ones_like(words["input_ids"]), "global_attention_mask": marks.long()}


def _rows(step: int) -> Batch:
    return {"x": torch.randn(4, _TOKENS, 128, generator=generator(step))}


def _sounds(step: int) -> Batch:
    source = generator(step)
    labels = torch.randint(1, 32, (2, 12), generator=source)
    labels[1, 5 + step % 7 :] = -100
    return {"input_values": torch.randn(2, 1280, generator=source), "labels": labels}


def _pictures(step: int) -> Batch:
    source = generator(step)
    return {
        "pixel_values": torch.randn(2, 3, 128, 128, generator=source),
        "boxes": torch.rand(2, 20, 4, generator=source) * 0.5 + 0.2,
        "classes": torch.randint(0, 20, (2, 20), generator=source),
        "counts": torch.randint(1, 21, (2,), generator=source),
    }


KINDS = (
    Kind(name="Mixtral", make=_mixtral, batch_of=_words),
    Kind(name="Qwen3-MoE", make=_qwen3_moe, batch_of=_words),
    Kind(name="OLMoE", make=_olmoe, batch_of=_words),
    Kind(name="DeepSeek-V3", make=_deepseek_v3, batch_of=_words),
    Kind(name="GPT-OSS", make=_gpt_oss, batch_of=_words),
    Kind(name="Switch", make=_switch, batch_of=_words),
    Kind(name="Longformer", make=_longformer, batch_of=_marked_words),
    Kind(name="BigBird", make=_big_bird, batch_of=_words),
    Kind(name="Reformer", make=_reformer, batch_of=_rows),
    Kind(name="Wav2Vec2", make=_wav2vec2, batch_of=_sounds),
    Kind(name="DETR", make=_detr, batch_of=_pictures),
    Kind(name="Deformable DETR", make=_deformable_detr, batch_of=_pictures),
    Kind(name="RT-DETR", make=_rt_detr, batch_of=_pictures),
)
