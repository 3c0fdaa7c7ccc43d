"""Small real architectures with batches that train them: what the tracing tests run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

Sample = tuple[nn.Module, dict[str, torch.Tensor]]


def llama() -> Sample:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        use_cache=False,
    )
    return _language(transformers.LlamaForCausalLM(config))


def gpt2() -> Sample:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=100, n_positions=64, use_cache=False, **ends
    )
    return _language(transformers.GPT2LMHeadModel(config))


def bert() -> Sample:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128
    )
    model, batch = _language(transformers.BertForMaskedLM(config))
    return model, {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def t5() -> Sample:
    config = transformers.T5Config(
        vocab_size=100,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return _language(transformers.T5ForConditionalGeneration(config))


def mixtral() -> Sample:
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        num_local_experts=4,
        use_cache=False,
    )
    return _language(transformers.MixtralForCausalLM(config))


def vit() -> Sample:
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )
    return _vision(transformers.ViTForImageClassification(config))


def swin() -> Sample:
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=10
    )
    return _vision(transformers.SwinForImageClassification(config))


def convnext() -> Sample:
    config = transformers.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, num_labels=10)
    return _vision(transformers.ConvNextForImageClassification(config))


def resnet() -> Sample:
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=10
    )
    return _vision(transformers.ResNetForImageClassification(config))


def clip() -> Sample:
    text = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "eos_token_id": 99}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
    heads = {"num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**text, **heads}, vision_config={**vision, **heads}, projection_dim=16
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).train()
    ids = torch.randint(0, 99, (2, 16))
    return model, {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}  # type: ignore[dict-item]


class ConvNet(nn.Module):
    """Residual blocks of convolution, batch norm and ReLU."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)))


def conv_net() -> Sample:
    torch.manual_seed(0)
    return ConvNet().train(), {"x": torch.randn(2, 3, 32, 32), "y": torch.randint(0, 10, (2,))}


TRANSFORMERS: dict[str, Callable[[], Sample]] = {"llama": llama, "gpt2": gpt2, "vit": vit, "bert": bert, "t5": t5}
ALL: dict[str, Callable[[], Sample]] = {
    **TRANSFORMERS,
    "clip": clip,
    "mixtral": mixtral,
    "swin": swin,
    "convnext": convnext,
    "resnet": resnet,
    "conv net": conv_net,
}


def _language(model: nn.Module, length: int = 32) -> Sample:
    torch.manual_seed(0)
    ids = torch.randint(1, 100, (2, length))
    return model.train(), {"input_ids": ids, "labels": ids}


def _vision(model: nn.Module) -> Sample:
    torch.manual_seed(0)
    return model.train(), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))}


def loss_of(output: Any) -> torch.Tensor:
    """What the step calls backward on."""
    return getattr(output, "loss", output)


class Block(nn.Module):
    """A residual two-layer block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks in a row; ``calls`` says which block runs when."""

    def __init__(self, width: int = 8, depth: int = 2, calls: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.calls:
            x = self.blocks[index](x)
        return x.square().mean()
