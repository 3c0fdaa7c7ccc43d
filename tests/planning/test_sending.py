"""What frameworks' own switches send to the host: which values, when they are gone, what compute waits for."""

from __future__ import annotations

import msgspec
import pytest

import zoo
from long_cases import some
from planning.builders import StepBuilder
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Form, Forms, LinkCost, RegionForms, ValueForms
from plimsoll.artifacts.region import Origin
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.sending import Sending, modules_of
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import strategy_choices
from plimsoll.tracing.trace import trace
from plimsoll.units import MIB

WIDTH = 4 * MIB
LAYERS = 6
ATTENTION = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")


def layered(*, layers: int = LAYERS, width: int = WIDTH, seconds: float = 1.0) -> StepBuilder:
    """Layers of a norm, products before and after attention, a norm, and a product; each op takes ``seconds``."""
    step = StepBuilder()
    x = step.op("embedding", size=width, module="embedding", seconds=seconds)
    for layer in range(layers):
        name = f"layers.{layer}"
        with step.region(name, x) as region:
            normed = step.op("scale", x, size=width, saves=(x,), module="input_norm", seconds=seconds)
            qkv = step.op("mm", normed, size=3 * width, saves=(normed,), module="attn.qkv", seconds=seconds)
            mixed = step.op("scaled_dot_product", qkv, size=width, saves=(qkv, -1), module="attn", seconds=seconds)
            out = step.op("mm", mixed, size=width, saves=(mixed,), module="attn.out", seconds=seconds)
            middle = step.op("add", x, out, size=width, seconds=seconds)
            normed = step.op("scale", middle, size=width, saves=(middle,), module="mlp_norm", seconds=seconds)
            x = step.op("mm", normed, size=width, saves=(normed,), module="mlp.up", seconds=seconds)
            region.outputs = (x,)
    step.op("loss", x, size=8, seconds=seconds)
    return step


def indexed(step: StepBuilder, bytes_per_second: float, latency_seconds: float = 0.0) -> StepIndex:
    """The step with a host at the other end of such a link."""
    trace, costs = step.finish()
    link = LinkCost(
        name="host",
        out_bytes_per_second=bytes_per_second,
        in_bytes_per_second=bytes_per_second,
        latency_seconds=latency_seconds,
    )
    regions = tuple(
        RegionForms(
            name=call.name,
            call=call.call,
            values=tuple(
                ValueForms(
                    value=value.name,
                    forms=(Form(name="host", decision=Decision.OFFLOAD, held_bytes=0, link_bytes=value.bytes),),
                )
                for value in call.graph.values
                if value.origin is not Origin.PARAMETER
            ),
        )
        for call in trace.regions
    )
    return StepIndex(trace, costs, Forms(regions=regions, link=link))


def sent(index: StepIndex, strategy: str, *modules: str, fraction: float = 1.0):
    return Sending(modules, fraction).run(index, strategy_choices(index, strategy))


def kept(index: StepIndex, strategy: str):
    return run_choices(index, strategy_choices(index, strategy))


def test_ops_belong_to_modules_by_what_they_stand_between():
    modules = modules_of(StepIndex(*layered().finish()).views[0])
    assert modules == ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "", "mlp_norm", ""]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "llama",
            {
                "attn_norm": {"input_layernorm"},
                "qkv_linear": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
                "core_attn": {"self_attn"},
                "attn_proj": {"self_attn.o_proj"},
                "mlp_norm": {"post_attention_layernorm"},
            },
        ),
        (
            "gpt2",
            {
                "attn_norm": {"ln_1"},
                "qkv_linear": {"attn.c_attn"},
                "core_attn": {"attn"},
                "attn_proj": {"attn.c_proj"},
                "mlp_norm": {"ln_2"},
            },
        ),
        (
            "mixtral",
            {
                "attn_norm": {"input_layernorm"},
                "qkv_linear": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
                "core_attn": {"self_attn"},
                "attn_proj": {"self_attn.o_proj"},
                "mlp_norm": {"post_attention_layernorm"},
                "expert_fc1": {"mlp.experts"},
                "moe_act": {"mlp.experts", "mlp.experts.act_fn"},
            },
        ),
    ],
)
@pytest.mark.parametrize("attention", some(["sdpa", "eager"], 1))
def test_modules_of_real_layers_are_found(name, expected, attention):
    model, batch = zoo.sample(name)
    model.set_attn_implementation(attention)
    step = trace(model, batch, device_name="H100-SXM")
    [view, *_] = StepIndex(step, roofline_costs(step, find_device("H100"))).views
    found: dict[str, set[str]] = {}
    for op, module in zip(view.graph.ops, modules_of(view), strict=True):
        if module:
            found.setdefault(module, set()).add(view.graph.values[op.writes[0]].name.rpartition("::")[0])
    assert found == expected


@pytest.mark.parametrize(("strategy", "again"), [("full", LAYERS), ("nth:2", LAYERS // 2), ("nth:4", 2), ("none", 0)])
def test_in_line_every_copy_is_waited_for_and_inputs_are_gone(strategy, again):
    index = indexed(layered(), bytes_per_second=WIDTH, latency_seconds=0.25)
    before, after = kept(index, strategy), sent(index, strategy)
    assert after.seconds - before.seconds == pytest.approx(again * (1 + 1 + 2 * 0.25))
    assert after.link_bytes == again * WIDTH
    # At the handover nothing is run again yet: what is held there is what is gone.
    at = index.handover
    assert before.curve[at] - after.curve[at] == again * WIDTH


def test_what_no_recipe_rebuilds_is_no_input_and_stays():
    step = StepBuilder()
    x = step.op("embedding", size=WIDTH, module="embedding")
    for layer in range(2):
        with step.region(f"layers.{layer}", x) as region:
            drawn = step.op("draw", x, size=WIDTH, saves=(x, -1), obstacle="draws from somewhere")
            hidden = step.op("gelu", drawn, size=WIDTH, saves=(drawn,))
            x = step.op("mul", hidden, x, size=WIDTH, saves=(hidden, x))
            region.outputs = (x,)
    step.op("loss", x, size=8)
    index = indexed(step, bytes_per_second=WIDTH)
    before, after = kept(index, "full"), sent(index, "full")
    assert after.link_bytes == 2 * WIDTH
    assert before.curve[index.handover] - after.curve[index.handover] == 2 * WIDTH


def test_what_compute_hides_costs_nothing_and_the_last_layer_stays():
    index = indexed(layered(), bytes_per_second=100 * WIDTH)
    before, after = kept(index, "none"), sent(index, "none", *ATTENTION)
    assert after.seconds == before.seconds
    of_a_layer = WIDTH * (1 + 1 + 3 + 1)  # norm's input, product's, queries to values, what attention returns
    assert after.link_bytes == (LAYERS - 1) * of_a_layer
    assert before.curve[index.handover] - after.curve[index.handover] == (LAYERS - 1) * of_a_layer
    assert after.peak_bytes < before.peak_bytes


def test_what_is_on_its_way_is_on_the_device():
    """Copies that take longer than layers pile up: at the handover only those are gone that the link had time for."""
    slow = WIDTH / 2  # a layer's six units take 12 s, its seven ops 7 s
    index = indexed(layered(), bytes_per_second=slow)
    before, after = kept(index, "none"), sent(index, "none", *ATTENTION)
    gone_bytes = int(before.curve[index.handover] - after.curve[index.handover])
    seconds = float(index.seconds_before[index.handover // 2])
    assert 0 < gone_bytes <= seconds * slow < after.link_bytes
    assert after.seconds > before.seconds
    slower = sent(indexed(layered(), bytes_per_second=slow / 4), "none", *ATTENTION)
    assert slower.peak_bytes >= after.peak_bytes
    assert slower.seconds > after.seconds


def test_compute_waits_at_most_for_all_bytes_both_ways():
    speed = WIDTH / 100
    index = indexed(layered(), bytes_per_second=speed)
    before, after = kept(index, "none"), sent(index, "none", *ATTENTION)
    copied = sum(6 + 1 for _ in range(LAYERS - 1)) * WIDTH  # attention's result twice, for it and for the product
    assert 0.9 * 2 * copied / speed < after.seconds - before.seconds <= 2 * copied / speed


def test_a_fraction_sends_the_first_groups():
    index = indexed(layered(), bytes_per_second=100 * WIDTH)
    found = [sent(index, "none", *ATTENTION, fraction=tenths / 10) for tenths in range(11)]
    assert found[0].peak_bytes == kept(index, "none").peak_bytes
    assert [each.link_bytes for each in found] == sorted(each.link_bytes for each in found)
    assert [each.peak_bytes for each in found] == sorted((each.peak_bytes for each in found), reverse=True)
    packed = [bool(choice.packed) for choice in found[5].choices]
    assert packed == sorted(packed, reverse=True)
    assert any(packed) != all(packed)


def test_a_value_that_something_else_on_the_device_saves_stays():
    """Attention's result is saved by the product behind it too: sent with attention alone it is copied in vain."""
    index = indexed(layered(), bytes_per_second=100 * WIDTH)
    alone, both = sent(index, "none", "core_attn"), sent(index, "none", "core_attn", "attn_proj")
    assert alone.link_bytes == (LAYERS - 1) * 3 * WIDTH
    assert both.link_bytes == (LAYERS - 1) * 4 * WIDTH


def test_tensors_that_megatron_leaves_are_left():
    index = indexed(layered(width=MIB), bytes_per_second=100 * WIDTH)
    found = sent(index, "none", *ATTENTION)
    assert found.link_bytes == (LAYERS - 1) * 3 * MIB  # the others have fewer than 2^20 elements of 16 bits


def test_a_norm_that_is_run_again_is_run_from_what_was_sent():
    index = indexed(layered(), bytes_per_second=100 * WIDTH)
    before, after = kept(index, "selective:norm"), sent(index, "selective:norm", "attn_norm")
    assert after.link_bytes == (LAYERS - 1) * WIDTH
    assert after.replayed == before.replayed


def test_what_runs_again_hides_copies_too():
    """Megatron-Core's streams run beside whatever computes."""
    index = indexed(layered(), bytes_per_second=0.9 * WIDTH)
    plain, again = (
        sent(index, "none", "core_attn", "attn_proj"),
        sent(index, "selective:norm", "core_attn", "attn_proj"),
    )
    waited = [found.seconds - kept(index, name).seconds for name, found in (("none", plain), ("selective:norm", again))]
    assert waited[0] >= waited[1]


def test_another_schedule_leaves_the_step_as_it_was():
    index = indexed(layered(), bytes_per_second=WIDTH)
    before = kept(index, "full")
    sent(index, "full")
    again = kept(index, "full")
    assert again.peak_bytes == before.peak_bytes
    assert again.seconds == before.seconds
    assert msgspec.json.encode(index.forms) == msgspec.json.encode(indexed(layered(), bytes_per_second=WIDTH).forms)
