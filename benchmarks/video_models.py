"""Video models of diffusers and transformers under a plan: peaks, and whether gradients are equal bit for bit.

Tiny sizes with random weights, on a CPU. Run with ``python -m benchmarks.video_models``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import plimsoll

SHARE = 0.1
"""A budget is the floor plus this share of the way to the unmanaged peak."""
Built = tuple[torch.nn.Module, dict[str, Any]]


def ltx() -> Built:
    from diffusers import LTXVideoTransformer3DModel

    heads = {"num_attention_heads": 4, "attention_head_dim": 16, "cross_attention_dim": 64}
    model = LTXVideoTransformer3DModel(in_channels=8, out_channels=8, num_layers=3, caption_channels=32, **heads)
    sizes = {"num_frames": 4, "height": 8, "width": 8}
    text = {"encoder_hidden_states": torch.randn(1, 16, 32), "encoder_attention_mask": torch.ones(1, 16)}
    return model, {"hidden_states": torch.randn(1, 256, 8), "timestep": torch.tensor([500.0]), **text, **sizes}


def wan() -> Built:
    from diffusers import WanTransformer3DModel

    heads = {"num_attention_heads": 4, "attention_head_dim": 16, "text_dim": 32, "freq_dim": 32, "ffn_dim": 256}
    model = WanTransformer3DModel(patch_size=(1, 2, 2), in_channels=8, out_channels=8, num_layers=3, **heads)
    text = {"encoder_hidden_states": torch.randn(1, 16, 32)}
    return model, {"hidden_states": torch.randn(1, 8, 4, 16, 16), "timestep": torch.tensor([500]), **text}


def cogvideox() -> Built:
    from diffusers import CogVideoXTransformer3DModel

    sizes = {"sample_width": 16, "sample_height": 16, "sample_frames": 9, "max_text_seq_length": 16}
    heads = {"num_attention_heads": 4, "attention_head_dim": 16, "time_embed_dim": 32, "text_embed_dim": 32}
    model = CogVideoXTransformer3DModel(in_channels=8, out_channels=8, num_layers=3, **heads, **sizes)
    text = {"encoder_hidden_states": torch.randn(1, 16, 32)}
    return model, {"hidden_states": torch.randn(1, 3, 8, 16, 16), "timestep": torch.tensor([500]), **text}


def video_mae() -> Built:
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
    model = VideoMAEForVideoClassification(VideoMAEConfig(image_size=64, num_frames=8, num_labels=10, **sizes))
    return model, {"pixel_values": torch.randn(2, 8, 3, 64, 64), "labels": torch.tensor([1, 2])}


def mean_square(output: Any) -> torch.Tensor:
    """The squared error of predicted noise, against zero."""
    return (output.sample**2).mean()


def row_of(make: Callable[[], Built]) -> str:
    """Plan and verify one model. Return a row of the table."""
    torch.manual_seed(0)
    model, batch = make()
    loss = None if make is video_mae else mean_square
    keeping = plimsoll.plan(model, batch, loss=loss)
    floor, unmanaged = keeping.floor_bytes, keeping.predicted_peak_bytes
    plan = plimsoll.plan(model, batch, loss=loss, budget=int(floor + SHARE * (unmanaged - floor)))
    receipt = plimsoll.verify(model, batch, plan, loss=loss)
    sizes = " | ".join(f"{bytes_ / 2**20:.1f}" for bytes_ in (unmanaged, floor, plan.predicted_peak_bytes))
    return f"| {type(model).__name__} | {sizes} | {receipt.verdict} |"


if __name__ == "__main__":
    print("| model | unmanaged MiB | floor MiB | plan MiB | verdict |\n| --- | --: | --: | --: | --- |")
    for make in (ltx, wan, cogvideox, video_mae):
        print(row_of(make), flush=True)
