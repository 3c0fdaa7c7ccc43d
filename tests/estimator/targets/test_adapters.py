"""Models with adapters: what a traced one holds beside peft's own, and that the model comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plimsoll
import zoo
from long_cases import some
from metering import simulated_transient_peak, transient_peak
from plimsoll.artifacts.job import Techniques
from plimsoll.artifacts.trace import Category, Trace
from plimsoll.errors import InvalidLayout, InvalidOption
from plimsoll.estimator.targets.adapters import adapted
from plimsoll.tracing.trace import trace

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 67}


def llama() -> nn.Module:
    return zoo.build("llama", **SIZES).bfloat16()


def batch() -> dict[str, torch.Tensor]:
    return {name: words % SIZES["vocab_size"] for name, words in zoo.words(2, 32).items()}


def trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def quantized(model: nn.Module) -> nn.Module:
    """The model with bitsandbytes' 4-bit layers in its blocks."""
    layers = pytest.importorskip("bitsandbytes").nn
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in name:
            how: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}
            sizes = (module.in_features, module.out_features)
            layer = layers.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, **how)
            layer.weight = layers.Params4bit(module.weight.data, requires_grad=False, **how).to("cpu")
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, layer)
    model.is_loaded_in_4bit = True
    return model


@pytest.mark.parametrize(
    ("how", "targets"),
    some(
        [
            (Techniques(lora=4), "all-linear"),
            (Techniques(lora=8, lora_on="qv"), ["q_proj", "v_proj"]),
            (Techniques(qlora=4), "all-linear"),
        ],
        1,
    ),
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_a_step_with_adapters_takes_what_pefts_takes(how: Techniques, targets: Any):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=how.lora or how.qlora, target_modules=targets, lora_dropout=0.0)
    base = quantized(llama()) if how.qlora else llama()
    theirs = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    model = llama()
    with adapted(model, how):
        step = trace(model, batch(), repeats=1)
        assert trained(model) == trained(theirs)
    assert simulated_transient_peak(step) == pytest.approx(transient_peak(theirs, **batch()), rel=0.02)


@pytest.mark.parametrize("how", [Techniques(lora=2), Techniques(qlora=2), Techniques(adapters=8)], ids=str)
def test_the_model_comes_back_as_it_was(how: Techniques):
    model = llama()
    model.model.norm.weight.requires_grad_(False)
    before = {name: (id(module), type(module)) for name, module in model.named_modules()}
    needed = [parameter.requires_grad for parameter in model.parameters()]
    with adapted(model, how):
        assert 0 < trained(model) < 0.2 * sum(p.numel() for p in model.parameters())
        model(**batch()).loss.backward()
    assert {name: (id(module), type(module)) for name, module in model.named_modules()} == before
    assert [parameter.requires_grad for parameter in model.parameters()] == needed
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_in_four_bits_take_half_a_byte_and_scales():
    model = llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    with adapted(model, Techniques(qlora=4)):
        base = model.model.layers[0].mlp.up_proj.base
        held = sum(parameter.nbytes for parameter in base.parameters())
    assert held == weight.numel() // 2 + weight.numel() // 64 + 4


def test_stacked_experts_are_in_four_bits_too_and_come_back():
    model = zoo.build("mixtral", **SIZES).bfloat16()
    before = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    classes = [type(module) for module in model.modules()]
    experts = model.model.layers[0].mlp.experts
    count = experts.down_proj.numel() + experts.gate_up_proj.numel()
    with adapted(model, Techniques(lora=4)) as notes:
        assert "the stacks of experts do not get adapters" in notes
        in_16_bits = trace(model, batch(), repeats=1)
    with adapted(model, Techniques(qlora=4)) as notes:
        assert any("experts are in 4 bits" in note for note in notes)
        held = sum(parameter.nbytes for parameter in experts.parameters())
        assert experts.down_proj.dtype is torch.bfloat16
        in_4_bits = trace(model, batch(), repeats=1)
    assert held == pytest.approx(count / 2 + count / 64, rel=0.01)
    assert parameter_bytes(in_4_bits) < 0.5 * parameter_bytes(in_16_bits)
    assert [(name, id(p), p.requires_grad) for name, p in model.named_parameters()] == before
    assert [type(module) for module in model.modules()] == classes


def parameter_bytes(step: Trace) -> int:
    return sum(storage.bytes for storage in step.storages if storage.category is Category.PARAMETER)


def estimated(**how: Any) -> dict[str, int]:
    found = plimsoll.estimate("llama-tiny", 1, **({"sequence": 256, "device": "H100", "precision": "bf16"} | how))
    return {item.name: item.bytes or 0 for item in found.stages[0].items}


@pytest.mark.long
def test_an_estimate_counts_what_is_trained_and_what_is_frozen():
    whole, low_rank, four_bits = (estimated(techniques=text) for text in ("", "lora=8", "qlora=8"))
    assert low_rank["optimizer state"] < 0.1 * whole["optimizer state"]
    assert low_rank["parameters"] > whole["parameters"] > four_bits["parameters"]
    assert estimated(techniques="adapters=8")["optimizer state"] < 0.1 * whole["optimizer state"]


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        {"has_master_weights": True, "techniques": "gradients=fp32"},
        {"precision": "fsdp-bf16", "layout": "dp=2,zero=3,micro-batches=2"},
    ],
    ids=["gradients=fp32", "fsdp-bf16"],
)
def test_adapters_have_f32_gradients_on_4_bit_weights_too(how: dict[str, Any]):
    other = f",{how['techniques']}" if "techniques" in how else ""
    low_rank, four_bits = (estimated(**(how | {"techniques": text + other})) for text in ("lora=8", "qlora=8"))
    assert four_bits["gradients"] == pytest.approx(
        low_rank["gradients"], rel=0.05
    )  # a new one may be alive at the peak


@pytest.mark.long
@pytest.mark.parametrize("text", ["lora=4", "qlora=4"])
def test_layers_whose_weight_a_kernel_reads_do_not_get_adapters(text: str):
    found = plimsoll.estimate("mamba2-tiny", device="H100", precision="bf16", techniques=text)
    assert f"{found.facts.layers} adapters are trained; all other parameters are frozen" in found.notes


@pytest.mark.parametrize("text", ["lora=8,qlora=8", "lora=8,adapters=8", "lora-on=qv"])
def test_half_or_double_wishes_are_refused(text: str):
    with pytest.raises(InvalidOption, match="contradictory or incomplete"):
        estimated(techniques=text)


def test_adapters_are_refused_where_nothing_is_known_of_them():
    with pytest.raises(InvalidOption, match="moe=fused cannot be combined with qlora=8"):
        plimsoll.estimate("mixtral-tiny", precision="bf16", techniques="qlora=8,moe=fused")
    with pytest.raises(InvalidLayout, match="Adapters are not supported with tp=2"):
        estimated(techniques="lora=8", layout="tp=2")
    with pytest.raises(InvalidOption, match="does not match any layer"), adapted(nn.Linear(2, 2), Techniques(lora=2)):
        pytest.fail("no layer was found")
