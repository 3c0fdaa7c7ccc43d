"""Names of many regions and calls stay short."""

from __future__ import annotations

import pytest

from plimsoll.artifacts.naming import compress_names, name_call, plain_name, plain_place, with_rest


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["layers.0"], "layers.0"),
        (["layers.0", "layers.1", "layers.2"], "layers.0–2"),
        (["layers.0", "layers.2", "layers.3"], "layers.0,2–3"),
        (["h.0.attn", "h.1.attn", "head"], "h.0–1.attn, head"),
        (["enc.layers.0", "enc.layers.1", "dec.layers.0"], "enc.layers.0–1, dec.layers.0"),
        (["stage1.block0", "stage1.block1"], "stage1.block0–1"),
        ([], ""),
    ],
)
def test_names_that_differ_in_one_number_become_a_range(names: list[str], text: str):
    assert compress_names(names) == text


def test_later_calls_of_a_region_are_counted_from_one():
    assert name_call("block", 0) == "block"
    assert name_call("block", 1) == "block (call 2)"
    assert name_call("", 0) == "(the model)"


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("layers.3.mlp.act_fn::silu#0", "layers.3.mlp.act_fn silu"),
        ("layers.3::add#1", "layers.3 add (2)"),
        ("layers.0.self_attn::scaled_dot_product_attention#0.1", "layers.0.self_attn attention, output 2"),
        ("lm_head::_log_softmax_backward_data#0", "gradient of lm_head log_softmax"),
        ("nll_loss_backward#2", "gradient of nll_loss (3)"),
        ("waiting: norm::mul#0", "waiting: norm mul"),
        ("mylib.scan#0", "mylib.scan"),
        ("input:0", "input"),
        ("input:1", "input 2"),
        ("optimizer state", "optimizer state"),
    ],
)
def test_labels_of_tensors_are_written_in_plain_words(label: str, text: str):
    assert plain_name(label) == text
    assert with_rest([(label, 1)], 1) == [(text, 1)]


@pytest.mark.parametrize(
    ("module", "op", "text"),
    [
        ("layers.0.mlp", "mul", "layers.0.mlp (mul)"),
        ("LogSoftmaxBackward0", "_log_softmax_backward_data", "log_softmax"),
        ("PowBackward0", "mul", "pow (mul)"),
        (
            "ScaledDotProductFlashAttentionForCpuBackward0",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "attention",
        ),
    ],
)
def test_nodes_of_autograd_are_named_as_their_ops(module: str, op: str, text: str):
    assert plain_place(module, op) == text
