"""Techniques of a training run: read from words, refused where they contradict the rest, and compared with real steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.claims.traces import Sizes, traced
from torch import nn

import plimsoll
import zoo
from long_cases import some
from metering import simulated_transient_peak, transient_peak
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.job import Layout, Techniques, read_techniques
from plimsoll.artifacts.trace import Category
from plimsoll.errors import InvalidLayout, InvalidOption
from plimsoll.estimator.techniques import with_techniques
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.host import HOST_LINK_SHARE
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import strategy_choices
from plimsoll.tracing.trace import trace
from steps import Net


def on_gpu(**how: Any) -> Estimate:
    return plimsoll.estimate("llama-tiny", 1, **({"sequence": 256, "device": "H100"} | how))


def bytes_of(estimate: Estimate, name: str) -> int:
    return next((item.bytes or 0 for item in estimate.stages[0].items if item.name == name), 0)


def test_what_techniques_print_is_read_back():
    text = "gradients=fp32,loss=fused-linear,optimizer-in-backward,tf32,offload=parameters+activations,packed=512"
    assert str(read_techniques(f" {text.replace(',', ' , ')} ")) == text
    assert read_techniques("") == Techniques()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss=liger", "loss=liger is not a valid technique.*\\n.*\\n.*loss=chunked or fused"),
        ("loss", "loss is not a valid technique"),
        ("tf32=1", "tf32=1 is not a valid technique.*\\n.*does not have a value"),
        ("gradient=fp32", "No technique is called 'gradient'.*\\n.*\\n.*try gradients"),
        ("tf32,tf32", "tf32 is given twice"),
        ("tf32,", "No technique is called ''"),
        ("offload=optimizer+optimizer", "is not a valid technique"),
        ("offload=optimizer+weights", "is not a valid technique"),
        ("packed=0", "packed=0 is not a valid technique.*\\n.*\\n.*packed=1024"),
    ],
)
def test_words_that_mean_nothing_are_refused(text: str, message: str):
    with pytest.raises(InvalidOption, match=message):
        read_techniques(text)


@pytest.mark.parametrize(
    ("how", "words"),
    some(
        [
            ({"precision": "fsdp-bf16"}, "this layout does not shard parameters"),
            ({"precision": "fsdp-bf16", "layout": "dp=4,zero=1"}, "this layout does not shard parameters"),
            ({"techniques": "reduce=bf16"}, "reduce_dtype"),
            ({"techniques": "gradients=fp32", "precision": "bf16"}, "needs master weights"),
            ({"techniques": "tf32", "device": "V100"}, "V100-32GB does not support tf32"),
            ({"techniques": "offload=optimizer", "optimizer": "none"}, "no optimizer on H100"),
            ({"techniques": "offload=optimizer,optimizer-in-backward"}, "after all gradients are computed"),
            ({"techniques": "fp8=rowwise", "device": "A100"}, "A100-80GB does not support fp8=rowwise"),
            ({"techniques": "fp8=rowwise", "precision": "fp32"}, "does not apply to any matrix product"),
            ({"techniques": "fp8=mxfp8", "precision": "bf16"}, "cannot compute in this format"),
            ({"techniques": "fp8=delayed", "precision": "bf16", "layout": "dp=8,zero=3"}, "how it shards them"),
            ({"techniques": "offload=parameters", "layout": "dp=8,zero=2"}, "this layout does not shard parameters"),
            ({"techniques": "packed=256"}, "fewer tokens than a sample has"),
            ({"techniques": "padded=100"}, "would leave only padding"),
            ({"techniques": "loss=vocabulary-parallel"}, "needs tensor parallelism"),
            ({"techniques": "optimizer-in-backward", "optimizer": "none"}, "the job does not have an optimizer"),
            ({"techniques": "optimizer-in-backward", "layout": "micro-batches=2"}, "2 micro-batches"),
            ({"techniques": "optimizer-in-backward", "layout": "dp=2"}, "buckets hold all gradients"),
            ({"techniques": "loss=chunked", "layout": "tp=2"}, "can only be fused"),
            ({"techniques": "megatron,compile"}, "each sets the kernels of the blocks"),
            (
                {"techniques": "fp8=rowwise,fp8-weights", "precision": "bf16"},
                "only Transformer Engine holds weights in fp8",
            ),
            ({"techniques": "comm-overlap", "layout": "tp=2"}, "it hides collectives of sequence parallelism"),
            ({"techniques": "expandable-segments", "device": "laptop-CPU"}, "a setting of the caching allocator"),
        ],
        8,
    ),
)
def test_techniques_that_contradict_the_rest_are_refused(how: dict[str, Any], words: str):
    with pytest.raises(InvalidOption, match=words):
        on_gpu(**how)


def test_a_paged_optimizer_is_not_offloaded_again():
    with pytest.raises(InvalidOption, match="offload=optimizer cannot be combined with paged-adamw"):
        on_gpu(techniques="offload=optimizer", optimizer="paged-adamw")


def test_replicas_of_one_rank_each_are_refused_because_they_shard_nothing():
    with pytest.raises(InvalidLayout, match="replicas=8 leaves one rank in each group of dp=8"):
        on_gpu(layout="dp=8,zero=3,replicas=8")


@pytest.mark.parametrize("layout", ["dp=8,replicas=2", "dp=8,zero=3,replicas=3", "dp=8,zero=3,replicas=2,ep=2"])
def test_replicas_without_sharded_groups_of_equal_size_are_refused(layout: str):
    with pytest.raises(InvalidLayout, match=r"each shard gradients or parameters \(HSDP\)"):
        on_gpu(layout=layout)


def test_hsdp_shards_over_a_part_of_the_ranks():
    whole, hybrid = (on_gpu(layout=f"dp=8,zero=3{text}") for text in ("", ",replicas=4"))
    assert bytes_of(hybrid, "optimizer state") == pytest.approx(4 * bytes_of(whole, "optimizer state"), rel=0.01)
    assert bytes_of(hybrid, "NCCL buffers (replicas)") > 0
    assert hybrid.layout.ranks == whole.layout.ranks == 8


@pytest.mark.long
def test_f32_gradients_are_twice_as_large_and_need_no_cast():
    cast, wide = (on_gpu(precision="bf16", has_master_weights=True, techniques=text) for text in ("", "gradients=fp32"))
    assert bytes_of(wide, "gradients") == 2 * bytes_of(wide, "parameters")
    assert bytes_of(cast, "gradients") == bytes_of(cast, "parameters")
    assert bytes_of(wide, "master weights") == bytes_of(cast, "master weights")
    assert "gradients=fp32" in str(wide)


def test_fsdp_mixed_precision_holds_f32_and_computes_in_bf16():
    mixed, narrow = (on_gpu(precision=text, layout="dp=4,zero=3") for text in ("fsdp-bf16", "bf16"))
    assert bytes_of(mixed, "optimizer state") == pytest.approx(2 * bytes_of(narrow, "optimizer state"), rel=0.01)
    assert mixed.precision == "fsdp-bf16"
    kept = on_gpu(precision="fsdp-bf16", layout="dp=4,zero=2")
    assert bytes_of(kept, "parameters") > bytes_of(mixed, "parameters")


@pytest.mark.long
def test_tf32_makes_f32_products_faster_and_nothing_smaller():
    plain, fast = (on_gpu(precision="fp32", sequence=1024, techniques=text) for text in ("", "tf32"))
    assert fast.throughput.step_seconds < plain.throughput.step_seconds
    assert fast.stages[0].allocated_bytes == plain.stages[0].allocated_bytes


class _InPlaceLoss(torch.autograd.Function):
    """Cross entropy whose gradient takes the place of the logits, one row at a time, as fused kernels have it."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for row, word in zip(logits, target, strict=True):
            chances = row.softmax(0)
            total -= chances[word].log()
            chances[word] -= 1
            row.copy_(chances / len(target))
        ctx.save_for_backward(logits)
        return total / len(target)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        return logits.mul_(gradient), None


def _model() -> Net:
    def run(net: Net, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        for block in net.blocks:
            x = block(x)
        return net.loss(net.head(x), words)

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
    return Net(run, blocks=blocks, head=nn.Linear(32, 4000, bias=False), loss=nn.functional.cross_entropy)


BATCH = (torch.randn(64, 32), torch.arange(64))


def test_a_fused_loss_holds_the_logits_once_and_is_faster():
    model = _model()
    step = trace(model, BATCH, repeats=1)
    assert simulated_transient_peak(step) == pytest.approx(transient_peak(model, *BATCH), rel=0.01)
    model.loss = _InPlaceLoss.apply
    fused = with_techniques(step, Techniques(loss="fused"))
    assert simulated_transient_peak(fused) == pytest.approx(transient_peak(model, *BATCH), rel=0.02)
    device = find_device("H100")
    seconds = [
        StepIndex(each, roofline_costs(each, device)).base_seconds - len(each.ops) * device.launch_seconds
        for each in (step, fused)
    ]
    assert seconds[1] < seconds[0]


def test_a_fused_linear_loss_holds_one_chunk_of_logits():
    step = trace(_model(), BATCH, repeats=1)
    chunked, both = (with_techniques(step, Techniques(loss=loss)) for loss in ("chunked", "fused-linear"))
    assert simulated_transient_peak(both) == simulated_transient_peak(chunked)
    assert simulated_transient_peak(both) < 0.8 * simulated_transient_peak(step)
    accumulated = [s for s in both.storages if s.category is Category.GRADIENT]
    assert sum(s.bytes for s in accumulated) == sum(p.bytes for p in both.parameters)


def test_a_policy_of_torchtitan_is_known_by_its_name():
    none, selective, full = (on_gpu(strategy=name) for name in ("none", "selective:torchtitan", "full"))
    again = [each.stages[0].seconds.recompute_seconds for each in (none, selective, full)]
    assert 0 == again[0] < again[1] < again[2]
    assert selective.stages[0].allocated_bytes <= none.stages[0].allocated_bytes


def test_paged_state_is_on_the_host_and_takes_the_links_time():
    plain, paged = (on_gpu(optimizer=name) for name in ("adamw-8bit", "paged-adamw-8bit"))
    assert bytes_of(paged, "optimizer state") < 0.5 * bytes_of(plain, "optimizer state")
    assert paged.throughput.step_seconds > plain.throughput.step_seconds
    with pytest.raises(InvalidLayout, match="its host"):
        plimsoll.estimate("llama-tiny", 1, device="cpu", sequence=256, optimizer="paged-adamw-8bit")


def test_state_in_four_bits_takes_half_a_byte_per_moment_and_a_scale_per_block():
    state = {
        name: bytes_of(on_gpu(optimizer=name, precision="bf16"), "optimizer state")
        for name in ("adamw-4bit", "adamw-fp8")
    }
    parameters = bytes_of(on_gpu(precision="bf16"), "parameters") // 2
    assert state["adamw-4bit"] == pytest.approx(parameters * 2 * (0.5 + 4 / 128), rel=0.01)
    assert state["adamw-fp8"] == pytest.approx(parameters * 2 * (1 + 4 / 256), rel=0.01)


def _saved_by_torch(block: nn.Module, step: Any) -> int:
    """Bytes that a compiled block saves for backward, parameters aside: each storage once."""
    saved: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    compiled = torch.compile(block.forward, backend="aot_eager_decomp_partition")

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return compiled(*args, **kwargs)

    block.forward = forward  # type: ignore[method-assign]
    step()
    return sum(saved.values())


@pytest.mark.parametrize("name", some(["llama", "gpt2"], 1))
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block_saves_what_torchs_partitioner_saves(name: str):
    model = zoo.build(name).bfloat16()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batch = zoo.words(2, 32)
    step = with_techniques(trace(model, batch, repeats=1), Techniques(compile=True))
    index = StepIndex(step, roofline_costs(step, find_device("H100")))
    view, choice = index.views[1], strategy_choices(index, "min-cut")[1]
    values = [view.graph.values[value] for value in (*choice.kept, *view.forced)]
    predicted = sum({value.storage: value.bytes for value in values}.values())
    everything = [view.graph.values[value] for value in view.saved]
    assert predicted < 0.8 * sum({value.storage: value.bytes for value in everything}.values())
    block = next(module for path, module in model.named_modules() if path == view.call.name)
    torch._dynamo.reset()
    measured = _saved_by_torch(block, lambda: model(**batch).loss.backward())
    assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.long
def test_compiled_blocks_are_faster_and_hold_less_and_no_arithmetic_is_lost():
    plain, compiled = (on_gpu(sequence=2048, precision="bf16", techniques=text) for text in ("", "compile"))
    before, after = plain.stages[0], compiled.stages[0]
    assert after.seconds.forward_seconds < 0.8 * before.seconds.forward_seconds
    assert after.seconds.backward_seconds < 0.8 * before.seconds.backward_seconds
    assert after.seconds.product_seconds == pytest.approx(before.seconds.product_seconds)
    assert after.allocated_bytes < before.allocated_bytes
    work = [each.throughput.mfu * each.throughput.step_seconds for each in (plain, compiled) if each.throughput.mfu]
    assert work[0] == pytest.approx(work[1], rel=0.001)
    assert (
        on_gpu(sequence=2048, precision="bf16", techniques="compile", strategy="full").stages[0].allocated_bytes
        <= after.allocated_bytes
    )


@pytest.mark.long
def test_fp8_products_are_faster_by_their_peak_and_pay_for_their_casts():
    how = {"sequence": 4096, "precision": "bf16"}
    plain, tensorwise, rowwise = (
        on_gpu(**how, techniques=text) for text in ("compile", "compile,fp8=tensorwise", "compile,fp8=rowwise")
    )
    products = [each.stages[0].seconds.product_seconds for each in (plain, rowwise, tensorwise)]
    assert products[1] < products[0]
    assert products[1] == products[2]
    seconds = [each.stages[0].seconds for each in (rowwise, tensorwise)]
    others = [each.forward_seconds + each.backward_seconds - each.product_seconds for each in seconds]
    assert others[0] < others[1]
    for name in ("parameters", "optimizer state", "gradients"):
        assert bytes_of(plain, name) == bytes_of(rowwise, name)
    on_gpu(**how, techniques="fp8=rowwise", strategy="full", layout="pp=2,micro-batches=2")


def test_fp8_holds_one_byte_per_element_of_both_operands_while_it_multiplies():
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(3)])
    plain = trace(
        nn.Sequential(*model).bfloat16(), torch.randn(32, 64).bfloat16(), loss=lambda y: y.square().mean(), repeats=1
    )
    cast = with_techniques(plain, Techniques(fp8="tensorwise"))
    made = list(cast.storages[len(plain.storages) :])
    products = [op for op in plain.ops if op.name == "mm" and op.region >= 0]
    assert products
    assert len(made) == len(products)
    assert made[0].bytes == 64 * 64 + 32 * 64
    assert all(storage.dies - storage.born == 2 for storage in made)
    assert len(cast.ops) == len(plain.ops) + len(made)


@pytest.mark.parametrize("gradients", ["", ",gradients=fp32"])
def test_an_optimizer_on_the_host_leaves_its_state_there_and_pays_for_the_way(gradients: str):
    how: dict[str, Any] = {"precision": "bf16", "has_master_weights": True}
    here, there = (on_gpu(**how, techniques=f"tf32{text}{gradients}") for text in ("", ",offload=optimizer"))
    assert bytes_of(there, "optimizer state") == bytes_of(there, "master weights") == 0
    assert bytes_of(there, "parameters") == bytes_of(here, "parameters")
    assert there.stages[0].allocated_bytes < here.stages[0].allocated_bytes
    device, parameters = find_device("H100"), bytes_of(here, "parameters")
    link = device.host_link_bytes_per_second * HOST_LINK_SHARE
    sent = parameters * (3 if gradients else 2)
    moved = 28 * parameters // 2  # weight, gradient and two states in f32, all but the gradient written too
    step = moved / (device.host_bandwidth_bytes_per_second / device.host_sockets * 0.44)
    spent = there.stages[0].seconds.optimizer_seconds
    assert sent / link + step < spent < sent / link + 1.5 * step


@pytest.mark.parametrize(("recipe", "device", "byte"), [("delayed", "H100", 1.0), ("mxfp8", "B200", 1 + 1 / 32)])
def test_transformer_engine_saves_inputs_of_products_in_fp8_and_holds_weights_so(recipe: str, device: str, byte: float):
    layers = [
        nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False)) for _ in range(3)
    ]
    batch = torch.randn(32, 64).bfloat16()
    plain = trace(nn.Sequential(*layers).bfloat16(), batch, loss=lambda y: y.square().mean(), repeats=1)
    cast = with_techniques(plain, Techniques(fp8=recipe))
    held = {s.label: s.bytes for s in cast.storages if s.label.startswith("weight in fp8")}
    assert set(held.values()) == {int(2 * byte * 64 * 128)}
    before, after = (
        [call.graph.values[slot.value].bytes for call in each.regions for slot in call.graph.slots if slot.is_managed]
        for each in (plain, cast)
    )
    # What GELU makes only the second product saves; what GELU reads, it saves itself.
    assert {new / old for old, new in zip(before, after, strict=True)} == {1.0, byte / 2}
    casts = [op for op in cast.ops if op.name == "fp8_cast"]
    assert len(casts) == 12 - 1, (
        "both products of forward, the one of backward that is no weight's; the first needs none"
    )


def test_recipes_of_transformer_engine_hold_less_of_activations_and_more_of_weights():
    how = {"sequence": 4096, "precision": "bf16"}
    plain, kept = (on_gpu(**how, techniques=text) for text in ("fp8=tensorwise", "fp8=current"))
    assert bytes_of(kept, "activations") < bytes_of(plain, "activations")
    assert kept.throughput.step_seconds < plain.throughput.step_seconds, "each tensor is cast once"


@pytest.mark.long
def test_a_layer_of_megatron_saves_parts_of_what_is_gathered_and_casts_of_what_products_alone_read():
    tokens, hidden, intermediate, tp = 128, 256, 512, 2
    held = []
    for layers in (2, 3):
        sizes = Sizes(
            hidden=hidden, intermediate=intermediate, heads=4, layers=layers, sequence=tokens, attention="sdpa"
        )
        layout = Layout(tp=tp, sequence_parallel=True)
        step = with_techniques(traced(sizes, layout, "H100-SXM"), Techniques(megatron=True, fp8="current"))
        index = StepIndex(step, roofline_costs(step, find_device("H100"), layout))
        simulation = run_choices(index, strategy_choices(index, "min-cut"))
        held.append(int(simulation.curve[index.handover]) - index.lasting_bytes)
    # Inputs of both norms (2 each), their outputs in fp8 (1), queries, keys, values (2), attention's output (2 and 1 in fp8),
    # gate and up (2), their product in fp8 (1): a rank's part of each, as TransformerEngine's modules save them.
    expected = tokens * (15 * hidden + 5 * intermediate) // tp
    statistics = tokens * 4 * (2 / tp + 4 / tp)  # two norms' deviations, attention's sums per head
    assert held[1] - held[0] == pytest.approx(expected + statistics, rel=0.01)


def test_weights_in_fp8_alone_take_the_place_of_those_in_16_bits():
    how = {"sequence": 256, "precision": "bf16", "layout": "micro-batches=4"}
    beside, alone = (on_gpu(**how, techniques=f"megatron,fp8=current{text}") for text in ("", ",fp8-weights"))
    once = on_gpu(**how, techniques="megatron,fp8=current,fp8-weights", device="B200")
    assert bytes_of(alone, "parameters") == bytes_of(beside, "parameters"), "by rows and by columns, one byte each"
    assert bytes_of(once, "parameters") < 0.75 * bytes_of(alone, "parameters"), "Blackwell reads one copy both ways"
    assert bytes_of(alone, "temporaries") < bytes_of(beside, "temporaries")
    assert bytes_of(alone, "gradients") == bytes_of(beside, "gradients")


@pytest.mark.long
def test_divided_logits_are_held_once_by_a_fused_loss():
    how = {"sequence": 2048, "precision": "bf16", "layout": "tp=2"}
    plain, fused = (on_gpu(**how, techniques=text) for text in ("", "loss=fused"))
    assert fused.stages[0].allocated_bytes < plain.stages[0].allocated_bytes
    assert fused.throughput.step_seconds < plain.throughput.step_seconds


@pytest.mark.long
def test_overlapped_collectives_leave_their_first_piece_and_gathers_go_beside_the_next_forward():
    how = {"sequence": 2048, "precision": "bf16", "layout": "dp=4,tp=4,sp,zero=1", "has_master_weights": True}
    plain, beside = (on_gpu(**how, techniques=text).stages[0].seconds for text in ("megatron", "megatron,comm-overlap"))
    assert plain.communication_seconds / 4 <= beside.communication_seconds < plain.communication_seconds
    assert beside.optimizer_seconds < plain.optimizer_seconds


def test_expandable_segments_are_what_is_reserved():
    how = {"sequence": 2048, "precision": "bf16"}
    plain, expandable = (on_gpu(**how, techniques=text) for text in ("", "expandable-segments"))
    assert expandable.stages[0].reserved_bytes == plain.expandable_bytes


def test_parameters_on_the_host_leave_gathered_copies_and_pay_for_the_way():
    how: dict[str, Any] = {"precision": "bf16", "layout": "dp=8,zero=3"}
    here, there = (on_gpu(**how, techniques=text) for text in ("", "offload=parameters"))
    assert bytes_of(there, "optimizer state") == 0
    assert bytes_of(there, "parameters") < bytes_of(here, "parameters")
    assert there.stages[0].allocated_bytes < here.stages[0].allocated_bytes
    assert there.throughput.step_seconds > here.throughput.step_seconds


@pytest.mark.parametrize("precision", some(["fp32", "bf16"], 1))
@pytest.mark.parametrize("strategy", ["none", "full", "selective:torchtitan"])
def test_activations_on_the_host_are_those_that_the_strategy_keeps(precision: str, strategy: str):
    how: dict[str, Any] = {"precision": precision, "strategy": strategy, "sequence": 2048}
    here, there = (
        on_gpu(**how, techniques=f"loss=fused-linear{text}").stages[0] for text in ("", ",offload=activations")
    )
    assert there.allocated_bytes < here.allocated_bytes
    assert there.seconds.recompute_seconds >= here.seconds.recompute_seconds


@pytest.mark.long
def test_a_strategy_that_offloads_waits_for_the_link_of_the_catalogue():
    slow, fast = (on_gpu(device=name, strategy="offload", sequence=2048) for name in ("H100", "GH200"))
    assert 0 < fast.stages[0].seconds.recompute_seconds < slow.stages[0].seconds.recompute_seconds
    within = on_gpu(techniques="offload=activations", sequence=2048, budget=slow.stages[0].allocated_bytes)
    assert within.does_fit
    with pytest.raises(InvalidLayout, match="its host"):
        plimsoll.estimate("llama-tiny", 1, device="cpu", sequence=256, strategy="offload")


@pytest.mark.long
def test_packed_documents_take_attention_off_and_padding_takes_tokens_off():
    whole, packed, padded = (on_gpu(sequence=4096, techniques=text) for text in ("", "packed=512", "padded=25"))
    speeds = [each.throughput.tokens_per_second or 0 for each in (whole, packed, padded)]
    assert speeds[1] > speeds[0]
    assert speeds[2] == pytest.approx(0.75 * speeds[0])
    assert packed.stages[0].allocated_bytes == whole.stages[0].allocated_bytes
    assert padded.throughput.mfu == whole.throughput.mfu


def test_a_tpu_has_bytes_and_no_caching_allocator():
    found = on_gpu(device="TPU-v5e", precision="bf16")
    assert found.stages[0].reserved_bytes is None
    assert found.device_bytes == int(15.75 * 2**30)
    assert {item.name for item in found.stages[0].unsupported} == {"device context", "library workspaces"}


def test_gradients_in_both_types_last():
    how = {"precision": "bf16", "has_master_weights": True, "layout": "dp=2,zero=1,micro-batches=2"}
    plain, both = (on_gpu(**how, techniques=f"gradients={kind}") for kind in ("fp32", "both"))
    own = bytes_of(both, "gradients") - bytes_of(plain, "gradients")
    assert own == pytest.approx(bytes_of(plain, "parameters"), rel=0.02)
    with pytest.raises(InvalidOption, match="16-bit gradients are kept in addition to f32 gradients"):
        on_gpu(**how | {"layout": "dp=2,zero=2"}, techniques="gradients=both")


@pytest.mark.long
def test_the_whole_has_the_error_that_published_runs_of_its_kind_show():
    how = {"precision": "fp16", "has_master_weights": True, "device": "A100-80GB", "layout": "pp=2,micro-batches=4"}
    known = on_gpu(**how).tightest
    assert known.error_bytes == round(0.09 * known.total_bytes)
    unknown = on_gpu(**how | {"device": "H100"}).tightest
    assert unknown.error_bytes == sum(item.error_bytes for item in unknown.items)
