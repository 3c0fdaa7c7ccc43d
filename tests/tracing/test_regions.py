"""Regions are the blocks that people would point at."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

import plimsoll
import zoo as species
from plimsoll.errors import InvalidRegions
from plimsoll.tracing.regions import find_regions
from plimsoll.tracing.trace import trace
from tracing import zoo

BLOCKS = {
    "llama": ["model.layers.0", "model.layers.1", "model.layers.2"],
    "gpt2": ["transformer.h.0", "transformer.h.1", "transformer.h.2"],
    "vit": ["vit.layers.0", "vit.layers.1", "vit.layers.2"],
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1", "bert.encoder.layer.2"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "clip": [f"{tower}_model.encoder.layers.{i}" for tower in ("text", "vision") for i in range(2)],
    "mixtral": ["model.layers.0", "model.layers.1"],
    "swin": [f"swin.encoder.layers.{stage}.blocks.{i}" for stage in range(2) for i in range(2)],
    "convnext": [f"convnext.encoder.stages.{stage}.layers.{i}" for stage in range(2) for i in range(2)],
    "resnet": [f"resnet.encoder.stages.{stage}.layers.{i}" for stage in range(2) for i in range(2)],
    "conv net": ["blocks.0", "blocks.1", "blocks.2"],
}


ONE = {"llama": "num_hidden_layers", "gpt2": "n_layer", "bert": "num_hidden_layers", "vit": "num_hidden_layers"}
OTHERS = {
    "a decoder of one block": (lambda: species.build("t5", num_decoder_layers=1), [*BLOCKS["t5"][:3]]),
    "stages of one and two blocks": (
        lambda: species.build("swin", depths=[1, 2]),
        ["swin.encoder.layers.0", *BLOCKS["swin"][2:]],
    ),
    "lists in a list": (
        lambda: held(stages=nn.ModuleList([nn.ModuleList([zoo.Block()]), nn.ModuleList([zoo.Block(), zoo.Block()])])),
        ["stages.0.0", "stages.1.0", "stages.1.1"],
    ),
    "a sequence": (lambda: nn.Sequential(nn.Linear(8, 8), zoo.Block(), zoo.Block()), ["1", "2"]),
    "a sequence that begins with a block of another kind": (
        lambda: held(
            blocks=nn.Sequential(nn.Sequential(first_block()), nn.Sequential(zoo.Block(), zoo.Block())), norm=NormAct(8)
        ),
        ["blocks.0.0", "blocks.1.0", "blocks.1.1"],
    ),
    "attributes": (lambda: held(first=zoo.Block(), second=zoo.Block()), ["first", "second"]),
    "parallel branches": (
        lambda: held(layers=nn.ModuleList(branched(zoo.Block, zoo.Block) for _ in range(2))),
        ["layers.0", "layers.1"],
    ),
    "experts": (
        lambda: held(layers=nn.ModuleList(branched(*[zoo.Block] * 8) for _ in range(2))),
        ["layers.0", "layers.1"],
    ),
    "a block alone in a sequence": (
        lambda: held(tail=nn.Sequential(zoo.Block(), nn.Linear(8, 8)), first=first_block(), second=first_block()),
        ["first", "second"],
    ),
    "another kind of block among many": (
        lambda: held(layers=nn.ModuleList([zoo.Block(), branched(zoo.Block), zoo.Block()])),
        ["layers.0", "layers.1", "layers.2"],
    ),
    "an encoder and a decoder of one layer": (
        lambda: nn.Transformer(16, 2, 2, 1, 32),
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"],
    ),
    "two attentions in a block": (
        lambda: species.build("t5", num_layers=1, num_decoder_layers=1),
        ["encoder.block.0", "decoder.block.0"],
    ),
    **{
        f"{name} of one block": (lambda name=name: species.build(name, **{ONE[name]: 1}), BLOCKS[name][:1])
        for name in ONE
    },
}


def held(**children):
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


class NormAct(nn.Module):
    """A norm with its activation: a module with children, and no more than a part of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm1d(width), nn.SiLU()


def first_block() -> nn.Module:
    """What convolutional networks begin with: a block of a kind of its own, with the same norms as all others."""
    return held(narrow=nn.Linear(8, 8), one=NormAct(8), wide=nn.Linear(8, 8), two=NormAct(8))


def branched(*kinds):
    """A block whose branches, two or eight, stand beside attention."""
    return held(
        attention=nn.MultiheadAttention(8, 2), gate=nn.Linear(8, 8), branches=nn.ModuleList(kind() for kind in kinds)
    )


@pytest.mark.parametrize("name", OTHERS)
def test_regions_are_the_outermost_blocks_that_are_no_stacks_of_others(name):
    build, expected = OTHERS[name]
    assert list(find_regions(build())) == expected


@pytest.mark.parametrize("weighs", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "swin"])
def test_adapters_do_not_change_which_blocks_are_regions(name, weighs):
    targets = ["c_attn", "c_proj", "c_fc"] if name == "gpt2" else "all-linear"
    config = peft.LoraConfig(target_modules=targets, use_dora=weighs, fan_in_fan_out=name == "gpt2")
    model = species.build(name)
    expected = [f"base_model.model.{path}" for path in find_regions(model)]
    assert list(find_regions(peft.get_peft_model(model, config))) == expected


def test_a_model_with_adapters_fits_where_its_blocks_are_recomputed():
    model, batch = species.sample("llama")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    plan = plimsoll.plan(model, batch, strategy="full")
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes
    assert plimsoll.verify(model, batch, plan).verdict.is_pass


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_regions_are_the_repeated_blocks(name: str):
    model, _ = zoo.ALL[name]()
    assert list(find_regions(model)) == BLOCKS[name]


def uncalled() -> nn.Module:
    """A container that nobody calls."""
    model = nn.Module()
    model.parts = nn.ModuleList([zoo.Block(), nn.Linear(4, 4)])
    return model


def wrapping() -> nn.Module:
    """Modules around one that refuses to have a length, as what torch.compile has wrapped does."""

    class Lengthless(nn.Linear):
        def __len__(self):
            raise TypeError

    model = nn.ModuleDict({"encoder": nn.Module(), "decoder": nn.Module()})
    for child in model.values():
        child.inner = Lengthless(4, 4)
    return model


@pytest.mark.parametrize(
    ("model", "regions"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), [""]),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 3),
            ["layers.0", "layers.1", "layers.2"],
        ),
        (nn.ModuleDict({"encoder": zoo.Block(), "decoder": nn.Sequential(nn.Linear(4, 4))}), ["encoder", "decoder"]),
        (uncalled(), ["parts.0"]),
        (wrapping(), ["encoder", "decoder"]),
    ],
    ids=[
        "a sequence: the whole",
        "torch's encoder",
        "no repeats: children with children",
        "no dead container",
        "no length",
    ],
)
def test_regions_of_a_model_without_lists_are_what_is_called(model: nn.Module, regions: list[str]):
    assert list(find_regions(model)) == regions


@pytest.mark.parametrize(
    ("pattern", "regions"),
    [("model.layers.*.mlp", [f"model.layers.{i}.mlp" for i in range(3)]), ("model.layers.**", BLOCKS["llama"])],
)
def test_one_star_names_one_level_and_two_any_depth_of_which_the_outermost(pattern: str, regions: list[str]):
    assert list(find_regions(zoo.llama()[0], [pattern])) == regions


def test_pattern_that_matches_nothing_names_the_closest_module():
    model, _ = zoo.llama()
    with pytest.raises(InvalidRegions) as caught:
        find_regions(model, ["model.layer.0"])
    assert "model.layers.0" in caught.value.why


def test_block_that_runs_twice_has_two_calls():
    step = trace(zoo.Stack(depth=2, calls=(0, 1, 0)), torch.randn(2, 8), repeats=1)
    calls = [(region.name, region.call) for region in step.regions]
    assert calls == [("blocks.0", 0), ("blocks.1", 0), ("blocks.0", 1)]


def test_equal_blocks_share_a_kind():
    model, batch = zoo.llama()
    assert len({region.kind for region in trace(model, batch, repeats=1).regions}) == 1
