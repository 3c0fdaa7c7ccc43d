"""A CLIP of transformers' own code with random weights: two towers of blocks and a contrastive loss."""

from __future__ import annotations

from typing import Any

from transformers import CLIPConfig, CLIPModel

from benchmarks.models.data import images_and_labels, text_ids

_TEXT_LENGTH = 77
_SIZES = {
    "tiny": ({"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2}, 2),
    "small": ({"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 3}, 4),
    "cpu": ({"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}, 8),
    "h200": ({"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}, 256),
}


def build(size: str) -> tuple[Any, dict[str, Any], Any]:
    shape, batch = _SIZES[size]
    config = CLIPConfig(
        text_config={
            **shape, "vocab_size": 258, "max_position_embeddings": _TEXT_LENGTH,
            "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 0,
        },
        vision_config={**shape, "image_size": 224, "patch_size": 16},
        projection_dim=256,
        attn_implementation="sdpa",
    )  # fmt: skip
    images, _ = images_and_labels(batch, 224)
    ids = text_ids(batch, _TEXT_LENGTH)
    ids[:, 0], ids[:, -1] = 256, 257
    return (
        CLIPModel(config),
        {"input_ids": ids, "pixel_values": images, "return_loss": True},
        lambda output: output.loss,
    )
