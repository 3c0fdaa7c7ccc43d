"""A fake trace says what a real one would say."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo as shared_zoo
from long_cases import some
from plimsoll.artifacts.trace import Phase, Trace
from plimsoll.errors import TracingFailed
from plimsoll.tracing.trace import trace
from steps import Net
from tracing import zoo


@functools.cache
def real_trace(name: str) -> Trace:
    model, batch = zoo.ALL[name]()
    return trace(model, batch, repeats=1)


@functools.cache
def fake_trace(name: str) -> Trace:
    model, batch = zoo.ALL[name]()
    return trace(model, batch, device_name="laptop-CPU")


@functools.cache
def gpu_trace(name: str, dtype: torch.dtype) -> Trace:
    model, batch = zoo.ALL[name]()
    return trace(model.to(dtype), batch, device_name="H100")


@functools.cache
def meta_trace(name: str) -> Trace:
    """Of a model on the meta device, with a batch that has data."""
    model, batch = zoo.ALL[name]()
    model.to("meta").tie_weights()
    meta = trace(model, batch)
    assert all(p.is_meta for p in model.parameters())
    return meta


@pytest.mark.parametrize("name", some([*zoo.TRANSFORMERS, "clip", "convnext", "resnet", "conv net"], 1))
def test_fake_trace_with_cpu_kernels_equals_the_real_one(name: str):
    real, fake = real_trace(name), fake_trace(name)
    assert [(op.cost_key, op.module, op.phase, op.region) for op in fake.ops] == [
        (op.cost_key, op.module, op.phase, op.region) for op in real.ops
    ]
    assert fake.storages == real.storages
    assert fake.regions == real.regions
    assert fake.specs == real.specs


def test_fake_trace_has_neither_seconds_nor_workspaces():
    fake = fake_trace("conv net")
    assert fake.is_fake
    assert fake.device == "laptop-CPU"
    assert not fake.timings
    assert not fake.workspaces


@pytest.mark.parametrize("name", some(["llama", "gpt2", "vit"], 1))
def test_model_on_the_meta_device_is_traced_like_the_real_one(name: str):
    real, meta = real_trace(name), meta_trace(name)
    assert meta.is_fake
    assert [op.cost_key for op in meta.ops] == [op.cost_key for op in real.ops]
    assert [s.bytes for s in meta.storages] == [s.bytes for s in real.storages]


def test_batch_on_the_meta_device_is_enough_for_a_causal_model():
    model, batch = zoo.llama()
    known = meta_trace("llama")
    unknown = trace(model.to("meta"), {name: tensor.to("meta") for name, tensor in batch.items()})
    assert [op.cost_key for op in known.ops] == [op.cost_key for op in unknown.ops]


def test_tied_weights_stay_tied():
    labels = [s.label for s in gpu_trace("gpt2", torch.float32).storages]
    assert "parameter:transformer.wte.weight" in labels
    assert "parameter:lm_head.weight" not in labels


def test_gpu_target_keeps_dropout_masks_of_bytes():
    names = [op.name for op in gpu_trace("vit", torch.float32).ops]
    assert "native_dropout" in names
    assert "bernoulli_" not in names


def test_life_of_a_dropout_mask_leaves_out_the_slot_that_saves_it():
    step = gpu_trace("gpt2", torch.float32)
    for region in step.regions:
        graph = region.graph
        saved = [graph.values[slot.value] for slot in graph.slots if slot.is_managed]
        masks = [value for value in saved if value.name.endswith("native_dropout#0.1")]
        assert masks, "a plan may drop them"
        assert all(step.storages[mask.storage].dies <= region.forward[1] for mask in masks)


def attention_of(step: Trace) -> set[str]:
    """The kernels of attention in forward; each needs its backward."""
    names = [op.name for op in step.ops]
    found = {name for name in names if "scaled_dot_product" in name and not name.endswith("_backward")}
    assert all(names.count(name) == names.count(f"{name}_backward") for name in found)
    return {name.removeprefix("_scaled_dot_product_").removesuffix("_attention") for name in found}


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    some(
        [
            ("H100-SXM", torch.bfloat16, "cudnn"),
            ("GH200-96GB", torch.bfloat16, "cudnn"),
            ("B200", torch.bfloat16, "cudnn"),
            ("A100-80GB", torch.bfloat16, "flash"),
            ("RTX-5090", torch.bfloat16, "flash"),
            ("MI300X", torch.bfloat16, "flash"),
            ("H100-SXM", torch.float32, "efficient"),
        ],
        2,
    ),
)
def test_gpu_target_takes_the_attention_kernel_of_its_device_and_dtype(device: str, dtype: torch.dtype, kernel: str):
    model, batch = zoo.ALL["gpt2"]()
    assert attention_of(trace(model.to(dtype), batch, device_name=device)) == {kernel}


@pytest.mark.parametrize("way", some(["variable", "old", "deterministic", "switched off", "all switched off"], 1))
def test_gpu_target_leaves_out_kernels_that_torch_leaves_out(way: str, monkeypatch: pytest.MonkeyPatch):
    model, batch = zoo.ALL["gpt2"]()
    with contextlib.ExitStack() as stack:
        if way == "variable":
            monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
        elif way == "old":
            monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
            monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91500)
        elif way == "deterministic":
            stack.callback(torch.use_deterministic_algorithms, mode=False)
            torch.use_deterministic_algorithms(mode=True)
        else:
            kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if way == "switched off" else [SDPBackend.MATH]
            stack.enter_context(sdpa_kernel(kernels))
        found = attention_of(trace(model.bfloat16(), batch, device_name="H100"))
    assert found == (set() if way == "all switched off" else {"flash"})


def heads(value_size: int) -> Net:
    """Attention of two heads; values that are narrower than keys are those of multi-head latent attention."""

    def attend(net: Net, x: torch.Tensor) -> torch.Tensor:
        projected = net.project(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(*projected.split((24, 24, value_size), -1), is_causal=True)

    return Net(attend, project=nn.Linear(8, 2 * (24 + 24 + value_size)))


@pytest.mark.parametrize(
    ("device", "dtype", "count"),
    [
        ("H100", torch.bfloat16, 4),
        ("A100", torch.bfloat16, 5),  # with an empty mask for debugging
        ("A100", torch.float32, 4),
        ("laptop-CPU", torch.float32, 2),
    ],
)
def test_values_of_attention_have_one_name_under_every_kernel(device: str, dtype: torch.dtype, count: int):
    step = trace(heads(24).to(dtype), torch.randn(1, 32, 8).to(dtype), loss=torch.sum, device_name=device)
    made = [value for value in step.regions[0].graph.values if "scaled_dot" in value.name]
    assert [value.name for value in made] == [f"scaled_dot_product_attention#0.{index}" for index in range(count)]
    # Output and logsumexp, then at most two words of random state.
    assert [value.bytes for value in made[:2]] == [2 * 32 * 24 * dtype.itemsize, 2 * 32 * 4]
    assert all(value.bytes <= 16 for value in made[2:])


def test_values_of_another_head_size_take_the_efficient_kernel():
    step = trace(heads(16).bfloat16(), torch.randn(1, 32, 8).bfloat16(), loss=torch.sum, device_name="A100")
    kernel = "_scaled_dot_product_efficient_attention"
    names = [op.name for op in step.ops]
    assert names.count(kernel) == names.count(f"{kernel}_backward") == 1
    assert not {"bmm", "_softmax"} & set(names)
    assert all(spec.is_causal for spec in step.specs.values() if kernel in spec.name)


@pytest.mark.long
def test_gpu_target_with_a_mask_takes_a_kernel_that_has_masks():
    model, batch = zoo.bert()
    batch["attention_mask"][:, -4:] = 0
    model.bfloat16()
    assert attention_of(trace(model, batch, device_name="A100")) == {"efficient"}
    assert attention_of(trace(model, batch, device_name="H100")) == {"cudnn"}


def test_gpu_target_fuses_rms_norm():
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
    step = trace(model, torch.randn(2, 8), loss=torch.sum, device_name="H100")
    assert {"_fused_rms_norm", "_fused_rms_norm_backward"} <= {op.name for op in step.ops}


def test_gpu_target_keeps_norms_in_float32_under_autocast_as_cuda_does():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    with torch.autocast("cpu", torch.bfloat16):
        step = trace(model, torch.randn(2, 8), loss=torch.sum, device_name="H100")
    keys = [op.cost_key for op in step.ops]
    assert any(key.startswith("aten.addmm.default(bf16") for key in keys)
    assert any(key.startswith("aten.native_layer_norm.default(f32") for key in keys)


def test_kernels_of_the_target_are_gone_afterwards():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    step = trace(model, torch.randn(2, 8), loss=torch.sum, device_name="H100")
    assert "native_dropout" in [op.name for op in step.ops]
    x = torch.ones(2, requires_grad=True)
    assert type(F.dropout(x, 0.5).grad_fn).__name__ == "MulBackward0"


def test_mask_of_the_users_is_computed_for_real():
    model, batch = zoo.bert()
    full = fake_trace("bert")
    batch["attention_mask"][:, -4:] = 0
    padded = trace(model, batch, device_name="laptop-CPU")
    assert len(padded.ops) > len(full.ops)


@pytest.mark.parametrize(
    "choose", [lambda y: y if y.sum() > 0 else -y, lambda y: y[y > 0]], ids=["a branch", "a shape that depends on data"]
)
def test_what_depends_on_an_activation_needs_data(choose: Callable[[torch.Tensor], torch.Tensor]):
    with pytest.raises(TracingFailed, match="depends on values") as caught:
        trace(
            Net(lambda net, x: choose(net.layer(x)).sum(), layer=nn.Linear(4, 1)), torch.randn(2, 4), device_name="H100"
        )
    assert "real parameters" in caught.value.next


def test_llama_as_wide_as_70b_is_traced_for_a_gpu():
    widths = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    words = {"vocab_size": 128256, "max_position_embeddings": 8192}
    with torch.device("meta"):
        model = shared_zoo.build("llama", **widths, **words).bfloat16()
        ids = torch.empty(1, 8192, dtype=torch.int64)
    step = trace(model, {"input_ids": ids, "labels": ids}, device_name="H100")
    assert len(step.regions) == 2
    assert len({region.kind for region in step.regions}) == 1
    graph = step.regions[1].graph
    saved = {
        graph.values[slot.value].storage: graph.values[slot.value].bytes for slot in graph.slots if slot.is_managed
    }
    assert sum(saved.values()) > 2**31


def test_attributes_of_parameters_and_of_the_batch_are_read_without_a_device():
    """As in mup, which notes a width on weights and scales by it."""
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight.width = 2.0
    batch = torch.randn(4, 8)
    batch.scale = 3.0
    scaled = Net(lambda net, x: (net.inner(x) * net.inner[0].weight.width * x.scale).sum(), inner=model)
    step = trace(scaled, batch, device_name="H100")
    assert [op.name for op in step.ops if op.phase is Phase.FORWARD].count("mul") == 2
