"""A vision transformer of transformers' own code with random weights and dropout on."""

from __future__ import annotations

from typing import Any

from transformers import ViTConfig, ViTForImageClassification

from benchmarks.models.data import images_and_labels

_SIZES = {
    "tiny": ({"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}, 2),
    "small": ({"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 3}, 4),
    "cpu": ({"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 6}, 8),
    "h200": ({"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}, 256),
}


def build(size: str) -> tuple[Any, dict[str, Any], Any]:
    shape, batch = _SIZES[size]
    config = ViTConfig(
        **shape, image_size=224, patch_size=16, num_labels=10,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, attn_implementation="sdpa",
    )  # fmt: skip
    images, labels = images_and_labels(batch, 224)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": labels}, lambda output: output.loss
