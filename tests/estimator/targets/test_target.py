"""A target in words in, a model and a batch that trains it out: families, sizes, precision, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from long_cases import some
from plimsoll.artifacts.job import Precision
from plimsoll.errors import InvalidTarget
from plimsoll.estimator.catalogue.models import known_models
from plimsoll.estimator.targets import recipe
from plimsoll.estimator.targets.recipe import find_recipe
from plimsoll.estimator.targets.target import Target, TargetOptions, load_target

TINY_NAMES = [name for name in known_models() if name.endswith("-tiny")]
META = TargetOptions(is_meta=True)


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    def write(fields: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return str(tmp_path / "config.json")

    return write


def written(name: str) -> dict[str, Any]:
    """The entry's configuration as its library would have written it."""
    known = find_recipe(name)
    fields = dict(known.fields)
    return fields | ({"_class_name": known.architecture} if known.library == "diffusers" else {})


def loss_of(target: Target) -> torch.Tensor:
    with target.autocast():
        output = target.model(**target.batch)
    return output if isinstance(output, torch.Tensor) else output.loss


@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_family_trains_on_its_batch(name: str):
    target = load_target(name, TargetOptions(batch=2, sequence=16 if known_models()[name].sequence else None))
    loss = loss_of(target)
    loss.backward()
    assert torch.isfinite(loss)
    assert target.model.training
    assert all(p.grad is not None for p in target.model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["mixtral-tiny", "deepseek-v3-tiny", "clip-tiny"])
@pytest.mark.parametrize("precision", list(Precision))
def test_every_precision_trains_on_a_cpu(name: str, precision: Precision):
    target = load_target(name, TargetOptions(batch=2, sequence=16, precision=precision))
    assert {str(p.dtype) for p in target.model.parameters()} == {f"torch.{precision.parameter_dtype}"}
    loss = loss_of(target)
    loss.backward()
    assert torch.isfinite(loss)
    assert not torch.is_autocast_enabled("cpu")


def test_mixed_precision_computes_under_autocast_and_keeps_parameters_whole():
    target = load_target("llama-tiny", TargetOptions(batch=1, sequence=8, precision=Precision.BF16_MIXED))
    with target.autocast():
        logits = target.model(input_ids=target.batch["input_ids"]).logits
    assert logits.dtype is torch.bfloat16
    assert next(target.model.parameters()).dtype is torch.float32


@pytest.mark.parametrize("name", [name for name in TINY_NAMES if name != "mamba2-tiny"])
def test_a_configuration_without_a_class_gets_the_same_model(name: str, config_file: Callable[[dict[str, Any]], str]):
    built = load_target(config_file(written(name)), META)
    known = load_target(name, META)
    shapes = {key: tuple(value.shape) for key, value in known.model.state_dict().items()}
    assert {key: tuple(value.shape) for key, value in built.model.state_dict().items()} == shapes
    assert built.batch.keys() == known.batch.keys()


def test_without_memory_only_integers_have_values():
    target = load_target("clip-tiny", META)
    assert all(p.is_meta for p in target.model.parameters())
    assert target.batch["pixel_values"].is_meta
    assert not target.batch["input_ids"].is_meta


@pytest.mark.parametrize("name", ["vit-tiny", "sd-unet-tiny"])
def test_a_sequence_is_refused_where_samples_have_no_text(name: str):
    with pytest.raises(InvalidTarget, match="--seq would not have an effect"):
        load_target(name, TargetOptions(is_meta=True, sequence=128))


@pytest.mark.parametrize(("name", "longest"), [("gpt2-tiny", 1024), ("bert-tiny", 256), ("clip-tiny", 32)])
def test_more_tokens_than_learned_positions_are_refused(name: str, longest: int):
    assert load_target(name, TargetOptions(is_meta=True, sequence=longest)).batch["input_ids"].shape[1] == longest
    with pytest.raises(InvalidTarget, match=f"at most {longest:,} tokens") as caught:
        load_target(name, TargetOptions(is_meta=True, sequence=longest + 1))
    assert f"--seq {longest}" in caught.value.next


def test_rotary_positions_have_no_end():
    assert load_target("llama-tiny", TargetOptions(is_meta=True, sequence=4096)).batch["input_ids"].shape == (4, 4096)


@pytest.mark.parametrize(
    ("target", "found", "close"),
    [
        ("llama-3-80b", "is not a target", "llama-3-8b"),
        ("mixtral", "is not a target", "mixtral-tiny"),
        ("Qwen3-9B", "is not a target", "qwen3-8b"),
        ({"model_type": "lama"}, "model_type 'lama'", "llama"),
        ({"model_type": "llama", "architectures": ["LlamaForCasualLM"]}, "'LlamaForCasualLM'", "LlamaForCausalLM"),
        ({"_class_name": "UNet2DConditionalModel"}, "diffusers class UNet2DConditionalModel", "UNet2DConditionModel"),
    ],
)
def test_an_unknown_name_or_architecture_shows_the_closest(
    target: str | dict[str, Any], found: str, close: str, config_file: Callable[[dict[str, Any]], str]
):
    with pytest.raises(InvalidTarget, match=found) as caught:
        load_target(target if isinstance(target, str) else config_file(target), META)
    assert close in caught.value.why + caught.value.next


def test_a_configuration_that_makes_no_sense_is_refused_with_the_reason(config_file: Callable[[dict[str, Any]], str]):
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": "wide"}
    with pytest.raises(InvalidTarget, match="cannot build 'LlamaForCausalLM'") as caught:
        load_target(config_file(fields), META)
    assert "hidden_size" in caught.value.why
    assert "'wide'" in caught.value.why
    assert "\n" not in caught.value.why


def test_a_model_without_a_known_batch_is_refused(config_file: Callable[[dict[str, Any]], str]):
    fields = {**written("bert-tiny"), "architectures": ["BertModel"]}
    with pytest.raises(InvalidTarget, match="Plimsoll cannot make a batch for BertModel"):
        load_target(config_file(fields), META)


def test_a_quantized_checkpoint_is_built_unquantized_and_says_so(config_file: Callable[[dict[str, Any]], str]):
    fields = {**written("llama-tiny"), "quantization_config": {"quant_method": "fp8"}}
    target = load_target(config_file(fields), META)
    assert any("quantization_config" in note for note in target.notes)


def linear_in_bf16() -> tuple[torch.nn.Module, torch.Tensor]:
    return torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.ones(2, 4)


def test_a_precision_must_be_that_of_a_functions_parameters():
    name = f"{__name__}:linear_in_bf16"
    for precision in (Precision.FP32, Precision.FP16):
        with pytest.raises(InvalidTarget, match=rf"needs parameters in .*; those of {name} are in bfloat16"):
            load_target(name, TargetOptions(precision=precision))
    for precision in (Precision.BF16, Precision.BF16_MIXED):
        assert load_target(name, TargetOptions(precision=precision)).precision is precision


DENOISERS = {
    "UNet2DModel": {
        "sample_size": 16,
        "block_out_channels": [8, 16],
        "norm_num_groups": 4,
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    },
    "DiTTransformer2DModel": {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "out_channels": 8},
    "PixArtTransformer2DModel": {
        "num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": 24,
        "sample_size": 16,
    },
    "SD3Transformer2DModel": {
        "num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "caption_projection_dim": 16,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 8,
        "sample_size": 16,
    },
    "FluxTransformer2DModel": {
        "num_layers": 1,
        "num_single_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "axes_dims_rope": [2, 2, 4],
        "joint_attention_dim": 24,
        "pooled_projection_dim": 8,
        "in_channels": 4,
        "guidance_embeds": True,
    },
    "UNet2DConditionModel": {
        "sample_size": 16,
        "block_out_channels": [8, 16],
        "norm_num_groups": 4,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 32,
    },
}


@pytest.mark.parametrize("name", some(DENOISERS, 2))
def test_denoisers_of_diffusers_train_on_latents_of_their_configuration(
    name: str, config_file: Callable[[dict[str, Any]], str]
):
    pytest.importorskip("diffusers")
    target = load_target(config_file({"_class_name": name} | DENOISERS[name]), TargetOptions(batch=2))
    loss = loss_of(target)
    loss.backward()
    assert torch.isfinite(loss)
    assert any(p.grad is not None and p.grad.any() for p in target.model.parameters())


def test_a_class_of_diffusers_has_its_own_sizes():
    diffusers = pytest.importorskip("diffusers")
    target = load_target("diffusers/DiTTransformer2DModel", META)
    assert type(target.model.denoiser) is diffusers.DiTTransformer2DModel
    assert len(target.model.denoiser.transformer_blocks) == 28
    assert target.batch["hidden_states"].shape == (1, 4, 32, 32)
    assert target.batch["hidden_states"].is_meta


@pytest.mark.parametrize(("name", "input_size"), [("resnet18", (3, 224, 224)), ("test_vit.r160_in1k", (3, 160, 160))])
def test_a_model_of_timm_trains_on_images_of_its_size(name: str, input_size: tuple[int, ...]):
    pytest.importorskip("timm")
    target = load_target(f"timm/{name}", TargetOptions(batch=2))
    assert target.batch["pixel_values"].shape == (2, *input_size)
    loss = loss_of(target)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in target.model.parameters())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vit_base_patch16_225", "vit_base_patch16_224"),
        ("hf-hub:some/one", "does not know the model"),
        ("vit_base_patch14_dinov2", "loss"),
    ],
)
def test_a_model_that_timm_does_not_know_or_that_has_no_classes_is_refused(name: str, words: str):
    pytest.importorskip("timm")
    with pytest.raises(InvalidTarget, match=words):
        load_target(f"timm/{name}", META)


def test_a_library_that_is_not_there_or_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(InvalidTarget, match="needs timm, which is not installed"):
        find_recipe("timm/resnet18")
    monkeypatch.undo()
    (tmp_path / "timm.py").write_text("raise RuntimeError('its half is missing')")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidTarget, match="cannot be imported") as caught:
        load_target("timm/resnet18", META)
    assert "its half is missing" in str(caught.value)


def test_a_name_of_the_hub_is_refused_as_nothing_is_downloaded():
    with pytest.raises(InvalidTarget, match="Plimsoll does not download anything"):
        find_recipe("someone/some-model")


def test_building_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    load_target("vit-tiny", TargetOptions(batch=1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Llama-3.2-1B", "llama-3.2-1b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
    ],
)
def test_a_name_of_the_hub_is_a_model_of_the_catalogue(typed: str, name: str):
    assert find_recipe(typed).name == name


@pytest.mark.parametrize(
    "typed",
    [
        "mistralai/Mistral-7B-v0.1",
        "someone/qwen9-7b",
        "a/b/qwen2.5-7b",
        "openai/whisper-tiny",
        "prajjwal1/bert-tiny",
    ],
)
def test_a_name_of_the_hub_with_other_sizes_is_refused(typed: str):
    with pytest.raises(InvalidTarget) as refused:
        find_recipe(typed)
    assert "-tiny" not in refused.value.next
