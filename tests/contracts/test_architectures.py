"""Real architectures, small: everything that can be dropped is dropped, and no bit changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from contracts.harness import Report, differences, manage, train
from plimsoll.artifacts.decision import Engine

transformers = pytest.importorskip("transformers")

HIDDEN = 32
TOKENS = 12
LEAST_SHARE = {"llama": 0.9, "gpt2": 0.9, "vit": 0.9}


def _text(vocabulary: int = 64) -> dict[str, torch.Tensor]:
    tokens = torch.randint(2, vocabulary, (2, TOKENS))
    return {"input_ids": tokens, "labels": tokens}


def _image(size: int = 16) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(0, 3, (2,))}


def llama() -> tuple[nn.Module, Callable[[], dict[str, torch.Tensor]]]:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), _text


def gpt2():
    config = transformers.GPT2Config(n_embd=HIDDEN, n_layer=2, n_head=4, vocab_size=64, n_positions=TOKENS)
    config.use_cache = False
    return transformers.GPT2LMHeadModel(config), _text


def vit():
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config), _image


def bert():
    config = transformers.BertConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=TOKENS,
    )
    return transformers.BertForMaskedLM(config), _text


def t5():
    config = transformers.T5Config(
        d_model=HIDDEN,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=64,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), _text


def clip():
    config = transformers.CLIPConfig(
        text_config={
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 64,
            "max_position_embeddings": TOKENS,
            "eos_token_id": 1,
        },
        vision_config={
            "hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        projection_dim=16,
    )

    def batch():
        tokens = torch.randint(2, 64, (2, TOKENS))
        return {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}

    return transformers.CLIPModel(config), batch


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config), lambda: _image(32)


def mixtral():
    config = transformers.MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=64,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config), _text


def step(batch: Callable[[], dict[str, torch.Tensor]], *, autocast: bool = False):
    def run(model: nn.Module, index: int):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch()).loss
        loss.backward()
        return loss

    return run


def managed_run(build, *, autocast: bool = False, **settings) -> Report:
    torch.manual_seed(0)
    plain, batch = build()
    plain.train()
    model = copy.deepcopy(plain)
    expected = train(plain, step(batch, autocast=autocast), 2)
    with warnings.catch_warnings(), manage(model, **settings) as handle:
        warnings.simplefilter("ignore")
        found = train(model, step(batch, autocast=autocast), 2)
        report = Report(handle.outcomes(), handle.obstacles())
    assert differences(expected, found) == []
    return report


MODELS = [llama, gpt2, vit, bert, t5, clip, resnet, mixtral]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_everything_droppable_is_dropped_and_every_bit_stays(build):
    report = managed_run(build)
    if build is mixtral:
        assert Engine.RECIPE in report.engines or Engine.RERUN in report.engines
        return
    assert report.engines == {Engine.RECIPE}
    share = report.dropped_share
    print(f"{build.__name__}: {share:.1%} of the activations that blocks save are dropped")
    assert share >= LEAST_SHARE.get(build.__name__, 0.8), report.obstacles


@pytest.mark.parametrize("build", [llama, gpt2, t5], ids=lambda build: build.__name__)
def test_dropped_boundaries_keep_every_bit(build):
    managed_run(build, boundaries=(1, 2, 3))


@pytest.mark.parametrize("build", [llama, gpt2, vit], ids=lambda build: build.__name__)
def test_mixed_precision_keeps_every_bit(build):
    assert managed_run(build, autocast=True).dropped_share >= 0.9
