"""A target in words in, a model and a batch that trains it out: families, sizes, precision, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll.artifacts.job import Precision
from plimsoll.errors import InvalidTarget
from plimsoll.estimator.catalogue.models import known_models
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
    recipe = find_recipe(name)
    fields = dict(recipe.fields)
    return fields | ({"_class_name": recipe.architecture} if recipe.is_diffusers else {})


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
    with pytest.raises(InvalidTarget, match="--seq would have no effect"):
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
        ("llama-3-80b", "no target", "llama-3-8b"),
        ("mixtral", "no target", "mixtral-tiny"),
        ("Qwen3-8B", "no target", "qwen3-8b"),
        ({"model_type": "lama"}, "model_type 'lama'", "llama"),
        ({"model_type": "llama", "architectures": ["LlamaForCasualLM"]}, "'LlamaForCasualLM'", "LlamaForCausalLM"),
        ({"_class_name": "UNet2DConditionalModel"}, "UNet2DConditionalModel of diffusers", "UNet2DConditionModel"),
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
    with pytest.raises(InvalidTarget, match="no batch is known for BertModel"):
        load_target(config_file(fields), META)


def test_a_quantized_checkpoint_is_built_unquantized_and_says_so(config_file: Callable[[dict[str, Any]], str]):
    fields = {**written("llama-tiny"), "quantization_config": {"quant_method": "fp8"}}
    target = load_target(config_file(fields), META)
    assert any("quantization_config" in note for note in target.notes)


def test_a_precision_of_parameters_is_refused_for_a_function():
    with pytest.raises(InvalidTarget, match="--precision would have no effect"):
        load_target("some.module:function", TargetOptions(precision=Precision.BF16))


def test_building_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    load_target("vit-tiny", TargetOptions(batch=1))
    assert torch.equal(torch.get_rng_state(), before)
