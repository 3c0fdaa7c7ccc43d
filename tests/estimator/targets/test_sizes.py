"""Parameters counted from a configuration, compared with the built model."""

from __future__ import annotations

import dataclasses

import pytest

from plimsoll.estimator.catalogue.models import known_models
from plimsoll.estimator.targets.recipe import facts_of, find_recipe
from plimsoll.estimator.targets.sizes import count_parameters, count_step_flops, parameter_bytes
from plimsoll.estimator.targets.target import TargetOptions, build

pytest.importorskip("transformers")
COUNTED = [name for name in known_models() if count_parameters(find_recipe(name)) is not None]


def test_most_decoders_of_the_catalogue_are_counted():
    assert {"llama-tiny", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt2-xl"} <= set(COUNTED)


@pytest.mark.parametrize("name", COUNTED)
def test_the_count_from_the_configuration_is_that_of_the_built_model(name: str):
    recipe = find_recipe(name)
    layers = "n_layer" if "n_layer" in recipe.fields else "num_hidden_layers"
    few = dataclasses.replace(recipe, fields={**recipe.fields, layers: 2})
    model = build(few, TargetOptions(is_meta=True, batch=1, sequence=8)).model
    assert count_parameters(few) == sum(parameter.numel() for parameter in model.parameters())
    assert parameter_bytes(few) == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    "change", [{"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 32}, {"tie_word_embeddings": True}]
)
def test_options_of_a_configuration_change_the_count_as_they_change_the_model(change: dict[str, object]):
    recipe = find_recipe("llama-tiny")
    changed = dataclasses.replace(recipe, fields={**recipe.fields, **change})
    model = build(changed, TargetOptions(is_meta=True)).model
    assert count_parameters(changed) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["bert-tiny", "vit-tiny", "deepseek-v3-tiny", "sd-unet-tiny"])
def test_other_kinds_of_models_are_not_counted(name: str):
    assert count_parameters(find_recipe(name)) is None
    assert count_step_flops(find_recipe(name)) is None


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-3-8b", 128),
        ("qwen3-0.6b", 128),
        ("gpt2-124m", 64),
        ("deepseek-v3", 160),
        ("t5-large", None),
        ("mamba2-130m", None),
    ],
)
def test_the_size_of_a_head_is_the_configurations_own(name: str, size: int | None):
    assert facts_of(find_recipe(name)).head_size == size


def test_a_configuration_without_a_size_is_not_counted():
    recipe = find_recipe("llama-tiny")
    fields = {key: value for key, value in recipe.fields.items() if key != "hidden_size"}
    assert count_parameters(dataclasses.replace(recipe, fields=fields)) is None


def test_arithmetic_grows_with_the_square_of_a_long_sequence():
    recipe = find_recipe("llama-tiny")
    short, long = (count_step_flops(recipe, batch=1, sequence=length) for length in (100_000, 200_000))
    assert 3.9 < long / short < 4.0


PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
"""The numbers of parameters that the models' pages on the Hugging Face Hub give for their weight files."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_of_the_catalogue_have_the_published_number_of_parameters(name: str):
    assert count_parameters(find_recipe(name)) == PUBLISHED[name]
